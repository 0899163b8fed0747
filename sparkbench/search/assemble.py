"""Selection and assembly: what every depth-by-depth search shares.

`select` keeps the best paths of one depth, `best_nodes` turns the kept paths of all depths into a
`DraftTree`. Both know scores and positions only, so searches whose transitions depend on the parent (a Markov
bias) use them as they are.

They fix the order of the nodes: score, then smaller depth, then earlier parent, then better rank. Candidates
come in the order (parent, rank) with parents already ordered, levels come by depth, and every sort is stable;
no more is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparkbench.decoding.tree import DraftTree

INF = float("inf")
_FEW = 512  # sorting so few candidates takes less time than finding those worth sorting


@dataclass(frozen=True, eq=False)
class Levels:
    """Kept paths of depths 0, 1, ..., side by side: M paths a row, each depth in the order of the nodes.

    scores:   [B, M] float64, cumulative; -inf where a row has no such path.
    parents:  [B, M] int64: position of the parent in this list.
    tokens:   [B, M] int64.
    widths:   paths of each depth; the first is 1, the root.
    """

    scores: Tensor
    parents: Tensor
    tokens: Tensor
    widths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the M positions of `Levels` lie: depth [M], and first position [M] of the depth above."""

    depths: Tensor
    above: Tensor


@lru_cache(maxsize=64)
def layout(widths: tuple[int, ...], device: torch.device) -> Layout:
    counts = torch.tensor(widths)
    depths = torch.arange(len(widths)).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return Layout(depths.to(device), starts[(depths - 1).clamp(min=0)].to(device))


def select(candidates: Tensor, width: int, floor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores and columns [B, w] of the w <= `width` best of `candidates` [B, C] float64, ties by column.

    floor: [B, 1], a lower bound on the scores that matter; columns below it in every row may be dropped,
    which makes w depend on the data. None where the host must not wait: then w = min(width, C).
    """
    if floor is None or candidates.shape[1] <= _FEW:
        scores, columns = candidates.sort(dim=1, descending=True, stable=True)
        return scores[:, :width], columns[:, :width]
    alive = (candidates >= floor).any(0).nonzero().squeeze(1)
    scores, order = candidates.index_select(1, alive).sort(dim=1, descending=True, stable=True)
    return scores[:, :width], alive.take(order[:, :width])


def best_nodes(levels: Levels, nodes: int) -> DraftTree:
    """The root and the `nodes` best paths of `levels`, best first; padded where a row has fewer.

    Scores do not rise along a path, so an ancestor never comes after its descendant and the tree is closed.
    """
    order = levels.scores.sort(dim=1, descending=True, stable=True).indices
    return _tree(levels, order[:, : 1 + nodes])


def all_nodes(levels: Levels) -> DraftTree:
    """The root and every path of `levels`, in their order; padding comes last."""
    return _tree(levels, (levels.scores == -INF).sort(dim=1, stable=True).indices)


def _tree(levels: Levels, order: Tensor) -> DraftTree:
    """The paths at positions `order` [B, n], parents before children."""
    places = layout(levels.widths, levels.scores.device)
    scores = levels.scores.gather(1, order)
    valid = scores > -INF
    index = torch.zeros_like(levels.parents)  # position in the list -> index in the tree
    index.scatter_(1, order, _iota(order.shape[1], order.device).expand_as(order))
    parents = index.gather(1, levels.parents.gather(1, order)).where(valid, -1)
    parents[:, 0] = -1
    tokens = levels.tokens.gather(1, order).where(valid, 0)
    depths = places.depths.take(order).where(valid, 0)
    deepest = int(depths.max()) if depths.is_cpu else len(levels.widths) - 1
    return DraftTree(tokens, parents, depths, valid, deepest, scores)


def root_alone(anchors: Tensor) -> DraftTree:
    """Trees without nodes for anchors [B], scores included."""
    none = anchors.new_empty(len(anchors), 0)
    return DraftTree.chain_of(anchors, none, none.double())


def join(trees: Sequence[DraftTree], width: int) -> DraftTree:
    """Trees of single rows as one batch, padded to `width`."""
    fills = {"tokens": 0, "parents": -1, "depths": 0, "valid": False, "log_probs": -INF}

    def rows(name: str) -> Tensor:
        parts = [getattr(tree, name) for tree in trees]
        return torch.cat([pad(part, (0, width - part.shape[1]), value=fills[name]) for part in parts])

    tokens, parents, depths, valid, log_probs = map(rows, fills)
    return DraftTree(tokens, parents, depths, valid, max(tree.max_depth for tree in trees), log_probs)


@lru_cache(maxsize=64)
def _iota(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)
