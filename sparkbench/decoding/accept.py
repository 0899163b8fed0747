"""The acceptance rule `match`: keep the path along which the target's own draws agree with the draft.

At each node the target's next token has been drawn (sampling.py); the path follows the child that carries it, and the
first draw without such a child is the bonus token. Since only the target's draws are ever kept, a draft can waste time
but cannot change the output (DESIGN of the project: exactness).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What B rows accepted of their trees, on the device.

    path:     [B, max_depth + 1] int64: node at each depth of the accepted path, root first; repeats its end.
    accepted: [B] int64: draft tokens accepted, A.
    tokens:   [B, max_depth + 1] int64: the committed tokens: entry k < A is the accepted token of depth k + 1, entry A
              is the bonus token, the rest is padding.
    bonus:    [B] int64: the bonus token, the next round's anchor.
    """

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    bonus: Tensor


def match(tree: DraftTree, drawn: Tensor) -> Acceptance:
    """Follow the target's draws `drawn` [B, N] through the tree."""
    last = tree.max_depth
    if last == 0:
        zero = torch.zeros_like(drawn[:, 0])
        return Acceptance(zero[:, None], zero, drawn[:, :1], drawn[:, 0])
    if tree.chain:
        agrees = tree.tokens[:, 1:] == drawn[:, :-1]
        accepted = agrees.cumprod(1, dtype=torch.int64).sum(1)
        bonus = drawn.gather(1, accepted[:, None])[:, 0]
        return Acceptance(tree.depths.clamp(max=accepted[:, None]), accepted, drawn, bonus)
    wanted = drawn.gather(1, tree.parents.clamp(min=0))
    agrees = (tree.tokens == wanted) & tree.valid
    agrees[:, 0] = True
    # A node is on the accepted path if it and all its ancestors agree; the deepest such node ends it.
    reached = agrees.gather(1, tree.ancestors.flatten(1)).view(tree.ancestors.shape).all(2)
    end = torch.where(reached, tree.depths, -1).argmax(1, keepdim=True)
    accepted = tree.depths.gather(1, end)
    steps_up = (accepted - torch.arange(last + 1, device=drawn.device)).clamp(min=0)
    upwards = tree.ancestors.gather(1, end[:, :, None].expand(-1, -1, last + 1))[:, 0]
    path = upwards.gather(1, steps_up)
    tokens = drawn.gather(1, path)
    return Acceptance(path, accepted[:, 0], tokens, drawn.gather(1, end)[:, 0])
