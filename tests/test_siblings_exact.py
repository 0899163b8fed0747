"""Recursive rejection added up with the real `rejection`: no draws, no second implementation of the rule."""

import itertools

import pytest
import torch
from torch import Tensor

from sparkbench.decoding.accept import Acceptance, rejection
from sparkbench.decoding.tree import DraftTree


def trees_of(siblings: Tensor, q: Tensor) -> DraftTree:
    rows, count = siblings.shape
    return DraftTree(
        tokens=torch.cat([torch.zeros(rows, 1, dtype=torch.int64), siblings], 1),
        parents=torch.tensor([[-1, *[0] * count]]).expand(rows, -1),
        depths=torch.tensor([[0, *[1] * count]]).expand(rows, -1),
        valid=torch.ones(rows, count + 1, dtype=torch.bool),
        max_depth=1,
        draft_probs=q.float().expand(rows, 1, -1),
    )


def outcome(p: Tensor, q: Tensor, count: int) -> tuple[Tensor, float]:
    """The chance [V] of each token to come out, and that of an accepted sibling, over all ordered sets of siblings.

    The chance of each sibling is where its verdict flips: bisected, with all tests before it failed by an infinite one.
    """
    siblings = torch.tensor(list(itertools.permutations(q.nonzero()[:, 0].tolist(), count)))
    rows = len(siblings)
    tree = trees_of(siblings, q)
    rest: list[Tensor] = []

    def settle(accepted: Tensor, left: Tensor) -> Tensor:
        rest.append(left.double() / left.double().sum(1, keepdim=True))
        return left.argmax(1)

    def tried(tests: Tensor) -> Acceptance:
        return rejection(tree, p.float().expand(rows, count + 1, -1), tests, settle)

    refused = torch.full((rows, count + 1), torch.inf, dtype=torch.float64)
    reached = torch.ones(rows, dtype=torch.float64)  # chance to be drawn and to get as far
    out, taken, left = torch.zeros(len(p), dtype=torch.float64), 0.0, torch.ones(rows, dtype=torch.float64)
    for rank in range(count):
        chance = q.double()[siblings[:, rank]]
        reached, left = reached * chance / left, left - chance
    for rank in range(count):
        low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        for _ in range(45):
            middle = (low + high) / 2
            tests = refused.clone()
            tests[:, rank + 1] = middle
            passed = tried(tests).path[:, -1] == rank + 1
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        out.index_add_(0, siblings[:, rank], reached * low)
        taken += float((reached * low).sum())
        reached = reached * (1 - low)
    tried(refused)
    return out + (reached[:, None] * rest[-1]).sum(0), taken


CASES = [(5, 1.0, 0), (5, 3.0, 1), (4, 6.0, 2), (5, 0.0, 3), (6, 2.0, 4)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("vocab", "spread", "seed"), CASES)
def test_siblings_added_up(vocab: int, spread: float, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, vocab, generator=generator).double() * spread).softmax(1)
    found, _ = outcome(p, q, count)
    torch.testing.assert_close(found, p, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_siblings_where_both_are_cut(count: int) -> None:
    p, q = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.0, 0.3, 0.0])
    torch.testing.assert_close(outcome(p, q, count)[0], p.double(), atol=1e-6, rtol=0)


def test_more_siblings_are_accepted_more_often() -> None:
    p, q = torch.tensor([[1.0, 0.2, -0.5, 0.9, -2.0], [0.4, 1.1, -0.5, -0.3, 0.5]]).double().softmax(1)
    rates = [outcome(p, q, count)[1] for count in (1, 2, 3, 4)]
    assert rates[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] <= 1
