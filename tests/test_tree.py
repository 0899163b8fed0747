"""DraftTree: structure, ancestors and visibility against plain definitions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkbench.decoding.tree import DraftTree


@st.composite
def parent_lists(draw: st.DrawFn) -> list[list[int]]:
    """Parents of 1 to 3 trees of any shape, unpadded."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 12))
        rows.append([-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))])
    return rows


def padded_tree(rows: list[list[int]]) -> DraftTree:
    """The trees with distinct tokens."""
    width = max(map(len, rows))
    depths = []
    for parents in rows:
        depth: list[int] = []
        for parent in parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        depths.append(depth + [0] * (width - len(parents)))
    return DraftTree(
        torch.arange(width).expand(len(rows), width),
        torch.tensor([parents + [-1] * (width - len(parents)) for parents in rows]),
        torch.tensor(depths),
        torch.tensor([[i < len(parents) for i in range(width)] for parents in rows]),
        max(map(max, depths)),
    )


def path_to(parents: list[int], node: int) -> list[int]:
    """A node and its ancestors, itself first."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@settings(max_examples=150, deadline=None)
@given(parent_lists())
def test_ancestors_and_visibility(rows: list[list[int]]) -> None:
    tree = padded_tree(rows)
    steps = tree.max_depth + 1
    assert tree.ancestors.shape == (tree.batch, tree.width, steps)
    for row, parents in enumerate(rows):
        for node in range(len(parents)):
            path = path_to(parents, node)
            assert tree.ancestors[row, node].tolist() == (path + [0] * steps)[:steps]
            assert set(tree.visibility[row, node].nonzero()[:, 0].tolist()) == set(path)
        for node in range(len(parents), tree.width):
            assert tree.visibility[row, node].any(), "a padded node must see something, or its softmax is NaN"
            assert not tree.visibility[row, : len(parents), node].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 9))
def test_a_chain_is_a_tree(batch: int, length: int) -> None:
    anchors, drafts = torch.arange(batch), torch.arange(batch * length).view(batch, length) + 50
    chain = DraftTree.chain_of(anchors, drafts)
    tree = padded_tree([list(range(-1, length))] * batch)
    assert (chain.chain, chain.max_depth, chain.width, chain.batch) == (True, length, length + 1, batch)
    assert chain.tokens.tolist() == [[a, *d] for a, d in zip(anchors.tolist(), drafts.tolist(), strict=True)]
    for field in ("parents", "depths", "valid", "visibility", "ancestors"):
        assert torch.equal(getattr(chain, field), getattr(tree, field)), field


def test_chain_log_probs_start_at_the_root() -> None:
    chain = DraftTree.chain_of(torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([[-0.5, -1.5]]))
    assert chain.log_probs is not None
    assert chain.log_probs.tolist() == [[0.0, -0.5, -1.5]]


def test_root_alone() -> None:
    root = DraftTree.root(torch.tensor([7, 8]))
    assert (root.chain, root.max_depth, root.width) == (True, 0, 1)
    assert root.tokens.tolist() == [[7], [8]]
    assert root.parents.tolist() == [[-1], [-1]]
    assert root.visibility.tolist() == [[[True]], [[True]]]
