"""Sampling: filters against plain definitions, and positional noise as a random source and as a fixed function."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from conftest import autoregressive, requests_of, run, tiny_target
from torch import Tensor

from sparkbench.decoding import sampling as module
from sparkbench.decoding.sampling import Sampling, draw, gumbel, noise_key
from sparkbench.errors import UsageError


def keys_of(*keys: int) -> Tensor:
    return torch.tensor(keys)


def noise(keys: Sequence[int], positions: Sequence[int], vocab: int) -> Tensor:
    """[len(keys), len(positions), vocab]"""
    return gumbel(torch.tensor(keys), torch.tensor(positions).expand(len(keys), -1), vocab)


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    statistic = ((observed.double() - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


def uniform_p(probabilities: Tensor, cells: int = 100) -> float:
    """p-value of a chi-square test that numbers in (0, 1) are uniform."""
    flat = probabilities.flatten()
    counts = torch.bincount((flat * cells).long().clamp(0, cells - 1), minlength=cells)
    return chi_square_p(counts, torch.full((cells,), len(flat) / cells, dtype=torch.float64))


def gumbel_cdf(values: Tensor) -> Tensor:
    return (-(-values.double()).exp()).exp()


# Filters


def plainly_filtered(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that stay: top-k first, then the smallest set of the likeliest whose mass reaches top-p."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[token] / temperature) for token in order]
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p * sum(weights):
            break
        kept.append(token)
        mass += weight
    return set(kept)


FILTERS = [
    (1.0, 5, 1.0),
    (0.7, 0, 0.8),
    (1.5, 7, 0.5),
    (1.0, 0, 1e-6),
    (1.0, 1000, 1.0),
    (0.3, 1, 0.9),
    (1.0, 0, 0.999),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
def test_filters(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(top_k)) * 2
    scores = Sampling(temperature, top_k, top_p).scores(logits)
    for row, found in zip(logits, scores, strict=True):
        kept = plainly_filtered(row.tolist(), temperature, top_k, top_p)
        assert set(found.isfinite().nonzero()[:, 0].tolist()) == kept
    inside = scores.isfinite()
    torch.testing.assert_close(scores[inside], (logits / temperature)[inside])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
def test_filters_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(7)) * 3
    ids = torch.zeros(20, 1, dtype=torch.int64)
    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    torch.testing.assert_close(Sampling(temperature, top_k, top_p).scores(logits), expected)


def test_greedy_leaves_logits_alone() -> None:
    logits = torch.randn(3, 9)
    assert torch.equal(Sampling(0.0, top_k=2, top_p=0.5).scores(logits), logits)
    assert torch.equal(Sampling(1.0).scores(logits.bfloat16()), logits.bfloat16().float())


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.01}, "top-p"),
        ({"top_p": math.nan}, "top-p"),
    ],
)
def test_bad_values(values: dict[str, float], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Sampling(**values)  # type: ignore[arg-type]


# The noise as a function

PINNED_KEYS = [-1296478826667349311, -7135889198921212497]
PINNED_HASHES = [0, 6238072747940578789, -5417735806833148549, 1360429390938723525, 2720858781877447050]
PINNED_NOISE = [[[-1044, 111, -70285], [29823, -65, 35383]], [[-2536, -13102, 62889], [-20272, 168046, 68309]]]


def test_known_values() -> None:
    """Pinned: noise must be the same on every machine and in every version, or stored outputs lose their meaning."""
    assert noise_key([1, 2, 3], 0) == PINNED_KEYS[0]
    assert noise_key([], -5, repeat=2, copy=1) == PINNED_KEYS[1]
    hashes = module._mix(torch.tensor([0, 1, -1, 2**62, -(2**63)]))
    assert hashes.tolist() == PINNED_HASHES
    values = noise([PINNED_KEYS[0], -1], [0, 1_000_000], 3).double()
    assert (values * 2**16).round().long().tolist() == PINNED_NOISE


def test_against_plain_integers() -> None:
    """The hash in Python's own integers, SplitMix64 as published, and the float64 formula."""
    mask = (1 << 64) - 1

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    golden = 0x9E3779B97F4A7C15
    # First outputs of the published generator seeded with 0.
    assert [mix(golden * n & mask) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    keys, positions = [0, 12345, -1, 2**63 - 1, -(2**63)], [0, 1, 4095]
    found = noise(keys, positions, 20)
    for i, key in enumerate(keys):
        for j, position in enumerate(positions):
            stream = mix((key + position * golden) & mask)
            for token in range(20):
                bits = mix((stream + (token + 1) * golden) & mask) >> 12
                expected = -math.log(-math.log1p(-(bits + 0.5) * 2.0**-52))
                assert found[i, j, token].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_depends_on_key_position_and_token_alone() -> None:
    keys, positions = [5, -7, 11], [3, 4, 5, 9]
    whole = noise(keys, positions, 300)
    for i, key in enumerate(keys):
        for j, position in enumerate(positions):
            assert torch.equal(noise([key], [position], 300)[0, 0], whole[i, j])
    assert torch.equal(noise(keys, positions, 100), whole[..., :100])
    shuffled = gumbel(keys_of(11, 5), torch.tensor([[9, 3], [5, 3]]), 300)
    assert torch.equal(shuffled[0, 0], whole[2, 3])
    assert torch.equal(shuffled[1, 0], whole[0, 2])


def test_keys_differ() -> None:
    prompts: list[list[int]] = [[], [1], [1, 2], [2, 1], [1, 2, 0]]
    keys = {
        noise_key(prompt, seed, repeat, copy)
        for prompt in prompts
        for seed in (0, 1, -1)
        for repeat in (0, 1)
        for copy in (0, 1)
    }
    assert len(keys) == 5 * 3 * 2 * 2
    assert all(-(2**63) <= key < 2**63 for key in keys)


# The noise as a random source


@pytest.mark.parametrize("key", [0, 1, noise_key([1, 2, 3], 0)])
def test_distribution(key: int) -> None:
    values = noise([key], range(40), 5000)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    assert uniform_p(gumbel_cdf(values)) > 1e-4
    count = values.numel()
    variance = math.pi**2 / 6
    assert abs(values.double().mean() - 0.5772156649) < 4 * math.sqrt(variance / count)
    assert abs(values.double().var() - variance) < 0.05
    ordered = gumbel_cdf(values).flatten().sort().values
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert max((steps - ordered).max(), (ordered - steps + 1 / count).max()) < 2.2 / math.sqrt(count)


def fine_tail(noise_of: Callable[[Tensor], Tensor]) -> bool:
    """Whether the 200 or so largest of 4 million values are distinct, as they are if uniforms are finer than 2^-24."""
    values = noise_of(module._mix(torch.arange(4_000_000) * module._GOLDEN + 17))
    tail = values[values > -math.log(-math.log1p(-1 / 20_000))]
    return len(tail) > 100 and len(tail.unique()) > 0.98 * len(tail)


def of_24_bits(hashes: Tensor) -> Tensor:
    """What 24-bit uniforms would give."""
    uniform = (module._shift(hashes, 40).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log1p(-uniform)).float()


def test_tail_is_resolved() -> None:
    """24-bit uniforms repeat values in the tail, which the test must notice."""
    assert fine_tail(module._gumbel_of)
    assert not fine_tail(of_24_bits)


def test_extremes_are_finite() -> None:
    ends = module._gumbel_of(torch.tensor([0, -1, 1 << 12, -(1 << 63), (1 << 63) - 1]))
    assert ends.isfinite().all()
    assert ends[0].item() == pytest.approx(53 * math.log(2), abs=1e-4)
    assert ends[1].item() == pytest.approx(-math.log(53 * math.log(2)), abs=1e-4)


def correlation(first: Tensor, second: Tensor) -> float:
    pair = torch.stack([gumbel_cdf(first).flatten(), gumbel_cdf(second).flatten()])
    return float(torch.corrcoef(pair)[0, 1].abs())


def test_independence() -> None:
    """Between neighbouring positions, tokens, keys, seeds, repeats and copies."""
    count = 40_000
    bound = 4.5 / math.sqrt(count)
    prompt = [3, 1, 4]
    base = noise_key(prompt, 0)
    here = noise([base], [7], count)
    others = {
        "position": noise([base], [8], count),
        "key": noise([base + 1], [7], count),
        "seed": noise([noise_key(prompt, 1)], [7], count),
        "repeat": noise([noise_key(prompt, 0, repeat=1)], [7], count),
        "copy": noise([noise_key(prompt, 0, copy=1)], [7], count),
        "token": noise([base], [7], count + 1)[..., 1:],
    }
    for what, other in others.items():
        assert correlation(here, other) < bound, what
        joint = (gumbel_cdf(here) * 8).long() * 8 + (gumbel_cdf(other) * 8).long()
        counts = torch.bincount(joint.flatten().clamp(max=63), minlength=64)
        assert chi_square_p(counts, torch.full((64,), count / 64, dtype=torch.float64)) > 1e-4, what
    across = torch.cat([noise([base], range(4000), 3)[0].flatten(), noise(list(range(4000)), [7], 3).flatten()])
    assert uniform_p(gumbel_cdf(across)) > 1e-4


# Drawing


def test_draw_takes_the_noise_of_the_token_drawn() -> None:
    """A node at depth d behind `length` committed tokens draws the token of position length + d + 1."""
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(1))
    depths, lengths, keys = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]]), torch.tensor([5, 9]), keys_of(3, 4)
    drawn = draw(logits, depths, lengths, keys, 3, Sampling(0.8))
    for row in range(2):
        for node in range(4):
            position = int(lengths[row] + depths[row, node]) + 1
            expected = (logits[row, node] / 0.8 + noise([int(keys[row])], [position], 30)[0, 0]).argmax()
            assert drawn[row, node] == expected
    assert torch.equal(draw(logits, depths, lengths, keys, 3, Sampling()), logits.argmax(-1))


def test_drawn_tokens_follow_softmax() -> None:
    count, temperature = 20_000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    zeros = torch.zeros(count, 1, dtype=torch.int64)
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=3), Sampling(temperature, top_p=0.85)):
        drawn = draw(logits.expand(count, 1, -1), zeros, zeros[:, 0] + 4, torch.arange(count), 0, sampling)
        expected = sampling.scores(logits).double().softmax(0)
        counts = torch.bincount(drawn[:, 0], minlength=6)
        assert counts[expected == 0].sum() == 0
        assert chi_square_p(counts[expected > 0], expected[expected > 0] * count) > 1e-4


def test_decoding_follows_softmax() -> None:
    """Pairs of tokens that the loop samples on a vocabulary of 5, against the model's own probabilities."""
    target = tiny_target(vocab=5, layers=1, seed=4)
    count, prompt, temperature = 4000, [1, 4], 5.0
    requests = requests_of([prompt] * count, [noise_key(prompt, seed) for seed in range(count)])
    generations = run(target, autoregressive(), requests, 2, sampling=Sampling(temperature))
    outputs = torch.tensor([generation.output_ids for generation in generations])
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, token] for token in range(5)])
        probabilities = (target.model(ids).logits.double() / temperature).softmax(-1)
    joint = probabilities[0, 1, :, None] * probabilities[:, 2]
    counts = torch.bincount(outputs[:, 0] * 5 + outputs[:, 1], minlength=25)
    assert joint.min() * count > 1
    assert chi_square_p(counts, joint.flatten() * count) > 1e-4
