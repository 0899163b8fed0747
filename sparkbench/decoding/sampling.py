"""Sampling with positional noise.

At temperature 0 the target's next token is the argmax of its logits. Above, it is the argmax of
`logits / T + g_t`, where g_t is Gumbel noise over the vocabulary (the Gumbel-max trick: this draws exactly from
softmax(logits / T)). The noise is not drawn from a stream: it is a function of the request's key and the absolute
position t alone. All nodes of one depth therefore share it, and whatever a method drafts, the token kept at position t
is the one that autoregressive decoding would have drawn. That makes exactness above temperature 0 a comparison of
token ids.

The noise is a counter-based hash on the device: SplitMix64 with one stream a position, 52 bits of it as a uniform
number in float64, so both tails are resolved far beyond what 24-bit uniforms give (a Gumbel value up to 36.7 instead
of 16.6).

What else is random, drafts and the tests of rejection sampling, has streams of its own (`stream_keys`), so that it is
independent of the target's noise.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparkbench.errors import UsageError

# Constants of SplitMix64 (Steele, Lea, Flood 2014) as signed 64-bit numbers: torch integers wrap like unsigned ones.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is drawn; all as `generate` of transformers defines it.

    temperature: 0 is greedy.  top_k: 0 is off.  top_p: in (0, 1], 1 is off.  min_p: in [0, 1], 0 is off.
    repetition_penalty: above 0, 1 is off: positive logits of tokens that the prompt or the output holds already are
    divided by it, negative ones multiplied.

    The penalty comes first and works at any temperature; the others are for temperatures above 0, in this order.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature {self.temperature} is not allowed: a finite number, 0 or above")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} is not allowed: 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} is not allowed: above 0, at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p {self.min_p} is not allowed: 0 (off) to 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UsageError(f"repetition-penalty {self.repetition_penalty} is not allowed: above 0, 1 is off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens may be cut."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1

    def for_drafts(self, temperature: float | None = None) -> "Sampling":
        """The same without the penalty, which knows the output; `temperature`: another one."""
        chosen = self.temperature if temperature is None else temperature
        return replace(self, temperature=chosen, repetition_penalty=1.0)

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """logits [..., V] -> float32 scores [..., V]: penalised and tempered, with -inf where a filter cuts.

        seen: [..., V] bool, tokens that the penalty is for; needed only if there is one.
        """
        scores = logits.float()
        if self.penalises and seen is not None:
            moved = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = torch.where(seen, moved, scores)
        if self.greedy:
            return scores
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            cut = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < cut, -math.inf)
        if self.top_p < 1:
            ordered, order = scores.sort(dim=-1, descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            cut_ordered = before >= self.top_p
            cut_ordered[..., 0] = False  # the likeliest token always stays
            scores = scores.masked_fill(cut_ordered.scatter(-1, order, cut_ordered), -math.inf)
        if self.min_p > 0:
            probabilities = scores.softmax(-1)
            too_rare = probabilities < self.min_p * probabilities.amax(-1, keepdim=True)
            scores = scores.masked_fill(too_rare, -math.inf)
        return scores

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The distribution [..., V] float32 that a token is drawn from; at temperature 0 all of it is on one token."""
        scores = self.scores(logits, seen)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, argmax(scores)[..., None], 1.0)
        return scores.softmax(-1)


def noise_key(prompt_ids: Sequence[int], seed: int, repeat: int = 0, copy: int = 0) -> int:
    """The 64-bit key of a request's noise; `repeat` and `copy` (of a duplicate prompt) give noise of their own."""
    numbers = struct.pack(f"<{len(prompt_ids) + 3}q", seed, repeat, copy, *prompt_ids)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little", signed=True)


def stream_keys(keys: Tensor, stream: int) -> Tensor:
    """Keys [B] of another stream of random numbers, independent of that of `keys` and of other streams (not 0)."""
    return _mix(keys ^ _mix(torch.full_like(keys, stream)))


def round_keys(keys: Tensor, lengths: Tensor) -> Tensor:
    """Keys [B] of a round behind `lengths` [B] committed positions, so that no number serves two rounds.

    What a round drafts may depend on how earlier rounds went, in which the same positions were drafted too.
    """
    return _mix(keys + lengths * _GOLDEN)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise for keys [B] int64 at positions [B, D] int64: [B, D, vocab_size] float32."""
    streams = _mix(keys[:, None] + positions * _GOLDEN)
    tokens = torch.arange(1, vocab_size + 1, device=keys.device)
    return _gumbel_of(_mix(streams[..., None] + tokens * _GOLDEN))


def uniform(keys: Tensor, positions: Tensor, numbers: Tensor) -> Tensor:
    """Numbers in (0, 1), [B, N] float64, for keys [B] at positions [B, N], told apart by `numbers` [B, N] int64.

    With the same keys, `gumbel` turns the very same numbers into noise: keys of another stream (`stream_keys`) are the
    caller's business.
    """
    return _uniform_of(_mix(_mix(keys[:, None] + positions * _GOLDEN) + (numbers + 1) * _GOLDEN))


def draw(
    logits: Tensor,
    depths: Tensor,
    lengths: Tensor,
    keys: Tensor,
    max_depth: int,
    sampling: Sampling,
    seen: Tensor | None = None,
) -> Tensor:
    """The target's next token at each node: [B, N] int64.

    logits:  [B, N, V].   depths: [B, N].   keys: [B] int64.
    lengths: [B] int64, the absolute position of each root; a node at depth d draws the token of position
             length + d + 1.
    seen:    as in `Sampling.scores`.
    """
    if sampling.greedy and not sampling.penalises:
        return argmax(logits)
    scores = sampling.scores(logits, seen)
    if sampling.greedy:
        return argmax(scores)
    steps = torch.arange(1, max_depth + 2, device=logits.device)
    noise = gumbel(keys, lengths[:, None] + steps, logits.shape[-1])
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    return argmax(scores + noise[rows, depths])


def argmax(scores: Tensor) -> Tensor:
    """Ids [...] of the highest of scores [..., V], the first of equal ones.

    On a CPU by NumPy, which is about ten times as fast as torch's (benchmarks/bench_argmax.py).
    """
    if scores.is_cpu and scores.dtype == torch.float32:
        return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))
    return scores.argmax(-1)


def _mix(state: Tensor) -> Tensor:
    """The output function of SplitMix64 on int64 states."""
    state = state.clone()
    shifted = torch.empty_like(state)  # all in place: over a vocabulary, memory is what it costs
    for bits, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        state ^= _shift(state, bits, shifted)
        if factor != 1:
            state *= factor
    return state


def _shift(state: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Logical right shift: torch's is arithmetic, so the copies of the sign are masked away."""
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _gumbel_of(hashes: Tensor) -> Tensor:
    """int64 hashes -> standard Gumbel noise, float32: -log(-log1p(-u)) of u in (0, 1).

    1 - u is exact for such u, so the plain logarithm of it loses nothing.
    """
    return _uniform_of(hashes).neg_().add_(1).log_().neg_().log_().neg_().float()


def _uniform_of(hashes: Tensor) -> Tensor:
    """52 bits of each hash as a number in (0, 1), float64."""
    return _shift(hashes, 12).double().add_(0.5).mul_(2.0**-52)
