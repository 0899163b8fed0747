"""Level-synchronous search where a node's children depend on its token: the best-first tree without a heap.

A node's score never exceeds its parent's, so the N best nodes contain their own ancestors, and at each depth they
are among the N best paths. Each depth is one batched step: the bias of the kept paths, their distributions, the best
of all children. A path outside the N best found so far has no descendant in the tree, so it is not expanded.

On a CPU, rows are searched one after the other and the number of paths follows the data (`level_tree`). Elsewhere the
host must not wait, so every depth has a fixed number of parents (`fixed_tree`), and a flag on the device says when
that was too few.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.assemble import Levels, best_nodes, join, layout, root_alone, select
from sparkbench.search.candidates import (
    LOWEST,
    MarkovHead,
    SearchSpec,
    Space,
    Stage,
    log_probs,
    quiet,
    set_size,
    space_of,
)
from sparkbench.search.ranking import INF, best_ids, capacity

_GROUP = 32  # parents expanded at once: bounds the memory, too
_ROUNDING = 1e-6  # relative; more than the rounding of a difference of two float32 numbers


def level_tree(
    logits: Tensor, head: MarkovHead | None, anchors: Tensor, spec: SearchSpec, stage: Stage = quiet
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
            space = space_of(logits[row : row + 1], head, anchor, spec, trim=True)
        levels = _grow(space, anchor, spec, stage)
        with stage("build/expand"):
            trees.append(best_nodes(levels, nodes))
    return join(trees, 1 + nodes)


def fixed_tree(
    logits: Tensor,
    head: MarkovHead | None,
    anchors: Tensor,
    spec: SearchSpec,
    stage: Stage = quiet,
    parents: int = 0,
) -> tuple[DraftTree, Tensor]:
    """The same tree with shapes that do not depend on the data, and nothing read back to the host.

    parents: paths of a depth that are expanded; 0: the budget, which always suffices. The flag [B] bool is True where
    a path among the best found so far was not expanded, so that the tree may miss nodes.
    """
    nodes = _nodes(logits, spec)
    if not nodes:
        return root_alone(anchors), torch.zeros_like(anchors, dtype=torch.bool)
    with stage("build/topk"):
        space = space_of(logits, head, anchors, spec)
    widths = [spec.budget] * space.depth
    levels, overflow = fixed_levels(space, anchors, widths, spec.fan_out(space.size), stage, parents)
    with stage("build/expand"):
        return best_nodes(levels, nodes), overflow


def fixed_levels(
    space: Space, anchors: Tensor, widths: Sequence[int], fanout: int, stage: Stage, parents: int = 0
) -> tuple[Levels, Tensor]:
    """The widths[d] best paths of depth d + 1 among the `fanout` best children of each path kept above.

    `parents`, if not 0, bounds how many paths of a depth are expanded; the flag [B] is that of `fixed_tree`, for a
    budget of widths[0] nodes.
    """
    scores, tokens = anchors.new_zeros(len(anchors), 1, dtype=torch.float64), anchors[:, None]
    kept, drafted, chosen = [scores], [tokens], [torch.zeros_like(tokens)]
    overflow = torch.zeros_like(anchors, dtype=torch.bool)
    for depth, width in enumerate(widths):
        with stage("build/bias"):
            bias = space.bias(depth, space.latents(depth, tokens))
        with stage("build/expand"):
            logits, normaliser = space.distribution(depth, bias, tokens.shape[1])
            children = min(fanout, width)
            slots = best_ids(logits.flatten(0, 1), children).view(*tokens.shape, children)
            offered = scores[:, :, None] + log_probs(logits.gather(2, slots), normaliser)
            scores, columns = select(offered.flatten(1), width, None)
            tokens = space.tokens(depth, slots.flatten(1).gather(1, columns))
            kept.append(scores)
            drafted.append(tokens)
            chosen.append(columns // children)
            if 0 < parents < scores.shape[1]:
                found = torch.cat(kept[1:], dim=1)
                floor = found.topk(widths[0]).values[:, -1] if found.shape[1] >= widths[0] else -INF
                left = scores[:, parents]
                overflow |= (left >= floor) & (left > -INF)
                scores, tokens = scores[:, :parents], tokens[:, :parents]
    counts = tuple(each.shape[1] for each in kept)
    above = layout(counts, anchors.device).above
    return Levels(torch.cat(kept, 1), above + torch.cat(chosen, 1), torch.cat(drafted, 1), counts), overflow


def _nodes(logits: Tensor, spec: SearchSpec) -> int:
    """How many nodes the tree can have."""
    _, depth, vocab = logits.shape
    return capacity(depth, spec.fan_out(set_size(spec, depth, vocab)), spec.budget)


def _grow(space: Space, anchor: Tensor, spec: SearchSpec, stage: Stage) -> Levels:
    """The paths of one row that can be in the tree.

    The parents of a depth are expanded best first and in groups, since what one group finds spares many of the next.
    """
    budget, fanout = spec.budget, spec.fan_out(space.size)
    scores, tokens = torch.zeros(1, dtype=torch.float64), anchor
    kept, drafted, parents_of = [scores], [tokens], [torch.zeros_like(anchor)]
    best, floor = scores[:0], -INF  # the best scores found so far, and the last of them once they are `budget`
    start = 0  # of the depth above, in the list of all paths
    for depth in range(space.depth):
        found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        done = 0
        while done < len(scores) and scores[done] >= floor:
            group = slice(done, done + _GROUP)
            with stage("build/bias"):
                bias = space.bias(depth, space.latents(depth, tokens[None, group]))
            with stage("build/expand"):
                above = scores[group]
                logits, normaliser = (each[0] for each in space.distribution(depth, bias, len(above)))
                parents, slots = _reach(logits, normaliser, above, floor, fanout, fanout < min(budget, space.size))
                chosen = logits[parents, slots]
                offered = above[parents] + log_probs(chosen, normaliser[parents, 0])
                found.append((offered, done + parents, slots, chosen))
                best = torch.cat([best, offered])
                best = best.topk(min(budget, len(best))).values
                floor = float(best[-1]) if len(best) == budget else -INF
            done += len(above)
        with stage("build/expand"):
            offered, parents, slots, chosen = map(torch.cat, zip(*found, strict=True))
            ordered, order = offered.sort(descending=True, stable=True)
            if (ordered[1:] == ordered[:-1]).any():
                order = _by_rank(parents, chosen)
                ordered, again = offered[order].sort(descending=True, stable=True)
                order = order[again]
            alive = min(budget, int((ordered >= max(floor, LOWEST)).sum()))
            if not alive:
                break
            order = order[:alive]
            parents_of.append(start + parents[order])
            start += len(scores)
            scores, tokens = ordered[:alive], space.tokens(depth, slots[order][None])[0]
            kept.append(scores)
            drafted.append(tokens)
    widths = tuple(map(len, kept))
    return Levels(torch.cat(kept)[None], torch.cat(parents_of)[None], torch.cat(drafted)[None], widths)


def _reach(
    logits: Tensor, normaliser: Tensor, scores: Tensor, floor: float, fanout: int, capped: bool
) -> tuple[Tensor, Tensor]:
    """Parents and slots [n] of the children that reach a score of `floor`, or barely miss it, by parent.

    `capped`: no more than the `fanout` best of a parent.
    """
    if floor == -INF:
        slots = best_ids(logits, fanout)
        return torch.arange(len(scores)).repeat_interleave(fanout), slots.flatten()
    # What a logit must be, less what rounding can amount to.
    least = (floor * (1 + _ROUNDING) - scores)[:, None] + normaliser - _ROUNDING * normaliser.abs()
    # NumPy finds the few that remain several times as fast as torch does.
    found = np.flatnonzero(logits.detach().numpy() >= least.detach().float().numpy())
    parents, slots = (torch.from_numpy(part) for part in np.divmod(found, logits.shape[1]))
    if capped:
        order = _by_rank(parents, logits[parents, slots])
        parents, slots = parents[order], slots[order]
        ranks = torch.arange(len(parents)) - torch.searchsorted(parents, parents)
        parents, slots = parents[ranks < fanout], slots[ranks < fanout]
    return parents, slots


def _by_rank(parents: Tensor, logits: Tensor) -> Tensor:
    """The order by parent, then logit, then the order given."""
    order = logits.sort(descending=True, stable=True).indices
    return order[parents[order].sort(stable=True).indices]
