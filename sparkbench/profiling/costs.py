"""What a round costs on this machine, for methods that decide by it: the step curve, and everything beside it.

`sparkbench run` measures both once, before anything is timed; a curve can also come from a file that
`sparkbench profile` wrote. What a round costs beside the target's forward (drafting, search, the choice itself, the
host) is taken from rounds of the method at work.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import covered
from sparkbench.profiling.curve import StepCurve, StepCurves
from sparkbench.profiling.measure import gathered, step_curve

# Draft nodes a row at which curves are measured.
NODES = (0, 1, 2, 3, 5, 7, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 192
_NEW_TOKENS = 32


@dataclass(frozen=True)
class RoundCosts:
    """curves: of the target's forward.   overheads: by rows, (seconds a round, seconds a node) of all else."""

    curves: StepCurves
    overheads: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def at(self, rows: int, context: int) -> tuple[StepCurve, float, float]:
        """What a round of `rows` rows behind `context` tokens costs: the curve, and `overhead`."""
        return self.curves.at(rows, context), *self.overhead(rows)

    def overhead(self, rows: int) -> tuple[float, float]:
        """Seconds a round, and a node of its width, beside the target's forward; of the nearest number of rows."""
        if not self.overheads:
            return 0.0, 0.0
        return self.overheads[min(self.overheads, key=lambda known: abs(math.log(known / rows)))]


def measure_curves(target: Target, batch_sizes: Sequence[int], max_nodes: int) -> StepCurves:
    """The step curves of a target for some batch sizes, up to trees of `max_nodes`."""
    nodes = [count for count in NODES if count < max_nodes] + [max_nodes]
    context = min(CONTEXT, target.max_context - max_nodes - 1)
    return gathered(
        target, [step_curve(target, rows, context, [rows * (1 + count) for count in nodes]) for rows in batch_sizes]
    )


def measure_overheads(
    target: Target, method: Any, curves: StepCurves, batch_sizes: Sequence[int], widths: tuple[int, int] = (8, 64)
) -> dict[int, tuple[float, float]]:
    """Seconds a round and a node that `method` spends beside the target's forward, by number of rows.

    A method that takes a budget is made to propose two widths (its `cap`), and a line is put through them; for others
    the second number is 0. Deciding takes its time too, so the method gets `curves` to decide by.
    """
    method.costs = RoundCosts(curves)
    overheads = {}
    for rows in batch_sizes:
        if not method.takes_budget:
            overheads[rows] = (_beside_forward(target, method, rows), 0.0)
            continue
        spent = []
        for method.cap in widths:
            spent.append(_beside_forward(target, method, rows))
        method.cap = None
        each = max(0.0, (spent[1] - spent[0]) / (widths[1] - widths[0]))
        overheads[rows] = (max(0.0, spent[0] - each * widths[0]), each)
    return overheads


def _beside_forward(target: Target, method: Any, rows: int) -> float:
    """Median seconds of a round without its forward, on random prompts; the first two rounds are left out."""
    draws = torch.Generator().manual_seed(0)
    length = min(64, target.max_context // 4)
    prompts = torch.randint(target.vocab_size, (rows, length), generator=draws).tolist()
    new_tokens = min(_NEW_TOKENS, target.max_context - length)
    config = DecodeConfig(new_tokens, stop_ids=frozenset(), profile=True)
    found: Sequence[Generation] = generate(target, method, [Request(tuple(ids)) for ids in prompts], config)
    longest = max(found, key=lambda generation: len(generation.rounds))
    rounds = longest.rounds[2:] or longest.rounds[-1:]
    return statistics.median((covered(each.stages_ns) - each.stages_ns.get("verify", 0)) / 1e9 for each in rounds)
