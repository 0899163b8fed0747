"""How drafts are chosen above temperature 0: options that methods share, and what follows from them in a round.

A chain's drafts are greedy or sampled; a tree ranks its nodes, or samples them (search/sampled.py). Two more choices:

draft-temperature: of the distribution that chains sample and trees rank: 1, or the target's. By default trees are
    ranked at 1, as published, and what is sampled or shares noise takes the target's. At temperature 0 a tree is ranked
    at 1, since there is nothing to rank otherwise.
draft-noise=shared: drafts the argmax of `logits / T + g_t`, with the very noise g_t that the target draws with, so that
    both choose the same token more often than two independent draws would (a Gumbel coupling: with p and q the two
    distributions, with probability sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x)). Trees are ranked by
    the perturbed logits. Only the target's draws are kept, so the output stays what it is.

Filters (top-k, top-p, min-p) cut what is sampled and chains of shared noise as they cut the target's distribution;
trees are ranked without them. Nobody but a method with shared noise ever sees the target's noise.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sparkbench.decoding.sampling import argmax

if TYPE_CHECKING:
    from sparkbench.decoding.method import Context


@dataclass(frozen=True)
class DraftOptions:
    """rule: how drafts are accepted (decoding/accept.py); rejection is for sampled drafts.

    draft_temperature, draft_noise: see above.
    """

    rule: Literal["match", "rejection"] = "match"
    draft_temperature: Literal["auto", "1", "target"] = "auto"
    draft_noise: Literal["none", "shared"] = "none"

    def __post_init__(self) -> None:
        if self.draft_noise == "shared" and self.rule == "rejection":
            raise ValueError(
                "rule=rejection needs drafts that know nothing of the target's noise, not draft-noise=shared"
            )
        if self.draft_noise == "shared" and self.sampled:
            raise ValueError("draft-noise=shared is instead of sampled drafts: it takes the target's noise")
        if self.rule == "rejection" and not self.sampled:
            raise ValueError(f"rule=rejection needs drafts that are sampled: {self.unsampled}")

    @property
    def sampled(self) -> bool:
        """Whether drafts are drawn at random."""
        return False

    @property
    def unsampled(self) -> str:
        """Why drafts are not sampled, or how they would be."""
        return "these are searched for"

    @property
    def noise(self) -> Literal["none", "own", "shared"]:
        """Which noise drafts take."""
        return "own" if self.sampled else self.draft_noise


@dataclass(frozen=True)
class ChainOptions(DraftOptions):
    """draft: greedy or sampled; `auto` samples for rule=rejection."""

    draft: Literal["auto", "greedy", "sampled"] = "auto"

    @property
    def sampled(self) -> bool:
        return self.draft == "sampled" or (self.draft == "auto" and self.rule == "rejection")

    @property
    def unsampled(self) -> str:
        return "draft=greedy has no distribution"


@dataclass(frozen=True)
class TreeOptions(DraftOptions):
    """tree_draft: ranked takes the likeliest paths; sampled draws the children of each node without replacement."""

    tree_draft: Literal["ranked", "sampled"] = "ranked"

    @property
    def sampled(self) -> bool:
        return self.tree_draft == "sampled"

    @property
    def unsampled(self) -> str:
        return "add tree-draft=sampled"


class Drafts:
    """The choices of one round, for drafts of `slots` depths over a vocabulary.

    probabilities: what `pick` sampled from so far, [B, n, V] float32 each.
    """

    def __init__(self, options: DraftOptions, context: "Context", slots: int, vocab: int) -> None:
        target = context.sampling
        default = "target" if options.noise != "none" else "1"
        own = options.draft_temperature if options.draft_temperature != "auto" else default
        self.sampling = target.for_drafts(None if own == "target" else 1.0)
        self.sampled = options.sampled
        self.shared = options.noise == "shared" and not target.greedy
        self.probabilities: list[Tensor] = []
        self.noise = context.gumbel(slots, vocab) if options.sampled or self.shared else None

    def pick(self, logits: Tensor, slot: int = 0) -> Tensor:
        """Tokens [B, n] for logits [B, n, V] of the slots from `slot` on."""
        if self.noise is None:
            return argmax(logits)
        noise = self.noise[:, slot : slot + logits.shape[1]]
        if not self.sampled:
            return argmax(self.sampling.scores(logits) + noise)
        self.probabilities.append(self.sampling.probabilities(logits))
        return argmax(self.probabilities[-1].log() + noise)

    @property
    def draft_probs(self) -> Tensor | None:
        """[B, L, V] of all that was sampled; None if nothing was."""
        return torch.cat(self.probabilities, 1) if self.sampled else None

    def log_probs(self, logits: Tensor, drafts: Tensor) -> Tensor | None:
        """Cumulative log-probabilities [B, L] of `drafts` [B, L]; None where shared noise chose them."""
        if self.shared:
            return None
        scaled = self.ranked(logits)
        return (scaled.gather(2, drafts[..., None])[..., 0] - scaled.logsumexp(-1)).cumsum(1)

    @property
    def scale(self) -> float:
        """What logits and biases are multiplied by before a tree is ranked."""
        return 1.0 if self.sampling.greedy else 1 / self.sampling.temperature

    def ranked(self, logits: Tensor) -> Tensor:
        """Logits [B, L, V] as a tree is ranked by: tempered, and with the shared noise if there is one."""
        if self.scale != 1:
            logits = logits.float() * self.scale
        return logits if not self.shared or self.noise is None else logits.float() + self.noise
