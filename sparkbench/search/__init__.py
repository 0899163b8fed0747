"""Tree search over draft distributions: ranking, then one of the builders.

    ranked = rank(logits, budget)
    tree = BUILDERS["level"](ranked, anchors, budget)

Every builder returns the same tree: the `budget` best nodes by cumulative log-probability, in one order, ties
included. They are two calls so that a caller can time them apart. Drafts whose rows depend on the parent's
token are not covered yet; `assemble` is written for them too.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search.heap import heap_tree
from sparkbench.search.level import level_tree
from sparkbench.search.ranking import Ranked, rank

Builder = Callable[[Ranked, Tensor, int], DraftTree]

BUILDERS: Mapping[str, Builder] = MappingProxyType({"level": level_tree, "heap": heap_tree})

__all__ = ["BUILDERS", "Builder", "Ranked", "heap_tree", "level_tree", "rank"]
