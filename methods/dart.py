"""DART: a tree over a one-layer drafter's logits, searched for continuity with an n-gram index.

DART, arXiv 2601.19278. The drafter predicts d tokens in one forward, each without knowing the others; the search puts
together those that follow each other in text, by the counts of an n-gram index (sparkbench.search.continuity). The
tree holds the `budget` best nodes of a beam search, `theta` of the paper. It is drafted the same at any temperature,
as published, unless its options say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sparkbench.decoding.drafting import DraftOptions, Drafts
from sparkbench.decoding.method import Context
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.dart import DartDrafter
from sparkbench.errors import UsageError
from sparkbench.methods.dflash import DFlash
from sparkbench.registry import method
from sparkbench.search import ContinuitySpec, continuity_tree, warm_up


@dataclass(frozen=True)
class Options(DraftOptions):
    """drafter: as for dflash; any drafter without a Markov head, so `dflash` and `dspark-b7+none` serve too.

    index:        n-gram index: a file, a hub id, or `none`; empty for the target's default.
    depth:        most tokens drafted; 0 is as many as the drafter can.
    candidates:   tokens of each depth that may be nodes, k of the paper.   beam: paths that are extended, w.
    ngram_weight: of the n-gram term in a node's score.
    order:        tokens of the longest n-gram that is looked up, 2 or above; 0 is the index's own.
    score:        that of the published code (probabilities over the candidates alone, no n-gram term at the first
                  token), or as the paper writes it.
    final_norms:  how often a DART drafter's last norm is applied; the published code does it twice.
    """

    drafter: str = ""
    index: str = ""
    depth: int = 0
    candidates: int = 25
    beam: int = 20
    ngram_weight: float = 0.5
    order: int = 0
    score: Literal["code", "paper"] = "code"
    final_norms: Literal[2, 1] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 0:
            raise ValueError(f"depth {self.depth} is not allowed: 0 or above")
        self.spec(1)

    def spec(self, nodes: int) -> ContinuitySpec:
        """The search of trees of `nodes` nodes. ValueError: a value that is not allowed."""
        return ContinuitySpec(nodes, self.candidates, self.beam, self.ngram_weight, self.order, self.score)


@method("dart")
class Dart(DFlash):
    Options = Options
    summary = "beam search with n-gram continuity over a one-layer drafter (arXiv 2601.19278)"
    drafter_kind = "dart"
    takes_budget = True

    def __init__(self, options: Any, drafter: Any, budget: int | None) -> None:
        super().__init__(options, drafter, budget)
        self.spec = options.spec(budget)
        if options.final_norms != Options.final_norms and not isinstance(drafter, DartDrafter | None):
            raise UsageError(f"drafter {drafter.source}: it is no DART drafter, and final-norms is for those")

    @property
    def max_nodes(self) -> int:
        assert self.budget is not None
        return self.budget

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        if isinstance(self.drafter, DartDrafter):
            self.session = self.drafter.begin(target, batch, capacity, self.depth, self.options.final_norms)
        else:
            super().begin(target, batch, capacity)
        self._history = torch.full((batch, self._remembered), -1, device=target.device)
        warm_up(self.index)

    @property
    def _remembered(self) -> int:
        """Tokens before the anchor that a look-up may read."""
        return max(0, self.spec.context_length(self.index) - 1)

    def propose(self, context: Context) -> DraftTree:
        with context.stage("draft"):
            logits = self.session.draft(context).logits
        with context.stage("build"):
            self._remember(context)
            logits = Drafts(self.options, context, *logits.shape[1:]).ranked(logits)
            stops = context.stop_ids
            return continuity_tree(logits, context.anchors, self._history, self.index, self.spec, stops, context.stage)

    def _remember(self, context: Context) -> None:
        """Move the last committed tokens, of which every row has another number, into the history."""
        width = self._history.shape[1]
        joined = torch.cat([self._history, context.tokens], 1)
        if min(context.counts) == context.tokens.shape[1]:
            self._history = joined[:, joined.shape[1] - width :]
            return
        ends = torch.tensor(context.counts, device=joined.device)[:, None]
        self._history = joined.gather(1, ends + torch.arange(width, device=joined.device))

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._history = self._history[torch.tensor(rows, device=self._history.device)]

    def admit(self, rows: int) -> None:
        super().admit(rows)
        self._history = torch.cat([self._history, self._history.new_full((rows, self._history.shape[1]), -1)])
