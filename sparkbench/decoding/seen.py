"""Which tokens the text of each row holds already, for the repetition penalty: prompt, output and, in a tree, the path.

Kept only where there is a penalty. [B, V] booleans on the device, and [B, N, V] for a tree.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.tree import DraftTree


class Seen:
    """The tokens of the rows of a batch; `mask` [B, V] bool."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocab: int, device: torch.device) -> None:
        self.mask = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            self.mask[row, torch.tensor(prompt, device=device)] = True

    def at_nodes(self, tree: DraftTree) -> Tensor:
        """[B, N, V]: the tokens seen behind each node, its own and those of its ancestors among them."""
        paths = tree.tokens.gather(1, tree.ancestors.flatten(1)).view(tree.ancestors.shape)
        return self.mask[:, None].repeat(1, tree.width, 1).scatter_(2, paths, True)

    def add(self, anchors: Tensor, acceptance: Acceptance) -> None:
        """Take in a round: the anchors [B] and what was accepted behind them."""
        places = torch.arange(acceptance.tokens.shape[1], device=anchors.device)
        committed = acceptance.tokens.where(places < acceptance.accepted[:, None], acceptance.bonus[:, None])
        self.mask.scatter_(1, torch.cat([anchors[:, None], committed], 1), True)

    def keep(self, rows: Tensor) -> None:
        self.mask = self.mask[rows]

    def join(self, other: "Seen") -> None:
        self.mask = torch.cat([self.mask, other.mask])
