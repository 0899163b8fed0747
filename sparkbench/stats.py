"""Estimators and intervals: every number a report prints is computed here, once.

Headline estimators are pooled: the sum of tokens over the sum of seconds, the sum of committed tokens over
rounds. The alternatives that papers print (means of ratios, means over responses) exist under their own
names. Intervals are bootstraps over prompts (`intervals.py`), a method and AR resampled together. At batch
sizes above 1 a batch has one wall time, so whole batches are resampled.

What cannot be computed is None, never NaN or an infinity: no rounds, no seconds, nothing in common.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike

from sparkbench.intervals import (
    MIN_PROMPTS,
    RESAMPLES,
    Floats,
    Interval,
    Statistic,
    bootstrap,
    geomean_speedup,
    pooled_speedup,
    pooled_tau,
)

COUNTED = [
    *("run", "unit", "batch_id", "turn", "repeat", "dataset", "prompt_id", "batch_size", "status"),
    *("tokens_out", "decode_s", "batch_wall_s", "committed_sum", "rounds", "batch_rounds", "arrival_s"),
]


def ratio(numerator: float, denominator: float) -> float | None:
    """A ratio of sums; None where either is not positive or not finite (0 seconds measure nothing)."""
    if not (math.isfinite(numerator) and math.isfinite(denominator)) or numerator <= 0 or denominator <= 0:
        return None
    return numerator / denominator


def tau(committed: ArrayLike, rounds: ArrayLike) -> float | None:
    """Pooled acceptance length: sum of M over rounds (the bonus token included). None without a round."""
    return ratio(float(np.sum(committed)), float(np.sum(rounds)))


def tau_per_response(committed: ArrayLike, rounds: ArrayLike) -> float | None:
    """The mean over responses of each response's own mean M; responses without a round are left out."""
    sums, counts = np.asarray(committed, float), np.asarray(rounds, float)
    return _mean(sums[counts > 0] / counts[counts > 0])


def throughput(tokens: ArrayLike, seconds: ArrayLike) -> float | None:
    """Decode throughput, pooled: tokens after the first, a second. A batch's seconds count once."""
    return ratio(float(np.sum(tokens)), float(np.sum(seconds)))


def tpot(tokens: ArrayLike, seconds: ArrayLike) -> float | None:
    """Seconds an output token, pooled: decode time over output tokens without the first."""
    return ratio(float(np.sum(seconds)), float(np.sum(tokens)))


def survival(accepted: ArrayLike, depth: int) -> list[float | None]:
    """s_1 .. s_depth: the share of rounds with A >= k."""
    lengths = np.asarray(accepted)
    return [float((lengths >= k).mean()) if lengths.size else None for k in range(1, depth + 1)]


def conditional_acceptance(accepted: ArrayLike, depth: int) -> list[float | None]:
    """c_1 .. c_depth: s_k / s_(k-1) with s_0 = 1, so that E[A] is the sum over k of c_1 ... c_k.

    None from where no round got as far as k - 1.
    """
    lengths = np.asarray(accepted)
    return [_share(int((lengths >= k).sum()), int((lengths >= k - 1).sum())) for k in range(1, depth + 1)]


def offered_acceptance(accepted: ArrayLike, offered_next: ArrayLike, depth: int) -> list[float | None]:
    """As `conditional_acceptance`, among rounds whose tree had a child below the accepted node at depth k -
    1.

    offered_next: whether the deepest accepted node had a child; nodes above it had one by being passed.
    """
    lengths, offered = np.asarray(accepted), np.asarray(offered_next, bool)
    curve = []
    for k in range(1, depth + 1):
        got = int((lengths >= k).sum())
        curve.append(_share(got, got + int(((lengths == k - 1) & offered).sum())))
    return curve


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """The geometric mean of positive values; None when there are none or one of them is missing."""
    known = [value for value in values if value is not None and value > 0]
    if not known or len(known) < len(values):
        return None
    return math.exp(math.fsum(math.log(value) for value in known) / len(known))


# Measurements -----------------------------------------------------------------


class Moment(NamedTuple):
    """Where a measurement belongs: two arms are compared where all of this is equal."""

    run: str
    unit: str
    batch_id: str
    turn: int
    repeat: int


@dataclass(frozen=True)
class Measurement:
    """Sums over one batch (over one prompt at batch size 1) of one arm, turn and repeat.

    slots: rounds of the batch times its size, which `rounds` of its rows could have filled; None where unknown.
    """

    dataset: str
    prompt_ids: tuple[str, ...]
    tokens: int
    seconds: float
    committed: int
    rounds: int
    slots: int | None = None


@dataclass(frozen=True)
class Measured:
    """What an arm measured, and the prompts that had to be left out (a failed, skipped or empty row)."""

    moments: Mapping[Moment, Measurement]
    left_out: tuple[str, ...]


def measurements(samples: pa.Table) -> Measured:
    """The rows of one arm (one variant, budget, temperature and batch size) summed by batch.

    A batch counts once: tokens of its rows over its wall time. A batch with a row that is not `ok` is left
    out whole. Rows of the profile pass are not counted.
    """
    batches: dict[Moment, list[dict[str, Any]]] = {}
    left_out: list[str] = []
    for row in samples.filter(pc.equal(samples["pass"], "clean")).select(COUNTED).to_pylist():
        if row["status"] == "ok" or row["batch_id"] is not None:
            moment = Moment(row["run"], row["unit"], row["batch_id"], row["turn"], row["repeat"])
            batches.setdefault(moment, []).append(row)
        else:
            left_out.append(_name(row["dataset"], row["prompt_id"]))
    moments = {}
    for moment, rows in batches.items():
        if any(row["status"] != "ok" for row in rows):
            left_out.extend(_name(row["dataset"], row["prompt_id"]) for row in rows)
            continue
        alone = rows[0]["batch_size"] == 1 and rows[0]["arrival_s"] is None
        rounds = rows[0]["batch_rounds"]
        moments[moment] = Measurement(
            dataset=rows[0]["dataset"],
            prompt_ids=tuple(row["prompt_id"] for row in rows),
            tokens=sum(row["tokens_out"] - 1 for row in rows),
            seconds=rows[0]["decode_s"] if alone else max(row["batch_wall_s"] for row in rows),
            committed=sum(row["committed_sum"] for row in rows),
            rounds=sum(row["rounds"] for row in rows),
            slots=None if rounds is None else rounds * rows[0]["batch_size"],
        )
    return Measured(moments, tuple(dict.fromkeys(left_out)))


def fill(measured: Measured) -> float | None:
    """How full batches were: rounds of rows over the rounds that full batches would have had. None where unknown."""
    known = [each for each in measured.moments.values() if each.slots is not None]
    return ratio(sum(each.rounds for each in known), sum(each.slots or 0 for each in known))


def percentile(values: Sequence[float | None], share: float) -> float | None:
    """The percentile `share` (0 to 1) by linear interpolation between order statistics; None without values."""
    known = [value for value in values if value is not None]
    return float(np.quantile(known, share)) if known else None


@dataclass(frozen=True)
class Comparison:
    """A method against AR on the prompts both measured.

    speedup: the headline, the ratio of pooled throughputs; interval: its 95 % bootstrap over prompts, None
    below 10.
    by_dataset, geomean, geomean_interval: over data sets. The rest are alternatives under their own names.
    left_out: prompts that one of the two arms lacks. warnings: why something is None.
    """

    prompts: int
    speedup: float | None
    interval: Interval | None
    tau: float | None
    tau_interval: Interval | None
    throughput: float | None
    by_dataset: Mapping[str, float | None]
    geomean: float | None
    geomean_interval: Interval | None
    mean_of_ratios: float | None
    geometric_mean_of_ratios: float | None
    ratio_of_mean_tpot: float | None
    tau_per_response: float | None
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def compare(method: Measured, reference: Measured, *, seed: int = 0, resamples: int = RESAMPLES) -> Comparison:
    """Compare two arms on what both measured: same prompts, batches, turns, repeats and runs.

    The cluster that is resampled is the prompt, with its turns and repeats (the batch at batch sizes above
    1).
    """
    common = sorted(method.moments.keys() & reference.moments.keys())
    only_one = method.moments.keys() ^ reference.moments.keys()
    missing = (method.moments.get(moment) or reference.moments[moment] for moment in sorted(only_one))
    left_out = [*method.left_out, *reference.left_out]
    left_out += [_name(lost.dataset, prompt_id) for lost in missing for prompt_id in lost.prompt_ids]

    clusters: dict[tuple[str, str], Floats] = {}
    for moment in common:
        m, r = method.moments[moment], reference.moments[moment]
        sums = np.array([m.tokens, m.seconds, r.tokens, r.seconds, m.committed, m.rounds], float)
        key = (m.dataset, moment.batch_id)
        clusters[key] = clusters.get(key, np.zeros(6)) + sums
    keys = list(clusters)
    table = np.array([clusters[key] for key in keys]).reshape(-1, 6)
    strata = [dataset for dataset, _ in keys]
    total = table.sum(0)

    def interval(statistic: Statistic) -> Interval | None:
        return bootstrap(table, strata, statistic, seed=seed, resamples=resamples)

    by_dataset = {name: _speedup(table[[s == name for s in strata]].sum(0)) for name in dict.fromkeys(strata)}
    timed = table[(table[:, :4] > 0).all(1)]
    ratios = (timed[:, 0] / timed[:, 1]) / (timed[:, 2] / timed[:, 3])
    mean_tpot = _mean(timed[:, 1] / timed[:, 0]), _mean(timed[:, 3] / timed[:, 2])
    speedup = _speedup(total)
    warnings = []
    if speedup is None:
        warnings.append("no speedup: nothing in common with AR" if not common else "no speedup: 0 tokens or 0 seconds")
    elif len(keys) < MIN_PROMPTS:
        warnings.append(f"no interval below {MIN_PROMPTS} prompts (batches at batch sizes above 1)")
    return Comparison(
        prompts=len({(method.moments[m].dataset, p) for m in common for p in method.moments[m].prompt_ids}),
        speedup=speedup,
        interval=interval(pooled_speedup),
        tau=tau(table[:, 4], table[:, 5]),
        tau_interval=interval(pooled_tau),
        throughput=throughput(table[:, 0], table[:, 1]),
        by_dataset=by_dataset,
        geomean=geometric_mean(list(by_dataset.values())),
        geomean_interval=interval(geomean_speedup),
        mean_of_ratios=_mean(ratios),
        geometric_mean_of_ratios=geometric_mean(ratios.tolist()),
        ratio_of_mean_tpot=None if mean_tpot[0] is None or mean_tpot[1] is None else mean_tpot[1] / mean_tpot[0],
        tau_per_response=tau_per_response(table[:, 4], table[:, 5]),
        left_out=tuple(dict.fromkeys(left_out)),
        warnings=tuple(warnings),
    )


def _speedup(sums: Floats) -> float | None:
    mine, other = ratio(sums[0], sums[1]), ratio(sums[2], sums[3])
    return None if mine is None or other is None else mine / other


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if values.size else None


def _name(dataset: str, prompt_id: str) -> str:
    return f"{dataset}/{prompt_id}"
