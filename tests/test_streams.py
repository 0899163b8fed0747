"""Streams of random numbers: the target's noise, the drafts' and the tests of rejection know nothing of each other.

A number is a function of its key, position and place alone, whatever row it is for. Correlations are taken of uniform
numbers, and bounded by five standard deviations. The target's noise on its own is tested in test_sampling.py.
"""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from tiny_vocabulary import VOCAB, keys_of_rows, method_of, one_position, request_of, small_drafter, small_target
from torch import Tensor

from sparkbench.decoding import accept as rules
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.drafting import ChainOptions
from sparkbench.decoding.loop import DecodeConfig, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import Sampling, draw, gumbel, round_keys, stream_keys, uniform
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree

ROWS = 200_000
POSITION = 7


def at(position: int, rows: int = ROWS) -> Tensor:
    return torch.full((rows, 1), position)


def decisions(keys: Tensor, position: int = POSITION, number: int = 0) -> Tensor:
    """[B]"""
    return uniform(keys, at(position, len(keys)), at(number, len(keys)))[:, 0]


def noise_of(keys: Tensor, position: int = POSITION) -> Tensor:
    """[B, VOCAB], as uniform numbers."""
    return (-(-gumbel(keys, at(position, len(keys)), VOCAB)[:, 0].double()).exp()).exp()


def independent(first: Tensor, second: Tensor) -> None:
    """Of [B] or [B, V] each: every column of one against every column of the other."""
    one, other = (each.double().view(len(each), -1) for each in (first, second))
    both = torch.corrcoef(torch.cat([one, other], 1).T)[: one.shape[1], one.shape[1] :]
    assert float(both.abs().max()) < 5 / math.sqrt(len(first))


def test_tests_are_uniform() -> None:
    keys = keys_of_rows(ROWS)
    assert stats.kstest(decisions(keys).numpy(), "uniform").pvalue > 1e-4
    along = uniform(keys[:1], torch.arange(ROWS)[None], torch.zeros(1, ROWS, dtype=torch.int64))[0]
    assert stats.kstest(along.numpy(), "uniform").pvalue > 1e-4
    numbers = uniform(keys[:1], at(POSITION)[:, 0][None], torch.arange(ROWS)[None])[0]
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-4
    assert numbers.dtype == torch.float64
    assert 0 < numbers.min() < numbers.max() < 1


def test_numbers_depend_on_key_position_and_place_alone() -> None:
    keys, positions, numbers = torch.tensor([5, -7, 11]), torch.tensor([[3, 4, 9]] * 3), torch.tensor([[0, 1, 1]] * 3)
    whole = uniform(keys, positions, numbers)
    for row in range(3):
        for place in range(3):
            alone = uniform(keys[row : row + 1], positions[row, None, place, None], numbers[row, None, place, None])
            assert alone.item() == whole[row, place].item()
    assert len(whole.unique()) == whole.numel()
    lengths = torch.tensor([4, 9, 6])
    derived = round_keys(stream_keys(keys, 2), lengths)
    assert torch.equal(round_keys(stream_keys(keys[[2, 0]], 2), lengths[[2, 0]]), derived[[2, 0]])


def test_streams_are_independent() -> None:
    keys = keys_of_rows(ROWS)
    first, second = stream_keys(keys, 1), stream_keys(keys, 2)
    drafts, later = round_keys(second, at(POSITION)[:, 0]), round_keys(second, at(POSITION + 1)[:, 0])
    independent(noise_of(keys), decisions(first))
    independent(noise_of(keys), noise_of(second))
    independent(noise_of(keys), noise_of(drafts))
    independent(decisions(first), noise_of(drafts))
    independent(noise_of(drafts), noise_of(later))  # one position, drafted in two rounds
    independent(noise_of(drafts), noise_of(later, POSITION + 1))
    independent(decisions(first), decisions(first, POSITION + 1))
    independent(decisions(first), decisions(first, number=1))
    with pytest.raises(AssertionError):  # a key is a stream: with one for both, a test is the noise of one token
        independent(noise_of(keys), decisions(keys))


# What accepting and the loop use


def test_what_rejection_tests_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform numbers that have nothing to do with the target's noise, be it of the draft or of the bonus token."""
    seen: list[Tensor] = []
    rejection = rules.rejection

    def watched(tree: DraftTree, chances: Tensor, tests: Tensor, settle: Any) -> Acceptance:
        seen.append(tests)
        return rejection(tree, chances, tests, settle)

    monkeypatch.setattr(rules, "rejection", watched)
    logits = torch.zeros(VOCAB)
    one_position(ChainOptions(rule="rejection"), logits, logits, Sampling(1.0), ROWS, length=POSITION)
    tests = seen[0][:, 1]
    assert stats.kstest(tests.numpy(), "uniform").pvalue > 1e-4
    for position in range(POSITION, POSITION + 3):
        independent(noise_of(keys_of_rows(ROWS), position), tests)


def test_a_bonus_token_takes_the_noise_of_its_position() -> None:
    """Where the target excludes what is drafted, all of its distribution is left: autoregressive decoding's draw."""
    target, drafter = torch.linspace(0, 1, VOCAB), torch.linspace(1, 0, VOCAB)
    target[3:], drafter[:3] = -math.inf, -math.inf
    found = one_position(ChainOptions(rule="rejection"), target, drafter, Sampling(1.0), 1000, length=POSITION)
    lengths, at_root = torch.full((1000,), POSITION), torch.zeros(1000, 1, dtype=torch.int64)
    plain = draw(target.expand(1000, 1, -1), at_root, lengths, keys_of_rows(1000), 0, Sampling(1.0))
    assert torch.equal(found.tokens, plain)


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


@pytest.fixture(scope="module")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"dflash": small_drafter(tmp_path_factory.mktemp("drafter"), "dflash", target)}


def seen_keys(target: Target, drafters: dict[str, Any], text: str) -> list[tuple[Tensor, Tensor | None]]:
    """Of every round of three rows of one text: lengths and the keys of the drafts' noise."""
    found: list[tuple[Tensor, Tensor | None]] = []

    def watch(context: Context, tree: DraftTree, acceptance: Acceptance) -> None:
        found.append((context.lengths.clone(), context.noise_keys))

    config = DecodeConfig(8, Sampling(1.0), frozenset())
    generate(target, method_of(text, drafters), [request_of(seed) for seed in range(3)], config, watch)
    assert len(found) > 1
    return found


def test_drafts_take_the_noise_that_their_method_names(target: Target, drafters: dict[str, Any]) -> None:
    own = {request_of(seed).noise_key for seed in range(3)}
    assert all(keys is None for _, keys in seen_keys(target, drafters, "dflash"))
    for _, keys in seen_keys(target, drafters, "dflash:draft-noise=shared"):
        assert keys is not None
        assert set(keys.tolist()) <= own
    for text in ("dflash:draft=sampled", "dflash:rule=rejection"):
        used: list[int] = []
        for _, keys in seen_keys(target, drafters, text):
            assert keys is not None
            used += keys.tolist()
        assert len(set(used)) == len(used), "two rounds draft with one noise"
        assert not own & set(used), "drafts know the target's noise"


def test_no_test_serves_twice(target: Target, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that decided something in one round is not seen in another, and rows are alike alone and in a batch."""
    rejection = rules.rejection
    rounds: list[tuple[Tensor, Acceptance]] = []

    def watched(tree: DraftTree, chances: Tensor, tests: Tensor, settle: Any) -> Acceptance:
        rounds.append((tests, rejection(tree, chances, tests, settle)))
        return rounds[-1][1]

    monkeypatch.setattr(rules, "rejection", watched)
    method, config = method_of("dflash:rule=rejection", drafters), DecodeConfig(12, Sampling(1.0), frozenset())
    deciding: list[list[float]] = []
    for seeds in ((0,), (1,), (0, 1)):
        rounds.clear()
        generate(target, method, [request_of(seed) for seed in seeds], config)
        found: list[float] = []
        for tests, acceptance in rounds:
            for row, accepted in enumerate(acceptance.accepted.tolist()):
                found += tests[row, 1 : accepted + 2].tolist()
        deciding.append(found)
    assert all(len(found) == len(set(found)) > 5 for found in deciding)
    assert sorted(deciding[0] + deciding[1]) == sorted(deciding[2])
