"""Tree search below a Markov head: brute force over every path, agreement of the builders, and the edges.

Golden trees: test_golden_sparklingtree.py.
"""

import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from probes import Vanilla
from torch import Tensor

from sparkbench.decoding.timing import STAGES
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters import heads
from sparkbench.errors import UsageError
from sparkbench.search import BUILDERS, CONDITIONAL_BUILDERS, SearchSpec, TreeHead, fixed_tree, host, rank, widths
from sparkbench.search.candidates import space_of

INF = math.inf
FIELDS = ("tokens", "parents", "depths", "valid", "log_probs")
EXACT = ("level", "fixed", "heap", "reference", "table")
builders = pytest.mark.parametrize("builder", EXACT)


@dataclass(frozen=True)
class Gated(Vanilla):
    """A latent that depends on the depth, as a gate by the hidden state of the row makes it."""

    def latents(self, depth: int, tokens: Tensor) -> Tensor:
        return self.w1[tokens] * (depth % 3)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def drawn_head(seed: int, vocab: int, std: float, r: int = 8, kind: type[Vanilla] = Vanilla) -> Vanilla:
    """A head whose bias has the deviation `std`."""
    return kind(drawn(seed, vocab, r, scale=std / r**0.5), drawn(seed + 1, vocab, r))


def drawn_ints(seed: int, *shape: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def build(
    builder: str, logits: Tensor, head: TreeHead | None, spec: SearchSpec, anchors: Tensor | None = None
) -> DraftTree:
    anchors = torch.arange(len(logits)) % logits.shape[2] if anchors is None else anchors
    if builder == "fixed":
        return fixed_tree(logits, head, anchors, spec)[0]
    return CONDITIONAL_BUILDERS[builder](logits, head, anchors, spec)


def scores_of(tree: DraftTree) -> Tensor:
    assert tree.log_probs is not None
    return tree.log_probs


def paths_of(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, node after node; checks what holds for every tree."""
    tokens, parents, depths = (getattr(tree, name)[row].tolist() for name in ("tokens", "parents", "depths"))
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.valid[row].sum())):
        assert 0 <= parents[node] < node
        assert depths[node] == depths[parents[node]] + 1 <= tree.max_depth
        paths.append((*paths[parents[node]], tokens[node]))
    assert len(set(paths)) == len(paths)
    assert parents[0] == -1
    assert tree.valid[row, : len(paths)].all()
    assert set(parents[len(paths) :]) <= {-1}
    return paths[1:]


def assert_same(first: DraftTree, second: DraftTree, exact: bool = False) -> None:
    for field in FIELDS[:-1]:
        assert torch.equal(getattr(first, field), getattr(second, field)), field
    close = 0.0 if exact else 1e-5
    torch.testing.assert_close(scores_of(first), scores_of(second), atol=close, rtol=0)


def brute_force(logits: Tensor, head: Vanilla | None, anchor: int, spec: SearchSpec) -> list[tuple[Any, ...]]:
    """(token, parent, depth, score) of the nodes of logits [L, V] in order, from every path there is."""
    logits = torch.where(logits.isfinite(), logits, -INF)
    depth, vocab = logits.shape
    sets = [set(range(vocab))] * depth
    if 0 < spec.candidates < vocab:
        best = [row.sort(descending=True, stable=True).indices[: spec.candidates].tolist() for row in logits]
        sets = [set(ids) for ids in best]
        if spec.shortlist == "union":
            sets = [set(itertools.chain([anchor], *best))] * depth

    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        """(token, log-probability) of the children that a path may have, best first."""
        at, token = len(path), path[-1] if path else anchor
        row = logits[at].clone()
        if head is not None:
            row += head.w2 @ head.latents(at, torch.tensor(token))
        allowed = sorted(sets[at])
        over = row if spec.normalise == "full" else row[allowed]
        steps = (row - over.logsumexp(0)).clamp(max=0.0)
        ranked = sorted((t for t in allowed if row[t] > -INF), key=lambda t: (-float(row[t]), t))
        return [(t, float(steps[t])) for t in ranked[: spec.fanout or None]]

    score: dict[tuple[int, ...], float] = {(): 0.0}
    order: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        if len(path) < depth:
            for place, (token, step) in enumerate(children(path)):
                child = (*path, token)
                score[child], order[child] = score[path] + step, place
                paths.append(child)
    # The place of the parent is part of the order, so nodes are emitted one at a time.
    index: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[tuple[Any, ...]] = []
    ready: set[tuple[int, ...]] = {path for path in paths if len(path) == 1}
    while ready and len(nodes) < spec.budget:
        best_path = min(ready, key=lambda path: (-score[path], len(path), index[path[:-1]], order[path]))
        ready.remove(best_path)
        index[best_path] = len(index)
        nodes.append((best_path[-1], index[best_path[:-1]], len(best_path), score[best_path]))
        ready |= {path for path in paths if path[:-1] == best_path and path}
    return nodes


SPECS = [
    replace(spec, budget=budget, fanout=fanout)
    for spec in (
        SearchSpec(1),
        SearchSpec(1, 1),
        SearchSpec(1, 2, normalise="full"),
        SearchSpec(1, 1, shortlist="depth"),
        SearchSpec(1, 2, shortlist="depth"),
        SearchSpec(1, 2, shortlist="depth", normalise="full"),
        SearchSpec(1, 9, shortlist="depth", normalise="full"),
    )
    for budget in (1, 3, 20)
    for fanout in (0, 1, 2)
]


@cache
def small_case(seed: int, tied: bool) -> tuple[Tensor, Vanilla, Tensor, list[list[tuple[Any, ...]]]]:
    """Logits of 3 depths and 4 tokens, a head, an anchor, and the nodes for each of SPECS."""
    kind = Gated if seed == 2 else Vanilla
    anchors = torch.tensor([seed])
    if tied:
        logits = drawn_ints(seed, 1, 3, 4, low=0, high=1)
        head = kind(drawn_ints(seed + 5, 4, 2, low=0, high=1), drawn_ints(seed + 6, 4, 2, low=-1, high=1))
    else:
        logits, head = drawn(seed, 1, 3, 4), drawn_head(seed + 5, 4, 1.5, kind=kind)
        if seed == 1:
            logits[0, 1, 2], logits[0, 2, 0] = math.nan, INF
    return logits, head, anchors, [brute_force(logits[0], head, seed, spec) for spec in SPECS]


@builders
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tied", [False, True])
def test_brute_force(builder: str, seed: int, tied: bool) -> None:
    """`tied`: logits and bias are small integers, so that scores tie everywhere."""
    logits, head, anchors, expected = small_case(seed, tied)
    for spec, nodes in zip(SPECS, expected, strict=True):
        tree = build(builder, logits, head, spec, anchors)
        count = 1 + len(nodes)
        tokens, parents, depths, scores = zip(*nodes, strict=True)
        assert tree.valid[0].tolist() == [i < count for i in range(tree.width)]
        assert tree.tokens[0, 1:count].tolist() == list(tokens), spec
        assert tree.parents[0, :count].tolist() == [-1, *parents], spec
        assert tree.depths[0, 1:count].tolist() == list(depths)
        torch.testing.assert_close(scores_of(tree)[0, 1:count].tolist(), list(scores), atol=1e-5, rtol=0)
        paths_of(tree)


def test_builders_find_the_same_nodes() -> None:
    """Where the score at the cut is no near-tie, the same nodes; else the same scores. Near-ties are rare."""
    vocab, depth = 220, 6
    cases = close = 0
    for number, (std, budget, count, fanout) in enumerate(
        itertools.product((0.3, 3.0), (1, 2, 13, 64, 200, 512), (0, 16, 128), (0, 8, 64))
    ):
        if budget > 64 and number % 5:  # large trees take long
            continue
        logits = drawn(number, 1, depth, vocab, scale=2.0)
        head = drawn_head(number + 1000, vocab, std)
        spec = SearchSpec(budget, count, fanout)
        found = build("level", logits, head, spec)
        nodes = set(paths_of(found))
        more = scores_of(build("level", logits, head, SearchSpec(budget + 1, count, fanout or budget)))[0]
        near = len(more) > budget + 1 and float(more[budget] - more[budget + 1]) < 1e-5
        cases, close = cases + 1, close + near
        for builder in EXACT[1:]:
            if builder == "table" and count == 0 and number % 2:
                continue
            tree = build(builder, logits, head, spec)
            torch.testing.assert_close(scores_of(tree), scores_of(found), atol=1e-5, rtol=0)
            assert near or set(paths_of(tree)) == nodes, (builder, spec)
    assert close <= cases / 100
    assert cases > 50


@builders
@pytest.mark.parametrize("count", [0, 4])
def test_without_a_head_it_is_ddtree(builder: str, count: int) -> None:
    """Ties included. With candidates of a depth and the full normaliser, DDTree of the best few tokens."""
    logits = drawn(3, 2, 5, 40, scale=3.0).round()
    logits[1, 3, :] = -INF
    for budget in (1, 9, 100):
        spec = SearchSpec(budget, count, shortlist="depth", normalise="full")
        anchors = torch.tensor([7, 8])
        expected = BUILDERS["level"](rank(logits, count or budget), anchors, budget)
        tree = build(builder, logits, None, spec, anchors)
        for field in FIELDS[:-1]:
            assert torch.equal(getattr(tree, field), getattr(expected, field)), field
        torch.testing.assert_close(scores_of(tree), scores_of(expected), atol=1e-6, rtol=0)


@builders
def test_equal_scores_rank_by_logit(builder: str) -> None:
    """Logits that differ by less than their log-probabilities can tell: the higher comes first, whatever its id."""
    logits, anchors = drawn(4, 1, 2, 40, scale=1e-9), torch.tensor([0])
    logits[0, 0, 3] = 50.0  # so that the second depth is reached
    expected = BUILDERS["level"](rank(logits, 30), anchors, 30)
    assert len(set(scores_of(expected)[0].tolist())) < 5
    assert expected.tokens[0, 2:12].tolist() != sorted(expected.tokens[0, 2:12].tolist())
    assert_same(build(builder, logits, None, SearchSpec(30), anchors), expected)


@pytest.mark.parametrize("bad", [math.nan, -torch.tensor(math.nan), INF])
def test_a_bad_logit_does_not_spoil_a_shortlist(bad: Any) -> None:
    """Beside the best entries of a long row, which tie."""
    logits = torch.zeros(1, 1, 30_000)
    logits[0, 0, [6, 7, 9000]] = 4.0
    logits[0, 0, 5] = bad
    space = space_of(logits, None, torch.tensor([7]), SearchSpec(4, 3), trim=True)
    assert space.ids is not None
    assert space.ids.flatten().tolist() == [6, 7, 9000]


@builders
@pytest.mark.parametrize("shortlist", ["union", "depth"])
@pytest.mark.parametrize("normalise", ["candidates", "full"])
def test_rows_are_independent(builder: str, shortlist: Any, normalise: Any) -> None:
    """Rows of one batch, of unions of different sizes and some without logits, as each alone. The head is gated."""
    logits = drawn(11, 4, 6, 50, scale=2.0)
    logits[1] = logits[1, :1]  # one shortlist for all depths
    logits[2, 2] = math.nan
    logits[3, :, 5:] = -INF
    logits[0, 1, 7] = INF
    head, anchors = drawn_head(12, 50, 1.0, kind=Gated), torch.tensor([3, 3, 49, 0])
    spec = SearchSpec(60, 5, 0, shortlist, normalise)
    tree = build(builder, logits, head, spec, anchors)
    for row in range(4):
        alone = build(builder, logits[row : row + 1], head, spec, anchors[row : row + 1])
        assert paths_of(alone) == paths_of(tree, row)
        torch.testing.assert_close(scores_of(alone)[0], scores_of(tree)[row], atol=1e-6, rtol=0)
        assert torch.equal(alone.valid[0], tree.valid[row])
    assert_same(tree, build("level", logits, head, spec, anchors))
    assert int(tree.depths[2].max()) == 2
    assert not scores_of(tree).isnan().any()


@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("fanout", [0, 5])
def test_a_flag_says_when_too_few_parents_were_expanded(count: int, fanout: int) -> None:
    """Without the flag the tree is exact. Both happen, and flat drafts overflow where peaked ones do not."""
    flags = []
    for seed in range(12):
        scale = 1.0 if seed % 2 else 6.0
        logits = drawn(seed, 2, 6, 90, scale=scale)
        head, spec = drawn_head(seed + 50, 90, 0.3), SearchSpec(48, count, fanout)
        anchors = torch.tensor([1, 2])
        exact = build("level", logits, head, spec, anchors)
        tree, overflow = fixed_tree(logits, head, anchors, spec, parents=12)
        for row in range(2):
            flags.append((scale, bool(overflow[row])))
            assert overflow[row] or paths_of(tree, row) == paths_of(exact, row)
        assert_same(exact, fixed_tree(logits, head, anchors, spec, parents=48)[0])
        assert not fixed_tree(logits, head, anchors, spec)[1].any()
    assert flags.count((1.0, True)) >= 10
    assert flags.count((6.0, False)) >= 8


def test_the_flag_compares_with_the_last_node() -> None:
    """Scores .5 and .45 (first path), .3 and .2 (its siblings): with one parent, .3 is not expanded."""
    logits, anchors = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]]).log(), torch.tensor([0])
    flags = [fixed_tree(logits, None, anchors, SearchSpec(budget), parents=1)[1].item() for budget in (2, 3, 4)]
    assert flags == [False, True, True]


@builders
@pytest.mark.parametrize("count", [0, 6])
def test_smaller_budget_is_a_prefix(builder: str, count: int) -> None:
    logits, head = drawn(1, 1, 6, 40, scale=2.0).round(), drawn_head(2, 40, 1.0)
    largest = build(builder, logits, head, SearchSpec(150, count))
    for budget in (1, 5, 64, 149):
        tree = build(builder, logits, head, SearchSpec(budget, count))
        assert paths_of(tree) == paths_of(largest)[:budget]
        assert torch.equal(scores_of(tree), scores_of(largest)[:, : 1 + budget])


@pytest.mark.parametrize("builder", [*EXACT, "beam"])
@pytest.mark.parametrize(("depth", "budget"), [(5, 0), (0, 8)])
@pytest.mark.parametrize("count", [0, 3])
def test_root_alone(builder: str, depth: int, budget: int, count: int) -> None:
    tree = build(builder, drawn(0, 2, depth, 30), drawn_head(1, 30, 1.0), SearchSpec(budget, count))
    assert (tree.width, tree.max_depth, tree.batch) == (1, 0, 2)
    assert tree.tokens.tolist() == [[0], [1]]
    assert tree.parents.tolist() == [[-1], [-1]]
    assert scores_of(tree).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("builder", [*EXACT, "beam"])
def test_no_finite_logit_at_all(builder: str) -> None:
    tree = build(builder, torch.full((2, 3, 9), math.nan), drawn_head(1, 9, 1.0), SearchSpec(6, 2))
    assert tree.valid.sum(1).tolist() == [1, 1]
    assert tree.max_depth == 0 or builder in ("fixed", "beam")


@builders
def test_more_budget_than_paths(builder: str) -> None:
    """A vocabulary of two: the tree is complete, and one of one token is a chain."""
    tree = build(builder, drawn(0, 1, 3, 2), drawn_head(1, 2, 1.0), SearchSpec(1000))
    assert sorted(paths_of(tree)) == sorted(p for n in (1, 2, 3) for p in itertools.product((0, 1), repeat=n))
    chain = build(builder, drawn(0, 1, 4, 30), drawn_head(1, 30, 1.0), SearchSpec(50, 0, 1))
    assert chain.parents.tolist() == [[-1, 0, 1, 2, 3]]


@builders
def test_bfloat16_counts_as_its_float32_values(builder: str) -> None:
    logits, head = drawn(3, 2, 5, 300).bfloat16(), drawn_head(4, 300, 1.0)
    for spec in (SearchSpec(40), SearchSpec(40, 12), SearchSpec(40, 12, 3, "depth", "full")):
        assert_same(build(builder, logits, head, spec), build(builder, logits.float(), head, spec), exact=True)


@pytest.mark.parametrize("spec", [SearchSpec(40), SearchSpec(40, 7), SearchSpec(40, 7, 0, "depth", "full")])
def test_a_copy_on_the_host_gives_the_same_distributions(spec: SearchSpec) -> None:
    """What the host builders search where the logits are on a device."""
    logits, anchor = drawn(5, 1, 4, 60), torch.tensor([9])
    for kind in (Vanilla, Gated):
        space = space_of(logits, drawn_head(6, 60, 1.0, kind=kind), anchor, spec, trim=True)
        copy = host.on_host(space)
        assert copy is not space
        for depth in range(4):
            parents = anchor[None] if depth == 0 else space.tokens(depth - 1, torch.arange(space.size)[None, -3:])
            for one, other in zip(*(s.distribution(depth, s.bias(depth, s.latents(depth, parents)), parents.shape[1])
                                    for s in (space, copy)), strict=True):  # fmt: skip
                assert torch.equal(one, other)


def test_the_fixed_search_reads_nothing_back() -> None:
    """On a device whose tensors have no values, any look at a value raises."""
    with torch.device("meta"):
        logits, anchors = torch.empty(2, 5, 3000, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int64)
        head = Vanilla(torch.empty(3000, 8), torch.empty(3000, 8))
    for spec in (SearchSpec(32), SearchSpec(32, 16, 4), SearchSpec(32, 16, 0, "depth", "full")):
        tree, overflow = fixed_tree(logits, head, anchors, spec, parents=8)
        assert tree.tokens.shape == CONDITIONAL_BUILDERS["level"](logits, head, anchors, spec).tokens.shape == (2, 33)
        assert overflow.device == tree.tokens.device == logits.device
        beam = CONDITIONAL_BUILDERS["beam"](logits, head, anchors, spec)
        assert beam.tokens.shape == (2, 33)
    with pytest.raises((RuntimeError, NotImplementedError)):
        CONDITIONAL_BUILDERS["heap"](logits, head, anchors, SearchSpec(32))


@pytest.mark.parametrize("builder", CONDITIONAL_BUILDERS)
def test_stages(builder: str) -> None:
    opened: list[str] = []

    def stage(name: str) -> AbstractContextManager[None]:
        opened.append(name)
        return nullcontext()

    CONDITIONAL_BUILDERS[builder](
        drawn(0, 2, 4, 30), drawn_head(1, 30, 1.0), torch.tensor([1, 2]), SearchSpec(9, 4), stage
    )
    wanted = {"build/topk", "build/expand"}
    wanted |= {"heap": {"build/transfer"}, "reference": {"build/transfer"}}.get(builder, {"build/bias"})
    assert wanted <= set(opened) <= set(STAGES)


def test_beam_keeps_its_widths_and_leaves_the_root_out() -> None:
    logits, head, anchors = drawn(0, 2, 5, 40, scale=2.0), drawn_head(1, 40, 1.0), torch.tensor([5, 6])
    logits[:, :, 5:7] = -50.0  # roots are on no shortlist
    tree = build("beam", logits, head, SearchSpec(20, 4, widths=(6, 0, 3, -1, 5, 2)), anchors)
    for row in range(2):
        assert tree.depths[row].tolist() == [0] + [1] * 6 + [2] * 3 + [3] * 5 + [4] * 2
        space = space_of(logits[row : row + 1], head, anchors, SearchSpec(20, 4), root=False, trim=True)
        assert space.ids is not None
        assert set(tree.tokens[row, 1:].tolist()) <= set(space.ids.flatten().tolist())
        for depth in (1, 2, 3, 4):
            scores = scores_of(tree)[row][tree.depths[row] == depth]
            assert scores.tolist() == sorted(scores.tolist(), reverse=True)
        paths_of(tree, row)
    # All budget on one depth is the head of the best-first tree that has no more depths.
    flat = build("beam", logits, head, SearchSpec(9, widths=(9,)), anchors)
    assert paths_of(flat) == paths_of(build("level", logits[:, :1], head, SearchSpec(9), anchors))


def test_beam_pads_at_the_end() -> None:
    logits = drawn(0, 2, 3, 8)
    logits[0, 0, 2:] = -INF
    tree = build("beam", logits, drawn_head(1, 8, 1.0), SearchSpec(12, widths=(5, 5, 2)))
    assert tree.depths[0][tree.valid[0]].tolist() == [0] + [1] * 2 + [2] * 5 + [3] * 2
    assert len(paths_of(tree, 0)) == 9
    assert len(paths_of(tree, 1)) == 12


@pytest.mark.parametrize(
    ("schedule", "budget", "depth", "expected"),
    [
        ("flat", 64, 16, (4,) * 16),
        ("flat", 10, 7, (2,) * 5),
        ("flat", 11, 4, (3, 3, 3, 2)),
        ("flat-5", 16, 16, (6, 5, 5)),
        ("flat", 1, 16, (1,)),
        ("flat_depth-6", 16, 7, (3, 3, 3, 3, 2, 2)),
        ("flat_depth-99", 16, 3, (6, 5, 5)),
        ("geometric", 20, 4, (8, 5, 3, 2)),
        ("geometric-0.5", 16, 9, (8, 4, 2, 1, 1)),
        ("inv_geometric-0.5", 16, 3, (2, 4, 8)),
        ("16/16/8/8", 4, 2, (16, 16, 8, 8)),
        ("7", 99, 9, (7,)),
        ("flat", 0, 9, ()),
        ("geometric", 9, 0, ()),
    ],
)
def test_schedules(schedule: str, budget: int, depth: int, expected: tuple[int, ...]) -> None:
    assert widths(schedule, budget, depth) == expected


def test_schedule_parameters() -> None:
    assert widths("flat", 20, 9, min_width=10) == (10, 10)
    assert widths("geometric", 16, 9, decay=0.5) == widths("geometric-0.5", 16, 9)


UNKNOWN = (
    *("", "wide", "flat-0", "flat--1", "flat-x", "flat-2.5", "flat_depth", "flat_depth-0"),
    *("geometric-", "geometric-0", "geometric-1", "geometric-nan", "4/", "/", "4/-2", "4,4"),
)


@pytest.mark.parametrize("schedule", UNKNOWN)
def test_unknown_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(UsageError, match=r"widths must be flat.*inv_geometric.*16/16/8/8"):
        widths(schedule, 64, 16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget": -1}, "budget"),
        ({"budget": 4, "candidates": -1}, "candidates"),
        ({"budget": 4, "fanout": -2}, "fanout"),
        ({"budget": 4, "shortlist": "each"}, "union or depth"),
        ({"budget": 4, "normalise": "all"}, "candidates or full"),
    ],
)
def test_bad_specs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SearchSpec(**values)


def test_what_a_builder_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="budget of 8"):
        build("beam", drawn(0, 1, 3, 20), None, SearchSpec(8, widths=(5, 4)))
    monkeypatch.setattr(host, "_SLAB", 19**2)
    with pytest.raises(UsageError, match="at most 19 candidate tokens, not 20"):
        build("table", drawn(0, 1, 3, 20), None, SearchSpec(8))


def test_a_table_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the transitions of a depth do not fit at once, which happens where the full vocabulary is scored."""
    logits, head = drawn(0, 1, 4, 300), drawn_head(1, 300, 1.0, kind=Gated)
    spec = SearchSpec(40, 5, 0, "depth", "full")
    whole = build("table", logits, head, spec)
    monkeypatch.setattr(host, "_SLAB", 600)  # two parents at a time
    assert_same(build("table", logits, head, spec), whole)


@pytest.mark.parametrize("builder", CONDITIONAL_BUILDERS)
def test_a_gated_head_reads_the_hidden_states_of_its_own_row(builder: str) -> None:
    head = heads.MarkovHead("gated", 40, 4, 6).requires_grad_(False)
    for weight in head.parameters():
        weight.copy_(drawn(weight.dim(), *weight.shape))
    logits, hidden, anchors = drawn(1, 3, 5, 40), drawn(2, 3, 5, 6, scale=3), torch.tensor([3, 9, 27])
    spec = SearchSpec(12, widths=(4, 4, 4) if builder == "beam" else ())
    build = CONDITIONAL_BUILDERS[builder]
    together = build(logits, heads.BlockHead(head, hidden), anchors, spec)
    for row in range(3):
        rows = slice(row, row + 1)
        alone = build(logits[rows], heads.BlockHead(head, hidden[rows]), anchors[rows], spec)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert together.parents[row].tolist() == alone.parents[0].tolist()
    shifted = build(logits, heads.BlockHead(head, hidden.roll(1, 0)), anchors, spec)
    assert shifted.tokens.tolist() != together.tokens.tolist()
