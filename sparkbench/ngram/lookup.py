"""P(token | context) from an n-gram index, for many contexts and candidates in one call.

The rule is DART's (arXiv:2601.19278): the longest known suffix of the context that has the token as a child gives
count(child) / count(suffix); no discount, no mixing, no unigram level, and each candidate backs off on its own.

The kernel is compiled by numba and runs without the GIL. It trusts no value that it reads: every position is cut to
the arrays, so that a damaged index gives wrong numbers and never a crash.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.jit import compiled

Array = NDArray[Any]


def look_up(
    index: NgramIndex, contexts: Array, tokens: Array, rows: Array
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Probabilities [C, k] float32 of candidates after contexts, and how many context tokens each matched, [C, k] int8.

    contexts: [C, n], the last column is the most recent token; -1 where there is none, and all left of it is ignored,
              as is what the index is too short for.
    tokens:   [R, k] candidates; an entry outside the vocabulary (-1) gets probability 0.
    rows:     [C], whose candidates a context takes.

    Where nothing matches, both are 0. A child of count 0 is a match of probability 0 and ends the back-off.
    ValueError: shapes that do not fit, or a row outside `tokens`.
    """
    contexts, tokens, rows = _integers(contexts), _integers(tokens), _integers(rows)
    if contexts.ndim != 2 or tokens.ndim != 2 or rows.shape != contexts.shape[:1]:
        raise ValueError(f"contexts {contexts.shape}, tokens {tokens.shape} and rows {rows.shape} do not fit together")
    shape = len(contexts), tokens.shape[1]
    probabilities, lengths = np.zeros(shape, np.float32), np.zeros(shape, np.int8)
    arrays = index.tokens, index.counts, index.first_child
    if not fill(*arrays, index.vocab_size, contexts, tokens, rows, index.order - 1, probabilities, lengths):
        raise ValueError(f"rows must be from 0 to {len(tokens) - 1}")
    return probabilities, lengths


def warm_up(index: NgramIndex) -> None:
    """Compile the look-up for this index's types, or load it compiled, so that no later call waits for that."""
    one = np.zeros((1, 1), np.int64)
    look_up(index, one, one, one[0])


def _integers(array: Array) -> NDArray[np.int64]:
    """The array in the one form that the kernel is compiled for."""
    array = np.ascontiguousarray(array, dtype=np.int64)
    return array if array.flags.writeable else array.copy()


@compiled
def children(first_child: Array, node: int, nodes: int) -> tuple[Any, Any]:
    """The first child of a node and the place behind its last one; equal where it has none."""
    if node < 0 or node >= len(first_child) - 1:
        return 0, 0
    first, last = np.int64(first_child[node]), np.int64(first_child[node + 1])
    if first < 0 or last > nodes or last < first:
        return 0, 0
    return first, last


@compiled
def search(tokens: Array, first: int, last: int, wanted: Array, count: int, places: Array) -> None:
    """For each of `count` wanted tokens, the last of the nodes first to last - 1 whose token is not above it.

    Written to `places`; the first node, where there is none. All searches go on side by side: their steps wait for
    memory, and so they wait together. No branch depends on a token, which the processor would have to guess.
    """
    places[:count] = first
    size = last - first
    while size > 1:
        half = size >> 1
        for each in range(count):
            places[each] += half * (np.int64(tokens[places[each] + half]) <= wanted[each])
        size -= half


@compiled
def find_suffix(tokens: Array, first_child: Array, vocab_size: int, suffix: Array, place: Array) -> int:
    """The node of a suffix [n] of a context, or -1. `place` is scratch, one entry at least."""
    if suffix[0] < 0 or suffix[0] >= min(vocab_size, len(tokens) - 1):
        return -1
    node = 1 + suffix[0]  # depth 1 is dense
    for depth in range(1, len(suffix)):
        first, last = children(first_child, node, len(tokens))
        if first == last:
            return -1
        search(tokens, first, last, suffix[depth:], 1, place)
        node = place[0]
        if np.int64(tokens[node]) != suffix[depth]:
            return -1
    return node


@compiled
def fill(
    tokens: Array,
    counts: Array,
    first_child: Array,
    vocab_size: int,
    contexts: Array,
    candidates: Array,
    rows: Array,
    depth: int,
    probabilities: Array,
    lengths: Array,
) -> bool:
    """`look_up` into zeroed arrays, with at most `depth` context tokens; False where a row does not exist."""
    width = contexts.shape[1]
    wanted = np.empty(candidates.shape[1], np.int64)
    columns, places = np.empty_like(wanted), np.empty(max(1, len(wanted)), np.int64)
    for context in range(contexts.shape[0]):
        row = rows[context]
        if row < 0 or row >= candidates.shape[0]:
            return False
        known = 0
        while known < min(depth, width) and contexts[context, width - 1 - known] >= 0:
            known += 1
        left = 0  # candidates that nothing has matched yet: `wanted`, in `columns`
        for column in range(candidates.shape[1]):
            if candidates[row, column] >= 0:
                wanted[left], columns[left] = candidates[row, column], column
                left += 1
        for length in range(known, 0, -1):
            node = find_suffix(tokens, first_child, vocab_size, contexts[context, width - length :], places)
            first, last = children(first_child, node, len(tokens))
            if first == last:
                continue
            search(tokens, first, last, wanted, left, places)
            total, unmatched = counts[node], 0
            for each in range(left):
                place, column = places[each], columns[each]
                if np.int64(tokens[place]) != wanted[each]:
                    wanted[unmatched], columns[unmatched] = wanted[each], column
                    unmatched += 1
                    continue
                lengths[context, column] = length
                if total > 0:
                    probabilities[context, column] = counts[place] / total
            left = unmatched
    return True
