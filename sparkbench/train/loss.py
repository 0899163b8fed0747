"""The loss of a block drafter: cross-entropy, distance to the target's distribution, and confidence.

DSpark (arXiv 2607.05147, section 3.3): 0.1 cross-entropy + 0.9 L1 + 1.0 confidence, each a mean over slots that weigh
exp(-j / decay). The L1 term is the whole sum of |q - p| over the vocabulary, twice the total variation; q holds the
Markov bias with the true previous tokens. The confidence head learns 1 - L1 / 2, which is the probability that a token
drawn from q is accepted. DFlash (arXiv 2602.06036) is cross-entropy alone.

DART (arXiv 2601.19278): the divergence KL(p || q) from the target's whole distribution alone; slot j weighs gamma^j, so
its decay is -1 / ln(gamma).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.dart import DartDrafter


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms: cross-entropy, L1 distance, confidence, divergence. A term of weight 0 is not computed."""

    ce: float = 0.0
    l1: float = 0.0
    confidence: float = 0.0
    kl: float = 0.0


@dataclass(frozen=True, eq=False)
class BlockTargets:
    """What slots are to learn.

    previous: [..., L] int64, the true token before each slot.   labels: [..., L] int64, the true token of each slot.
    weights:  [..., L] float32, 0 where nothing is to be learnt.
    logits:   [..., L, V], the target's for each slot along the true text; None where the loss needs none.
    """

    previous: Tensor
    labels: Tensor
    weights: Tensor
    logits: Tensor | None


def slot_weights(length: int, decay: float) -> Tensor:
    """Weights [L] of the slots, exp(-j / decay) for j = 0, 1, ..."""
    return torch.exp(-torch.arange(length) / decay)


def block_loss(
    drafter: BlockDrafter | DartDrafter, target: Target, hidden: Tensor, targets: BlockTargets, loss: LossWeights
) -> Tensor:
    """The loss of slots with final hidden states `hidden` [..., L, H]."""
    logits = drafter.head(hidden, target).float()
    believed = None
    if drafter.markov_head is not None:
        logits = logits + drafter.markov_head.forced(targets.previous, hidden).float()
    if drafter.confidence_head is not None:
        believed = drafter.confidence_head(hidden, targets.previous, drafter.markov_head)
    value = logits.new_zeros(())
    if loss.kl:
        value = value + loss.kl * divergence(logits, targets)
    if loss.ce or loss.l1 or loss.confidence:
        ce, l1, confidence = terms(logits, believed, targets)
        value = value + loss.ce * ce + loss.l1 * l1 + loss.confidence * confidence
    return value


def divergence(logits: Tensor, targets: BlockTargets) -> Tensor:
    """The weighted mean over slots of KL(p || q), p the target's distribution and q that of `logits` [..., L, V]."""
    assert targets.logits is not None
    weights = targets.weights / targets.weights.sum().clamp(min=1e-6)
    wanted = targets.logits.float().log_softmax(-1)
    apart = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
    return (apart * weights).sum()


def terms(logits: Tensor, believed: Tensor | None, targets: BlockTargets) -> tuple[Tensor, Tensor, Tensor]:
    """The three terms; those that lack the target's logits or the drafter's confidence are 0.

    logits:   [..., L, V] float32 of the drafter, biases included.   believed: [..., L] confidence logits.
    """
    weights = targets.weights / targets.weights.sum().clamp(min=1e-6)
    losses = F.cross_entropy(logits.flatten(0, -2), targets.labels.flatten(), reduction="none")
    ce = (losses * weights.flatten()).sum()
    if targets.logits is None:
        return ce, ce.new_zeros(()), ce.new_zeros(())
    distance = (logits.softmax(-1) - targets.logits.float().softmax(-1)).abs().sum(-1)
    l1 = (distance * weights).sum()
    if believed is None:
        return ce, l1, ce.new_zeros(())
    # Nothing holds the confidence loss back from the backbone, as in the published training.
    chance = (1 - distance.detach() / 2).clamp(0, 1)
    surprise = F.binary_cross_entropy_with_logits(believed, chance, reduction="none")
    return ce, l1, (surprise * weights).sum()
