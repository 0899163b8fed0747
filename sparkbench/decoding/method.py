"""The contract of a method, and what it sees of a round.

A method only proposes: from the last committed token and the target's features of what was committed since its last
proposal it makes a draft tree. It reads no clock, no file and no command line, and it never sees the noise or the seed
with which the target draws, unless it asks for `shared` noise, which its variant says. One instance serves one batch
after the other; `begin` starts a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.sampling import Sampling, gumbel
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import StageTimer
from sparkbench.decoding.tree import DraftTree


@dataclass(eq=False)
class Context:
    """What a method may use in a round of B rows.

    anchors:     [B] int64, the last committed token of each row: the root of its tree.
    lengths:     [B] int64, tokens in the target's cache: the absolute position of the anchor.
    features:    [B, C, F * H], the target's features of what was committed since the last round (in round 0: of the
                 prompt); entries of row b beyond `counts[b]` are garbage. None without feature layers.
    tokens:      [B, C] int64, the ids of the same positions; the anchor follows them.
    counts:      valid entries of each row, on the host.
    sampling:    how the target draws.
    stop_ids:    token ids that end a generation.
    noise_keys:  [B] int64, of the noise that drafts take (`Method.noise`); None if they take none.
    round:       0 in the first round of a batch.
    """

    target: Target
    anchors: Tensor
    lengths: Tensor
    features: Tensor | None
    tokens: Tensor
    counts: Sequence[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    timer: StageTimer
    noise_keys: Tensor | None = None
    round: int = 0

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the enclosed work as stage `name` (timing.STAGES)."""
        return self.timer.stage(name)

    def gumbel(self, depths: int, vocab: int) -> Tensor:
        """Noise [B, depths, vocab] float32 for drafts of the next `depths` positions."""
        assert self.noise_keys is not None
        steps = torch.arange(1, depths + 1, device=self.anchors.device)
        return gumbel(self.noise_keys, self.lengths[:, None] + steps, vocab)


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


class Method(ABC):
    """Base of all methods. A subclass says what it is in class variables and implements `propose`.

    Options:      a frozen dataclass; each field is an option `name:field=value` with a default.
    summary:      one line for `sparkbench list`.
    takes_budget: proposes trees of at most `budget` draft nodes (root not counted).
    drafter_kind: the family of drafters it uses (sparkbench.drafters), None without a drafter.

    One that takes a budget and needs costs proposes exactly `cap` nodes while its own costs are measured.
    Who builds an instance gives it `costs` (profiling.costs.RoundCosts) if `needs_costs`, `calibration`
    (scheduling.Calibration) if it has one for the drafter, and `index` (ngram.NgramIndex) if an option `index` names
    one. `most_rows`, if set, is the batch size above which the loop lets it rest and decodes autoregressively.
    """

    Options: ClassVar[type] = NoOptions
    name: ClassVar[str] = ""
    summary: ClassVar[str]
    takes_budget: ClassVar[bool] = False
    drafter_kind: ClassVar[str | None] = None

    def __init__(self, options: Any, drafter: Any, budget: int | None) -> None:
        self.options = options
        self.drafter = drafter
        self.budget = budget
        self.costs: Any = None
        self.calibration: Any = None
        self.index: Any = None
        self.cap: int | None = None
        self.most_rows: int | None = None

    @property
    def needs_costs(self) -> bool:
        """Whether it decides by what a forward costs on this machine."""
        return False

    @property
    def rule(self) -> str:
        """How its drafts are accepted (decoding/accept.py)."""
        return getattr(self.options, "rule", "match")

    @property
    def noise(self) -> str:
        """Which noise its drafts take: none, its own, or `shared`, the target's (decoding/drafting.py)."""
        return getattr(self.options, "noise", "none")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose output the method wants (k: after layer k, -1: the embeddings)."""
        return ()

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Most draft nodes a proposal can have, root not counted."""

    @property
    def max_length(self) -> int | None:
        """Longest committed length behind which it can still draft; None without a limit of its own."""
        return None

    def begin(self, target: Target, batch: int, capacity: int) -> None:  # noqa: B027 (optional)
        """Start a batch of `batch` rows that will grow to about `capacity` positions."""

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """The draft trees of this round."""

    def observe(self, context: Context, tree: DraftTree, acceptance: Acceptance) -> None:  # noqa: B027 (optional)
        """See what the target made of the last proposal."""

    def keep(self, rows: Sequence[int]) -> None:  # noqa: B027 (optional)
        """Drop all rows but `rows` from the batch."""

    def admit(self, rows: int) -> None:  # noqa: B027 (optional)
        """Take `rows` new rows in, behind those there are; their prompts come with the next round's features."""
