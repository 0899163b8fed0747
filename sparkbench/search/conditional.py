"""Level-synchronous search where a node's children depend on its token: the best-first tree without a heap.

A node's score never exceeds its parent's, so the N best nodes contain their own ancestors, and at each depth they
are among the N best paths. Each depth is one batched step: the bias of the kept paths, their distributions, the best
of all children. A path outside the N best found so far has no descendant in the tree, so it is not expanded.

On a CPU, rows are searched one after the other and the number of paths follows the data (`level_tree`). Elsewhere the
host must not wait, so every depth has a fixed number of parents (`fixed_tree`), and a flag on the device says when
that was too few.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.assemble import Levels, best_nodes, join, layout, root_alone, select
from sparkbench.search.candidates import (
    LOWEST,
    SearchSpec,
    Space,
    Stage,
    TreeHead,
    log_probs,
    quiet,
    set_size,
    space_of,
)
from sparkbench.search.ranking import INF, best_ids, capacity

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

_GROUP = 32  # parents expanded at once: bounds the memory, too
_ROUNDING = 1e-6  # relative; more than the rounding of a difference of two float32 numbers


def level_tree(
    logits: Tensor, head: TreeHead | None, anchors: Tensor, spec: SearchSpec, stage: Stage = quiet
) -> DraftTree:
    """The `spec.budget` best nodes below `anchors` [B] from `logits` [B, L, V] and the bias of `head`.

    Nodes come best first; scores are float64 sums of float32 log-probabilities. Ties: smaller depth, earlier parent,
    better rank, where equal logits rank by token id.
    """
    if not logits.is_cpu:
        return fixed_tree(logits, head, anchors, spec, stage)[0]
    nodes = _nodes(logits, spec)
    if not nodes:
        return root_alone(anchors)
    trees = []
    for row in range(len(anchors)):
        anchor = anchors[row : row + 1]
        with stage("build/topk"):
            space = space_of(logits[row : row + 1], head and head.row(row), anchor, spec, trim=True)
        levels = _grow(space, anchor, spec, stage)
        with stage("build/expand"):
            trees.append(best_nodes(levels, nodes))
    return join(trees, 1 + nodes)


def fixed_tree(
    logits: Tensor,
    head: TreeHead | None,
    anchors: Tensor,
    spec: SearchSpec,
    stage: Stage = quiet,
    parents: int = 0,
) -> tuple[DraftTree, Tensor]:
    """The same tree with shapes that do not depend on the data, and nothing read back to the host.

    parents: paths of a depth that are expanded; 0: the budget, which always suffices. The flag [B] bool is True where
    a path that was not expanded scores as much as the last node, so that the tree may miss nodes.
    """
    nodes = _nodes(logits, spec)
    if not nodes:
        return root_alone(anchors), torch.zeros_like(anchors, dtype=torch.bool)
    with stage("build/topk"):
        space = space_of(logits, head, anchors, spec)
    widths = [spec.budget] * space.depth
    levels, left = fixed_levels(space, anchors, widths, spec.fan_out(space.size), stage, parents)
    with stage("build/expand"):
        tree = best_nodes(levels, nodes)
        assert tree.log_probs is not None
        return tree, (left >= tree.log_probs[:, -1]) & (left > -INF)


def fixed_levels(
    space: Space, anchors: Tensor, widths: Sequence[int], fanout: int, stage: Stage, parents: int = 0
) -> tuple[Levels, Tensor]:
    """The widths[d] best paths of depth d + 1 among the `fanout` best children of each path that is expanded above.

    `parents`, if not 0, bounds how many of a depth are. The second result [B] is the best score of those that were not,
    -inf if there are none.
    """
    scores, tokens = anchors.new_zeros(len(anchors), 1, dtype=torch.float64), anchors[:, None]
    kept, drafted, chosen = [scores], [tokens], [torch.zeros_like(tokens)]
    left = torch.full_like(scores[:, 0], -INF)
    for depth, width in enumerate(widths):
        if 0 < parents < scores.shape[1]:
            left = torch.maximum(left, scores[:, parents])
            scores, tokens = scores[:, :parents], tokens[:, :parents]
        children = min(fanout, width)
        parts = []
        for group, above in zip(tokens.split(_GROUP, 1), scores.split(_GROUP, 1), strict=True):
            with stage("build/bias"):
                bias = space.bias(depth, space.latents(depth, group))
            with stage("build/expand"):
                logits, normaliser = space.distribution(depth, bias, group.shape[1])
                best = best_ids(logits.flatten(0, 1), children).view(*group.shape, children)
                parts.append((best, above[:, :, None] + log_probs(logits.gather(2, best), normaliser)))
        with stage("build/expand"):
            slots, offered = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
            scores, columns = select(offered.flatten(1), width, None)
            tokens = space.tokens(depth, slots.flatten(1).gather(1, columns))
            kept.append(scores)
            drafted.append(tokens)
            chosen.append(columns // children)
    counts = tuple(each.shape[1] for each in kept)
    above = layout(counts, anchors.device).above
    return Levels(torch.cat(kept, 1), above + torch.cat(chosen, 1), torch.cat(drafted, 1), counts), left


def _nodes(logits: Tensor, spec: SearchSpec) -> int:
    """How many nodes the tree can have."""
    _, depth, vocab = logits.shape
    return capacity(depth, spec.fan_out(set_size(spec, depth, vocab)), spec.budget)


def _grow(space: Space, anchor: Tensor, spec: SearchSpec, stage: Stage) -> Levels:
    """The paths of one row that can be in the tree.

    The parents of a depth are expanded best first and in groups, since what one group finds spares many of the next.
    The lists of paths are short, and NumPy handles short arrays several times as fast as torch.
    """
    budget, fanout = spec.budget, spec.fan_out(space.size)
    scores, tokens = np.zeros(1), anchor
    kept, drafted, parents_of = [scores], [tokens], [np.zeros(1, np.int64)]
    best, floor = scores[:0], LOWEST  # the best scores found so far, and the last of them once they are `budget`
    start = 0  # of the depth above, in the list of all paths
    for depth in range(space.depth):
        found: list[tuple[Floats, Ints, Ints, Floats]] = []
        for first in range(0, len(scores), _GROUP):
            above = scores[first : first + _GROUP]
            if above[0] < floor:
                break
            with stage("build/bias"):
                bias = space.bias(depth, space.latents(depth, tokens[None, first : first + _GROUP]))
            with stage("build/expand"):
                logits, normaliser = (each[0].detach() for each in space.distribution(depth, bias, len(above)))
                parents, slots = _reach(logits, normaliser, above, floor, fanout, fanout < min(budget, space.size))
                chosen = logits.numpy()[parents, slots]
                offered = above[parents] + np.minimum(chosen - normaliser.numpy()[parents, 0], 0, dtype=np.float32)
                found.append((offered, first + parents, slots, chosen))
                best = np.concatenate([best, offered])
                if len(best) >= budget:
                    best = np.partition(best, -budget)[-budget:]
                    floor = max(floor, float(best[0]))
        with stage("build/expand"):
            offered, parents, slots, chosen = map(np.concatenate, zip(*found, strict=True))
            (alive,) = (offered >= floor).nonzero()
            order = alive[np.lexsort((-chosen[alive], parents[alive], -offered[alive]))][:budget]
            if not len(order):
                break
            parents_of.append(start + parents[order])
            start += len(scores)
            scores, tokens = offered[order], space.tokens(depth, torch.from_numpy(slots[order])[None])[0]
            kept.append(scores)
            drafted.append(tokens)
    listed, places = (torch.from_numpy(np.concatenate(each))[None] for each in (kept, parents_of))
    return Levels(listed, places, torch.cat(drafted)[None], tuple(map(len, kept)))


def _reach(
    logits: Tensor, normaliser: Tensor, scores: Floats, floor: float, fanout: int, capped: bool
) -> tuple[Ints, Ints]:
    """Parents and slots [n] of the children that reach a score of `floor`, or barely miss it, by parent.

    Those of one parent come by slot, or by rank. `capped`: no more than the `fanout` best of a parent.
    """
    if floor == LOWEST:
        slots = best_ids(logits, fanout).numpy()
        return np.arange(len(scores)).repeat(fanout), slots.flatten()
    # What a logit must be, less what rounding can amount to.
    norms = normaliser.numpy().astype(np.float64)
    least = (floor * (1 + _ROUNDING) - scores)[:, None] + norms - _ROUNDING * np.abs(norms)
    values = logits.numpy()
    reached = values >= np.maximum(least, LOWEST).astype(np.float32)
    parents, slots = np.divmod(np.flatnonzero(reached), logits.shape[1])
    if capped and len(parents) > fanout:
        order = np.lexsort((-values[parents, slots], parents))
        parents, slots = parents[order], slots[order]
        first = np.arange(len(parents)) - np.searchsorted(parents, parents) < fanout
        parents, slots = parents[first], slots[first]
    return parents, slots
