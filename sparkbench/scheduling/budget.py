"""How many nodes of the draft trees to verify, from what they promise and what a step costs.

A best-first tree orders its nodes by the probability that they are accepted, exp(log_prob), which never rises. So the
first n nodes are the best tree of n nodes for every n, and choosing n afterwards cuts the tree without searching again.

Adding nodes pays while the expected tokens of the next ones, over the seconds they add, exceed the average of the
round so far. That marginal rule finds the best n only where costs grow smoothly. Real forwards get dearer in steps, so
between two steps nodes are free and just beyond one a single node is dear: there are many local maxima, and all n
are looked at.

Legal because of the acceptance rule `match`: the verifier draws the target's own tokens, whatever was drafted, so
reading every node before deciding can waste time but change no output. Chains under rejection sampling need the
care of `prefix.py`.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sparkbench.scheduling.prefix import StepCost


def tree_width(
    survival: Sequence[Sequence[float]] | NDArray[np.floating],
    seconds: StepCost,
    overhead_s: float,
    per_node_s: float = 0.0,
) -> int:
    """The number of draft nodes, root not counted, to verify in every row; the smallest among equals.

    survival:   [R >= 1] rows, the probabilities of a row's nodes to be accepted, best first; rows may differ in length.
    seconds:    the cost of a target forward over so many tokens of the batch together; a pure function: its values
                are remembered.
    overhead_s: what else a round costs, whatever the width (drafting, the search, the host).
    per_node_s: what else a round costs for each node of the width (the mask, packing).

    Maximises (R + sum over rows of the first n probabilities) / (overhead_s + per_node_s n + seconds(R (1 + n))). One
    n for the batch: the verifier pads rows to the widest, so a node left out of one row alone would save nothing.
    """
    rows = len(survival)
    widest = max(map(len, survival))
    gains = np.zeros(widest + 1)
    gains[0] = rows
    for row in survival:
        gains[1 : len(row) + 1] += row
    costs = overhead_s + per_node_s * np.arange(widest + 1) + _forward_seconds(seconds, rows, widest)
    return int(np.argmax(np.cumsum(gains) / costs))


@lru_cache(maxsize=64)
def _forward_seconds(seconds: StepCost, rows: int, widest: int) -> NDArray[np.float64]:
    """[widest + 1] seconds of a forward of `rows` rows over the root and 0 .. `widest` nodes each.

    Remembered, because a round must not pay for some hundred calls; never written to.
    """
    return np.array([seconds(rows * (1 + nodes)) for nodes in range(widest + 1)])
