"""Tree search: golden trees, brute force over every path, and agreement of the builders where scores tie."""

import itertools
import json
import math

import pytest
import torch
from conftest import golden_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.search import BUILDERS, Ranked, level, rank

INF = math.inf
FIELDS = ("tokens", "parents", "depths", "valid", "log_probs")
builders = pytest.mark.parametrize("builder", sorted(BUILDERS))


def build(builder: str, logits: Tensor, budget: int) -> DraftTree:
    anchors = torch.arange(100, 100 + logits.shape[0])
    return BUILDERS[builder](rank(logits, budget), anchors, budget)


def assert_same(first: DraftTree, second: DraftTree) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(first, field), getattr(second, field)), field


def reference_ranking(logits: Tensor) -> list[list[tuple[float, int]]]:
    """Each row of logits [D, V] as (log-probability, id), best first, equal logits by id; finite ones
    only."""
    rows = []
    for row in torch.where(logits.isfinite(), logits, -INF):
        order = sorted((i for i in range(len(row)) if row[i] > -INF), key=lambda i: (-float(row[i]), i))
        log_probs = (row - row.logsumexp(0)).clamp(max=0.0)
        rows.append([(float(log_probs[i]), i) for i in order])
    return rows


def brute_force(logits: Tensor, budget: int) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of the best nodes of logits [D, V] in order, from every path there is."""
    rows = reference_ranking(logits)
    paths: list[tuple[int, ...]] = [()]
    for depth in range(1, len(rows) + 1):
        paths += itertools.product(*(range(len(row)) for row in rows[:depth]))
    score = {path: sum((rows[d][r][0] for d, r in enumerate(path)), 0.0) for path in paths}
    # The index of the parent is part of the order, so nodes are emitted one at a time.
    index: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[tuple[int, int, int, float]] = []
    open_paths = set(paths[1:])
    while open_paths and len(nodes) < budget:
        ready = [path for path in open_paths if path[:-1] in index]
        best = min(ready, key=lambda path: (-score[path], len(path), index[path[:-1]], path[-1]))
        open_paths.remove(best)
        index[best] = len(index)
        nodes.append((rows[len(best) - 1][best[-1]][1], index[best[:-1]], len(best), score[best]))
    return nodes


def golden_cases() -> list[tuple[str, int]]:
    cases = json.loads((golden_folder("dflash_ddtree") / "trees.json").read_text())["cases"]
    return [(case["name"], budget) for case in cases for budget in case["budgets"]]


def golden_logits(name: str, tensors: dict[str, Tensor]) -> Tensor:
    if f"{name}/draft_logits" in tensors:
        return tensors[f"{name}/draft_logits"]
    cases = json.loads((golden_folder("dflash_ddtree") / "trees.json").read_text())["cases"]
    case = next(case for case in cases if case["name"] == name)
    logits = torch.full((case["depth_rows"], case["vocab_size"]), case["sparse_fill_value"])
    ids = tensors[f"{name}/sparse_token_ids"].long()
    return logits.scatter(1, ids, tensors[f"{name}/sparse_values"])


@pytest.fixture(scope="module")
def golden_tensors() -> dict[str, Tensor]:
    return load_file(golden_folder("dflash_ddtree") / "trees.safetensors")


@builders
@pytest.mark.parametrize(("name", "budget"), golden_cases())
def test_golden_trees(builder: str, name: str, budget: int, golden_tensors: dict[str, Tensor]) -> None:
    tree = build(builder, golden_logits(name, golden_tensors)[None], budget)
    expected = {
        key.rsplit("/", 1)[1]: value
        for key, value in golden_tensors.items()
        if key.startswith(f"{name}/budget_{budget}/")
    }
    nodes = len(expected["node_token_ids"])
    assert tree.valid[0].sum() == 1 + nodes
    assert tree.tokens[0, : 1 + nodes].tolist() == [100, *expected["node_token_ids"].tolist()]
    assert tree.depths[0, : 1 + nodes].tolist() == [0, *expected["node_depths"].tolist()]
    assert tree.parents[0, : 1 + nodes].tolist() == expected["parents"].tolist()
    assert tree.log_probs is not None
    torch.testing.assert_close(tree.log_probs[0, 1 : 1 + nodes], expected["node_log_probs"], atol=1e-4, rtol=0)
    if "visibility" in expected:
        assert torch.equal(tree.visibility[0, : 1 + nodes, : 1 + nodes], expected["visibility"].bool())


@builders
@pytest.mark.parametrize(
    ("vocab", "depth", "values"), [(3, 3, 3), (4, 3, 2), (2, 5, 2), (1, 4, 3), (5, 2, 4), (3, 4, 1)]
)
def test_brute_force_with_planted_ties(builder: str, vocab: int, depth: int, values: int) -> None:
    generator = torch.Generator().manual_seed(vocab * 100 + depth)
    for _ in range(3):
        logits = torch.randint(values, (depth, vocab), generator=generator).float()
        for budget in (1, 2, 7, 30):
            nodes = brute_force(logits, budget)
            tree = build(builder, logits[None], budget)
            tokens, parents, depths, scores = zip(*nodes, strict=True)
            assert tree.valid.sum() == tree.width == 1 + len(nodes)
            assert tree.tokens[0, 1:].tolist() == list(tokens)
            assert tree.parents[0].tolist() == [-1, *parents]
            assert tree.depths[0, 1:].tolist() == list(depths)
            assert tree.log_probs is not None
            assert tree.log_probs[0, 1:].tolist() == list(scores)


entries = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([-INF, math.nan]), st.floats(-20, 20, width=32))


@st.composite
def batches(draw: st.DrawFn) -> Tensor:
    batch, depth, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    flat = draw(st.lists(entries, min_size=batch * depth * vocab, max_size=batch * depth * vocab))
    return torch.tensor(flat).view(batch, depth, vocab)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 40))
def test_builders_agree_and_rows_are_independent(logits: Tensor, budget: int) -> None:
    tree = build("level", logits, budget)
    assert_same(tree, build("heap", logits, budget))
    assert tree.max_depth >= int(tree.depths.max())
    assert (tree.parents[~tree.valid] == -1).all()
    for row in range(logits.shape[0]):
        alone = BUILDERS["level"](rank(logits[row : row + 1], budget), torch.tensor([100 + row]), budget)
        for field in FIELDS:
            assert torch.equal(getattr(alone, field)[0], getattr(tree, field)[row]), field


@pytest.mark.parametrize(("depth", "vocab", "step"), [(31, 600, 0.0), (15, 3000, 0.5), (3, 1500, 2.0)])
@pytest.mark.parametrize("budget", [64, 1024])
def test_builders_agree_on_large_trees(depth: int, vocab: int, step: float, budget: int) -> None:
    logits = torch.randn(2, depth, vocab, generator=torch.Generator().manual_seed(depth)) * 3
    if step:
        logits = (logits / step).round() * step  # ties everywhere
    assert_same(build("level", logits, budget), build("heap", logits, budget))


def test_without_reading_scores_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search as it runs on an accelerator, where no bound drops rows and paths: the same trees."""
    logits = torch.randn(2, 9, 300, generator=torch.Generator().manual_seed(5)).mul(2).round()
    logits[1, 4] = -INF
    pruned = [build("level", logits, budget) for budget in (16, 300)]
    monkeypatch.setattr(level, "_within_reach", lambda log_probs, budget: (None, log_probs))
    for tree, budget in zip(pruned, (16, 300), strict=True):
        assert_same(build("level", logits, budget), tree)


@builders
def test_smaller_budget_is_a_prefix(builder: str) -> None:
    logits = torch.randint(4, (1, 6, 40), generator=torch.Generator().manual_seed(1)).float()
    largest = build(builder, logits, 200)
    for budget in (0, 1, 5, 64, 199):
        tree = build(builder, logits, budget)
        for field in FIELDS:
            assert torch.equal(getattr(tree, field), getattr(largest, field)[:, : 1 + budget]), field


@builders
@pytest.mark.parametrize(("depth", "budget"), [(5, 0), (0, 8)])
def test_root_alone(builder: str, depth: int, budget: int) -> None:
    tree = build(builder, torch.randn(2, depth, 30), budget)
    assert (tree.width, tree.max_depth) == (1, 0)
    assert tree.tokens.tolist() == [[100], [101]]
    assert tree.parents.tolist() == [[-1], [-1]]


@builders
def test_row_without_finite_logits_ends_the_depth(builder: str) -> None:
    logits = torch.zeros(2, 3, 4)
    logits[0, 1] = -INF
    logits[1, 0, 1:] = math.nan
    tree = build(builder, logits, 50)
    assert tree.depths[0][tree.valid[0]].tolist() == [0, 1, 1, 1, 1]
    assert tree.tokens[1][(tree.depths[1] == 1) & tree.valid[1]].tolist() == [0]
    assert tree.log_probs is not None
    assert not tree.log_probs.isnan().any()


@builders
def test_one_token_makes_a_chain(builder: str) -> None:
    tree = build(builder, torch.randn(1, 6, 1), 50)
    assert tree.parents.tolist() == [list(range(-1, 6))]
    assert tree.tokens.tolist() == [[100, 0, 0, 0, 0, 0, 0]]


@builders
def test_bfloat16_counts_as_its_float32_values(builder: str) -> None:
    logits = torch.randn(2, 5, 700, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert_same(build(builder, logits, 64), build(builder, logits.float(), 64))


@builders
def test_negative_budget_is_refused(builder: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        BUILDERS[builder](rank(torch.zeros(1, 2, 3), 4), torch.tensor([0]), -1)


@pytest.mark.parametrize("vocab", [1, 63, 65, 700, 5000])
@pytest.mark.parametrize("k", [1, 7, 64, 300])
def test_ranking_orders_ties_by_id(vocab: int, k: int) -> None:
    """Also at the k-th place, across block edges, and for zeros of both signs."""
    generator = torch.Generator().manual_seed(vocab + k)
    logits = torch.randint(-2, 3, (2, 2, vocab), generator=generator).float()
    logits[0, 0, ::2] *= -1.0
    logits[1, 1] = 0.0
    ranked = rank(logits, k)
    stable = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(ranked.token_ids, stable)
    expected = logits.log_softmax(-1).gather(-1, stable)
    torch.testing.assert_close(ranked.log_probs, expected, atol=1e-5, rtol=0)


def test_builders_read_only_what_is_ranked() -> None:
    """Fewer ranks than min(budget, V) bound the fan-out; both builders keep to it."""
    full = rank(torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(9)), 40)
    cut = Ranked(full.log_probs[..., :2].contiguous(), full.token_ids[..., :2].contiguous())
    anchors = torch.tensor([0])
    trees = [BUILDERS[name](cut, anchors, 40) for name in sorted(BUILDERS)]
    assert_same(*trees)
    assert trees[0].width == 1 + 2 + 4 + 8 + 16
