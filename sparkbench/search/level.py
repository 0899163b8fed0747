"""Level-synchronous search: the best-first tree in one batched step a depth, on the device.

The score of a node never exceeds its parent's, so the N best nodes contain their own ancestors, and at each
depth they are among the N best paths of that depth. With independent draft rows there is more: the child of
rank r of the i-th best parent (both from 0) comes after all children (i', r') with i' <= i and r' <= r. It
can be among the N best only if (i + 1)(r + 1) <= N, so about N ln N pairs a depth are scored instead of N^2.

On a CPU a lower bound on the N-th best score also drops rows and paths that cannot matter. Elsewhere the
number of paths must not depend on the data, or the host would have to wait for it.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.assemble import INF, Levels, best_nodes, layout, root_alone, select
from sparkbench.search.ranking import Ranked, capacity


def level_tree(ranked: Ranked, anchors: Tensor, budget: int) -> DraftTree:
    """The `budget` best nodes below `anchors` [B], from the min(budget, V) best tokens of each draft row.

    Nodes come best first; scores are float64 sums of float32 log-probabilities. Ties: smaller depth, earlier
    parent, better rank.
    """
    batch, depth, ranks = ranked.token_ids.shape
    nodes = capacity(depth, ranks, budget)
    log_probs = ranked.log_probs.double()
    if not nodes:
        return root_alone(anchors)
    floor = None
    if anchors.is_cpu:
        floor, log_probs = _within_reach(log_probs, budget)

    pairs = _pairs(budget, ranks, anchors.device)
    kept = log_probs.new_zeros(batch, 1)
    scores, columns = [kept], [torch.zeros_like(anchors)[:, None]]
    for row in log_probs.unbind(1):
        offered = pairs.ends[kept.shape[1]]
        parents, children = pairs.parents[:offered], pairs.ranks[:offered]
        kept, chosen = select(kept.index_select(1, parents) + row.index_select(1, children), budget, floor)
        scores.append(kept)
        columns.append(chosen)

    widths = tuple(level.shape[1] for level in scores)
    places = layout(widths, anchors.device)
    pair = torch.cat(columns, dim=1)
    parents = places.above + pairs.parents.take(pair)
    cells = (places.depths - 1) * ranks + pairs.ranks.take(pair)
    drafted = ranked.token_ids.reshape(batch, depth * ranks).gather(1, cells[:, 1:])
    tokens = torch.cat([anchors[:, None], drafted], dim=1)
    levels = Levels(torch.cat(scores, dim=1), parents, tokens, widths)
    return best_nodes(levels, nodes)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The pairs (parent, rank) worth scoring, ordered by parent, then rank.

    parents, ranks:  [C] int64.
    ends:            entry p counts the pairs of the first p parents.
    """

    parents: Tensor
    ranks: Tensor
    ends: tuple[int, ...]


@lru_cache(maxsize=64)
def _pairs(budget: int, ranks: int, device: torch.device) -> _Pairs:
    children = (budget // torch.arange(1, budget + 1)).clamp(max=ranks)
    ends = torch.nn.functional.pad(children.cumsum(0), (1, 0))
    parents = torch.arange(budget).repeat_interleave(children)
    ranked = torch.arange(len(parents)) - ends[parents]
    return _Pairs(parents.to(device), ranked.to(device), tuple(ends.tolist()))


def _within_reach(log_probs: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """A lower bound [B, 1] on the `budget`-th best score, and the rows of `log_probs` that can matter.

    The bound is the `budget`-th best score among nodes that leave the greedy chain only by their end.
    No node is deeper than the part of the chain that reaches it.
    """
    batch, depth, ranks = log_probs.shape
    if budget > depth * ranks:
        return log_probs.new_full((batch, 1), -INF), log_probs
    deviations = log_probs.clone()
    deviations[:, 1:] += log_probs[:, :-1, 0].cumsum(1)[:, :, None]
    floor = deviations.flatten(1).topk(budget).values[:, -1:]
    reached = int((deviations[:, :, 0] >= floor).any(0).sum())
    return floor, log_probs[:, :reached]
