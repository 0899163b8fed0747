"""Sampled trees: their shape is fixed beforehand, and siblings are drawn without replacement."""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sparkbench.decoding.sampling import gumbel
from sparkbench.decoding.tree import DraftTree
from sparkbench.search import sampled_tree
from sparkbench.search.sampled import shape_of


def noise(rows: int, depth: int, vocab: int, seed: int = 0) -> Tensor:
    keys = torch.arange(rows) + 1000 * seed
    return gumbel(keys, torch.arange(depth).expand(rows, depth), vocab)


def rows_of(vocab: int, seed: int = 0) -> Tensor:
    """[V, V]: the distribution below each token."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(1)


def tree_of(chances: Tensor, rows: int, depth: int, budget: int, seed: int = 0) -> DraftTree:
    anchors = torch.arange(rows) % len(chances)
    given = noise(rows, depth, len(chances), seed)
    return sampled_tree(lambda at, parents: chances[parents], anchors, given, budget, len(chances))


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 16, 64, 200])
@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_every_node_is_a_child_drawn_below_its_parent(vocab: int, depth: int, budget: int) -> None:
    chances = rows_of(vocab)
    tree = tree_of(chances, 3, depth, budget)
    assert bool(tree.valid.all()), "no distribution runs out of tokens here"
    assert tree.width - 1 == min(budget, tree.width - 1)
    assert tree.width - 1 == budget or tree.width - 1 < sum(min(vocab, 16) ** k for k in range(1, depth + 1)) + 1
    if not budget:
        return
    assert tree.draft_probs is not None
    assert tree.log_probs is not None
    given = noise(3, depth, vocab)
    for row in range(3):
        children: dict[int, list[int]] = {}
        for node in range(1, tree.width):
            parent = int(tree.parents[row, node])
            assert 0 <= parent < min(node, tree.draft_probs.shape[1])
            assert tree.depths[row, node] == tree.depths[row, parent] + 1 <= depth
            children.setdefault(parent, []).append(node)
            token, above = int(tree.tokens[row, node]), int(tree.tokens[row, parent])
            step = float(tree.log_probs[row, node] - tree.log_probs[row, parent])
            assert step == pytest.approx(float(chances[above, token].log()), abs=1e-5)
            assert torch.equal(tree.draft_probs[row, parent], chances[above])
        for parent, nodes in children.items():
            scores = chances[tree.tokens[row, parent]].log() + given[row, int(tree.depths[row, parent])]
            wanted = scores.argsort(descending=True)[: len(nodes)]
            assert tree.tokens[row, nodes].tolist() == wanted.tolist(), "siblings come in the order of the draws"
            assert tree.ranks[row, nodes].tolist() == list(range(len(nodes)))


def test_the_shape_does_not_depend_on_what_is_drawn() -> None:
    first = tree_of(rows_of(9), 4, 5, 30)
    other = tree_of(rows_of(9, seed=1), 4, 5, 30, seed=7)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.parents, other.parents)
    assert torch.equal(first.parents, first.parents[:1].expand(4, -1))


def test_a_distribution_that_runs_out_of_tokens_has_fewer_children() -> None:
    chances = torch.eye(6)[torch.arange(6).roll(1)] * 0.75 + torch.eye(6) * 0.25
    tree = tree_of(chances, 6, 2, 20)
    most = {int(tree.valid[row][tree.parents[row] == 0].sum()) for row in range(6)}
    assert most == {2}
    assert bool((tree.tokens[~tree.valid] == 0).all())
    assert bool((tree.parents[~tree.valid] == -1).all())


def test_siblings_are_drawn_without_replacement() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rows = 60_000
    tree = tree_of(chances.float().expand(4, 4), rows, 1, 3)
    pairs = Counter(map(tuple, tree.tokens[:, 1:3].tolist()))
    orders = list(itertools.permutations(range(4), 2))
    expected = [rows * float(chances[a] * chances[b] / (1 - chances[a])) for a, b in orders]
    assert set(pairs) == set(orders)
    assert chisquare([pairs[order] for order in orders], expected).pvalue > 1e-4
    planted = [rows * float(chances[a] * chances[b]) for a, b in orders]  # with replacement, of what differs
    planted = [each * rows / sum(planted) for each in planted]
    assert chisquare([pairs[order] for order in orders], planted).pvalue < 1e-4


def test_inner_nodes_come_first() -> None:
    shape = shape_of(64, 16, 1000, torch.device("cpu"))
    assert set(shape.parents[1:].tolist()) == set(range(shape.inner))
    assert len(shape.parents) == 65
    assert sum(len(step.parents) for step in shape.steps) == shape.inner
