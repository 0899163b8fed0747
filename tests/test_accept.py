"""The rule `match` against a plain walk."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkbench.decoding.accept import Acceptance, match
from sparkbench.decoding.tree import DraftTree


def walk(tokens: list[int], parents: list[int], drawn: list[int]) -> list[int]:
    """The accepted path of one row, node by node."""
    path = [0]
    while True:
        children = [i for i, parent in enumerate(parents) if parent == path[-1] and tokens[i] == drawn[path[-1]]]
        if not children:
            return path
        path.append(children[0])


def check_row(acceptance: Acceptance, row: int, path: list[int], drawn: list[int]) -> None:
    count = len(path)
    assert acceptance.accepted[row] == count - 1
    assert acceptance.path[row].tolist() == path + path[-1:] * (acceptance.path.shape[1] - count)
    assert acceptance.tokens[row, :count].tolist() == [drawn[node] for node in path]
    assert acceptance.bonus[row] == drawn[path[-1]]


@st.composite
def rows_of_trees(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, parents and draws of 1 to 3 trees; few token ids, so that paths are long; siblings distinct."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        tokens, parents = [draw(st.integers(0, 3))], [-1]
        for _ in range(draw(st.integers(0, 13))):
            parent = draw(st.integers(0, len(tokens) - 1))
            free = set(range(4)) - {tokens[i] for i, p in enumerate(parents) if p == parent}
            if free:
                parents.append(parent)
                tokens.append(draw(st.sampled_from(sorted(free))))
        drawn = draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
        rows.append((tokens, parents, drawn))
    return rows


@settings(max_examples=200, deadline=None)
@given(rows_of_trees(), st.integers(0, 2))
def test_trees(rows: list[tuple[list[int], list[int], list[int]]], slack: int) -> None:
    """Rows of different sizes; `max_depth` may be larger than any depth; padding repeats what would be accepted."""
    width = max(len(tokens) for tokens, _, _ in rows)
    depths: list[list[int]] = []
    for _, parents, _ in rows:
        depth: list[int] = []
        for parent in parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        depths.append(depth + [min(1, max(depth))] * (width - len(parents)))  # whatever padding says
    tree = DraftTree(
        torch.tensor([t + [d[0]] * (width - len(t)) for t, _, d in rows]),
        torch.tensor([p + [-1] * (width - len(p)) for _, p, _ in rows]),
        torch.tensor(depths),
        torch.tensor([[i < len(t) for i in range(width)] for t, _, _ in rows]),
        max(map(max, depths)) + slack,
    )
    acceptance = match(tree, torch.tensor([d + [d[0]] * (width - len(d)) for _, _, d in rows]))
    assert acceptance.path.shape == acceptance.tokens.shape == (len(rows), tree.max_depth + 1)
    for row, (tokens, parents, drawn) in enumerate(rows):
        check_row(acceptance, row, walk(tokens, parents, drawn), drawn)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 6))
def test_chains(data: st.DataObject, batch: int, length: int) -> None:
    ids = st.lists(st.integers(0, 1), min_size=length + 1, max_size=length + 1)
    tokens = [data.draw(ids) for _ in range(batch)]
    drawn = [data.draw(ids) for _ in range(batch)]
    chain = DraftTree.chain_of(torch.tensor(tokens)[:, 0], torch.tensor(tokens)[:, 1:])
    acceptance = match(chain, torch.tensor(drawn))
    for row in range(batch):
        check_row(acceptance, row, walk(tokens[row], list(range(-1, length)), drawn[row]), drawn[row])


def test_a_match_after_a_mismatch_does_not_count() -> None:
    """[T, F, T, T] accepts one."""
    chain = DraftTree.chain_of(torch.tensor([0]), torch.tensor([[1, 9, 3, 4]]))
    assert match(chain, torch.tensor([[1, 2, 3, 4, 5]])).accepted.item() == 1


def test_nothing_but_the_root_is_valid() -> None:
    """A padded tree of only the root, as a drafter without finite logits gives it."""
    tree = DraftTree(
        torch.tensor([[5, 0, 0]]),
        torch.full((1, 3), -1),
        torch.zeros(1, 3, dtype=torch.int64),
        torch.tensor([[True, False, False]]),
        0,
    )
    acceptance = match(tree, torch.tensor([[8, 0, 0]]))
    assert (acceptance.path.tolist(), acceptance.tokens.tolist()) == ([[0]], [[8]])
    assert (acceptance.accepted.item(), acceptance.bonus.item()) == (0, 8)
