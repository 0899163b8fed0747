"""The two small heads of a DSpark drafter: Markov and confidence.

A block drafter predicts its slots in parallel, so a slot does not know what the slot before it became. The Markov head
repairs that: it adds to a slot's logits a bias that depends on the previous token, `W2 . latent`, of rank r. The
confidence head says how likely a slot is accepted, given that all slots before it are.

DSpark (arXiv 2607.05147) and the published checkpoints' three kinds of Markov head; e = W1[previous], h the slot's
hidden state after the final norm:

    vanilla   latent = e
    gated     latent = sigmoid(Wg [h; e] + bg) * e
    rnn       (a, b, c) = Wj [s; e; h] + bj;   latent = tanh(c);   s <- sigmoid(a) * s + (1 - sigmoid(a)) * tanh(b)
              where s is zero at the start of a block, and the latent reads the state before its update
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARKOV_KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """Parameter names are those of the published checkpoints. Both tables are [V, r]."""

    def __init__(self, kind: str, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Embedding(vocab_size, rank)  # a table: the search gathers its rows
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Latents [..., r] of slots behind tokens `previous` [...], with hidden states [..., H], and the new state.

        Only an rnn head has a state [..., r]; None starts a block.
        """
        e = self.markov_w1(previous)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden.expand(*e.shape[:-1], -1), e], -1))) * e, None
        if self.kind == "rnn":
            state = torch.zeros_like(e) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([state, e, hidden], -1)).chunk(3, -1)
            keep = torch.sigmoid(gate)
            return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)
        return e, None

    def bias(self, latent: Tensor) -> Tensor:
        """[..., V]: what is added to the logits."""
        return F.linear(latent, self.markov_w2.weight)

    def forced(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Biases [..., L, V] of whole blocks whose previous tokens [..., L] are given; hidden is [..., L, H]."""
        if self.kind != "rnn":
            return self.bias(self.step(previous, hidden)[0])
        latents, state = [], None
        for slot in range(previous.shape[-1]):
            latent, state = self.step(previous[..., slot], hidden[..., slot, :], state)
            latents.append(latent)
        return self.bias(torch.stack(latents, -2))

    def chain(
        self,
        logits: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        pick: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Tensor:
        """The chain [B, L] behind anchors [B]; `logits` [B, L, V] float32 get their biases in place.

        hidden: [B, L, H].   pick: chooses tokens [B, 1] by the logits [B, 1, V] of a slot; None is greedy. Each slot
        costs one step of the head and one choice; the host waits for none of them.
        """
        previous, state, tokens = anchors, None, []
        for slot in range(logits.shape[1]):
            latent, state = self.step(previous, hidden[:, slot], state)
            row = logits[:, slot].add_(self.bias(latent))
            previous = row.argmax(-1) if pick is None else pick(row[:, None], slot)[:, 0]
            tokens.append(previous)
        return torch.stack(tokens, 1)

    @cached_property
    def w2(self) -> Tensor:
        """[V, r] float32 for the tree search, converted once."""
        return self.markov_w2.weight.detach().float()

    @cached_property
    def host(self) -> "MarkovHead":
        """A float32 copy on the host, made once; itself if it is there."""
        if self.markov_w2.weight.is_cpu:
            return self
        return copy.deepcopy(self).float().cpu()


@dataclass(frozen=True, eq=False)
class BlockHead:
    """A Markov head in one round, as the tree search sees it. hidden: [B, L, H] of the round's blocks.

    scale: what biases are multiplied by, one over the temperature that a tree is ranked at.

    An rnn head cannot serve: its state depends on the whole path.
    """

    head: MarkovHead
    hidden: Tensor
    scale: float = 1.0

    @property
    def w2(self) -> Tensor:
        return self.head.w2

    def latents(self, depth: int, tokens: Tensor) -> Tensor:
        """[B, P, r] float32 for slot `depth` behind tokens [B, P]."""
        latents = self.head.step(tokens, self.hidden[:, depth, None])[0].float()
        return latents if self.scale == 1 else latents * self.scale

    def row(self, row: int) -> "BlockHead":
        """The head of one row of the batch."""
        return BlockHead(self.head, self.hidden[row : row + 1], self.scale)

    def on_host(self) -> "BlockHead":
        """The head on the host."""
        return BlockHead(self.head.host, self.hidden.cpu(), self.scale)


class ConfidenceHead(nn.Module):
    """One linear layer on a slot's hidden state and, if `rank` is not 0, on its predecessor's Markov embedding."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, previous: Tensor, markov: MarkovHead | None) -> Tensor:
        """Logits [..., L] float32 that slots are accepted, given that their predecessors `previous` [..., L] are.

        hidden: [..., L, H]. A slot's confidence never depends on the slot's own token.
        """
        if self.rank:
            assert markov is not None
            hidden = torch.cat([hidden, markov.markov_w1(previous)], -1)
        return self.proj(hidden)[..., 0].float()
