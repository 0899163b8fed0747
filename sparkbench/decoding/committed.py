"""What was committed since a method last proposed: tokens and the target's features, with a number of its own a row.

Usually that is one round. It is more after rounds in which the method rested, and a row that has just joined brings its
whole prompt. Entries of a row lie at its start; what is behind its count is garbage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class Committed:
    """Of B rows: tokens [B, C] int64, features [B, C, F * H] or None, and on the host each row's number of entries."""

    tokens: Tensor
    features: Tensor | None
    counts: Sequence[int]

    def keep(self, rows: Tensor) -> "Committed":
        """Only the rows `rows` [B'], indices on the device."""
        features = None if self.features is None else self.features[rows]
        return Committed(self.tokens[rows], features, [self.counts[row] for row in rows.tolist()])

    def join(self, other: "Committed") -> "Committed":
        """With the rows of `other` behind these."""
        widest = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens = torch.cat([_widened(self.tokens, widest), _widened(other.tokens, widest)])
        features = None
        if self.features is not None and other.features is not None:
            features = torch.cat([_widened(self.features, widest), _widened(other.features, widest)])
        return Committed(tokens, features, [*self.counts, *other.counts])

    def followed_by(self, later: "Committed") -> "Committed":
        """With the entries of `later`, of the same rows, behind each row's own."""
        counts = [mine + more for mine, more in zip(self.counts, later.counts, strict=True)]
        widest = max(counts)
        places = torch.arange(widest, device=self.tokens.device)
        own = torch.tensor(self.counts, device=self.tokens.device)[:, None]
        # Entry i of a row is its own while i is below its count, then entry i - count of what came later.
        is_own = places < own
        sources = torch.where(
            is_own, places, self.tokens.shape[1] + (places - own).clamp(min=0, max=max(later.counts) - 1)
        )
        tokens = torch.cat([self.tokens, later.tokens], 1).gather(1, sources)
        features = None
        if self.features is not None and later.features is not None:
            joined = torch.cat([self.features, later.features], 1)
            features = joined.gather(1, sources[:, :, None].expand(-1, -1, joined.shape[2]))
        return Committed(tokens, features, counts)


def _widened(entries: Tensor, width: int) -> Tensor:
    """[B, C, ...] with zeros up to `width` entries a row."""
    missing = width - entries.shape[1]
    return entries if not missing else pad(entries, (*[0, 0] * (entries.dim() - 2), 0, missing))
