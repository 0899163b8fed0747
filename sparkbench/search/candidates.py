"""What a conditional search searches: the candidate tokens of each depth, and their distribution below a parent.

A Markov head adds a bias to the logits of a draft row that depends on the token before: a node with token t gives its
children the distribution softmax(logits[d] + W2 @ latent(t)), d being its depth. `SearchSpec` says which tokens may
be children and over what they are normalised; `Space` gathers what is needed once and answers for any parents of a
depth at once. The search itself is elsewhere. Heads with a state along the path (RNN) are not covered.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sparkbench.errors import UsageError
from sparkbench.search.ranking import INF, best_ids, finite

LOWEST = torch.finfo(torch.float32).min  # normaliser of a row without a finite logit: its tokens stay at -inf


Stage = Callable[[str], AbstractContextManager[Any]]


def quiet(name: str) -> AbstractContextManager[Any]:
    """The stage of a caller that does not measure."""
    return nullcontext()


class TreeHead(Protocol):
    """What the search needs of a drafter's head: the bias of parents `tokens` is latents(depth, tokens) @ w2.T.

    w2: [V, r] float32.
    """

    @property
    def w2(self) -> Tensor: ...

    def latents(self, depth: int, tokens: Tensor) -> Tensor:
        """[B, P, r] float32 for parents `tokens` [B, P] int64; `depth`, from 0, is the row of the logits."""

    def row(self, row: int) -> "TreeHead":
        """The head of one row of the batch, as a batch of one."""

    def on_host(self) -> "TreeHead":
        """The head on the host; its tables are copied once, not at every call."""


@dataclass(frozen=True)
class SearchSpec:
    """Which tree is searched for.

    budget:      nodes, the root not counted.
    candidates:  C, the tokens that each depth puts on the shortlist by its logits before the bias; 0, or V and more:
                 the whole vocabulary.
    fanout:      K, the children that one node may have; 0: no cap.
    shortlist:   `union`: one set for all depths, the shortlists and the root's token together; `depth`: each its own.
    normalise:   probabilities over the `candidates`, or over the `full` vocabulary.
    widths:      nodes of each depth, for `beam` alone; empty: the flat schedule.
    """

    budget: int
    candidates: int = 0
    fanout: int = 0
    shortlist: Literal["union", "depth"] = "union"
    normalise: Literal["candidates", "full"] = "candidates"
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("budget", "candidates", "fanout"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name, allowed in (("shortlist", ("union", "depth")), ("normalise", ("candidates", "full"))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be {' or '.join(allowed)}, not {getattr(self, name)!r}")

    def fan_out(self, size: int) -> int:
        """k: how many children a node can contribute when there are `size` candidates."""
        return min(self.fanout or self.budget, self.budget, size)


@dataclass(frozen=True, eq=False)
class Space:
    """Candidates of B rows and what their distributions are made of. A slot is a place among the candidates.

    logits:  [B, L, U], without NaN and +inf; -inf in slots that hold no candidate.
    head:    None: no bias.
    w2:      [U, r], or [B, S, U, r] gathered for the candidates, S = 1 for one set or L; None without a head.
    ids:     [B, S, U] int64, ascending; None: all tokens, a slot is an id.
    hidden:  [B, S, U] bool, slots that count for the normaliser and are no candidates; None: there are none.
    """

    logits: Tensor
    head: TreeHead | None
    w2: Tensor | None
    ids: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def depth(self) -> int:
        return self.logits.shape[1]

    @property
    def size(self) -> int:
        """U."""
        return self.logits.shape[2]

    def latents(self, depth: int, parents: Tensor) -> Tensor | None:
        """[B, P, r] for parents [B, P], token ids."""
        return None if self.head is None else self.head.latents(depth, parents)

    def bias(self, depth: int, latents: Tensor | None) -> Tensor | None:
        """[B, P, U] float32: what the head adds to the logits."""
        if latents is None or self.w2 is None:
            return None
        weights = self.w2 if self.w2.dim() == 2 else _of_depth(self.w2, depth)
        if len(latents) == 1:  # a plain product, which is faster than a batched one
            return (latents[0] @ weights.view(self.size, -1).T)[None]
        return latents @ weights.transpose(-1, -2)

    def distribution(self, depth: int, bias: Tensor | None, parents: int) -> tuple[Tensor, Tensor]:
        """Logits [B, P, U] of the children of P parents and their normaliser [B, P, 1], both float32."""
        row = self.logits[:, depth, None].float()
        scored = row.expand(-1, parents, -1) if bias is None else row + bias
        normaliser = scored.logsumexp(-1, keepdim=True).clamp_(min=LOWEST)
        if self.hidden is not None:
            scored = scored.masked_fill(_of_depth(self.hidden, depth)[:, None], -INF)
        return scored, normaliser

    def tokens(self, depth: int, slots: Tensor) -> Tensor:
        """Ids [B, n] of `slots` [B, n]."""
        return slots if self.ids is None else _of_depth(self.ids, depth).gather(1, slots)


def log_probs(logits: Tensor, normaliser: Tensor) -> Tensor:
    """At most 0 whatever the rounding: the search relies on scores that never rise along a path."""
    return (logits - normaliser).clamp_(max=0.0)


def set_size(spec: SearchSpec, depth: int, vocab: int) -> int:
    """Upper bound of the candidates of a depth, known without looking at the logits."""
    if not 0 < spec.candidates < vocab:
        return vocab
    return spec.candidates if spec.shortlist == "depth" else min(vocab, depth * spec.candidates + 1)


def space_of(
    logits: Tensor,
    head: TreeHead | None,
    anchors: Tensor,
    spec: SearchSpec,
    *,
    root: bool = True,
    gather: bool = True,
    trim: bool = False,
) -> Space:
    """The candidates of `logits` [B, L, V] below `anchors` [B].

    root:    whether a union holds the anchor.
    gather:  whether candidates alone are scored where that suffices; else the whole vocabulary is.
    trim:    whether a union, of a single row, has its exact size. Otherwise it has the greatest size there can be, and
             the host waits for nothing.
    """
    w2 = None if head is None else head.w2
    batch, depth, vocab = logits.shape
    if not (0 < spec.candidates < vocab and depth):
        return Space(_clean(logits), head, w2)
    listed = _shortlist(logits.flatten(0, 1).float(), spec.candidates).unflatten(0, (batch, depth))
    if spec.shortlist == "union":
        listed = listed.flatten(1)[:, None]
        if root:
            listed = torch.cat([listed, anchors[:, None, None]], dim=2)
    if spec.normalise == "full" or not gather:
        others = torch.ones(batch, listed.shape[1], vocab, dtype=torch.bool, device=logits.device)
        others.scatter_(2, listed, False)
        logits = _clean(logits)
        if spec.normalise == "full":
            return Space(logits, head, w2, hidden=others)
        return Space(logits.masked_fill(others, -INF), head, w2)

    ids = _ascending(listed, vocab)[:, :, : set_size(spec, depth, vocab)]
    if trim:
        ids = ids[:, :, : int((ids < vocab).sum(2).max())]
    absent = ids == vocab
    ids = ids.clamp(max=vocab - 1)
    gathered = finite(logits.gather(2, ids.expand(-1, depth, -1))).masked_fill_(absent, -INF)
    if w2 is not None:
        w2 = w2.index_select(0, ids.flatten()).view(*ids.shape, w2.shape[1])
    return Space(gathered, head, w2, ids)


def _shortlist(rows: Tensor, count: int) -> Tensor:
    """[R, count] int64: the best of each row. On a CPU the first of them tells whether there was NaN or +inf."""
    if rows.is_cpu:
        best = best_ids(rows, count)
        if (rows.gather(1, best[:, :1]) < INF).all():
            return best
    return best_ids(finite(rows), count)


def _ascending(listed: Tensor, vocab: int) -> Tensor:
    """[B, S, n] ids, each once and in order; what is left over at the end is `vocab`."""
    ids = listed.sort(dim=2).values
    again = ids[:, :, 1:] == ids[:, :, :-1]
    ids[:, :, 1:].masked_fill_(again, vocab)
    return ids.sort(dim=2).values


def _of_depth(each: Tensor, depth: int) -> Tensor:
    """The entry of a depth in [B, S, ...]."""
    return each[:, min(depth, each.shape[1] - 1)]


def _clean(logits: Tensor) -> Tensor:
    """Logits without NaN and +inf. On a CPU the maximum tells cheaply whether there are any."""
    if logits.is_cpu and (not logits.numel() or logits.amax() < INF):
        return logits
    return finite(logits)
