"""The continuity search: a beam over independent draft rows, scored for how well its tokens follow each other in text.

DART, arXiv 2601.19278. A row's distribution does not know what the rows before it chose; an n-gram index does. With p a
candidate's probability at level l, counted from 0, and q that of the index after the tokens before it:

    score(path + t) = score(path) + (l + 1)^-0.7 * (0.9^l * ln(p + 1e-10) + weight * ln(q + 1e-10))

Each level extends the `beam` best paths of the one above by the `candidates` best tokens of its row. The tree is the
`nodes` best of all that were made, best first. Logits are touched where they are; what is left of them goes to the host
in one copy, and the search runs there (extension.py), a batch of look-ups a level.

Two scores. `code` is that of the published code (github.com/fvliang/DART): p is a softmax over the candidates alone,
and level 0 has no n-gram part. `paper` is as the paper writes it: p over the whole vocabulary, the n-gram part at all
levels. A path that ends in a stop token is extended only where fewer than `beam` others exist; it may be a leaf in any
case.

Other than in the published code, ancestors are always kept, equal scores go to the earlier (depth, then the parent's
place in the beam, then rank; equal logits rank by token id), p and q are float32 whatever the model's dtype, and no
score is NaN. Not here: the index (sparkbench.ngram), and searches whose score is a probability.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.ngram.index import NgramIndex
from sparkbench.search.candidates import Stage, quiet
from sparkbench.search.ranking import INF, best_ids, finite, rank

EPSILON = 1e-10
LEVEL_EXPONENT = -0.7
DRAFT_BASE = 0.9
MAX_BEAM = 1 << 31  # more paths than there can be; counts of paths stay in 64 bits
MAX_WEIGHT = 1e30  # scores stay finite in float32
DEFAULT_NODES = {"code": 60, "paper": 59}


@dataclass(frozen=True)
class ContinuitySpec:
    """Which tree is searched for; ValueError for a value that is not allowed.

    nodes:        theta, the nodes of the tree, the root not counted; None: DEFAULT_NODES of the score.
    candidates:   k, tokens of each level; all, where the vocabulary has fewer.
    beam:         w, paths that a level extends.
    ngram_weight: of the n-gram part; 0: none, and nothing is looked up.
    order:        tokens of the longest n-gram that is looked up, 2 or above; 0: the index's.
    score:        of the published code, or of the paper.
    """

    nodes: int | None = None
    candidates: int = 25
    beam: int = 20
    ngram_weight: float = 0.5
    order: int = 0
    score: Literal["code", "paper"] = "code"

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 0:
            raise ValueError(f"{self.nodes} nodes are not allowed: 0 or more")
        for name in ("candidates", "beam"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not allowed: 1 or more")
        if not 0 <= self.ngram_weight <= MAX_WEIGHT:
            raise ValueError(f"ngram_weight {self.ngram_weight} is not allowed: 0 to {MAX_WEIGHT:g}")
        if self.order < 0 or self.order == 1:
            raise ValueError(f"order {self.order} is not allowed: 0, or 2 and above")
        if self.score not in DEFAULT_NODES:
            raise ValueError(f"score {self.score!r} is not allowed: {' or '.join(DEFAULT_NODES)}")

    def context_length(self, index: NgramIndex | None) -> int:
        """Tokens before a candidate that a look-up reads; 0: nothing is looked up."""
        if index is None or not self.ngram_weight:
            return 0
        return min(self.order or index.order, index.order) - 1

    @property
    def theta(self) -> int:
        return DEFAULT_NODES[self.score] if self.nodes is None else self.nodes


@dataclass(frozen=True, eq=False)
class Shortlist:
    """What a search reads of a draft, on the host.

    terms:   [B, d, k] float32: 0.9^l * ln(p + 1e-10) of each candidate, best first; -inf: no candidate.
    tokens:  [B, d, k] int64.
    known:   [B, h] int64: the tokens up to the root, which is the last; -1 where there is none.
    """

    terms: NDArray[np.float32]
    tokens: NDArray[np.int64]
    known: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Paths:
    """Trees on the host, padded to N nodes: tokens, parents, depths and valid, [4, B, N] int64, and scores [B, N]
    float32 (the root: 0; padding: -inf)."""

    nodes: NDArray[np.int64]
    scores: NDArray[np.float32]


def continuity_tree(
    logits: Tensor,
    anchors: Tensor,
    history: Tensor,
    index: NgramIndex | None,
    spec: ContinuitySpec,
    stop_ids: Set[int] = frozenset(),
    stage: Stage = quiet,
) -> DraftTree:
    """Draft trees below anchors [B] int64, from logits [B, d, V] of any float type; only finite logits make nodes.

    history:  [B, n] int64, the tokens before the anchor, the last one the most recent; -1 where there is none. The
              look-up reads order - 2 of them at most.
    index:    None: no n-gram part.
    stage:    opens build/topk, build/transfer, build/lookup and build/search around what they cover.

    Nodes come best first, so the first n are the tree of n nodes. Scores are no probabilities, and are not kept.
    """
    if 0 in logits.shape or not spec.theta:
        return DraftTree.root(anchors)
    short = shortlist(logits, anchors, history, spec, stage)
    paths = search(short, index, spec, stop_ids, stage)
    if paths.nodes.shape[2] == 1:
        return DraftTree.root(anchors)
    with stage("build/transfer"):
        tokens, parents, depths, valid = torch.from_numpy(paths.nodes).to(anchors.device).unbind()
    return DraftTree(tokens, parents, depths, valid.bool(), int(paths.nodes[2].max()))


def shortlist(
    logits: Tensor, anchors: Tensor, history: Tensor, spec: ContinuitySpec, stage: Stage = quiet
) -> Shortlist:
    """The candidates of logits [B, d, V], none of them 0, and the tokens before them, in one copy to the host."""
    batch, depth, vocab = logits.shape
    width = min(spec.candidates, vocab)
    with stage("build/topk"):
        if spec.score == "paper":
            ranked = rank(logits, width)
            tokens, offered, chances = ranked.token_ids, ranked.log_probs > -INF, ranked.log_probs.exp()
        else:
            kept, tokens = _highest(logits.reshape(batch * depth, vocab).float(), width)
            offered, chances = kept > -INF, kept.softmax(-1)
        falling = DRAFT_BASE ** torch.arange(depth, device=logits.device, dtype=torch.float32)[:, None]
        terms = (chances + EPSILON).log_().clamp_(max=0.0).view(batch, depth, width) * falling
        terms = terms.masked_fill_(~offered.view(batch, depth, width), -INF)
    with stage("build/transfer"):  # float64 holds them all exactly
        parts = terms.flatten(1), tokens.reshape(batch, -1), history, anchors[:, None]
        packed = torch.cat([part.to(anchors.device, torch.float64) for part in parts], 1).cpu().numpy()
    cells = depth * width
    shape = batch, depth, width
    return Shortlist(
        packed[:, :cells].astype(np.float32).reshape(shape),
        packed[:, cells : 2 * cells].astype(np.int64).reshape(shape),
        packed[:, 2 * cells :].astype(np.int64),
    )


def _highest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest finite entries of rows [R, V] float32, equal ones by id, and their ids; then -inf."""
    if rows.is_cpu:  # looking is free there, and cleaning costs a pass over the vocabulary
        ids = best_ids(rows, count)
        kept = rows.gather(1, ids)
        if (kept[:, 0] < INF).all():
            return kept, ids
    rows = finite(rows)
    ids = best_ids(rows, count)
    return rows.gather(1, ids), ids


def search(
    short: Shortlist,
    index: NgramIndex | None,
    spec: ContinuitySpec,
    stop_ids: Set[int] = frozenset(),
    stage: Stage = quiet,
) -> Paths:
    """The trees of a shortlist. `stage` opens build/lookup and build/search."""
    from sparkbench.ngram.lookup import look_up  # numba takes a while to load, and other searches do without
    from sparkbench.search.extension import ask, count_candidates, extend, find_beam, read_tree

    terms, tokens, known = short.terms, short.tokens, short.known
    batch, depth, width = terms.shape
    remembered = spec.context_length(index)
    weight, epsilon = np.float32(spec.ngram_weight), np.float32(EPSILON)
    reach = min(spec.beam, MAX_BEAM)
    with stage("build/search"):
        widths = [1]  # of the beam, at most: it is read off the tree's nodes
        while len(widths) < depth:
            widths.append(min(spec.beam, spec.theta, widths[-1] * width))
        most = 1 + sum(widths) * width
        scores = np.zeros((batch, most), np.float32)
        nodes = np.empty((batch, most, 3), np.int64)
        nodes[:, 0] = 0, -1, 0
        nodes[:, 0, 0] = known[:, -1]
        best = np.zeros((batch, min(1 + spec.theta, most)), np.int64)
        counts = np.array([[1, 1, 0, 0]] * batch, np.int64)
        beam = np.empty((batch, max(widths)), np.int64)
        slots = np.empty_like(beam)
        contexts = np.empty((beam.size, remembered), np.int64)
        wanted = np.empty((beam.size, width), np.int64)
        each = np.arange(beam.size)
        grams = np.empty((0, 0), np.float32)
        stops = np.array(sorted(stop_ids), np.int64)
        offered = np.zeros((batch, depth, 2), np.int64)
        count_candidates(tokens, terms, stops, offered)

    for level in range(depth):
        factor = np.float32((level + 1) ** LEVEL_EXPONENT)
        with stage("build/search"):
            widest = find_beam(level, reach, offered, stops, scores, nodes, best, counts, beam)
        if not widest:
            break
        if index is not None and remembered and (level or spec.score == "paper"):
            with stage("build/lookup"):
                found = ask(
                    level, factor, tokens, terms, known, scores, nodes, best, counts, beam, slots, contexts, wanted
                )
                chances, _ = look_up(index, contexts[:found], wanted[:found], each[:found])
                grams = weight * np.log(chances + epsilon)
        with stage("build/search"):
            extend(level, factor, tokens, terms, grams, scores, nodes, best, counts, beam, slots)

    with stage("build/search"):
        tree = np.empty((4, batch, counts[:, 1].max()), np.int64)
        sums = np.empty(tree.shape[1:], np.float32)
        read_tree(scores, nodes, best, counts, tree, sums)
    return Paths(tree, sums)


def warm_up(index: NgramIndex | None) -> None:
    """Compile what a search runs for this index, or load it compiled, so that no round waits for that."""
    row = torch.zeros(1, 2, 2)
    anchors = torch.zeros(1, dtype=torch.int64)
    continuity_tree(row, anchors, anchors[:, None], index, ContinuitySpec(2, score="paper"))
