"""DFlash: a block-diffusion drafter fills a whole block in one forward, and its greedy tokens are verified as a chain.

Chen et al., arXiv 2602.06036. The drafter reads the target's features of all committed positions and predicts every
slot of the block in parallel, each from its own marginal. Drafts are greedy at any temperature, as published, unless
its options say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparkbench.decoding.drafting import ChainOptions, Drafts
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.registry import method


@dataclass(frozen=True)
class Options(ChainOptions):
    """drafter: an embedded drafter's name, a folder or a hub id; empty for the target's default.

    Others: decoding/drafting.py.
    """

    drafter: str = ""


@method("dflash")
class DFlash(Method):
    Options = Options
    summary = "block-diffusion drafter, greedy chain (arXiv 2602.06036)"
    drafter_kind = "dflash"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids

    @property
    def max_nodes(self) -> int:
        return self.depth

    @property
    def max_length(self) -> int | None:
        return self.drafter.max_length

    @property
    def depth(self) -> int:
        """Slots of a block that are used: all, or as many as the option `depth`, where there is one, allows."""
        length: int = self.drafter.config.draft_length
        return min(getattr(self.options, "depth", 0) or length, length)

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        self.session = self.drafter.begin(target, batch, capacity, self.depth)

    def propose(self, context: Context) -> DraftTree:
        with context.stage("draft"):
            logits = self.session.draft(context).logits
        with context.stage("build"):
            logits = logits.float()
            chosen = Drafts(self.options, context, *logits.shape[1:])
            drafts = chosen.pick(logits)
            log_probs = chosen.log_probs(logits, drafts)
            return DraftTree.chain_of(context.anchors, drafts, log_probs, draft_probs=chosen.draft_probs)

    def keep(self, rows: Sequence[int]) -> None:
        self.session.keep(rows)

    def admit(self, rows: int) -> None:
        self.session.admit(rows)
