"""How many draft tokens of each row to verify: the scheduler of DSpark (paper, sections 3.2.2 and 5.2).

A verified token costs time and is wasted when an earlier one of its row is rejected. The confidence head says
c_k, the probability that slot k is accepted given that all earlier slots were; the product a_j = c_1 ... c_j is the
survival of token j. Tokens of all rows of a batch compete: the one with the highest survival is the next to admit.

Why this can be unfair to the output. c_(k+1) is computed from the sampled token x_k. A rule that reads c_(k+1) to
decide whether x_k is verified lets the value of x_k decide its own fate, and under rejection sampling the output then
no longer has the target's distribution (paper, Appendix A). Every function here decides about token j of a row from
that row's slots up to j and from other rows, whose drafts are independent of x_j, only:

- `admit` walks down the ranking and stops for good at the first token that does not raise the throughput;
- `admit_capacity` is exact when the capacity was fixed without a look at the present drafts. `capacity` itself is a
  search over all scores, so feed it those of earlier steps, as `DelayedCapacity` does;
- `threshold_lengths` compares each slot with a constant.

Under the acceptance rule `match` the output never depends on the draft, and any rule would do.
Not here: calibrating the confidences (`calibration.py`), trees (`budget.py`), measuring the cost of a step.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence

StepCost = Callable[[int], float]
"""Seconds of one step whose target forward runs over so many tokens of the batch together, roots included."""

DELAY = 2
"""Steps between the drafts a capacity is computed from and the step it is used in (paper, section 5.2)."""


def admit(survival: Sequence[Sequence[float]], seconds: StepCost) -> list[int]:
    """Draft tokens to verify in each row (paper, Algorithm 1).

    survival: [R >= 1] rows, entry j of a row the probability that its first j + 1 draft tokens are all accepted;
              never rising along a row. Rows may differ in length, also 0.
    seconds:  the cost of a step over B = R + (admitted tokens) tokens.

    Tokens are admitted by falling survival (equal ones: the smaller slot, then the smaller row) while each raises the
    throughput: expected tokens of the step, one a row included, over seconds(B). Tokens of survival 0 are none to
    admit. The first that does not raise it ends the walk, also where a later one would: looking further is what
    biases the output. So on a cost curve with steps this may stop short of the best.
    """
    lengths = [0] * len(survival)
    tokens = len(survival)
    expected = float(tokens)
    best = expected / seconds(tokens)
    for negative, _, row in _ranking(survival):
        tokens += 1
        expected -= negative
        throughput = expected / seconds(tokens)
        if throughput <= best:
            break
        best = throughput
        lengths[row] += 1
    return lengths


def capacity(survival: Sequence[Sequence[float]], seconds: StepCost) -> int:
    """The number of draft tokens whose admission gives the highest throughput; the smallest among equals.

    Arguments as in `admit`. All numbers are tried, so steps in the cost curve do no harm. It reads every score: use
    the answer only for drafts it was not computed from.
    """
    tokens = len(survival)
    expected = float(tokens)
    best, best_tokens = expected / seconds(tokens), tokens
    for negative, _, _ in _ranking(survival):
        tokens += 1
        expected -= negative
        throughput = expected / seconds(tokens)
        if throughput > best:
            best, best_tokens = throughput, tokens
    return best_tokens - len(survival)


def admit_capacity(survival: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """Draft tokens to verify in each row: the `capacity` of highest survival, in the order of `admit`.

    Fewer where fewer have a survival above 0. A token's successors never rank before it, so its rank does not depend
    on them.
    """
    lengths = [0] * len(survival)
    for _, (_, _, row) in zip(range(capacity), _ranking(survival), strict=False):
        lengths[row] += 1
    return lengths


class DelayedCapacity:
    """`admit_capacity` with the capacity that was best for the drafts of two steps earlier (paper, section 5.2).

    Exact, because those drafts are settled before the present ones are sampled, and free of the stops that steps in
    the cost curve cause in `admit`. (One step earlier would be as exact; two let an asynchronous engine plan ahead.)

    A capacity is a number of tokens for a whole step, so one computed for more rows than are left would be too large.
    What is kept is therefore the survivals, without the rows that have left since (`keep`), and the capacity is
    computed for the rows present. That a row left is known before the step too. A row that joined has drafted nothing
    two steps earlier, so it counts as one whose tokens were all sure of being accepted (`join`).
    """

    def __init__(self) -> None:
        self._past: deque[list[Sequence[float]]] = deque(maxlen=DELAY)

    def admit(self, survival: Sequence[Sequence[float]], seconds: StepCost) -> list[int]:
        """Draft tokens to verify in each row in this step, and remember its survivals. Arguments as in `admit`."""
        if len(self._past) < DELAY:
            # Nothing is known yet that these tokens had no part in, so any choice by score would peek. The full draft
            # is what decoding without a scheduler verifies, and it is paid for two steps only.
            lengths = [len(row) for row in survival]
        else:
            lengths = admit_capacity(survival, capacity(self._past[0], seconds))
        self._past.append([tuple(map(float, row)) for row in survival])  # a copy: callers may reuse theirs
        return lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows of the last step, in this order, are in the next one."""
        self._past = deque(([step[row] for row in rows] for step in self._past), maxlen=DELAY)

    def join(self, rows: int, slots: int) -> None:
        """`rows` rows with drafts of `slots` tokens are in the next step, too, behind the others."""
        for step in self._past:
            step.extend([(1.0,) * slots] * rows)


def threshold_lengths(confidences: Sequence[Sequence[float]], threshold: float) -> list[int]:
    """Draft tokens to verify in each row: those before the first slot with a confidence below `threshold`.

    confidences: a slot's own c_k, conditional on the earlier ones, not the product. A threshold of 0 or less keeps
    all. This is the rule of the published evaluator; it knows no costs.
    """
    below = ((k for k, value in enumerate(row) if value < threshold) for row in confidences)
    return [next(slots, len(row)) for slots, row in zip(below, confidences, strict=True)]


def _ranking(survival: Sequence[Sequence[float]]) -> Iterator[tuple[float, int, int]]:
    """(minus survival, slot, row) of the tokens of survival above 0, best first.

    A merge, not a sort: a row's next slot is not even read before its last one was taken.
    """
    return heapq.merge(*(_row_ranking(row, scores) for row, scores in enumerate(survival)))


def _row_ranking(row: int, scores: Sequence[float]) -> Iterator[tuple[float, int, int]]:
    for slot, score in enumerate(scores):
        if not score > 0:
            return
        yield -float(score), slot, row
