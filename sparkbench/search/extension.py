"""The inner loops of the continuity search, compiled by numba: one level of the beam at a time, all rows at once.

Nodes of a row are numbered as they are made; node 0 is the root. `best` lists the best of them so far, best first,
equal scores in the order they were made (depth, then the parent's place in the beam, then rank). At the end it is the
tree, and each level's beam is read off it.

Once `best` is full, what scores no more than its last entry can bring nothing into the tree any more: a step never
raises a score, and among equal scores the later loses. Such paths are not extended, and the tree is still that of the
whole beam search. They are counted, though: a path that ends in a stop token stands behind all others, so how many
others there are decides whether it is extended.

Nothing is known here of logits, n-grams or devices; that is continuity.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.ngram.jit import compiled

Array = NDArray[Any]

TOKEN, PARENT, DEPTH = 0, 1, 2  # columns of `nodes`
MADE, KEPT, LIVE, WHOLE = 0, 1, 2, 3  # columns of `counts`


@compiled
def count_candidates(tokens: Array, terms: Array, stops: Array, offered: Array) -> None:
    """How many candidates each level has, and how many of them are no stop tokens, to offered [B, d, 2]."""
    for row in range(tokens.shape[0]):
        for level in range(tokens.shape[1]):
            for rank in range(tokens.shape[2]):
                if terms[row, level, rank] > -np.inf:
                    offered[row, level, 0] += 1
                    if not is_in(stops, tokens[row, level, rank]):
                        offered[row, level, 1] += 1


@compiled
def find_beam(
    level: int,
    width: int,
    offered: Array,
    stops: Array,
    scores: Array,
    nodes: Array,
    best: Array,
    counts: Array,
    beam: Array,
) -> int:
    """Write the paths that the level extends, best first, as nodes to beam [B, w]; returns the most that a row has.

    width:   paths that a level extends; those that are in `best` must fit into `beam`.
    stops:   [S] token ids.
    scores:  [B, P] float32, nodes [B, P, 3], best [B, T].
    counts:  [B, 4]: nodes made, nodes in `best`, paths in `beam`, and how many those would be without pruning.
    """
    widest = 0
    for row in range(len(counts)):
        sums, made, top, kept, live = scores[row], nodes[row], best[row], counts[row, KEPT], 0
        paths, plain = 1, 0  # without pruning; plain ones do not end in a stop token
        if level > 0:
            paths = counts[row, WHOLE] * offered[row, level - 1, 0]
            plain = counts[row, WHOLE] * offered[row, level - 1, 1]
        for stopped in (False, True):
            left = max(0, width - plain) if stopped else width
            for place in range(kept):
                node = top[place]
                if made[node, DEPTH] != level or (level > 0 and is_in(stops, made[node, TOKEN])) != stopped:
                    continue
                if left == 0 or not joins(sums[node], sums, top, kept):
                    break
                beam[row, live] = node
                live += 1
                left -= 1
        counts[row, LIVE], counts[row, WHOLE] = live, min(paths, width)
        widest = max(widest, live)
    return widest


@compiled
def ask(
    level: int,
    factor: np.float32,
    tokens: Array,
    terms: Array,
    known: Array,
    scores: Array,
    nodes: Array,
    best: Array,
    counts: Array,
    beam: Array,
    slots: Array,
    contexts: Array,
    wanted: Array,
) -> int:
    """Write what must be looked up to extend the beam; returns how many contexts.

    factor:    weight of the level.
    tokens:    [B, d, k] candidates, and terms [B, d, k] float32 <= 0, their part of a step; -inf, at the end: none.
    known:     [B, h] the tokens that the root ends, -1 where there is none.
    slots:     [B, w], a path's context; paths of a row that end alike share one.
    contexts:  [B * w, n], and wanted [B * w, k]: the candidates that can bring a node into the tree after each; else
               -1.
    """
    found = 0
    for row in range(len(counts)):
        sums, top, kept, first = scores[row], best[row], counts[row, KEPT], found
        for place in range(counts[row, LIVE]):
            node = beam[row, place]
            write_context(contexts, found, known, nodes, row, node)
            slot = first
            while not equal(contexts, slot, found):
                slot += 1
            slots[row, place] = slot
            if slot == found:
                wanted[found] = -1
                found += 1
            for rank in range(tokens.shape[2]):
                term = terms[row, level, rank]
                if term > -np.inf and joins(sums[node] + factor * term, sums, top, kept):
                    wanted[slot, rank] = tokens[row, level, rank]
    return found


@compiled
def extend(
    level: int,
    factor: np.float32,
    tokens: Array,
    terms: Array,
    grams: Array,
    scores: Array,
    nodes: Array,
    best: Array,
    counts: Array,
    beam: Array,
    slots: Array,
) -> None:
    """Extend the beam, and keep the best of all.

    grams:  [C, k] float32, the n-gram part of a step after each context; empty where there is none.
    The others are those of `ask`.
    """
    most = np.float32(0)
    for row in range(len(counts)):
        sums, made, top, kept = scores[row], nodes[row], best[row], counts[row, KEPT]
        for place in range(counts[row, LIVE]):
            parent = beam[row, place]
            for rank in range(tokens.shape[2]):
                step = terms[row, level, rank]
                if step == -np.inf:
                    break
                if len(grams) > 0:
                    step += min(grams[slots[row, place], rank], most)
                score = sums[parent] + factor * step
                if joins(score, sums, top, kept):
                    node = counts[row, MADE]
                    counts[row, MADE] += 1
                    sums[node] = score
                    made[node, TOKEN] = tokens[row, level, rank]
                    made[node, PARENT] = parent
                    made[node, DEPTH] = level + 1
                    kept = insert(node, sums, top, kept)
        counts[row, KEPT] = kept


@compiled
def read_tree(scores: Array, nodes: Array, best: Array, counts: Array, tree: Array, sums: Array) -> None:
    """The nodes of `best` as tokens, parents, depths and validity: tree [4, B, N]; and their scores: sums [B, N]."""
    for row in range(len(counts)):
        place_of = np.zeros(counts[row, MADE], np.int64)
        for place in range(tree.shape[2]):
            if place >= counts[row, KEPT]:
                tree[0, row, place], tree[1, row, place], tree[2, row, place], tree[3, row, place] = 0, -1, 0, 0
                sums[row, place] = -np.inf
                continue
            node = best[row, place]
            place_of[node] = place
            parent = nodes[row, node, PARENT]
            tree[0, row, place] = nodes[row, node, TOKEN]
            tree[1, row, place] = -1 if parent < 0 else place_of[parent]
            tree[2, row, place] = nodes[row, node, DEPTH]
            tree[3, row, place] = 1
            sums[row, place] = scores[row, node]


@compiled
def joins(score: np.float32, scores: Array, best: Array, kept: int) -> bool:
    """Whether a node of that score, the last so far, is among the best of its row."""
    return kept < len(best) or score > scores[best[kept - 1]]


@compiled
def insert(node: int, scores: Array, best: Array, kept: int) -> int:
    """Put a node behind all that score no less; a full `best` drops its last. Returns the nodes in `best`."""
    low, high = 0, kept
    while low < high:
        middle = (low + high) >> 1
        if scores[best[middle]] >= scores[node]:
            low = middle + 1
        else:
            high = middle
    for place in range(min(kept, len(best) - 1), low, -1):
        best[place] = best[place - 1]
    best[low] = node
    return min(kept + 1, len(best))


@compiled
def is_in(numbers: Array, number: int) -> bool:
    for each in numbers:  # noqa: SIM110 (a generator does not compile)
        if each == number:
            return True
    return False


@compiled
def write_context(contexts: Array, slot: int, known: Array, nodes: Array, row: int, node: int) -> None:
    """The last tokens up to `node`: of its path, and before it of what is known; then -1."""
    place = contexts.shape[1] - 1
    while place >= 0 and node > 0:
        contexts[slot, place] = nodes[row, node, TOKEN]
        node = nodes[row, node, PARENT]
        place -= 1
    before = known.shape[1] - 1
    while place >= 0:
        contexts[slot, place] = known[row, before] if before >= 0 else -1
        before -= 1
        place -= 1


@compiled
def equal(contexts: Array, first: int, second: int) -> bool:
    for place in range(contexts.shape[1]):  # noqa: SIM110 (a generator does not compile)
        if contexts[first, place] != contexts[second, place]:
            return False
    return True
