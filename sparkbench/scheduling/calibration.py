"""Confidences that can be believed: sequential temperature scaling (STS, DSpark paper, section 3.2.1).

A confidence head gives a logit a slot, whose sigmoid is the probability that the slot is accepted given that all
earlier ones were. Trained heads are too sure or too shy, and the products of their outputs more so. STS divides the
logits of slot k by a temperature T_k, found on held-out rollouts slot by slot: T_k makes the product of the first k
confidences agree with how often a prefix of length k was accepted, with the earlier temperatures frozen. A slot's own
confidences keep their order.

"Agree" is the expected calibration error (ECE) over 20 equal-width bins, those of the published evaluator. The paper
states neither grid nor bins; here T is searched on 33 log-spaced values from 0.2 to 5, then on 21 between the
neighbours of the best (steps of 1 %). Among equals the T nearest to 1 wins, so a slot that was never proposed keeps 1.

The rollouts must propose full drafts: lengths chosen by confidence leave out just the drafts that are to be judged.
Not here: making rollouts, and what confidences are used for (`prefix.py`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparkbench.errors import UsageError
from sparkbench.files import write_text

Floats = NDArray[np.float64]

BINS = 20
FORMAT = "sparkbench calibration 1"
ALLOWED = (0.001, 1000.0)

_SPAN = math.log(5.0)
_COARSE = np.linspace(-_SPAN, _SPAN, 33)  # log T; the middle one is exactly 0
_FINE = np.linspace(-1, 1, 21) * (_COARSE[1] - _COARSE[0])


@dataclass(frozen=True)
class Calibration:
    """One temperature a slot, for the confidence logits of one drafter with one target.

    provenance: where the temperatures come from, as JSON values; kept in the file, of no effect.
    UsageError: no temperatures, or one outside 0.001 to 1000.
    """

    temperatures: tuple[float, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        low, high = ALLOWED
        if not self.temperatures or not all(low <= value <= high for value in self.temperatures):
            raise UsageError(f"a calibration needs one temperature a slot, each from {low:g} to {high:g}")

    @classmethod
    def identity(cls, length: int) -> "Calibration":
        """The calibration of `length` slots that changes nothing."""
        return cls((1.0,) * length)

    def confidences(self, logits: ArrayLike) -> Floats:
        """sigmoid(logit / T_k), of the shape of `logits` [..., L].

        L may be smaller than the number of temperatures: a draft cut short has the first slots. UsageError: larger.
        """
        values = np.asarray(logits, float)
        slots = values.shape[-1]
        if slots > len(self.temperatures):
            raise UsageError(f"the calibration has {len(self.temperatures)} slots, the drafts have {slots}")
        return _sigmoid(values / np.array(self.temperatures[:slots]))

    def survival(self, logits: ArrayLike) -> Floats:
        """The products of the confidences up to each slot, of the shape of `logits` [..., L]."""
        return np.cumprod(self.confidences(logits), axis=-1, dtype=np.float64)

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read what `save` wrote. UsageError: missing, broken, something else, or impossible temperatures."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"calibration {path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UsageError(f"calibration {path}: not JSON") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UsageError(f'calibration {path}: not a calibration (no "format": "{FORMAT}")')
        values, provenance = document.get("temperatures"), document.get("provenance", {})
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise UsageError(f"calibration {path}: temperatures is not a list of numbers")
        if not isinstance(provenance, dict):
            raise UsageError(f"calibration {path}: provenance is not an object")
        try:
            return cls(tuple(values), provenance)
        except UsageError as error:
            raise UsageError(f"calibration {path}: {error}") from None

    def save(self, path: Path) -> None:
        """Write the temperatures and their provenance as JSON, whole or not at all. RunError: cannot be written."""
        document = {"format": FORMAT, "temperatures": self.temperatures, "provenance": dict(self.provenance)}
        write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def fit_sts(logits: ArrayLike, accepted: ArrayLike, lengths: ArrayLike | None = None) -> Calibration:
    """Fit one temperature a slot by sequential temperature scaling.

    logits:   [N, L] the head's raw outputs in N rounds.
    accepted: [N] how many drafts the acceptance rule accepted.
    lengths:  [N] how many drafts were proposed (default L); what lies beyond is not looked at. A round counts for slot
              k where k drafts or more were proposed.
    UsageError: shapes that do not fit, more accepted than proposed, a logit that is not finite.
    """
    values, hits, proposed = _rollouts(logits, accepted, lengths)
    survival = np.ones(len(values))
    temperatures = []
    for slot in range(values.shape[1]):
        rows = proposed > slot
        observed = survival[rows], values[rows, slot], hits[rows] > slot
        log = _best(_COARSE, *observed)
        log = _best(np.clip(log + _FINE, -_SPAN, _SPAN), *observed)
        temperatures.append(math.exp(log))
        survival *= _sigmoid(values[:, slot] / temperatures[-1])
    return Calibration(tuple(temperatures))


def expected_calibration_error(predicted: ArrayLike, happened: ArrayLike, bins: int = BINS) -> float:
    """How far predictions are from what happened: the mean over predictions of their bin's |mean p - share happened|.

    predicted: [N] in 0 .. 1; happened: [N] of bool; bins: of equal width over 0 .. 1, 1 in the last. N must not be 0.
    """
    chances = np.asarray(predicted, float)
    return _gap(chances, np.asarray(happened, bool), bins) / chances.size


def auroc(scores: ArrayLike, happened: ArrayLike) -> float | None:
    """The probability that a score where it happened exceeds one where it did not, equal scores counting half.

    scores, happened: [N]. Exact, by ranks. None where all or none happened.
    """
    positive = np.asarray(happened, bool)
    _, index, counts = np.unique(np.asarray(scores, float), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    yes = int(positive.sum())
    no = positive.size - yes
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no)) if yes and no else None


@dataclass(frozen=True)
class PositionCalibration:
    """How well the survival at one position (1: the first slot) is predicted; None without a round that proposed it.

    count: rounds that proposed it. ece_before: without a calibration. ece_after, auroc and brier (the mean squared
    error): with it. auroc is None also where all or none were accepted.
    """

    position: int
    count: int
    ece_before: float | None
    ece_after: float | None
    auroc: float | None
    brier: float | None


def calibration_table(
    logits: ArrayLike, accepted: ArrayLike, calibration: Calibration, lengths: ArrayLike | None = None
) -> list[PositionCalibration]:
    """One row a position (paper, Figure 6). Arguments as in `fit_sts`; use rollouts that the fit has not seen."""
    values, hits, proposed = _rollouts(logits, accepted, lengths)
    raw = Calibration.identity(values.shape[1]).survival(values)
    calibrated = calibration.survival(values)
    table = []
    for slot in range(values.shape[1]):
        rows = proposed > slot
        before, after, happened = raw[rows, slot], calibrated[rows, slot], hits[rows] > slot
        some = bool(happened.size)
        table.append(
            PositionCalibration(
                position=slot + 1,
                count=happened.size,
                ece_before=expected_calibration_error(before, happened) if some else None,
                ece_after=expected_calibration_error(after, happened) if some else None,
                auroc=auroc(after, happened),
                brier=float(np.mean((after - happened) ** 2)) if some else None,
            )
        )
    return table


def _rollouts(
    logits: ArrayLike, accepted: ArrayLike, lengths: ArrayLike | None
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Logits [N, L], accepted [N] and proposed [N] of rollouts that fit together."""
    values, hits = np.asarray(logits, float), np.asarray(accepted, np.int64)
    if values.ndim != 2 or not values.shape[1]:
        raise UsageError(f"confidence logits must be [rounds, slots], not of shape {values.shape}")
    slots = values.shape[1]
    proposed = np.full(len(values), slots) if lengths is None else np.asarray(lengths, np.int64)
    if hits.shape != (len(values),) or proposed.shape != (len(values),):
        raise UsageError(f"{len(values)} rounds of logits need as many counts, not {hits.shape} and {proposed.shape}")
    if not ((hits >= 0) & (hits <= proposed) & (proposed <= slots)).all():
        raise UsageError(f"counts must be 0 <= accepted <= proposed <= {slots}")
    if not np.isfinite(values[np.arange(slots) < proposed[:, None]]).all():
        raise UsageError("a confidence logit is not finite")
    return values, hits, proposed


def _best(grid: Floats, before: Floats, logits: Floats, happened: NDArray[np.bool_]) -> float:
    """The log T of `grid` with the least ECE of `before` times the slot's confidence; among equals nearest to 0."""
    nearest = grid[np.argsort(np.abs(grid), kind="stable")]
    gaps = [_gap(before * _sigmoid(logits * math.exp(-log)), happened, BINS) for log in nearest]
    return float(nearest[int(np.argmin(gaps))])


def _sigmoid(values: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp overflows where the answer is 0 to double precision
        return 1.0 / (1.0 + np.exp(-values))


def _gap(predicted: Floats, happened: NDArray[np.bool_], bins: int) -> float:
    """The ECE times the number of predictions, 0 of none: sum over bins of |sum of p - number that happened|."""
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(index, predicted - happened, bins)).sum())
