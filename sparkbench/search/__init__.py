"""Tree search over draft distributions.

Where draft rows are independent, ranking comes first, then one of the builders; they are two calls so that a caller
can time them apart:

    ranked = rank(logits, budget)
    tree = BUILDERS["level"](ranked, anchors, budget)

Where a Markov head adds a bias that depends on the parent's token:

    tree = CONDITIONAL_BUILDERS["level"](logits, head, anchors, SearchSpec(budget), context.stage)

Where an n-gram index knows which tokens follow each other:

    tree = continuity_tree(logits, anchors, history, index, ContinuitySpec(budget), stop_ids, context.stage)

Where drafts are to be samples of the draft distributions:

    tree = sampled_tree(distribution, anchors, noise, budget, vocab)

All other builders, but for `beam`, return the same tree: the `budget` best nodes by cumulative log-probability, in one
order, ties included.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.beam import beam_tree, planned_widths, widths
from sparkbench.search.candidates import SearchSpec, Stage, TreeHead, quiet
from sparkbench.search.conditional import fixed_tree
from sparkbench.search.conditional import level_tree as conditional_level_tree
from sparkbench.search.continuity import ContinuitySpec, continuity_tree, warm_up
from sparkbench.search.heap import heap_tree
from sparkbench.search.host import check_table, reference_tree, table_tree
from sparkbench.search.host import heap_tree as conditional_heap_tree
from sparkbench.search.level import level_tree
from sparkbench.search.ranking import Ranked, rank
from sparkbench.search.sampled import Distribution, sampled_tree

Builder = Callable[[Ranked, Tensor, int], DraftTree]


class ConditionalBuilder(Protocol):
    def __call__(
        self,
        logits: Tensor,
        head: TreeHead | None,
        anchors: Tensor,
        spec: SearchSpec,
        stage: Stage = quiet,
    ) -> DraftTree:
        """Draft trees for logits [B, L, V] of any float type, `head` (None: no bias) and anchors [B] int64.

        `stage` opens build/topk, build/bias, build/transfer and build/expand around what they cover.
        """


BUILDERS: Mapping[str, Builder] = MappingProxyType({"level": level_tree, "heap": heap_tree})

CONDITIONAL_BUILDERS: Mapping[str, ConditionalBuilder] = MappingProxyType(
    {
        "level": conditional_level_tree,
        "reference": reference_tree,
        "heap": conditional_heap_tree,
        "table": table_tree,
        "beam": beam_tree,
    }
)


def check_spec(spec: SearchSpec, builder: str, depth: int, vocab: int) -> None:
    """UsageError where a builder of CONDITIONAL_BUILDERS would refuse `spec` for drafts of `depth` rows, as far as can
    be known without logits."""
    if builder == "beam":
        planned_widths(spec, depth)
    if builder == "table" and not 0 < spec.candidates < vocab:
        check_table(vocab)


__all__ = [
    "BUILDERS",
    "CONDITIONAL_BUILDERS",
    "Builder",
    "ConditionalBuilder",
    "ContinuitySpec",
    "Distribution",
    "Ranked",
    "SearchSpec",
    "TreeHead",
    "check_spec",
    "continuity_tree",
    "fixed_tree",
    "heap_tree",
    "level_tree",
    "rank",
    "sampled_tree",
    "warm_up",
    "widths",
]
