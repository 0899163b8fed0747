"""What drafters of all kinds are built from: norm, feed-forward part, rotary embedding, and what a drafting gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkbench.decoding.cache import RowCache
from sparkbench.decoding.method import Context

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Block:
    """What one drafting forward gives: final hidden states [B, L, H], and logits [B, L, V] without any Markov bias."""

    hidden: Tensor
    logits: Tensor


class Session(Protocol):
    """A drafter at work on one batch: its `cache` follows what the target commits."""

    cache: RowCache

    def draft(self, context: Context) -> Block:
        """Take in what the target has committed, and draft behind it."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows`."""


class Drafter(Protocol):
    """A drafter of several tokens in one forward.

    config:     has `draft_length`, the tokens it drafts, and `target_layer_ids`, the layers whose features it reads.
    max_length: longest committed length behind which it can draft; None without a limit of its own.
    """

    config: Any
    source: str
    revision: str | None

    @property
    def max_length(self) -> int | None: ...

    def begin(self, target: Any, batch: int, capacity: int, depth: int) -> Session:
        """A session for `batch` rows that grow to about `capacity` positions, drafting `depth` tokens."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Cosines and sines [..., 1, D] of positions [...]; computed in float32."""
    half = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None].float() * theta**-half
    angles = torch.cat([angles, angles], -1)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [..., n, heads, D], half-split pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]


class RopeTable:
    """Rotations of the positions 0 .. rows - 1, made once for a batch, and again when it outgrows them."""

    def __init__(self, rows: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> None:
        self._make = lambda rows: rope(torch.arange(rows, device=device), head_dim, theta, dtype)
        self._cos, self._sin = self._make(rows)

    def behind(self, cache: RowCache, width: int, back: int = 0) -> Rope:
        """Rotations of `width` positions, of which the first is `back` before the end of each row's cache."""
        if cache.max_length + width > len(self._cos):
            self._cos, self._sin = self._make((cache.max_length + width) * 3 // 2)
        if cache.uniform:
            start = cache.max_length - back
            return self._cos[start : start + width], self._sin[start : start + width]
        positions = cache.lengths[:, None] + torch.arange(-back, width - back, device=cache.lengths.device)
        return self._cos[positions], self._sin[positions]
