"""Sampled trees: the children of a node are drawn from its draft distribution, without replacement.

For `rule=rejection` a tree has to be a sample. How many children a node gets may depend on its depth, its rank and the
path to it, but on nothing that is drawn below it, and no node that was drawn is dropped: choosing among drawn nodes by
their score would leave tokens that are no longer samples of their distribution, and the output would not have the
target's. So the shape of the tree is fixed beforehand and is the same for every row and round: the best-first tree for
the chances `CHANCES` that the child of each rank is accepted (a static tree as of Sequoia, Chen et al., arXiv
2402.12374). Where a distribution holds fewer tokens than there are children, those left over do not exist.

Siblings are the highest of log q + Gumbel noise, in that order, which draws them one after the other without
replacement (the Gumbel-top-k trick; Kool et al., arXiv 1903.06059). Nodes at one depth share the noise: at most one of
them is on the accepted path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.assemble import root_alone
from sparkbench.search.heap import heap_tree
from sparkbench.search.ranking import INF, Ranked

# Chance that the child of each rank is accepted, given that those before it are not and the path got to their parent:
# rounded from what sweeps/sibling_chances.py counts on the embedded model. A wrong one costs speed alone.
CHANCES = (0.7, 0.27, 0.23, 0.16, 0.1, 0.1, 0.07, 0.06, 0.05, 0.05, 0.05, 0.04, 0.04, 0.03, 0.03, 0.02)

# (depth from 0, parents' tokens [B, P]) -> the distributions of their children, [B, P, V] float32
Distribution = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """One depth of a shape. Parents and nodes are counted within their depth.

    parents: [P] int64, nodes of the depth above that have children.   most: children of the widest.
    above:   [W] int64, for each node of this depth its parent, as a place in `parents`.   ranks: [W] int64.
    """

    parents: Tensor
    most: int
    above: Tensor
    ranks: Tensor


@dataclass(frozen=True, eq=False)
class Shape:
    """A tree's shape: its steps, and parents [N] and depths [N] of the nodes, inner nodes first.

    order: [N] int64, for each node of the tree its place in the list of all depths.   inner: nodes with children.
    """

    steps: tuple[Step, ...]
    order: Tensor
    parents: Tensor
    depths: Tensor
    inner: int


def sampled_tree(distribution: Distribution, anchors: Tensor, noise: Tensor, budget: int, vocab: int) -> DraftTree:
    """Trees of `budget` nodes below `anchors` [B], sampled from `distribution`.

    noise: [B, D, V] Gumbel noise of D depths. Scores are float64 sums of the log-probabilities under `distribution`;
    `draft_probs` are the distributions themselves.
    """
    if not budget or not noise.shape[1]:
        return root_alone(anchors)
    shape = shape_of(budget, noise.shape[1], vocab, anchors.device)
    batch = len(anchors)
    tokens = anchors[:, None]
    scores = anchors.new_zeros(batch, 1, dtype=torch.float64)
    listed, summed, sampled = [tokens], [scores], []
    for depth, step in enumerate(shape.steps):
        probabilities = distribution(depth, tokens[:, step.parents])
        logs = probabilities.log()
        drawn = (logs + noise[:, depth, None]).topk(step.most, dim=2).indices
        chosen = drawn[:, step.above, step.ranks]
        scores = scores[:, step.parents][:, step.above] + logs[:, step.above].gather(2, chosen[:, :, None])[:, :, 0]
        tokens = chosen
        listed.append(tokens)
        summed.append(scores)
        sampled.append(probabilities)
    all_scores = torch.cat(summed, 1)[:, shape.order]
    valid = all_scores > -INF
    return DraftTree(
        tokens=torch.cat(listed, 1)[:, shape.order].where(valid, 0),
        parents=shape.parents.expand(batch, -1).where(valid, -1),
        depths=shape.depths.expand(batch, -1).where(valid, 0),
        valid=valid,
        max_depth=len(shape.steps),
        log_probs=all_scores,
        draft_probs=torch.cat(sampled, 1),
    )


@lru_cache(maxsize=64)
def shape_of(budget: int, depth: int, vocab: int, device: torch.device) -> Shape:
    """The shape of a tree of at most `budget` nodes, none deeper than `depth` or with more than `vocab` children."""
    chances = torch.tensor(CHANCES[:vocab])
    taken = chances * torch.cat([chances.new_ones(1), (1 - chances).cumprod(0)[:-1]])
    ranked = Ranked(taken.log().expand(1, depth, -1), torch.arange(len(chances)).expand(1, depth, -1))
    tree = heap_tree(ranked, torch.zeros(1, dtype=torch.int64), budget)  # a node's token is its rank
    ranks, parents, depths = (part[0].tolist() for part in (tree.tokens, tree.parents, tree.depths))
    levels = [[node for node in range(tree.width) if depths[node] == d] for d in range(tree.max_depth + 1)]
    inner = sorted(set(parents[1:]), key=lambda node: (depths[node], node))
    leaves = [node for node in range(tree.width) if node not in set(inner)]
    steps = []
    for above, level in pairwise(levels):
        fathers = [node for node in above if node in set(inner)]
        steps.append(
            Step(
                parents=torch.tensor([above.index(node) for node in fathers], device=device),
                most=1 + max(ranks[node] for node in level),
                above=torch.tensor([fathers.index(parents[node]) for node in level], device=device),
                ranks=torch.tensor([ranks[node] for node in level], device=device),
            )
        )
    # Inner nodes come first, so that the distributions of the steps, side by side, are those of the first nodes. Among
    # siblings an inner one never comes after a leaf in rank, and both lists keep the order of the search.
    order = [*inner, *leaves]
    flat = [node for level in levels for node in level]
    places = {node: place for place, node in enumerate(order)}
    return Shape(
        steps=tuple(steps),
        order=torch.tensor([flat.index(node) for node in order], device=device),
        parents=torch.tensor([-1 if parents[node] < 0 else places[parents[node]] for node in order], device=device),
        depths=torch.tensor([depths[node] for node in order], device=device),
        inner=len(inner),
    )
