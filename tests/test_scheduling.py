"""The scheduler against brute force, and that it never decides about a token by what depends on that token."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sparkbench.scheduling import (
    DelayedCapacity,
    StepCost,
    admit,
    admit_capacity,
    capacity,
    threshold_lengths,
    tree_width,
)

Rows = list[list[float]]
Policy = Callable[[Rows], list[int]]

APPENDIX_A = {1: 1 / 1.0, 2: 1 / 0.5, 3: 1 / 0.45}.__getitem__
"""The step costs of the DSpark paper's Appendix A, given there as steps a second."""


def smooth(tokens: int) -> float:
    return 0.02 + 0.003 * tokens


def staircase(tokens: int) -> float:
    """Dearer by every second token, as the tiles of a matrix product make it."""
    return 0.04 + 0.02 * (tokens // 2)


def confidences(rng: np.random.Generator, rows: int, slots: int) -> Rows:
    """Ragged rows of confidences; half of the time from a coarse grid, so that products tie and some are 0."""
    lengths = rng.integers(0, slots + 1, rows)
    if rng.random() < 0.5:
        return [rng.choice([0.0, 0.25, 0.5, 1.0], size=n, p=[0.1, 0.2, 0.3, 0.4]).tolist() for n in lengths]
    return [rng.beta(4, 1, size=n).tolist() for n in lengths]


def survival(rows: Rows) -> Rows:
    return [np.cumprod(row).tolist() for row in rows]


def throughput(scores: Rows, lengths: Sequence[int], seconds: StepCost) -> float:
    expected = len(scores) + sum(sum(row[:n]) for row, n in zip(scores, lengths, strict=True))
    return expected / seconds(len(scores) + sum(lengths))


def all_lengths(scores: Rows) -> list[tuple[int, ...]]:
    """Every choice of lengths whose tokens have a survival above 0."""
    return list(itertools.product(*(range(sum(score > 0 for score in row) + 1) for row in scores)))


# Against brute force ------------------------------------------------------------


@pytest.mark.parametrize("seconds", [smooth, staircase])
def test_admit_walks_the_sorted_candidates(seconds: StepCost) -> None:
    """The paper's Algorithm 1, written as it stands there: sort everything, then walk."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        scores = survival(confidences(rng, int(rng.integers(1, 6)), 6))
        candidates = [(-a, j, r) for r, row in enumerate(scores) for j, a in enumerate(row) if a > 0]
        lengths = [0] * len(scores)
        best, kept = throughput(scores, lengths, seconds), list(lengths)
        for _, j, r in sorted(candidates):
            lengths[r] = j + 1
            reached = throughput(scores, lengths, seconds)
            if reached <= best * (1 + 1e-12):
                break
            best, kept = reached, list(lengths)
        assert admit(scores, seconds) == kept


def test_admit_is_the_best_of_all_choices_where_costs_are_smooth() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        scores = survival(confidences(rng, 3, 4))
        best = max(throughput(scores, lengths, smooth) for lengths in all_lengths(scores))
        assert throughput(scores, admit(scores, smooth), smooth) == pytest.approx(best)


def test_capacity_is_the_best_of_all_choices_whatever_the_costs() -> None:
    rng = np.random.default_rng(3)
    short = 0
    for _ in range(100):
        scores = survival(confidences(rng, 3, 4))
        reached = {lengths: throughput(scores, lengths, staircase) for lengths in all_lengths(scores)}
        best = max(reached.values())
        count = capacity(scores, staircase)
        assert throughput(scores, admit_capacity(scores, count), staircase) == pytest.approx(best)
        assert count == min(sum(lengths) for lengths, value in reached.items() if value > best * (1 - 1e-12))
        short += throughput(scores, admit(scores, staircase), staircase) < best * (1 - 1e-9)
    assert short > 10  # a walk that stops at the first step of the staircase misses the best


def test_admit_capacity_takes_the_highest() -> None:
    scores = [[0.9, 0.5, 0.5], [0.5, 0.4], [], [0.0, 0.0]]
    taken = [admit_capacity(scores, count) for count in range(7)]
    # 0.9; then of the three 0.5 the first slot, then the smaller slot of row 0; then 0.4; the zeros never.
    assert taken == [
        *([0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0], [3, 1, 0, 0], [3, 2, 0, 0]),
        [3, 2, 0, 0],
    ]


def test_equal_throughput_admits_nothing_more() -> None:
    """Two tokens at twice the seconds of one are worth nothing."""
    assert admit([[1.0, 1.0]], float) == [0]
    assert capacity([[1.0, 1.0]], float) == 0


@pytest.mark.parametrize(
    ("threshold", "lengths"),
    [(-1.0, [3, 2, 0]), (0.0, [3, 2, 0]), (0.5, [3, 0, 0]), (0.6, [1, 0, 0]), (0.95, [0, 0, 0])],
)
def test_threshold_cuts_before_the_first_slot_below_it(threshold: float, lengths: list[int]) -> None:
    """Each slot's own confidence counts, not the product; one equal to the threshold stays."""
    assert threshold_lengths([[0.9, 0.5, 0.7], [0.0, 1.0], []], threshold) == lengths


# Nothing decides about a token by what depends on it ------------------------------


def by_threshold(rows: Rows) -> list[int]:
    return threshold_lengths(rows, 0.5)


def walking(rows: Rows) -> list[int]:
    return admit(survival(rows), staircase)


def delayed(rows: Rows) -> list[int]:
    scheduler = DelayedCapacity()
    for past in (0.6, 0.95):
        scheduler.admit([[past**k for k in range(1, 6)]] * len(rows), staircase)
    return scheduler.admit(survival(rows), staircase)


def peeking(rows: Rows) -> list[int]:
    """The planted error: the best number of tokens for the very drafts it is then applied to."""
    scores = survival(rows)
    return admit_capacity(scores, capacity(scores, staircase))


def violations(policy: Policy) -> int:
    """How often the fate of a token changed with the confidences of later slots of its row."""
    rng = np.random.default_rng(4)
    found = 0
    for _ in range(300):
        rows = confidences(rng, int(rng.integers(1, 5)), 5)
        before = policy(rows)
        for r, row in enumerate(rows):
            for j in range(len(row)):  # slot j decides about token j; slot j + 1 is computed from token j
                later = rng.choice([0.0, 0.5, 1.0, rng.random()], size=len(row) - j - 1).tolist()
                changed = [*rows[:r], [*row[: j + 1], *later], *rows[r + 1 :]]
                found += (before[r] > j) != (policy(changed)[r] > j)
    return found


@pytest.mark.parametrize("policy", [by_threshold, walking, delayed])
def test_no_token_is_judged_by_what_follows_it(policy: Policy) -> None:
    assert violations(policy) == 0


def test_a_search_over_present_scores_is_found_out() -> None:
    assert violations(peeking) > 10


def test_a_later_slot_never_pulls_an_earlier_one_in() -> None:
    """Scores that rise along a row are no survivals, and even then slot 2 is not read before slot 1 was taken."""
    assert admit_capacity([[0.5, 0.9], [0.6]], 1) == [0, 1]


def test_appendix_a_stops_where_a_search_would_look_further() -> None:
    assert [throughput(survival([[0.8, 0.9]]), [n], APPENDIX_A) for n in range(3)] == pytest.approx([1.0, 0.9, 1.134])
    assert throughput(survival([[0.8, 0.0]]), [2], APPENDIX_A) == pytest.approx(0.81)
    for second, searched in ((0.9, 2), (0.0, 0)):
        scores = survival([[0.8, second]])
        assert admit(scores, APPENDIX_A) == [0]
        assert capacity(scores, APPENDIX_A) == searched


def first_token(target: np.ndarray, draft: np.ndarray, second: Sequence[float], policy: Policy) -> np.ndarray:
    """The exact distribution of the first output token under rejection sampling of a chain of two drafts.

    second: the confidence of the second slot after each value of the first draft token. Only whether the first
    draft is verified matters for the first token: if so, it is accepted with probability min(1, p/q) and otherwise
    replaced by a draw from the positive part of p - q; if not, the target draws.
    """
    overlap = np.minimum(target, draft)
    residual = target - overlap
    residual = residual / max(residual.sum(), 1e-300)
    output = np.zeros(len(target))
    for token, chance in enumerate(draft):
        if policy([[float(overlap.sum()), second[token]]])[0]:
            accepted = overlap[token] / chance
            output[token] += chance * accepted
            output += chance * (1 - accepted) * residual
        else:
            output += chance * target
    return output


def appendix_peeking(rows: Rows) -> list[int]:
    scores = survival(rows)
    return admit_capacity(scores, capacity(scores, APPENDIX_A))


def test_appendix_a_bias() -> None:
    """Drafts A and B alike, A with a confident successor: searching verifies only A and outputs it too often."""
    target, draft = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    biased = first_token(target, draft, [0.9, 0.0], appendix_peeking)
    assert biased == pytest.approx([0.85, 0.15])
    fair = first_token(target, draft, [0.9, 0.0], lambda rows: admit(survival(rows), APPENDIX_A))
    assert fair == pytest.approx(target)


def largest_bias(policy: Policy) -> float:
    """The largest error of a first token's probability, of a row that shares its step with another one."""
    rng = np.random.default_rng(5)
    errors, cut = [0.0], set()
    for _ in range(200):
        target, draft = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        second, other = rng.random(4).tolist(), rng.beta(4, 1, 3).tolist()

        def beside(rows: Rows, other: list[float] = other) -> list[int]:
            lengths = policy([*rows, other])
            cut.add(lengths[0] > 0)
            return lengths

        errors.append(float(np.abs(first_token(target, draft, second, beside) - target).max()))
    assert cut == {False, True}  # it did decide something
    return max(errors)


@pytest.mark.parametrize("policy", [by_threshold, walking, delayed])
def test_the_output_keeps_the_targets_distribution(policy: Policy) -> None:
    assert largest_bias(policy) < 1e-12


def test_a_search_over_present_scores_biases_the_output() -> None:
    assert largest_bias(peeking) > 0.05


# The delayed capacity -------------------------------------------------------------


def test_delayed_capacity_is_that_of_two_steps_earlier() -> None:
    rng = np.random.default_rng(6)
    steps = [survival([rng.beta(3, 1, 5).tolist() for _ in range(4)]) for _ in range(8)]
    scheduler = DelayedCapacity()
    lengths = [scheduler.admit(step, smooth) for step in steps]
    assert lengths[:2] == [[5] * 4] * 2
    capacities = [capacity(step, smooth) for step in steps]
    assert len(set(capacities)) > 2
    assert [sum(row) for row in lengths[2:]] == capacities[:-2]
    assert lengths[2:] == [admit_capacity(step, count) for step, count in zip(steps[2:], capacities, strict=False)]


def test_delayed_capacity_forgets_rows_that_left() -> None:
    """The capacity is that of the rows still present, taken from the step two earlier, in their present order.

    Certain tokens always pay, so each row adds its own number to a capacity and the sum tells which rows are in it.
    """
    scheduler = DelayedCapacity()
    scheduler.admit([[1.0] * n for n in (1, 2, 4, 8)], smooth)
    scheduler.keep([0, 1, 3])
    scheduler.admit([[1.0] * n for n in (16, 16, 32)], smooth)
    scheduler.keep([2, 0])
    present = survival([[0.99] * 64, [0.98] * 64])
    assert scheduler.admit(present, smooth) == admit_capacity(present, 8 + 1)
    scheduler.keep([1])
    assert scheduler.admit(present[1:], smooth) == [16]


def test_delayed_capacity_copies_what_it_remembers() -> None:
    """A caller that writes the next step into the same buffer must not turn past scores into present ones."""
    buffer = np.tile(np.cumprod([0.9] * 5), (2, 1))
    expected = capacity(buffer.tolist(), smooth)
    scheduler = DelayedCapacity()
    scheduler.admit(list(buffer), smooth)
    scheduler.admit(list(buffer), smooth)
    buffer *= 0.01
    assert 0 < expected == sum(scheduler.admit(list(buffer), smooth))


# Trees ----------------------------------------------------------------------------


def slow_width(scores: Rows, seconds: StepCost, overhead_s: float, per_node_s: float) -> int:
    rows, widest = len(scores), max(map(len, scores))

    def rate(nodes: int) -> float:
        expected = rows + sum(sum(row[:nodes]) for row in scores)
        return expected / (overhead_s + per_node_s * nodes + seconds(rows * (1 + nodes)))

    return max(range(widest + 1), key=rate)


@pytest.mark.parametrize("seconds", [smooth, staircase])
def test_tree_width_is_the_best_of_all(seconds: StepCost) -> None:
    rng = np.random.default_rng(8)
    widths = set()
    for _ in range(200):
        rows = [np.sort(rng.beta(0.3, 2, rng.integers(0, 30)))[::-1].tolist() for _ in range(rng.integers(1, 4))]
        overhead_s, per_node_s = float(rng.choice([0.0, 0.05])), float(rng.choice([0.0, 0.001]))
        width = tree_width(rows, seconds, overhead_s, per_node_s)
        assert width == slow_width(rows, seconds, overhead_s, per_node_s)
        widths.add(width)
    assert len(widths) > 5


def test_tree_width_looks_beyond_a_step_that_does_not_pay() -> None:
    """The fourth node is dear and the next three are free: 2 nodes beat 3, and 6 beat both."""
    scores = [[0.9] * 6]
    costs = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.6, 5: 1.6, 6: 1.6, 7: 1.6}
    assert tree_width(scores, costs.__getitem__, 0.0) == 6
    assert tree_width([scores[0][:3]], costs.__getitem__, 0.0) == 2


def test_tree_width_where_the_margin_falls_below_the_average() -> None:
    """On a straight cost line the best width is where one more node brings less a second than the round does."""
    scores = (0.9 ** np.arange(1, 200))[None]
    width = tree_width(scores, smooth, 0.01)
    average = (1 + scores[0, :width].sum()) / (0.01 + smooth(1 + width))
    assert scores[0, width - 1] / 0.003 > average > scores[0, width] / 0.003


def test_tree_width_takes_the_smallest_among_equals_and_arrays() -> None:
    assert tree_width([[1.0, 0.0, 0.0]], lambda tokens: 1.0, 0.0) == 1
    assert tree_width([[]], smooth, 0.0) == 0
    scores = np.sort(np.random.default_rng(9).random((3, 20)).astype(np.float32))[:, ::-1] ** 4
    assert tree_width(scores, staircase, 0.01) == slow_width(scores.astype(float).tolist(), staircase, 0.01, 0.0) > 0


def test_tree_width_asks_for_costs_once() -> None:
    calls = []

    def counted(tokens: int) -> float:
        calls.append(tokens)
        return smooth(tokens)

    scores = np.full((2, 4), 0.5)
    assert tree_width(scores, counted, 0.0) == tree_width(scores, counted, 0.0)
    assert calls == [2, 4, 6, 8, 10]
