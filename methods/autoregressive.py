"""Autoregressive decoding: propose nothing, so the target gives one token a forward.

The baseline of every comparison. It runs through the same loop, cache and verifier as all other methods.
"""

from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.tree import DraftTree
from sparkbench.registry import method


@method("autoregressive")
class Autoregressive(Method):
    summary = "one token a forward of the target: the baseline"

    @property
    def max_nodes(self) -> int:
        return 0

    def propose(self, context: Context) -> DraftTree:
        return DraftTree.root(context.anchors)
