"""Ranking: the best tokens of every draft row, in a total order.

The builders read nothing but the `k` best tokens of a row and their log-probabilities, so the vocabulary is
touched here alone. Two things make it more than a top-k:

- `torch.topk` leaves the order of equal values open, and logits in bfloat16 tie all the time. Here equal
  logits rank by token id, also at the k-th place, on every device. Value and id are packed into one integer
  key without ties.
- A top-k over 151,936 entries costs more than anything else in a tree. The k best entries lie in the k best
  blocks of consecutive ids (best by maximum, then by id), so blocks are narrowed to smaller blocks, and these
  to entries.

Nothing is read back to the host, but for one flag where that is free. The Markov bias is not applied here;
searches that add it use `finite` and `best_ids` on rows of their own.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparkbench.errors import UsageError

INF = float("inf")

_SIZES = (64, 8, 1)  # entries of a block; each divides the one before
_WORTHWHILE = 2  # ranking blocks pays when it drops half of them
_SMALL = 2**14  # so few entries in all are ranked at once, on a CPU


@dataclass(frozen=True, eq=False)
class Ranked:
    """The K best tokens of each draft row, best first.

    log_probs:  [B, D, K] float32, log-softmax over the whole vocabulary; -inf marks a token that is no node.
    token_ids:  [B, D, K] int64.
    """

    log_probs: Tensor
    token_ids: Tensor


def rank(logits: Tensor, k: int) -> Ranked:
    """The min(k, V) best tokens of each row of `logits` [B, D, V] (any float type), equal logits by token id.

    Only finite logits make nodes: NaN and infinities count as -inf, so a row without a finite logit offers
    nothing.
    """
    batch, depth, vocab = logits.shape
    k = min(k, vocab)
    if 0 in (batch, depth, k):
        empty = logits.new_empty(batch, depth, k, dtype=torch.float32)
        return Ranked(empty, empty.long())
    rows = logits.reshape(batch * depth, vocab).float()
    normaliser = rows.logsumexp(-1, keepdim=True)
    # Cleaning costs a pass over the vocabulary. On a CPU the normaliser tells for free whether it is needed;
    # elsewhere asking would stall the device, and the pass is cheap.
    if not rows.is_cpu or not normaliser.isfinite().all():
        rows = finite(rows)
        normaliser = rows.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    token_ids = best_ids(rows, k)
    # At most 0 whatever the rounding: the search relies on scores that never rise along a path.
    log_probs = (rows.gather(1, token_ids) - normaliser).clamp_(max=0.0)
    return Ranked(log_probs.view(batch, depth, k), token_ids.view(batch, depth, k))


def finite(rows: Tensor) -> Tensor:
    """`rows` with NaN and infinities replaced by -inf: only finite logits make nodes."""
    return rows.nan_to_num(nan=-INF, posinf=-INF, neginf=-INF)


def best_ids(rows: Tensor, k: int) -> Tensor:
    """[R, k] int64: ids of the k <= V highest entries of rows [R, V] float32, highest first, equal entries by id.

    If a row holds NaN or +inf, so does its first place; the others are then not reliable.
    """
    count, vocab = rows.shape
    if rows.is_cpu and rows.numel() <= _SMALL:
        return _best(rows, _steps(vocab, 1, rows.device).expand(count, -1), k)
    # Padding has the highest ids, so it comes after every real entry and is never among k <= V.
    block = -(-vocab // _SIZES[0]) * _SIZES[0]
    if block > vocab:
        rows = torch.nn.functional.pad(rows, (0, block - vocab), value=-INF)
    blocks = rows.view(count, 1, block)
    firsts = torch.zeros(1, 1, 1, dtype=torch.int64, device=rows.device)  # id of each block's first entry
    for size in _SIZES:
        total = blocks.shape[1] * (block // size)
        if size > 1 and total < _WORTHWHILE * k:
            continue
        parts = blocks.reshape(count, total, size)
        firsts = (firsts + _steps(block, size, rows.device)).view(-1, total).expand(count, -1)
        best = _best(parts.amax(-1), firsts, k)
        blocks = parts.gather(1, best[:, :, None].expand(-1, -1, size))
        firsts, block = firsts.gather(1, best)[:, :, None], size
    return firsts.squeeze(2)


def _best(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """[R, k] int64: places of the k highest `values` [R, n], highest first, equal values by ascending id.

    Without equal values among a row's k + 1 highest, a plain top-k is in order already; on a CPU it costs nothing to
    look.
    """
    if values.is_cpu:
        found = values.topk(min(k + 1, values.shape[1]))
        best = found.indices[:, :k]
        tied = (found.values[:, 1:] == found.values[:, :-1]).any(1)
        if tied.any():
            best[tied] = _keys(values[tied], ids.expand_as(values)[tied]).topk(k).indices
        return best
    return _keys(values, ids).topk(k).indices


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Distinct integers in the order of `values` [R, n] float32, equal values by ascending id below 2^32; NaN
    comes first, as it does in a top-k."""
    bits = (
        values.nan_to_num(nan=INF, posinf=INF, neginf=-INF).add(0.0).view(torch.int32)
    )  # adding 0 makes -0.0 equal to 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # IEEE 754 bits, reordered to compare as integers
    return (bits.long() << 32) - ids


@lru_cache(maxsize=64)
def _steps(block: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(0, block, size, device=device)


def capacity(depth: int, ranks: int, budget: int) -> int:
    """How many nodes a tree can have: `budget`, or fewer when `ranks` tokens at `depth` depths make fewer."""
    if budget < 0:
        raise UsageError(f"budget must be 0 or more, not {budget}")
    total, paths = 0, 1
    for _ in range(depth):
        if total >= budget:
            break
        paths *= ranks
        total += paths
    return min(total, budget)
