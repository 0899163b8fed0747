"""Whether the arrays of an n-gram index fit together, read once from front to back (numba).

An index whose digest fits was written as it is; this says whether it was written right.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.jit import compiled

Array = NDArray[Any]
FAULTS = ("", "its children lie outside the nodes", "a child is no token", "its children do not rise")


def first_fault(index: NgramIndex) -> str | None:
    """The first node whose children do not lie where they must, in words; None where all is well."""
    node, fault = scan(index.tokens, index.first_child, index.vocab_size)
    return f"node {node}: {FAULTS[fault]}" if fault else None


@compiled
def scan(tokens: Array, first_child: Array, vocab_size: int) -> tuple[int, int]:
    """The first faulty node, and the place of its fault in FAULTS; 0 where there is none."""
    place = np.int64(1)
    for node in range(len(first_child) - 1):
        first, last = np.int64(first_child[node]), np.int64(first_child[node + 1])
        if first != place or last < first or last > len(tokens) or (first < last and first <= node):
            return node, 1
        before = np.int64(-1)
        for child in range(first, last):
            token = np.int64(tokens[child])
            if token >= vocab_size:
                return node, 2
            if token <= before:
                return node, 3
            before = token
        place = last
    return 0, 0
