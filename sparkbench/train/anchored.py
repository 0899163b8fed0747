"""Blocks at random anchors of one cached sequence: their loss, with gradients, and their analytic acceptance.

The published training (DSpark, arXiv 2607.05147, and its code): anchors are positions where the token and its successor
are the assistant's, drawn uniformly without replacement, anew every time a sequence is seen; where there are fewer than
wanted, all are taken. A slot is learnt where its label and all labels before it in the block are the assistant's. DART
(2601.19278) publishes only that a prefix has its own masks; it is trained at the same anchors.

Logits of all blocks at once would not fit: 32 anchors of 16 slots over 151,936 tokens are 311 MB in float32, several
times over. The drafter's layers run once for all blocks; head and loss run over a few anchors at a time, each part
weighed by its share of the sequence's slots, so the sum of the parts' gradients is the gradient of the whole.

Not covered: several sequences in one forward (block.py does that, for short ones with one answer each).
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkbench.decoding.target import Target
from sparkbench.train.block import Drafter
from sparkbench.train.features import CachedSequence
from sparkbench.train.loss import BlockTargets, LossWeights, block_loss
from sparkbench.train.samples import candidates
from sparkbench.train.slots import hidden_at

MOST_LOGITS = 1 << 25  # logits of a part; 128 MiB in float32


def draw_anchors(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` anchors [K], ascending, of a sequence with mask [S] bool; on the mask's device."""
    possible = candidates(mask)
    drawn = torch.randperm(len(possible), generator=generator)[:count].sort().values
    return possible[drawn.to(mask.device)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks at K anchors.

    places:   [K, L] int64, the position before each slot's token, where the target's final state predicts it.
    previous: [K, L] int64, the true token before each slot.   labels: [K, L] int64, the true token of each slot.
    learnt:   [K, L] bool, whether the slot counts.
    """

    places: Tensor
    previous: Tensor
    labels: Tensor
    learnt: Tensor

    @classmethod
    def at(cls, anchors: Tensor, sequence: CachedSequence, length: int) -> "Blocks":
        """`length` slots behind each of `anchors` [K]."""
        last = len(sequence.ids) - 1
        places = anchors[:, None] + torch.arange(length, device=anchors.device)
        inside = places.clamp(max=last - 1)
        learnt = ((places < last) & sequence.mask[inside + 1]).cumprod(1).bool()
        return cls(inside, sequence.ids[inside], sequence.ids[inside + 1], learnt)


class Anchored:
    """A drafter and its target, run at anchors.

    precision: number type of the products, a name of torch's.   part: anchors whose logits are held at once, by
    default as many as MOST_LOGITS allow.
    """

    def __init__(self, drafter: Drafter, target: Target, precision: str, part: int | None = None) -> None:
        self.drafter, self.target = drafter, target
        self.number_type = getattr(torch, precision)
        length = drafter.config.draft_length
        self.part = part or max(1, MOST_LOGITS // (length * target.vocab_size))

    def backward(
        self, sequence: CachedSequence, anchors: Tensor, by_slot: Tensor, loss: LossWeights, scale: float
    ) -> Tensor:
        """Add `scale` times the gradient of the sequence's mean loss to the weights' gradients; that loss, detached.

        by_slot: [L] weights of the slots.
        """
        blocks = Blocks.at(anchors, sequence, self.drafter.config.draft_length)
        hidden = self._hidden(sequence, anchors)
        leaf = hidden.detach().requires_grad_()
        weights = by_slot * blocks.learnt
        whole = torch.zeros((), device=hidden.device)
        for part in self._parts(len(anchors)):
            with self._autocast(hidden.device):
                with torch.no_grad():
                    wanted = self.target.head(sequence.final[blocks.places[part]])
                targets = BlockTargets(blocks.previous[part], blocks.labels[part], weights[part], wanted)
                mean = block_loss(self.drafter, self.target, leaf[part], targets, loss)
            share = mean * (weights[part].sum() / weights.sum())
            (share * scale).backward()
            whole += share.detach()
        hidden.backward(leaf.grad)
        return whole

    @torch.no_grad()
    def chances(self, sequence: CachedSequence, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """[K, L] float32, the probability that each slot is accepted, and [K, L] bool, whether the slot counts.

        With q the drafter's distribution behind the true tokens and p the target's, both at temperature 1, a token
        drawn from q is accepted with probability 1 - sum |q - p| / 2.
        """
        drafter = self.drafter
        blocks = Blocks.at(anchors, sequence, drafter.config.draft_length)
        hidden = self._hidden(sequence, anchors)
        found = []
        for part in self._parts(len(anchors)):
            with self._autocast(hidden.device):
                logits = drafter.head(hidden[part], self.target).float()
                if drafter.markov_head is not None:
                    logits = logits + drafter.markov_head.forced(blocks.previous[part], hidden[part]).float()
                wanted = self.target.head(sequence.final[blocks.places[part]]).float()
            found.append(1 - (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1) / 2)
        return torch.cat(found), blocks.learnt

    def _hidden(self, sequence: CachedSequence, anchors: Tensor) -> Tensor:
        """Final hidden states [K, L, H] of all blocks."""
        with self._autocast(anchors.device), warnings.catch_warnings():
            # Norms with float32 weights read bfloat16 states, which is meant; torch warns that no fused kernel does.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            return hidden_at(self.drafter, self.target, sequence.features[None], sequence.ids[None], anchors[None])[0]

    def _parts(self, count: int) -> Iterator[slice]:
        return (slice(first, first + self.part) for first in range(0, count, self.part))

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=self.number_type, enabled=self.number_type != torch.float32)


@dataclass(frozen=True)
class Acceptance:
    """Analytic acceptance at temperature 1, behind the true tokens. All lists are by slot.

    acceptance: mean probability that the slot is accepted, given that all before it are.
    survival:   mean probability that it and all before it are: of the products along each block.
    blocks:     blocks in which the slot counts; where none does, the two values are 0.
    tau:        1 + sum of survival, the mean number of tokens of a round with the target's own.
    """

    acceptance: tuple[float, ...]
    survival: tuple[float, ...]
    blocks: tuple[int, ...]
    tau: float

    @classmethod
    def of(cls, chances: Iterable[tuple[Tensor, Tensor]]) -> "Acceptance":
        """From what `Anchored.chances` gives for each sequence."""
        pairs = [(chance.double().cpu(), learnt.cpu()) for chance, learnt in chances]
        chance, learnt = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
        counts = learnt.sum(0)
        single, product = ((x * learnt).sum(0) / counts.clamp(min=1) for x in (chance, chance.cumprod(1)))
        return cls(tuple(single.tolist()), tuple(product.tolist()), tuple(counts.tolist()), 1 + float(product.sum()))
