"""Cases that went wrong in other tools: stop tokens and limits inside accepted blocks, and what a round counts.

COUNT continues 1, 2, 3 with 10, 11, 12, ... ORACLE proposes that, BAD3 is wrong at every output index divisible by 3,
NEVER is always wrong. Each is tried as a chain and as a tree.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    COUNT_PROMPT,
    Scripted,
    autoregressive,
    count_model,
    plain_continuation,
    requests_of,
    run,
    tiny_target,
)

from sparkbench.decoding.loop import Generation
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree

COUNTED = list(range(10, 60))
SHAPES = {"chain": 0, "tree": 2}
shapes = pytest.mark.parametrize("branch", SHAPES.values(), ids=SHAPES)


def oracle(branch: int, length: int = 7, wrong: Callable[[int], bool] = lambda index: False) -> Scripted:
    return Scripted([COUNT_PROMPT], [COUNTED], length=length, wrong=wrong, branch=branch)


def decode(target: Target, method: Method, limit: int, stops: Sequence[int] = ()) -> Generation:
    return run(target, method, requests_of([COUNT_PROMPT]), limit, stops=stops)[0]


def committed(generation: Generation) -> list[int]:
    return [round_.committed for round_ in generation.rounds]


def test_the_count_target_counts(tmp_path: Path) -> None:
    """Also after saving and loading it."""
    count_model().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), device="cpu")
    assert plain_continuation(target, COUNT_PROMPT, 30) == COUNTED[:30]
    assert plain_continuation(target, [3, 126], 3) == [127, 0, 1]


@shapes
@pytest.mark.parametrize(
    ("stops", "output", "commits"),
    [
        ([14], range(10, 15), [4]),  # inside an accepted block
        ([18], range(10, 19), [8]),  # the bonus slot
        ([10], [10], []),  # the prefill token
        ([97, 14], range(10, 15), [4]),  # two owners, one of which never occurs
        ([], range(10, 34), [8, 8, 7]),  # none
        ([17, 14, 12], range(10, 13), [2]),  # the first of several in one block
        ([26], range(10, 27), [8, 8]),  # the bonus slot of a later round
    ],
)
def test_stop_inside_a_block(
    count_target: Target, branch: int, stops: list[int], output: Sequence[int], commits: list[int]
) -> None:
    generation = decode(count_target, oracle(branch), 24, stops)
    assert list(generation.output_ids) == list(output)
    assert generation.output_ids == decode(count_target, autoregressive(), 24, stops).output_ids
    assert generation.stop_reason == ("stop" if stops else "length")
    assert committed(generation) == commits


def test_stop_ids_of_tokenizer_and_config() -> None:
    model = count_model()
    model.config.eos_token_id = 14
    target = Target.wrap(model, SimpleNamespace(eos_token_id=97))
    assert target.stop_ids == {14, 97}
    generation = decode(target, oracle(0), 24, sorted(target.stop_ids))
    assert list(generation.output_ids) == [10, 11, 12, 13, 14]


@shapes
def test_a_drafted_stop_token_that_is_rejected_stops_nothing(count_target: Target, branch: int) -> None:
    """The drafter proposes 97, a stop token, at output index 2."""

    class Proposes97(Scripted):
        def drafts(self, context: Context) -> torch.Tensor:
            drafts = super().drafts(context)
            index = int(context.lengths[0]) - len(COUNT_PROMPT)
            if index < 2:
                drafts[:, 1 - index] = 97
            return drafts

    generation = decode(count_target, Proposes97([COUNT_PROMPT], [COUNTED], branch=branch), 24, [97])
    assert generation.output_ids == decode(count_target, autoregressive(), 24, [97]).output_ids
    assert generation.stop_reason == "length"
    assert (generation.rounds[0].accepted, committed(generation)[0]) == (1, 2)


@shapes
@pytest.mark.parametrize(
    ("limit", "commits"), [(1, []), (2, [1]), (3, [2]), (5, [4]), (8, [7]), (9, [8]), (17, [8, 8])]
)
def test_exact_length(count_target: Target, branch: int, limit: int, commits: list[int]) -> None:
    generation = decode(count_target, oracle(branch), limit)
    assert list(generation.output_ids) == list(range(10, 10 + limit))
    assert (committed(generation), generation.stop_reason) == (commits, "length")


@shapes
@pytest.mark.parametrize(
    ("stop", "output", "reason"),
    [(12, [10, 11, 12], "stop"), (14, [10, 11, 12, 13, 14], "stop"), (15, [10, 11, 12, 13, 14], "length")],
)
def test_stop_precedence(count_target: Target, branch: int, stop: int, output: list[int], reason: str) -> None:
    for method in (oracle(branch), autoregressive()):
        generation = decode(count_target, method, 5, [stop])
        assert (list(generation.output_ids), generation.stop_reason) == (output, reason)


@shapes
def test_acceptance_counters(count_target: Target, branch: int) -> None:
    """Four rounds of 5 drafts: all match; the first is wrong; the third is wrong; a stop token is the third of five."""
    generation = decode(count_target, oracle(branch, 5, lambda index: index in (7, 10)), 40, [23])
    rounds = generation.rounds
    assert [round_.accepted for round_ in rounds] == [5, 0, 2, 5]
    assert committed(generation) == [6, 1, 3, 3]
    assert len(generation.output_ids) == 14
    assert sum(round_.max_depth for round_ in rounds) == 20
    assert sum(committed(generation)) / len(rounds) == 3.25
    bonus = [min(1, round_.committed - min(round_.committed, round_.accepted)) for round_ in rounds]
    assert bonus == [1, 1, 1, 0]
    survival = [sum(round_.accepted > k for round_ in rounds) / 4 for k in range(5)]
    assert survival == [3 / 4, 3 / 4, 2 / 4, 2 / 4, 2 / 4]
    assert [round_.offered_next for round_ in rounds] == [False, True, True, False]
    assert [round_.nodes for round_ in rounds] == [5 * (1 + branch)] * 4


@shapes
def test_never_right(count_target: Target, branch: int) -> None:
    generation = decode(count_target, oracle(branch, wrong=lambda index: True) if not branch else never_tree(), 9)
    assert list(generation.output_ids) == list(range(10, 19))
    assert [round_.accepted for round_ in generation.rounds] == [0] * 8
    assert committed(generation) == [1] * 8
    assert generation.rounds_drafted == 8


def never_tree() -> Scripted:
    """A tree whose every node is wrong: the drafted token is shifted past the true one, siblings further on."""
    return oracle(2, wrong=lambda index: True)


@shapes
def test_wrong_at_every_third(count_target: Target, branch: int) -> None:
    generation = decode(count_target, oracle(branch, wrong=lambda index: index % 3 == 0), 20)
    assert list(generation.output_ids) == list(range(10, 30))
    assert committed(generation) == [3, 3, 3, 3, 3, 3, 1]


def test_autoregressive_counters(count_target: Target) -> None:
    generation = decode(count_target, autoregressive(), 6)
    assert committed(generation) == [1] * 5
    assert {(r.nodes, r.max_depth, r.accepted, r.offered_next, r.expected_accepted) for r in generation.rounds} == {
        (0, 0, 0, False, None)
    }
    assert generation.rounds_drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_token_prompts(temperature: float) -> None:
    """A prompt of one token leaves nothing before the root; also beside longer prompts."""
    target = tiny_target("qwen3-mixed", window=4)
    prompts = [(5,), (7,), (1, 2, 3, 4, 5, 6)]
    requests = requests_of(prompts)
    sampling = Sampling(temperature)
    truths = [plain_continuation(target, r.prompt_ids, 20, r.noise_key, sampling) for r in requests]
    for some in ([0], [0, 1], [0, 1, 2]):
        method = Scripted([prompts[i] for i in some], [truths[i] for i in some], branch=1)
        found = run(target, method, [requests[i] for i in some], 10, sampling=sampling)
        assert [list(g.output_ids) for g in found] == [truths[i][:10] for i in some]


def test_rows_that_stop_at_different_times(count_target: Target) -> None:
    """Prefill, mid-block, bonus and limit in one batch of prompts of different lengths."""
    prompts = [(49,), (1, 2, 3), (2, 3, 20, 41), (5, 60)]
    truths = [[*range(p[-1] + 1, p[-1] + 50)] if p[-1] != 3 else COUNTED for p in prompts]
    truths = [[token % 128 for token in truth] for truth in truths]
    method = Scripted(prompts, truths, branch=1)
    found = run(count_target, method, requests_of(prompts), 12, stops=[50, 14])
    assert [list(g.output_ids) for g in found] == [
        [50],
        [10, 11, 12, 13, 14],
        [42, 43, 44, 45, 46, 47, 48, 49, 50],
        list(range(61, 73)),
    ]
    assert [committed(g) for g in found] == [[], [4], [8], [8, 3]]


def test_a_drafter_without_any_finite_logit(count_target: Target) -> None:
    """Its tree is the root and padding: decoding goes on one token a round."""

    class Nothing(Scripted):
        def propose(self, context: Context) -> DraftTree:
            tree = super().propose(context)
            valid = torch.zeros_like(tree.valid)
            valid[:, 0] = True
            nowhere = torch.full_like(tree.parents, -1)
            return DraftTree(tree.tokens, nowhere, torch.zeros_like(tree.depths), valid, 0)

    generation = decode(count_target, Nothing([COUNT_PROMPT], [COUNTED]), 6)
    assert list(generation.output_ids) == list(range(10, 16))
    assert [(r.nodes, r.accepted, r.committed) for r in generation.rounds] == [(0, 0, 1)] * 5
