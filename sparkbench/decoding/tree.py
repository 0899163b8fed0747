"""DraftTree: what a method proposes in a round.

A tree hangs below the root, the last committed token, which the target has not processed yet. A chain is a tree
without branches, and autoregressive decoding proposes the root alone, so verification, acceptance and the cache need
to know nothing but trees. A batch holds one tree a row, padded to the widest.

Masks and paths follow from `parents` on the device; nothing here copies to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Draft trees of B rows, padded to N nodes.

    tokens:     [B, N] int64; node 0 is the root.
    parents:    [B, N] int64; a parent comes before its children; -1 at the root and in padding.
    depths:     [B, N] int64; 0 at the root and in padding.
    valid:      [B, N] bool; False in padding.
    max_depth:  upper bound of `depths`, known on the host.
    log_probs:  [B, N] cumulative log-probability of each node under the drafter (0 at the root), or None where the
                scores are no probabilities.
    chain:      True if node i is the child of node i - 1 in every row and nothing is padded.
    draft_probs: [B, P, V] float32 where drafts were sampled: row i is the distribution that the children of node i were
                drawn from, one after the other without replacement in the order of the nodes. Nodes from P on have no
                children. None where drafts were not sampled.

    Siblings carry distinct tokens.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    max_depth: int
    log_probs: Tensor | None = None
    chain: bool = False
    draft_probs: Tensor | None = None

    @classmethod
    def root(cls, anchors: Tensor) -> "DraftTree":
        """The tree of only the root, for anchors [B]."""
        parents, depths, valid = _chain_structure(len(anchors), 1, anchors.device)
        return cls(anchors[:, None], parents, depths, valid, 0, chain=True)

    @classmethod
    def chain_of(
        cls,
        anchors: Tensor,
        drafts: Tensor,
        log_probs: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        draft_probs: Tensor | None = None,
    ) -> "DraftTree":
        """The chain anchors [B] -> drafts [B, L]; `log_probs` [B, L] are cumulative.

        lengths: tokens of each row's chain, at most L; None is L for every row.
        draft_probs: [B, L, V], what each draft was sampled from.
        """
        if lengths is not None:
            longest = max(lengths)
            drafts = drafts[:, :longest]
            log_probs = None if log_probs is None else log_probs[:, :longest]
            draft_probs = None if draft_probs is None else draft_probs[:, :longest]
        batch, length = drafts.shape
        parents, depths, valid = _chain_structure(batch, length + 1, anchors.device)
        if log_probs is not None:
            log_probs = torch.cat([log_probs.new_zeros(batch, 1), log_probs], dim=1)
        tokens = torch.cat([anchors[:, None], drafts], dim=1)
        if lengths is None or min(lengths) == length:
            return cls(tokens, parents, depths, valid, length, log_probs, True, draft_probs)
        ends = torch.tensor(lengths, device=anchors.device)[:, None]
        valid = depths <= ends
        tokens, parents, depths = tokens.where(valid, 0), parents.where(valid, -1), depths.where(valid, 0)
        return cls(tokens, parents, depths, valid, length, log_probs, False, draft_probs)

    def first(self, nodes: int) -> "DraftTree":
        """The tree of the root and the first `nodes` draft nodes of every row."""
        if nodes >= self.width - 1:
            return self
        cut = slice(nodes + 1)
        tokens, parents, depths, valid = (part[:, cut] for part in (self.tokens, self.parents, self.depths, self.valid))
        deepest = min(self.max_depth, nodes)
        if depths.is_cpu:
            deepest = int(depths.max())
        log_probs = None if self.log_probs is None else self.log_probs[:, cut]
        return DraftTree(tokens, parents, depths, valid, deepest, log_probs, self.chain)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """N, the root included."""
        return self.tokens.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, max_depth + 1] int64: entry k is the k-th ancestor of a node (0: itself), the root beyond its depth.

        Made by pointer doubling: log2(depth) gathers instead of one a level.
        """
        batch, nodes = self.tokens.shape
        table = torch.arange(nodes, device=self.tokens.device).expand(batch, nodes)[:, :, None]
        jump = self.parents.clamp(min=0)  # node -> its ancestor `table.shape[2]` steps up
        while table.shape[2] <= self.max_depth:
            steps = table.shape[2]
            lifted = table.gather(1, jump[:, :, None].expand(-1, -1, steps))
            table = torch.cat([table, lifted], dim=2)
            jump = jump.gather(1, jump)
        return table[:, :, : self.max_depth + 1]

    @cached_property
    def ranks(self) -> Tensor:
        """[B, N] int64: place of a node among its siblings, from 0."""
        if self.chain:
            return torch.zeros_like(self.depths)
        alike = (self.parents[:, :, None] == self.parents[:, None]) & self.valid[:, None]
        return (alike & _lower_triangle(self.width, self.tokens.device)).sum(2) - 1

    @cached_property
    def visibility(self) -> Tensor:
        """[B, N, N] bool: entry (i, j) says that j is i or an ancestor of i."""
        if self.chain:
            return _lower_triangle(self.width, self.tokens.device).expand(self.batch, -1, -1)
        batch, nodes = self.tokens.shape
        mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=self.tokens.device)
        return mask.scatter_(2, self.ancestors, True)


@lru_cache(maxsize=256)
def _chain_structure(batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and validity of a chain; never written to, so one copy serves all rounds."""
    depths = torch.arange(width, device=device).expand(batch, width)
    return depths - 1, depths, torch.ones(batch, width, dtype=torch.bool, device=device)


@lru_cache(maxsize=64)
def _lower_triangle(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()
