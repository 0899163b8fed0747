"""Calibrating a DSpark drafter's confidences on rounds that it was not trained on.

The drafter decodes prompts with whole chains, and every round tells its confidences and how much of the chain was
accepted. Temperatures are fitted on the rounds of some prompts and judged on those of the others; what goes into the
file is the fit. The mathematics is `sparkbench.scheduling.calibration`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import Sampling, noise_key
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.methods.dspark import DSpark, Options
from sparkbench.scheduling import Calibration, calibration_table, fit_sts
from sparkbench.train.recipe import CalibrationRecipe

FEWEST_ROUNDS = 50


@dataclass(frozen=True, eq=False)
class Rollouts:
    """N rounds.

    logits: [N, L] float64, of the confidences.   accepted: [N] int64, draft tokens accepted, up to a stop token.
    lengths: [N] int64, slots that tell something: L, or up to an accepted stop token, as in the published evaluator.
    """

    logits: NDArray[np.float64]
    accepted: NDArray[np.int64]
    lengths: NDArray[np.int64]


class _Recorder(DSpark):
    """DSpark with whole chains that keeps what its confidence head said."""

    def __init__(self, drafter: Any) -> None:
        super().__init__(Options(), drafter, None)
        self.logits: list[Tensor] = []
        self.accepted: list[Tensor] = []
        self.proposed: list[Tensor] = []
        self.stops: Tensor | None = None

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        super().begin(target, batch, capacity)
        self.stops = torch.tensor(sorted(target.stop_ids), dtype=torch.int64, device=target.device)

    @property
    def uses_confidence(self) -> bool:
        return True

    def lengths(self, logits: Tensor) -> list[int]:
        self.logits.append(logits)
        return [self.max_nodes] * len(logits)

    def observe(self, context: Context, tree: DraftTree, acceptance: Acceptance) -> None:
        assert self.stops is not None
        accepted, tokens = acceptance.accepted, acceptance.tokens[:, : self.max_nodes]
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        stopped = torch.isin(tokens, self.stops) & (places <= accepted[:, None])
        cut = torch.where(stopped, places, self.max_nodes).amin(1)
        self.accepted.append(torch.minimum(accepted, cut))
        self.proposed.append(cut)


def collect(
    target: Target, drafter: Any, prompts: Sequence[Sequence[int]], recipe: CalibrationRecipe, seed: int
) -> Rollouts:
    """The rounds of decoding `prompts` at the recipe's temperature."""
    if drafter.confidence_head is None:
        raise UsageError(f"drafter {drafter.source}: it has no confidence head to calibrate")
    recorder = _Recorder(drafter)
    ordered = sorted(prompts, key=len)
    config = DecodeConfig(recipe.max_new_tokens, Sampling(recipe.temperature))
    for start in range(0, len(ordered), recipe.batch):
        batch = [
            Request(tuple(ids), noise_key(ids, seed, copy=start + place))
            for place, ids in enumerate(ordered[start : start + recipe.batch])
        ]
        generate(target, recorder, batch, config)
    if not recorder.logits:
        return Rollouts(np.zeros((0, recorder.max_nodes)), np.zeros(0, np.int64), np.zeros(0, np.int64))
    logits = torch.cat(recorder.logits).double().cpu().numpy()
    accepted, lengths = (torch.cat(part).cpu().numpy() for part in (recorder.accepted, recorder.proposed))
    return Rollouts(logits, accepted, lengths)


def calibrate(
    target: Target, drafter: Any, prompts: Sequence[Sequence[int]], recipe: CalibrationRecipe, seed: int
) -> tuple[Calibration, dict[str, Any]]:
    """The calibration, and what it does on held-out rounds: a row for each position (`calibration_table`).

    UsageError: no confidence head, or too few rounds.
    """
    split = round(len(prompts) * (1 - recipe.judged))
    fitted, judged = (collect(target, drafter, part, recipe, seed) for part in (prompts[:split], prompts[split:]))
    for what, rounds in (("fit", fitted), ("judge", judged)):
        if len(rounds.accepted) < FEWEST_ROUNDS:
            raise UsageError(
                f"calibration: {len(rounds.accepted)} rounds to {what} on are too few, {FEWEST_ROUNDS} are needed; "
                "give more prompts"
            )
    calibration = fit_sts(fitted.logits, fitted.accepted, fitted.lengths)
    table = [asdict(row) for row in calibration_table(judged.logits, judged.accepted, calibration, judged.lengths)]
    facts = {
        "target": target.name,
        "drafter": str(drafter.source),
        "temperature": recipe.temperature,
        "rounds_fitted": len(fitted.accepted),
        "rounds_judged": len(judged.accepted),
        "judged": table,
    }
    return Calibration(calibration.temperatures, {k: v for k, v in facts.items() if k != "judged"}), facts
