"""Best-first search with a heap on the host: the classic construction, kept as the yardstick.

Nodes leave a heap one at a time; each pushes its next sibling and its best child. `walk` is that search for any
source of ranked children; `heap_tree` feeds it the ranked tokens of independent draft rows. Every row of the batch
is searched alone.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.ranking import INF, Ranked, capacity

# Log-probabilities and tokens of children, best first.
Family = tuple[list[float], list[int]]
# (depth of a node, its token, n) -> its n best children, or all if there are fewer; more than n do no harm.
Children = Callable[[int, int, int], Family]
# Tokens, parents, depths and scores of the nodes of a row.
Nodes = tuple[list[int], list[int], list[int], list[float]]

_FIRST = 8  # children fetched at first; most nodes contribute fewer


def heap_tree(ranked: Ranked, anchors: Tensor, budget: int) -> DraftTree:
    """The same tree as `level_tree`, node by node: same scores, same order."""
    _, depth, ranks = ranked.token_ids.shape
    width = 1 + capacity(depth, ranks, budget)

    def search(anchor: int, log_probs: list[list[float]], ids: list[list[int]]) -> Nodes:
        families = list(zip(log_probs, ids, strict=True))
        return walk(anchor, depth, ranks, width, lambda depth, token, count: families[depth])

    rows = zip(anchors.tolist(), ranked.log_probs.tolist(), ranked.token_ids.tolist(), strict=True)
    return as_tree([search(*row) for row in rows], width, anchors.device)


def walk(anchor: int, depth: int, fanout: int, width: int, children: Children) -> Nodes:
    """The best `width` nodes of one row, the root among them, none deeper than `depth`.

    No node has more than its `fanout` best children, and there must be as many.
    """
    tokens, parents, depths, scores = [anchor], [-1], [0], [0.0]
    families: dict[int, Family] = {}
    heap: list[tuple[float, int, int, int]] = []  # (-score, depth, parent, rank): the order of the nodes

    def push(parent: int, below: int, rank: int) -> None:
        if rank == fanout:
            return
        family = families.get(parent)
        if family is None or rank == len(family[0]):
            family = families[parent] = children(below - 1, tokens[parent], min(max(_FIRST, 4 * rank), fanout))
        step = family[0][rank]
        if step > -INF:
            heappush(heap, (-(scores[parent] + step), below, parent, rank))

    if width > 1:
        push(0, 1, 0)
    while heap and len(tokens) < width:
        cost, below, parent, rank = heappop(heap)
        tokens.append(families[parent][1][rank])
        parents.append(parent)
        depths.append(below)
        scores.append(-cost)
        push(parent, below, rank + 1)
        if below < depth:
            push(len(tokens) - 1, below + 1, 0)
    return tokens, parents, depths, scores


def as_tree(rows: Sequence[Nodes], width: int, device: torch.device) -> DraftTree:
    """One tree a row, padded to `width`."""

    def padded(rows: Sequence[list[int]] | Sequence[list[float]], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype).to(device)

    tokens, parents, depths, scores = zip(*rows, strict=True)
    log_probs = padded(scores, -INF, torch.float64)
    return DraftTree(
        tokens=padded(tokens, 0, torch.int64),
        parents=padded(parents, -1, torch.int64),
        depths=padded(depths, 0, torch.int64),
        valid=log_probs > -INF,
        max_depth=max(map(max, depths)),
        log_probs=log_probs,
    )
