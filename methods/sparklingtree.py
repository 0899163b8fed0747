"""SparklingTree: the best tree of a DSpark drafter, whose Markov head makes a node depend on its parent's token.

github.com/jwlaboratory/diffusion-sparked-tree. One forward of the drafter gives the base logits of every depth; the
children of a node with token t at depth d follow softmax(base[d] + bias(t)). The tree holds the `budget` likeliest
paths. Unlike DDTree's, whose depths are independent, its paths hang together.

The exact tree over the whole vocabulary is the default. The published study cut the candidates to those among the 128
best base logits of some depth (`candidates=128`) and the children of a node to 64 (`fanout=64`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from sparkbench.decoding.drafting import Drafts
from sparkbench.decoding.method import Context
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.heads import BlockHead
from sparkbench.drafters.parts import Block
from sparkbench.errors import UsageError
from sparkbench.methods.ddtree import DDTree, DDTreeOptions
from sparkbench.registry import method
from sparkbench.search import CONDITIONAL_BUILDERS, Distribution, SearchSpec, check_spec, widths

_RANKED_ONLY = ("candidates", "fanout", "builder", "widths", "shortlist", "normalise")


@dataclass(frozen=True)
class Options(DDTreeOptions):
    """drafter, depth: as for dspark. The others are for ranked trees.

    candidates: best base logits of each depth that may be nodes; 0 is the whole vocabulary, which is exact.
    fanout:     most children of a node; 0 is no cap.
    builder:    how the tree is searched; all but beam give the same tree.
    widths:     nodes of each depth for builder=beam: flat, flat_depth, geometric, inv_geometric or given ones.
    shortlist:  whether the candidates of all depths are united; normalise: over what probabilities sum to 1.
    """

    candidates: int = 0
    fanout: int = 0
    builder: Literal["level", "reference", "heap", "table", "beam"] = "level"
    widths: str = "flat"
    shortlist: Literal["union", "depth"] = "union"
    normalise: Literal["candidates", "full"] = "candidates"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("candidates", "fanout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is not allowed: 0 or above")
        if self.budget and self.builder == "beam":
            raise ValueError("budget=auto and builder=beam exclude each other")
        if self.widths != "flat" and self.builder != "beam":
            raise ValueError("widths are for builder=beam")
        for name in _RANKED_ONLY:
            if self.sampled and getattr(self, name) != getattr(Options, name):
                raise ValueError(f"{name} is for ranked trees")
        widths(self.widths, 64, 16)


@method("sparklingtree")
class SparklingTree(DDTree):
    Options = Options
    summary = "best-first tree over a DSpark drafter's Markov head (diffusion-sparked-tree)"
    drafter_kind = "dspark"

    def __init__(self, options: Any, drafter: Any, budget: int | None) -> None:
        super().__init__(options, drafter, budget)
        if drafter is not None and drafter.markov_head is not None and drafter.markov_head.kind == "rnn":
            raise UsageError(f"drafter {drafter.source}: an rnn Markov head depends on whole paths and makes no tree")
        if drafter is not None:
            check_spec(self.spec(self.max_nodes), options.builder, self.depth, drafter.config.vocab_size)

    def spec(self, budget: int) -> SearchSpec:
        """What is searched for, with a budget."""
        options = self.options
        return SearchSpec(
            budget=budget,
            candidates=options.candidates,
            fanout=options.fanout,
            shortlist=options.shortlist,
            normalise=options.normalise,
            widths=widths(options.widths, budget, self.depth) if options.builder == "beam" else (),
        )

    def search(self, context: Context, block: Block, drafts: Drafts, budget: int) -> DraftTree:
        head = self.drafter.markov_head
        bias = None if head is None else BlockHead(head, block.hidden, drafts.scale)
        builder = CONDITIONAL_BUILDERS[self.options.builder]
        return builder(drafts.ranked(block.logits), bias, context.anchors, self.spec(budget), context.stage)

    def distribution(self, block: Block, drafts: Drafts) -> Distribution:
        head = self.drafter.markov_head
        if head is None:
            return super().distribution(block, drafts)

        def below(depth: int, parents: Tensor) -> Tensor:
            latents, _ = head.step(parents, block.hidden[:, depth, None])
            return drafts.sampling.probabilities(block.logits[:, depth, None].float() + head.bias(latents))

        return below
