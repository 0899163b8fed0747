"""DDTree: the best tree of a DFlash drafter's marginals, verified in one forward.

Ringel and Romano, arXiv 2604.12989. The drafter's slots are independent, so a path's probability is the product of its
tokens' marginals; the tree holds the `budget` likeliest paths. It is ranked at temperature 1 whatever the decoding
temperature, as published, unless its options say otherwise. `tree-draft=sampled` draws the children of each node
instead (search/sampled.py), which `rule=rejection` needs.

With `budget=auto` (`--budget auto`) each round chooses how many nodes are verified: those whose expected tokens are
worth their time on the step curve, this choice's own time included. A node's probability under the drafter stands for
its chance to be accepted.
"""

from dataclasses import dataclass, replace
from typing import Literal

from sparkbench.decoding.drafting import Drafts, TreeOptions
from sparkbench.decoding.method import Context
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.parts import Block
from sparkbench.methods.dflash import DFlash
from sparkbench.registry import method
from sparkbench.scheduling import tree_width
from sparkbench.search import BUILDERS, Distribution, rank, sampled_tree

AUTO_LIMIT = 256  # most nodes that budget=auto proposes
_REACHES = (8, 16, 32, 64, 128, AUTO_LIMIT)
_AUTO_START = 64


@dataclass(frozen=True)
class DDTreeOptions(TreeOptions):
    """What DDTree and SparklingTree share. budget: `auto` chooses it each round; else it is that of `--budget`.

    drafter: as for dflash.   depth: most tokens drafted; 0 is as many as the drafter can.
    curve:   step curve for budget=auto, as `sparkbench profile` writes it; empty measures one at the start.
    Others: decoding/drafting.py.
    """

    drafter: str = ""
    depth: int = 0
    budget: Literal["", "auto"] = ""
    curve: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 0:
            raise ValueError(f"depth {self.depth} is not allowed: 0 or above")
        if self.budget and self.noise != "none":
            raise ValueError("budget=auto is for ranked trees without draft-noise, whose scores are probabilities")


@dataclass(frozen=True)
class Options(DDTreeOptions):
    """builder: how a ranked tree is searched; all give the same tree. `auto` takes what is faster by
    benchmarks/bench_tree_builders.py: the heap on a CPU, else the level-synchronous search, which never waits
    for the host.
    """

    builder: Literal["auto", "level", "heap"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampled and self.builder != "auto":
            raise ValueError("builder is for ranked trees")


@method("ddtree")
class DDTree(DFlash):
    Options = Options
    summary = "best-first tree over a DFlash drafter's marginals (arXiv 2604.12989)"
    takes_budget = True

    @property
    def needs_costs(self) -> bool:
        return bool(self.options.budget)

    @property
    def max_nodes(self) -> int:
        return AUTO_LIMIT if self.budget is None else self.budget

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        super().begin(target, batch, capacity)
        self._reach = _AUTO_START

    def propose(self, context: Context) -> DraftTree:
        if self.budget is not None:
            return self.build(context, self.budget)
        tree = self.build(context, self._reach)
        with context.stage("build"):
            width = self._worthwhile(tree)
            if self.cap is not None:
                width = min(self.cap, tree.width - 1)
            # Nodes that the next round looks at, in few sizes: every other one would have buffers of its own.
            self._reach = next(reach for reach in _REACHES if reach >= min(2 * width, AUTO_LIMIT))
            return tree.first(width)

    def build(self, context: Context, budget: int) -> DraftTree:
        """The tree of the `budget` best nodes, best first, or a sampled one."""
        with context.stage("draft"):
            block = self.session.draft(context)
        with context.stage("build"):
            drafts = Drafts(self.options, context, *block.logits.shape[1:])
            if not drafts.sampled:
                tree = self.search(context, block, drafts, budget)
                return replace(tree, log_probs=None) if drafts.shared else tree
            assert drafts.noise is not None
            with context.stage("build/expand"):
                distribution = self.distribution(block, drafts)
                return sampled_tree(distribution, context.anchors, drafts.noise, budget, block.logits.shape[2])

    def search(self, context: Context, block: Block, drafts: Drafts, budget: int) -> DraftTree:
        """The ranked tree."""
        with context.stage("build/topk"):
            ranked = rank(drafts.ranked(block.logits), budget)
        with context.stage("build/expand"):
            builder = self.options.builder
            if builder == "auto":
                builder = "heap" if context.anchors.is_cpu else "level"
            return BUILDERS[builder](ranked, context.anchors, budget)

    def distribution(self, block: Block, drafts: Drafts) -> Distribution:
        """What the children of nodes are sampled from."""
        rows = drafts.sampling.probabilities(block.logits)
        return lambda depth, parents: rows[:, depth, None].expand(-1, parents.shape[1], -1)

    def _worthwhile(self, tree: DraftTree) -> int:
        """How many of the nodes, the same number in every row, are worth verifying."""
        assert tree.log_probs is not None
        assert self.costs is not None
        chances = tree.log_probs[:, 1:].exp().cpu().numpy()
        curve, fixed, each = self.costs.at(tree.batch, self.session.cache.max_length)
        return tree_width(chances, curve.seconds, fixed, each)
