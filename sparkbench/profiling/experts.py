"""Experts: how many of a mixture of experts a forward loads, which is what its cost beside a dense model depends on.

One token loads `active` experts of each layer. A draft tree loads all that any of its nodes chose, so that a wide tree
reads almost the whole model. If every node chose uniformly and independently, a layer of E experts with k active ones
would load E * (1 - (1 - k/E)^n) distinct ones for n nodes. Trained routers are correlated within a text and load fewer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparkbench.decoding.target import Target


@dataclass(frozen=True)
class ExpertCount:
    """Distinct experts of a forward over `tokens` tokens; `distinct` is the mean over layers of mixtures."""

    batch_size: int
    context: int
    tokens: int
    distinct: float
    uniform: float


def mixtures(target: Target) -> list[Any]:
    """The modules of the target that hold a router (`gate`) and its `experts`; empty for a dense model."""
    return [
        module
        for module in target.decoder.modules()
        if isinstance(getattr(module, "gate", None), nn.Module)
        and isinstance(getattr(module, "experts", None), nn.Module)
    ]


def expected_distinct(experts: int, active: int, tokens: int) -> float:
    """E * (1 - (1 - k/E)^n): the mean number of distinct experts if `tokens` nodes choose uniformly and alone."""
    return experts * (1.0 - (1.0 - active / experts) ** tokens)


@contextmanager
def watched(target: Target) -> Iterator[list[int]]:
    """While open, each router appends the number of distinct experts it chose in a forward, layer by layer.

    Counting waits for the device, so it has no place in a forward that is timed.
    """
    counts: list[int] = []

    def count(module: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        chosen = next(part for part in output if not part.is_floating_point())  # [tokens, active] expert indices
        counts.append(int(chosen.unique().numel()))

    handles = [mixture.gate.register_forward_hook(count) for mixture in mixtures(target)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
