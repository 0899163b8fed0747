"""Exactness: the methods against AR, AR against transformers, and the classes of differing outputs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import golden_dflash as golden
import pytest
import torch
from conftest import (
    COUNT_PROMPT,
    FAMILIES,
    WINDOWED,
    autoregressive,
    plain_continuation,
    requests_of,
    run,
    tiny_model,
    tiny_target,
)
from torch import Tensor

from sparkbench.decoding.loop import Generation, Request
from sparkbench.decoding.sampling import Sampling, gumbel, noise_key
from sparkbench.decoding.target import Target
from sparkbench.exactness import IDENTICAL, TIE_FLIP, VIOLATION, Verdict, classify, width_noise
from sparkbench.paths import datasets_folder

ARMS = [("dflash", ""), ("ddtree_1", "level"), ("ddtree_5", "level"), ("ddtree_16", "heap"), ("ddtree_64", "level")]
TEMPERATURES = [0.0, 0.7, 1.0]


@pytest.fixture(scope="module")
def pair() -> golden.Pair:
    return golden.Pair.load()


def random_prompts(target: Target, count: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [tuple(torch.randint(target.vocab_size, (n,), generator=generator).tolist()) for n in lengths]


def text_prompts(target: Target, per_set: int) -> list[tuple[int, ...]]:
    """The first bytes of bundled prompts, where the vocabulary has all bytes."""
    prompts = []
    for file in sorted(datasets_folder().glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines()[:per_set]:
            ids = tuple(json.dumps(json.loads(line)).encode()[10:50])
            prompts.append(tuple(i % target.vocab_size for i in ids))
    assert prompts
    return prompts


def check_arms(
    pair: golden.Pair,
    prompts: Sequence[tuple[int, ...]],
    temperature: float,
    batch: int,
    limit: int,
    arms: Sequence[tuple[str, str]],
) -> None:
    """All arms give AR's tokens; AR is decoded in another batch."""
    sampling = Sampling(temperature)
    requests = [Request(prompt, noise_key(prompt, 0, copy=i)) for i, prompt in enumerate(prompts)]
    stops = sorted(pair.target.stop_ids)
    reference = run(pair.target, autoregressive(), requests, limit, stops=stops, sampling=sampling)
    for recorded, builder in arms:
        method = pair.method(recorded, builder or "level")
        for start in range(0, len(requests), batch):
            some = requests[start : start + batch]
            found = run(pair.target, method, some, limit, stops=stops, sampling=sampling)
            for one, other in zip(found, reference[start : start + batch], strict=True):
                assert one.output_ids == other.output_ids, (recorded, builder)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_methods_equal_autoregressive_decoding(pair: golden.Pair, temperature: float, batch: int) -> None:
    """In float32 there is nothing to excuse: not one token differs."""
    prompts = random_prompts(pair.target, 4) + text_prompts(pair.target, 1)[:4]
    arms = [ARMS[0], ARMS[1 + batch % 3], ARMS[4]]
    check_arms(pair, prompts[:batch] if batch == 1 else prompts, temperature, batch, 16, arms)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("temperature", [*TEMPERATURES, 1.5])
def test_methods_equal_autoregressive_decoding_on_many_prompts(
    pair: golden.Pair, temperature: float, batch: int
) -> None:
    prompts = random_prompts(pair.target, 16) + text_prompts(pair.target, 4)
    arms = [*ARMS, ("ddtree_5", "heap"), ("ddtree_64", "heap"), ("ddtree_256", "level")]
    check_arms(pair, prompts, temperature, batch, 64, arms)


@pytest.mark.parametrize("family", FAMILIES)
def test_autoregressive_decoding_is_what_transformers_generates(family: str) -> None:
    for window in (4, 7) if family in WINDOWED else (4,):
        target = tiny_target(family, window=window)
        prompts = [(1, 2, 3), (9,), (8, 7, 6, 5, 4, 3, 2, 1, 10, 11)]
        found = run(target, autoregressive(), requests_of(prompts), 14)
        for prompt, generation in zip(prompts, found, strict=True):
            ids = torch.tensor([prompt])
            expected = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False, pad_token_id=0
            )
            assert list(generation.output_ids) == expected[0, len(prompt) :].tolist()
            assert len(set(generation.output_ids)) > 3, "the model says one thing only"


# Classes of differing outputs


PROMPT = (1, 2, 3, 4)


def nearly_tied(closeness: float, temperature: float) -> tuple[Target, int, int, Request]:
    """A target that nearly ties two tokens at output index 2: (target, winner, loser, request)."""
    sampling = Sampling(temperature)
    model = tiny_model()
    target = Target.wrap(model, name="tied")
    request = Request(PROMPT, 77)
    first = plain_continuation(target, PROMPT, 2, request.noise_key, sampling)
    ids = [*PROMPT, *first]
    with torch.inference_mode():
        hidden = target.decoder(torch.tensor([ids])).last_hidden_state[0, -1]
        logits = model.lm_head(hidden)
        scores = sampling.scores(logits)
        if temperature:
            scores = scores + gumbel(torch.tensor([77]), torch.tensor([[len(ids)]]), len(scores))[0, 0]
        # The runner-up's head row gets what it lacks along this hidden state.
        winner, loser = scores.topk(2).indices.tolist()
        lacking = (scores[winner] - scores[loser]) * (temperature or 1.0) - closeness
        model.lm_head.weight[loser] += lacking * hidden / hidden.square().sum()
    assert plain_continuation(target, PROMPT, 2, request.noise_key, sampling) == first, "the planted tie moved the past"
    return target, winner, loser, request


def changed(generation: Generation, place: int, token: int) -> Generation:
    output = list(generation.output_ids)
    output[place] = token
    return replace(generation, output_ids=tuple(output))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_identical_tie_flip_and_violation(temperature: float) -> None:
    sampling = Sampling(temperature)
    verdicts: dict[float, Verdict] = {}
    for closeness in (0.0, 0.5):
        target, winner, loser, request = nearly_tied(closeness, temperature)
        (reference,) = run(target, autoregressive(), [request], 6, sampling=sampling)
        noise = {1: 0.0, 8: 1e-4}
        assert classify(target, request, reference, reference, sampling, noise) == Verdict(IDENTICAL)
        drawn = reference.output_ids[2]
        assert drawn == winner or closeness == 0.0
        # The other method verified the place in a round of 8 nodes, 2 below its root.
        record = replace(reference.rounds[0], nodes=7, committed=5, accepted=4, max_depth=7, accepted_node=4)
        flipped = changed(reference, 2, loser if drawn == winner else winner)
        other = replace(flipped, rounds=(record,))
        verdicts[closeness] = classify(target, request, reference, other, sampling, noise)
        assert verdicts[closeness].first_divergence == 2
    loose = verdicts[0.5]
    assert loose.exactness == VIOLATION
    assert loose.score_gap == pytest.approx(0.5 / (temperature or 1.0), abs=1e-4)
    assert loose.width_noise is not None
    assert loose.width_noise < 1e-4
    tight = verdicts[0.0]
    assert tight.score_gap is not None
    assert tight.width_noise is not None
    # Whether the planted tie counts as one is decided by the measured error, as the rule says.
    limit = 2 * tight.width_noise / (temperature or 1.0)
    assert tight.exactness == (TIE_FLIP if tight.score_gap <= limit else VIOLATION)
    assert tight.score_gap < 1e-4


def fake_logits(rows: Mapping[int, Tensor]) -> Any:
    """In place of the real forwards: logits by width."""
    return lambda target, prefix, width, behind, batch: rows[width]


@pytest.mark.parametrize(
    ("gap", "error", "measured", "temperature", "expected"),
    [
        (0.010, 0.006, 0.010, 0.0, TIE_FLIP),  # within 2 e, and e is ordinary
        (0.013, 0.006, 0.010, 0.0, VIOLATION),  # beyond 2 e
        (0.010, 0.006, 0.005, 0.0, VIOLATION),  # e is larger than this width ever shows
        (0.0, 0.0, 0.0, 0.0, TIE_FLIP),  # an exact tie
    ],
)
def test_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    count_target: Target,
    gap: float,
    error: float,
    measured: float,
    temperature: float,
    expected: str,
) -> None:
    narrow = torch.full((128,), -9.0)
    narrow[11], narrow[50] = 5.0, 5.0 - gap
    wide = narrow.clone()
    wide[50] += error
    monkeypatch.setattr("sparkbench.exactness._wide_logits", fake_logits({1: narrow, 8: wide}))
    request = Request((1, 2, 3))
    (reference,) = run(count_target, autoregressive(), [request], 4)
    record = replace(reference.rounds[0], nodes=7, committed=3)
    other = replace(changed(reference, 1, 50), rounds=(record,))
    verdict = classify(count_target, request, reference, other, Sampling(temperature), {8: measured})
    assert (verdict.exactness, verdict.first_divergence) == (expected, 1)
    assert verdict.score_gap == pytest.approx(gap, abs=1e-5)
    assert verdict.width_noise == pytest.approx(error, abs=1e-5)


def test_a_filters_cut_off_may_flip(monkeypatch: pytest.MonkeyPatch, count_target: Target) -> None:
    """Two tokens far apart in score, but one sits at the edge of top-k: rounding decides whether it may be drawn."""
    narrow = torch.full((128,), -9.0)
    narrow[11], narrow[50], narrow[60] = 5.0, 3.0, 3.001
    wide = narrow.clone()
    wide[50] += 0.004
    monkeypatch.setattr("sparkbench.exactness._wide_logits", fake_logits({1: narrow, 8: wide}))
    request = Request((1, 2, 3), 5)
    (reference,) = run(count_target, autoregressive(), [request], 4)
    other = replace(changed(reference, 1, 50), rounds=(replace(reference.rounds[0], nodes=7, committed=3),))
    for top_k, expected in ((2, TIE_FLIP), (0, VIOLATION)):
        verdict = classify(count_target, request, reference, other, Sampling(1.0, top_k), {8: 0.01})
        assert verdict.exactness == expected


def test_another_length_is_a_violation(count_target: Target) -> None:
    request = Request((1, 2, 3))
    (reference,) = run(count_target, autoregressive(), [request], 6)
    shorter = replace(reference, output_ids=reference.output_ids[:4])
    for one, other in ((reference, shorter), (shorter, reference)):
        verdict = classify(count_target, request, one, other, Sampling(), {1: 1.0})
        assert verdict == Verdict(VIOLATION, 4)


@pytest.mark.parametrize("prompt", [(1, 2, 3), (3,)])
@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_a_corrupted_output_is_a_violation_anywhere(count_target: Target, prompt: tuple[int, ...], place: int) -> None:
    """Also at the first token, and behind a prompt of one token."""
    request = Request(prompt)
    (reference,) = run(count_target, autoregressive(), [request], 6)
    noise = width_noise(count_target, request, reference.output_ids, [1, 8])
    verdict = classify(count_target, request, reference, changed(reference, place, 99), Sampling(), noise)
    assert (verdict.exactness, verdict.first_divergence) == (VIOLATION, place)


def test_bfloat16_replays_in_float32() -> None:
    """What float32 keeps apart is a violation whatever bfloat16 shows; what it ties is not."""
    model = tiny_model().bfloat16()
    target = Target.wrap(model, name="half")
    request = Request(PROMPT, 3)
    (reference,) = run(target, autoregressive(), [request], 6)
    noise = width_noise(target, request, reference.output_ids, [1, 16])
    exact = tiny_model().bfloat16().float()
    with torch.inference_mode():
        order = exact(torch.tensor([[*PROMPT, *reference.output_ids[:2]]])).logits[0, -1].argsort(descending=True)
    far = changed(reference, 2, int(order[-1]))
    assert classify(target, request, reference, far, Sampling(), noise).exactness == VIOLATION
    near = changed(reference, 2, int(order[1]))
    generous = {1: 100.0}
    assert classify(target, request, reference, near, Sampling(), generous).exactness == TIE_FLIP


@pytest.mark.parametrize("family", FAMILIES)
def test_width_noise_is_small_in_float32(family: str) -> None:
    target = tiny_target(family)
    request = Request(PROMPT)
    ids = plain_continuation(target, PROMPT, 20)
    noise = width_noise(target, request, ids, [1, 8, 17, 65])
    assert noise.keys() == {1, 8, 17, 65}
    assert noise[1] == 0.0
    assert all(value < 1e-4 for value in noise.values())


def test_width_noise_replays_the_text(count_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of the text up to the 64th, behind its own prefix, whatever the width and the batch."""
    seen: list[Tensor] = []
    head = Target.head

    def spied(self: Target, hidden: Tensor) -> Tensor:
        seen.append(head(self, hidden))
        return seen[-1]

    text = [(10 + i) % 128 for i in range(70)]
    monkeypatch.setattr(Target, "head", spied)
    noise = width_noise(count_target, Request(COUNT_PROMPT), text, [1, 3, 9], batch=2)
    assert noise == pytest.approx(dict.fromkeys((1, 3, 9), 0.0), abs=1e-5)
    for width in (3, 9):
        forwards = [logits for logits in seen if logits.shape[1] == width]
        step = min(width, 4)
        assert len(forwards) == -(-64 // step)
        following = torch.cat([logits[:, :step].argmax(-1) for logits in forwards], 1)[:, :64]
        assert following.tolist() == [[token + 1 for token in text[:64]]] * 2


def test_width_noise_shows_a_width_that_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward whose wide logits are off by 0.25 is reported as such."""
    target = tiny_target()
    head = Target.head
    monkeypatch.setattr(Target, "head", lambda self, hidden: head(self, hidden) + 0.25 * (hidden.shape[1] == 8))
    noise = width_noise(target, Request(PROMPT), plain_continuation(target, PROMPT, 12), [4, 8])
    assert noise[4] < 1e-4
    assert noise[8] == pytest.approx(0.25, abs=1e-4)


def test_the_golden_target_has_no_width_noise_to_speak_of(pair: golden.Pair) -> None:
    """What `zero tie flips` rests on: in float32 widths differ by far less than the golden gaps."""
    prompt = tuple(golden.document("e2e")["cases"][0]["prompt_ids"])
    (reference,) = run(pair.target, autoregressive(), [Request(prompt)], 24)
    noise = width_noise(pair.target, Request(prompt), reference.output_ids, [8, 17, 65])
    assert max(noise.values()) < 1e-3
