"""The acceptance rules: which path of a draft tree is kept, and which token follows it.

match: at each node the target's next token has been drawn (sampling.py); the path follows the child that carries it,
and the first draw without such a child is the bonus token. Since only the target's draws are ever kept, a draft can
waste time but cannot change the output (DESIGN of the project: exactness).

rejection: drafts were sampled, and the distribution of each is known. The children x of a node are tried in the order
they were drawn in: with p the target's distribution there and q the one that x was drawn from, x is accepted with
probability min(1, p(x) / q(x)); if not, p becomes the normalised positive part of p - q, and q loses x. What is left of
p when no child is accepted gives the bonus token. With one child this is speculative sampling (Leviathan et al., arXiv
2211.17192; Chen et al., arXiv 2302.01318), with several the same repeated over siblings drawn without replacement
(recursive rejection sampling; Jeon et al., arXiv 2402.14160; Yang et al., arXiv 2401.06706). The output has the
target's distribution, but is not, token by token, that of autoregressive decoding.

All nodes are tried at once, whether or not the path reaches them; a depth costs nothing, a sibling one step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkbench.decoding.sampling import Sampling, argmax, draw, gumbel, stream_keys, uniform
from sparkbench.decoding.tree import DraftTree

RULES = ("match", "rejection")
_TESTS = 1  # stream of the numbers that decide rejections
_NOTHING = 1e-8  # mass of p - q at which float32 holds only rounding errors; p itself is kept then


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


def accept(
    rule: str,
    tree: DraftTree,
    logits: Tensor,
    lengths: Tensor,
    keys: Tensor,
    sampling: Sampling,
    seen: Tensor | None = None,
) -> Acceptance:
    """Accept by a rule of RULES.

    logits:  [B, N, V], the target's.   lengths: [B], absolute positions of the roots.   keys: [B], of the noise.
    seen:    [B, N, V] bool, tokens that a repetition penalty is for; needed only if there is one.
    """
    if rule == "match" or tree.max_depth == 0:
        return match(tree, draw(logits, tree.depths, lengths, keys, tree.max_depth, sampling, seen))
    tests = uniform(stream_keys(keys, _TESTS), lengths[:, None] + tree.depths, tree.ranks)

    def settle(accepted: Tensor, left: Tensor) -> Tensor:
        # The bonus token's noise is the one autoregressive decoding uses at its position.
        noise = 0.0 if sampling.greedy else gumbel(keys, (lengths + accepted + 1)[:, None], left.shape[1])[:, 0]
        return argmax(left.log() + noise)

    return rejection(tree, sampling.probabilities(logits, seen), tests, settle)


def match(tree: DraftTree, drawn: Tensor) -> Acceptance:
    """Follow the target's draws `drawn` [B, N] through the tree."""
    if tree.max_depth == 0:
        zero = torch.zeros_like(drawn[:, 0])
        return Acceptance(zero[:, None], zero, drawn[:, :1], drawn[:, 0])
    if tree.chain:
        agrees = tree.tokens[:, 1:] == drawn[:, :-1]
    else:
        agrees = (tree.tokens == drawn.gather(1, tree.parents.clamp(min=0)))[:, 1:] & tree.valid[:, 1:]
    path, accepted, end = _follow(tree, agrees)
    tokens = drawn if tree.chain else drawn.gather(1, path)
    return Acceptance(path, accepted, tokens, drawn.gather(1, end)[:, 0])


def rejection(tree: DraftTree, target: Tensor, tests: Tensor, settle: Callable[[Tensor, Tensor], Tensor]) -> Acceptance:
    """Try the sampled drafts of `tree` against the target's distributions.

    target:  [B, N, V] float32 probabilities.   tests: [B, N] float64, a uniform number for each node.
    settle:  draws the bonus tokens [B], given how many drafts were accepted [B] and what is left of the target's
             distribution behind them [B, V], not normalised.
    """
    assert tree.draft_probs is not None
    children = _children(tree)  # [B, P, K]
    inner, most = children.shape[1:]
    left = target[:, :inner].clone()
    won = torch.zeros_like(children, dtype=torch.bool)
    parents = torch.arange(inner, device=left.device)
    draft, p, waiting = tree.draft_probs, left, torch.ones_like(won[:, :, 0])
    mass = draft_mass = left.new_ones(waiting.shape)
    for rank in range(most):
        place = children[:, parents, rank]
        here = waiting & (place >= 0)
        node = place.clamp(min=0)
        token = tree.tokens.gather(1, node)[:, :, None]
        chance, draft_chance = p.gather(2, token)[:, :, 0], draft.gather(2, token)[:, :, 0]
        passed = here & (tests.gather(1, node) * draft_chance * mass < chance * draft_mass)
        won[:, parents, rank] = passed
        rest = (p - draft * (mass / draft_mass)[:, :, None]).clamp_(min=0)
        rest_mass = rest.sum(2)
        refused = here & ~passed & (rest_mass > _NOTHING * mass)
        left[:, parents] = p = torch.where(refused[:, :, None], rest, p)
        if rank + 1 == most:
            break
        mass = torch.where(refused, rest_mass, mass)
        draft = draft.scatter(2, token, draft_chance[:, :, None].masked_fill(here[:, :, None], 0.0))
        waiting = waiting & ~passed
        if left.is_cpu:  # only nodes that have a next child; elsewhere the host would have to wait to know them
            going = (children[:, parents, rank + 1] >= 0).any(0).nonzero()[:, 0]
            parents, p, draft, mass, waiting = (
                parents[going],
                p[:, going],
                draft[:, going],
                mass[:, going],
                waiting[:, going],
            )
        draft_mass = draft.sum(2)
    above = tree.parents[:, 1:].clamp(min=0)
    slots = (above * most + tree.ranks[:, 1:].clamp(max=most - 1)).clamp(max=inner * most - 1)
    agrees = won.flatten(1).gather(1, slots) & tree.valid[:, 1:]
    path, accepted, end = _follow(tree, agrees)
    places = end[:, :, None].expand(-1, -1, target.shape[2])
    tried = left.gather(1, places.clamp(max=inner - 1))[:, 0]
    bonus = settle(accepted, torch.where(end < inner, tried, target.gather(1, places)[:, 0]))
    committed = torch.cat([tree.tokens.gather(1, path)[:, 1:], bonus[:, None]], 1)
    return Acceptance(path, accepted, committed.scatter(1, accepted[:, None], bonus[:, None]), bonus)


def _follow(tree: DraftTree, agrees: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The path, the number of accepted drafts [B] and the path's last node [B, 1].

    agrees: [B, N - 1] bool, for each draft node whether the path goes on to it from its parent.
    """
    if tree.chain:
        accepted = agrees.cumprod(1, dtype=torch.int64).sum(1)
        return tree.depths.clamp(max=accepted[:, None]), accepted, accepted[:, None]
    agrees = torch.cat([agrees.new_ones(len(agrees), 1), agrees], 1)
    # A node is on the accepted path if it and all its ancestors agree; the deepest such node ends it.
    reached = agrees.gather(1, tree.ancestors.flatten(1)).view(tree.ancestors.shape).all(2)
    end = torch.where(reached, tree.depths, -1).argmax(1, keepdim=True)
    accepted = tree.depths.gather(1, end)
    last = tree.max_depth
    steps_up = (accepted - torch.arange(last + 1, device=agrees.device)).clamp(min=0)
    upwards = tree.ancestors.gather(1, end[:, :, None].expand(-1, -1, last + 1))[:, 0]
    return upwards.gather(1, steps_up), accepted[:, 0], end


def _children(tree: DraftTree) -> Tensor:
    """[B, P, K] int64: the children of each node that has a draft distribution, in order; -1 where there are none."""
    assert tree.draft_probs is not None
    batch, inner = tree.draft_probs.shape[:2]
    drafted = tree.valid[:, 1:]
    most = 1 if tree.chain else 1 + int(tree.ranks[:, 1:].where(drafted, 0).max())
    # What is padding goes to a last column that is cut off.
    slots = torch.where(drafted, tree.parents[:, 1:] * most + tree.ranks[:, 1:], inner * most)
    nodes = torch.arange(1, tree.width, device=slots.device).expand(batch, -1)
    return nodes.new_full((batch, inner * most + 1), -1).scatter_(1, slots, nodes)[:, :-1].view(batch, inner, most)
