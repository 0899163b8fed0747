"""What several tests look at: values within a tolerance, one forward of a target, and drafts of a block drafter."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import StageTimer
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.block import BlockSession
from sparkbench.drafters.parts import Block


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-4, the tolerance of all golden values."""
    torch.testing.assert_close(actual.float(), expected.float(), atol=1e-4, rtol=0)


def whole_forward(target: Target, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits and features at every position of ids [1, n], as a chain behind an empty cache."""
    verifier = target.session(1, ids.shape[1], layers)
    try:
        verified = verifier.verify(verifier.pack(DraftTree.chain_of(ids[:, 0], ids[:, 1:])))
    finally:
        verifier.close()
    assert verified.features is not None
    return verified.logits, verified.features


def context_of(
    target: Target,
    features: Tensor,
    counts: Sequence[int],
    anchors: Sequence[int],
    tokens: Tensor | None = None,
) -> Context:
    """A round in which `counts` rows of `features` [B, n, F * H] are new; `tokens` [B, n] are zeros if not given."""
    timer = StageTimer(target.device, recording=False)
    lengths = torch.zeros(len(anchors), dtype=torch.int64)
    tokens = torch.zeros(features.shape[:2], dtype=torch.int64) if tokens is None else tokens
    return Context(target, torch.tensor(anchors), lengths, features, tokens, counts, Sampling(), target.stop_ids, timer)


@contextmanager
def drafted_blocks() -> Iterator[list[Block]]:
    """The blocks that drafters make meanwhile, in order."""
    blocks: list[Block] = []
    draft = BlockSession.draft

    def watched(session: BlockSession, context: Context) -> Block:
        blocks.append(draft(session, context))
        return blocks[-1]

    with patch.object(BlockSession, "draft", watched):
        yield blocks


@dataclass(frozen=True)
class Vanilla:
    """A vanilla Markov head as the search sees it, of two tables [V, r]."""

    w1: Tensor
    w2: Tensor

    def latents(self, depth: int, tokens: Tensor) -> Tensor:
        return self.w1[tokens]

    def row(self, row: int) -> "Vanilla":
        return self

    def on_host(self) -> "Vanilla":
        return self
