"""Best-first search with a heap on the host: the classic construction, kept as the yardstick.

The ranked tokens are copied to the host, and nodes leave a heap one at a time; each pushes its next sibling
and its best child. Every row of the batch is searched alone.
"""

from heapq import heappop, heappush

import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.ranking import Ranked, capacity

INF = float("inf")


def heap_tree(ranked: Ranked, anchors: Tensor, budget: int) -> DraftTree:
    """The same tree as `level_tree`, node by node: same scores, same order."""
    width = 1 + capacity(ranked.token_ids.shape[1], ranked.token_ids.shape[2], budget)
    rows = zip(anchors.tolist(), ranked.log_probs.tolist(), ranked.token_ids.tolist(), strict=True)
    trees = [_search(anchor, log_probs, ids, width) for anchor, log_probs, ids in rows]
    device = anchors.device
    tokens, parents, depths, scores = zip(*trees, strict=True)
    log_probs = torch.tensor(scores, dtype=torch.float64).to(device)
    return DraftTree(
        tokens=torch.tensor(tokens).to(device),
        parents=torch.tensor(parents).to(device),
        depths=torch.tensor(depths).to(device),
        valid=log_probs > -INF,
        max_depth=max(map(max, depths)),
        log_probs=log_probs,
    )


def _search(
    anchor: int, log_probs: list[list[float]], ids: list[list[int]], width: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Tokens, parents, depths and scores of one row, padded to `width`."""
    tokens, parents, depths, scores = [anchor], [-1], [0], [0.0]
    heap: list[tuple[float, int, int, int]] = []  # (-score, depth, parent, rank): the order of the nodes

    def push(parent: int, depth: int, rank: int) -> None:
        row = log_probs[depth - 1]
        if rank < len(row) and row[rank] > -INF:
            heappush(heap, (-(scores[parent] + row[rank]), depth, parent, rank))

    if width > 1:
        push(0, 1, 0)
    while heap and len(tokens) < width:
        cost, depth, parent, rank = heappop(heap)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-cost)
        push(parent, depth, rank + 1)
        if depth < len(log_probs):
            push(len(tokens) - 1, depth + 1, 0)
    padding = width - len(tokens)
    return tokens + [0] * padding, parents + [-1] * padding, depths + [0] * padding, scores + [-INF] * padding
