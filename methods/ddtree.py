"""DDTree: the best tree of a DFlash drafter's marginals, verified in one forward.

Ringel and Romano, arXiv 2604.12989. The drafter's slots are independent, so a path's probability is the product of its
tokens' marginals; the tree holds the `budget` likeliest paths. It is drafted at temperature 1 whatever the decoding
temperature.
"""

from dataclasses import dataclass
from typing import Literal

from sparkbench.decoding.method import Context
from sparkbench.decoding.tree import DraftTree
from sparkbench.methods.dflash import DFlash
from sparkbench.registry import method
from sparkbench.search import BUILDERS, rank


@dataclass(frozen=True)
class Options:
    """drafter: as for dflash.

    builder: how the tree is searched; all give the same tree. `auto` takes what is faster by
             benchmarks/bench_tree_builders.py: the heap on a CPU, else the level-synchronous search, which never waits
             for the host.
    """

    drafter: str = ""
    builder: Literal["auto", "level", "heap"] = "auto"


@method("ddtree")
class DDTree(DFlash):
    Options = Options
    summary = "best-first tree over a DFlash drafter's marginals (arXiv 2604.12989)"
    takes_budget = True

    @property
    def max_nodes(self) -> int:
        assert self.budget is not None
        return self.budget

    def propose(self, context: Context) -> DraftTree:
        assert self.budget is not None
        with context.stage("draft"):
            logits = self.session.draft(context)
        with context.stage("build"):
            with context.stage("build/topk"):
                ranked = rank(logits, self.budget)
            with context.stage("build/expand"):
                builder = self.options.builder
                if builder == "auto":
                    builder = "heap" if context.anchors.is_cpu else "level"
                return BUILDERS[builder](ranked, context.anchors, self.budget)
