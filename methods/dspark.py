"""DSpark: a block drafter whose Markov head makes each slot depend on the token before it, verified as a chain.

DSpark, arXiv 2607.05147. One forward of the drafter, then one small step of the head a slot. The published evaluator
samples the slots and accepts by rejection (`rule=rejection`); by default they are greedy and matched.
The confidence head says how likely each slot is accepted, and can shorten the chain before it is verified:

- `confidence-threshold`: the prefix before the first slot whose own confidence is below it (the published evaluator).
- `verify-length=scheduled`: Algorithm 1 of the paper over all rows of the batch, on the step curve of this machine.
- `verify-length=delayed`: the capacity of a round follows from the confidences of two rounds before (paper, 5.2).

Both count a whole step: the forward on the curve, and what a round costs beside it. None of the three looks at what
depends on the token it admits. The verifier pads the rows of a batch to the longest, so above batch
size 1 a shortened row saves time only when all are short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparkbench.decoding.drafting import ChainOptions, Drafts
from sparkbench.decoding.method import Context
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.parts import Block
from sparkbench.errors import UsageError
from sparkbench.methods.dflash import DFlash
from sparkbench.registry import method
from sparkbench.scheduling import Calibration, DelayedCapacity, admit, threshold_lengths


@dataclass(frozen=True)
class Options(ChainOptions):
    """drafter: a drafter's name, a folder or a hub id; empty for the target's default. `A+B` gives A the Markov head
             of B, `A+none` leaves it out.
    depth:   most tokens drafted; 0 is the whole block.
    confidence_threshold: 0 is off.
    curve:   step curve for scheduled and delayed, as `sparkbench profile` writes it; empty measures one at the start.
    calibration: file of temperatures for the confidences; empty takes the drafter's own, `none` none.
    Others: decoding/drafting.py.
    """

    drafter: str = ""
    depth: int = 0
    verify_length: Literal["full", "scheduled", "delayed"] = "full"
    confidence_threshold: float = 0.0
    curve: str = ""
    calibration: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 0:
            raise ValueError(f"depth {self.depth} is not allowed: 0 or above")
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(f"confidence-threshold {self.confidence_threshold} is not allowed: 0 to 1")
        if self.confidence_threshold and self.verify_length != "full":
            raise ValueError(f"confidence-threshold and verify-length={self.verify_length} exclude each other")
        if self.verify_length == "full" and (self.curve or self.calibration):
            raise ValueError("curve and calibration are for verify-length=scheduled or delayed")


@method("dspark")
class DSpark(DFlash):
    Options = Options
    summary = "block drafter with a Markov head, greedy chain (arXiv 2607.05147)"
    drafter_kind = "dspark"

    def __init__(self, options: Any, drafter: Any, budget: int | None) -> None:
        super().__init__(options, drafter, budget)
        if self.uses_confidence and drafter is not None and drafter.confidence_head is None:
            raise UsageError(f"drafter {drafter.source}: it has no confidence head, which the options ask for")

    @property
    def uses_confidence(self) -> bool:
        return self.options.verify_length != "full" or self.options.confidence_threshold > 0

    @property
    def needs_costs(self) -> bool:
        return self.options.verify_length != "full"

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        super().begin(target, batch, capacity)
        self._delayed = DelayedCapacity()

    def propose(self, context: Context) -> DraftTree:
        with context.stage("draft"):
            block = self.session.draft(context)
        with context.stage("build"):
            logits = block.logits.float()
            with context.stage("build/markov"):
                head = self.drafter.markov_head
                chosen = Drafts(self.options, context, *logits.shape[1:])
                if head is None:
                    drafts = chosen.pick(logits)
                else:
                    drafts = head.chain(logits, block.hidden, context.anchors, chosen.pick)
            lengths = None
            if self.uses_confidence:
                with context.stage("build/confidence"):
                    lengths = self.lengths(self.confidence(block, context.anchors, drafts))
            log_probs = chosen.log_probs(logits, drafts)
            return DraftTree.chain_of(context.anchors, drafts, log_probs, lengths, chosen.draft_probs)

    def confidence(self, block: Block, anchors: Tensor, drafts: Tensor) -> Tensor:
        """Confidence logits [B, L] of the slots of a chain `drafts` [B, L]."""
        previous = torch.cat([anchors[:, None], drafts[:, :-1]], 1)
        return self.drafter.confidence_head(block.hidden, previous, self.drafter.markov_head)

    def lengths(self, logits: Tensor) -> list[int]:
        """How much of each row's chain is verified, from confidence logits [B, L]; the host has to know."""
        options = self.options
        if options.verify_length == "full":
            return threshold_lengths(logits.sigmoid().tolist(), options.confidence_threshold)
        assert self.costs is not None
        curve, fixed, _ = self.costs.at(len(logits), self.session.cache.max_length)
        calibration = self.calibration or Calibration.identity(self.drafter.config.draft_length)
        survival = calibration.survival(logits.cpu().numpy()).tolist()
        rule = admit if options.verify_length == "scheduled" else self._delayed.admit
        return rule(survival, lambda tokens: fixed + curve.seconds(tokens))

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._delayed.keep(rows)

    def admit(self, rows: int) -> None:
        super().admit(rows)
        self._delayed.join(rows, self.depth)
