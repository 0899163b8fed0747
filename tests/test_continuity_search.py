"""The continuity search against the algorithm written plainly: lists, tuples and a dictionary of counts.

The plain search prunes nothing and takes the candidates' terms as they are (`shortlist` has tests of its own), so
trees, their order and every bit of their scores must agree, whatever ties.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from golden_dart import index_of, row_paths
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_helpers import Gram, count, expected
from numpy.typing import NDArray
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.ngram.index import NgramIndex
from sparkbench.search import ContinuitySpec, continuity_tree, warm_up
from sparkbench.search.continuity import Paths, Shortlist, search, shortlist

INF = math.inf
Array = NDArray[Any]
Node = tuple[Gram, np.float32]


def plain_search(
    short: Shortlist,
    row: int,
    counts: Mapping[Gram, int] | None,
    order: int,
    spec: ContinuitySpec,
    stops: frozenset[int],
) -> list[Node]:
    """The nodes of a row's tree and their scores, best first."""
    known = tuple(short.known[row].tolist())
    weight, epsilon = np.float32(spec.ngram_weight), np.float32(1e-10)
    pool: list[Node] = []
    beam: list[Node] = [((), np.float32(0))]
    for level in range(short.terms.shape[1]):
        factor = np.float32((level + 1) ** -0.7)
        extensions: list[Node] = []
        for path, score in beam:
            for term, token in zip(short.terms[row, level], short.tokens[row, level].tolist(), strict=True):
                if term == -INF:
                    continue
                step = term
                if counts is not None and weight and (level or spec.score == "paper"):
                    step = term + weight * np.log(np.float32(expected(counts, known + path, token, order)[0]) + epsilon)
                extensions.append(((*path, token), score + factor * step))
        pool += extensions
        beam = sorted(extensions, key=lambda node: (node[0][-1] in stops, -node[1]))[: spec.beam]
    return sorted(pool, key=lambda node: -node[1])[: spec.theta]


def nodes_of(paths: Paths, row: int) -> list[Node]:
    """The same of a search, once it is checked that its nodes make a tree whose scores fall."""
    tokens, parents, depths, valid = (torch.from_numpy(part) for part in paths.nodes)
    tree = DraftTree(tokens, parents, depths, valid.bool(), int(depths.max()))
    found, scores = row_paths(tree, row), paths.scores[row]
    assert scores[0] == 0
    assert (scores[len(found) :] == -INF).all()
    assert (np.diff(scores[: len(found)]) <= 0).all()
    return list(zip(found[1:], scores[1:], strict=False))


LOGITS = ("any", "coarse", "equal", "certain", "holes")


def some_logits(kind: str, depth: int, vocab: int, draws: torch.Generator) -> Tensor:
    """[depth, vocab] float32."""
    logits = torch.randn(depth, vocab, generator=draws)
    if kind == "coarse":
        return (2 * logits).round()
    if kind == "equal":
        return torch.zeros(depth, vocab)
    if kind == "certain":  # p = 1 and p = 0
        return torch.where(torch.rand(depth, vocab, generator=draws) < 0.3, 200.0, 0.0)
    if kind == "holes":
        values = torch.tensor([torch.nan, INF, -INF, -INF, 0.0, 1.0])
        return values[torch.randint(len(values), (depth, vocab), generator=draws)]
    return 3 * logits


@dataclass(frozen=True)
class Problem:
    logits: Tensor
    known: Tensor
    counts: Counter[Gram] | None
    index: NgramIndex | None
    spec: ContinuitySpec
    stops: frozenset[int]

    @property
    def order(self) -> int:
        assert self.index is not None
        return min(self.spec.order or self.index.order, self.index.order)

    def shortlist(self, rows: slice = slice(None)) -> Shortlist:
        known = self.known[rows]
        return shortlist(self.logits[rows], known[:, -1], known[:, :-1], self.spec)

    def tree(self, spec: ContinuitySpec | None = None) -> DraftTree:
        anchors, history = self.known[:, -1], self.known[:, :-1]
        return continuity_tree(self.logits, anchors, history, self.index, spec or self.spec, self.stops)

    def plain(self, row: int) -> list[Node]:
        order = 0 if self.index is None else self.order
        return plain_search(self.shortlist(), row, self.counts, order, self.spec, self.stops)

    def check(self) -> None:
        """Rows together, rows alone and the plain search give the same."""
        together = search(self.shortlist(), self.index, self.spec, self.stops)
        for row in range(len(self.logits)):
            alone = search(self.shortlist(slice(row, row + 1)), self.index, self.spec, self.stops)
            wanted = self.plain(row)
            assert nodes_of(together, row) == wanted
            assert nodes_of(alone, 0) == wanted


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    draws = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    vocab, depth, order = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(2, 4))
    kinds = draw(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=3))
    tokens = st.integers(0, vocab - 1)
    period = draw(st.lists(tokens, min_size=1, max_size=12))
    documents = [period * 3, *draw(st.lists(st.lists(tokens, max_size=9), max_size=3))]
    counts = count(documents, order)
    if draw(st.booleans()):  # as in a reduced index, where an n-gram that is kept may have lost all its occurrences
        counts.update({gram: -count for gram, count in counts.items() if torch.rand(1, generator=draws) < 0.2})
    with_index = draw(st.booleans()) or draw(st.booleans())
    history = draw(st.integers(0, 4))
    spec = ContinuitySpec(
        nodes=draw(st.integers(0, 12) | st.integers(0, 200)),
        candidates=draw(st.integers(1, 10)),
        beam=draw(st.integers(1, 8)),
        ngram_weight=draw(st.sampled_from([0.5, 0.5, 0.0, 2.0])),
        order=draw(st.sampled_from([0, 0, 2, 3, 5])),
        score=draw(st.sampled_from(["code", "paper"])),
    )
    return Problem(
        logits=torch.stack([some_logits(kind, depth, vocab, draws) for kind in kinds]),
        known=torch.tensor(
            [[*draw(st.lists(tokens | st.just(-1), min_size=history, max_size=history)), draw(tokens)] for _ in kinds]
        ),
        counts=counts if with_index else None,
        index=index_of(counts, vocab, order) if with_index else None,
        spec=spec,
        stops=frozenset(draw(st.lists(tokens, max_size=3))),
    )


@given(problems())
@settings(max_examples=250, deadline=None)
def test_search_equals_the_plain_one(problem: Problem) -> None:
    problem.check()


@given(problems(), st.data())
@settings(max_examples=60, deadline=None)
def test_first_nodes_are_the_smaller_tree(problem: Problem, data: st.DataObject) -> None:
    tree, fewer = problem.tree(), data.draw(st.integers(0, problem.spec.theta))
    smaller = problem.tree(dataclasses.replace(problem.spec, nodes=fewer))
    first = tree.first(fewer)
    assert smaller.log_probs is tree.log_probs is None
    for field in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(smaller, field), getattr(first, field)), field
    assert smaller.max_depth == int(smaller.depths.max())


def certain_problem(seed: int, depth: int = 8) -> Problem:
    """Every level has candidates of p = 1 beside others of p = 0, and the text repeats, so that g = 1."""
    draws = torch.Generator().manual_seed(seed)
    text = torch.randperm(32, generator=draws)[:20].tolist()
    counts = count([text * 4], 3)
    start = int(torch.randint(20 - depth - 2, (1,), generator=draws))  # a document's end is followed by nothing
    chosen = torch.tensor(text[start + 2 : start + 2 + depth])
    logits = 60.0 * torch.nn.functional.one_hot(chosen, 32) + torch.randint(-30, 1, (depth, 32), generator=draws)
    known = torch.tensor([text[start : start + 2]])
    nodes = 1 + seed % depth
    return Problem(logits[None], known, counts, index_of(counts, 32, 3), ContinuitySpec(nodes), frozenset())


def test_trees_full_of_ties_are_closed() -> None:
    tied = 0
    for seed in range(300):
        problem = certain_problem(seed)
        found = search(problem.shortlist(), problem.index, problem.spec)
        nodes = nodes_of(found, 0)
        scores = dict(nodes) | {(): np.float32(0)}
        cut = nodes[-1][1]
        tied += any(score == cut == scores[path[:-1]] for path, score in nodes)
        if seed % 10 == 0:
            assert nodes == problem.plain(0)
    assert tied == 300  # a node of the score at the cut has a parent of that score


def test_the_worked_example() -> None:
    """Two levels of two candidates; documents 1 2 3, 1 2 4, 1 2 5 and 9 8 7."""
    counts = count([[1, 2, 3], [1, 2, 4], [1, 2, 5], [9, 8, 7]], 3)
    logits = torch.full((1, 2, 10), -INF)
    logits[0, 0, [2, 7]] = torch.tensor([0.6, 0.4]).log()
    logits[0, 1, [3, 6]] = torch.tensor([0.7, 0.3]).log()
    spec = ContinuitySpec(4, candidates=2, beam=2)
    problem = Problem(logits, torch.tensor([[9, 1]]), counts, index_of(counts, 10, 3), spec, frozenset({0}))
    nodes = nodes_of(search(problem.shortlist(), problem.index, spec, problem.stops), 0)
    assert [path for path, _ in nodes] == [(2,), (7,), (2, 3), (7, 3)]
    assert [float(score) for _, score in nodes] == pytest.approx([-0.5108, -0.9163, -1.0466, -8.2009], abs=1e-4)
    tree = problem.tree()
    assert tree.tokens.tolist() == [[1, 2, 7, 3, 3]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]
    paper = search(problem.shortlist(), problem.index, dataclasses.replace(spec, score="paper"), problem.stops)
    # After (9, 1) comes 2 in three of three cases, after 1 likewise; 7 never does.
    assert nodes_of(paper, 0)[0] == ((2,), nodes[0][1])
    assert dict(nodes_of(paper, 0))[7,] == pytest.approx(-0.9163 + 0.5 * math.log(1e-10), abs=1e-4)


def test_a_stop_token_is_extended_only_into_places_that_are_left() -> None:
    logits = torch.tensor([[[4.0, 3.0, 2.0], [1.0, 1.0, 1.0]]])
    for beam, extended in ((2, {(1,), (2,)}), (3, {(0,), (1,), (2,)})):
        spec = ContinuitySpec(100, candidates=3, beam=beam)
        tree = continuity_tree(logits, torch.tensor([1]), torch.zeros(1, 0).long(), None, spec, frozenset({0}))
        paths = row_paths(tree, 0)
        assert {path[:-1] for path in paths if len(path) == 2} == extended
        assert (0,) in paths


def test_a_beam_beyond_the_tree_costs_no_memory() -> None:
    """Paths are read off the tree's nodes, so a beam of a billion takes what a beam of the tree's size takes."""
    logits, anchors = torch.randn(1, 6, 300, generator=torch.Generator().manual_seed(1)), torch.tensor([1])
    trees = [
        continuity_tree(logits, anchors, anchors[:, None], None, ContinuitySpec(12, beam=beam, candidates=300))
        for beam in (12, 10**20)
    ]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)


def test_places_are_left_by_paths_that_count_without_pruning() -> None:
    """A pruned path takes a place in the beam from a stop token all the same."""
    logits = torch.tensor([[[9.0, 8.0, -9.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    for beam in range(1, 13):
        spec = ContinuitySpec(5, candidates=3, beam=beam)
        problem = Problem(logits, torch.tensor([[1]]), None, None, spec, frozenset({0}))
        problem.check()


@pytest.mark.parametrize("score", ["code", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("vocab", [5, 700])
def test_candidates_and_their_chances(score: str, dtype: torch.dtype, kind: str, vocab: int) -> None:
    spec = ContinuitySpec(candidates=20, score=score)  # type: ignore[arg-type]
    logits = some_logits(kind, 6, vocab, torch.Generator().manual_seed(1)).to(dtype)
    short = shortlist(logits[None], torch.tensor([7]), torch.tensor([[-1, 2**40]]), spec)
    assert short.known.tolist() == [[-1, 2**40, 7]]
    assert [short.terms.dtype, short.tokens.dtype] == [np.dtype(np.float32), np.dtype(np.int64)]
    assert short.terms.shape == short.tokens.shape == (1, 6, min(20, vocab))
    for level, row in enumerate(logits.tolist()):
        order = sorted((token for token in range(vocab) if math.isfinite(row[token])), key=lambda token: -row[token])
        kept = order[:20]
        assert short.tokens[0, level, : len(kept)].tolist() == kept
        assert (short.terms[0, level, len(kept) :] == -INF).all()
        weights = {token: math.exp(row[token] - row[order[0]]) for token in order}
        total = sum(weights[token] for token in (kept if score == "code" else order))
        wanted = [0.9**level * math.log(weights[token] / total + 1e-10) for token in kept]
        np.testing.assert_allclose(short.terms[0, level, : len(kept)], wanted, rtol=1e-5, atol=2e-6)
    assert (short.terms <= 0).all()


def test_rows_without_candidates_are_the_root_alone() -> None:
    logits = torch.full((2, 3, 4), torch.nan)
    logits[0, :, 1] = 0.0
    anchors, none = torch.tensor([5, 6]), torch.zeros(2, 0, dtype=torch.int64)
    tree = continuity_tree(logits, anchors, none, None, ContinuitySpec())
    assert row_paths(tree, 0) == [(), (1,), (1, 1), (1, 1, 1)]
    assert row_paths(tree, 1) == [()]
    assert tree.tokens[:, 0].tolist() == [5, 6]
    for alone in (
        continuity_tree(logits[1:], anchors[1:], none[1:], None, ContinuitySpec()),
        continuity_tree(logits[:1, :0], anchors[:1], none[:1], None, ContinuitySpec()),
        continuity_tree(logits[:1], anchors[:1], none[:1], None, ContinuitySpec(0)),
    ):
        assert alone.chain
        assert alone.width == 1


Asked = list[list[list[int]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[Asked, Asked]:
    """The contexts and the candidates of each look-up, as they are made."""
    from sparkbench.ngram import lookup

    seen: tuple[Asked, Asked] = [], []
    real = lookup.look_up

    def watched(index: NgramIndex, contexts: Array, tokens: Array, rows: Array) -> tuple[Array, Array]:
        seen[0].append(contexts.tolist())
        seen[1].append(tokens[rows].tolist())
        return real(index, contexts, tokens, rows)

    monkeypatch.setattr(lookup, "look_up", watched)
    return seen


def test_one_look_up_a_level_and_none_without_weight(asked: tuple[Asked, Asked]) -> None:
    contexts, _ = asked
    counts = count([[0, 1, 2, 3, 0, 1]], 3)
    known, spec = torch.tensor([[1, 2], [-1, 3]]), ContinuitySpec(1000)
    problem = Problem(torch.zeros(2, 4, 4), known, counts, index_of(counts, 4, 3), spec, frozenset())
    problem.tree()
    level1, level2, level3 = contexts
    assert level1 == [[root, token] for root in (2, 3) for token in range(4)]
    assert len(level2) == 2 * 16
    assert len(level3) == 2 * 16  # 20 paths a row end in one of 16 ways
    contexts.clear()
    problem.tree(ContinuitySpec(score="paper"))
    assert contexts[0] == [[1, 2], [-1, 3]]
    assert len(contexts) == 4
    contexts.clear()
    problem.tree(ContinuitySpec(ngram_weight=0.0))
    assert not contexts


def test_only_what_can_join_the_tree_is_looked_up(asked: tuple[Asked, Asked]) -> None:
    counts = count([[0, 1, 2, 0]], 3)
    logits = torch.tensor([[[0.6, 0.4, 0.0], [0.1, 0.9, 0.0], [0.5, 0.5, 0.0]]]).log()
    problem = Problem(
        logits, torch.tensor([[2]]), counts, index_of(counts, 3, 3), ContinuitySpec(2, ngram_weight=1e-3), frozenset()
    )
    problem.check()
    # Level 0 makes nodes of ln 0.6 and ln 0.4, and there may be two. At level 1 a child of 0.9 improves on them, one of
    # 0.1 does not, and at level 2 none does.
    assert asked == ([[[2, 0]]] * 2, [[[1, -1, -1]]] * 2)


def test_stages() -> None:
    opened: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    counts = count([[0, 1]], 2)
    anchors = torch.zeros(1, dtype=torch.int64)
    index, none = index_of(counts, 2, 2), torch.zeros(1, 0, dtype=torch.int64)
    continuity_tree(torch.zeros(1, 2, 2), anchors, none, index, ContinuitySpec(), stage=stage)
    assert set(opened) == {"build/topk", "build/transfer", "build/lookup", "build/search"}
    opened.clear()
    continuity_tree(torch.zeros(1, 2, 2), anchors, none, None, ContinuitySpec(), stage=stage)
    assert set(opened) == {"build/topk", "build/transfer", "build/search"}


def test_the_largest_weight_keeps_scores_finite() -> None:
    counts = count([[0, 1, 0, 0]], 3)
    spec = ContinuitySpec(30, ngram_weight=1e30)
    problem = Problem(torch.zeros(1, 3, 3), torch.tensor([[0, 1]]), counts, index_of(counts, 3, 3), spec, frozenset())
    problem.check()
    assert np.isfinite(search(problem.shortlist(), problem.index, spec).scores).all()


@pytest.mark.parametrize("with_index", [True, False])
def test_warm_up_compiles_all_that_a_search_runs(with_index: bool) -> None:
    from sparkbench.ngram import lookup
    from sparkbench.search import extension

    counts = count([[0, 1, 2, 0]], 3)
    index = index_of(counts, 3, 3) if with_index else None
    warm_up(index)
    kernels = (lookup.fill, *(getattr(extension, name) for name in ("ask", "extend", "find_beam", "read_tree")))
    compiled = [len(kernel.signatures) for kernel in kernels]
    for score in ("code", "paper"):
        for batch in (1, 3):
            for dtype in (torch.float32, torch.bfloat16):
                logits, known = torch.zeros(batch, 3, 3, dtype=dtype), torch.zeros(batch, 4, dtype=torch.int64)
                spec = ContinuitySpec(score=score)
                Problem(logits, known, counts, index, spec, frozenset({1})).tree()
    assert [len(kernel.signatures) for kernel in kernels] == compiled


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": -1}, {"candidates": 0}, {"beam": 0}, {"ngram_weight": -0.1}, {"ngram_weight": math.nan},
        {"ngram_weight": INF}, {"ngram_weight": 2e30}, {"order": 1}, {"order": -1}, {"score": "other"},
    ],
)  # fmt: skip
def test_impossible_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        ContinuitySpec(**wrong)  # type: ignore[arg-type]


def test_default_nodes() -> None:
    assert ContinuitySpec().theta == 60
    assert ContinuitySpec(score="paper").theta == 59
    assert ContinuitySpec(7).theta == 7
