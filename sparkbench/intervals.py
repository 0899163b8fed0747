"""Intervals: the bootstrap over prompts, and the statistics it is used on.

What is resampled is the prompt, never the round: rounds of one prompt resemble each other, and resampling
them gives intervals that are far too narrow. The two arms of a comparison are sums in one row, so they are
resampled together (paired); data sets are resampled apart (stratified). The generator has an explicit seed.
The estimators themselves are `stats.py`.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]

MIN_PROMPTS = 10
MIN_FREEDOM = 5
RESAMPLES = 4000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    low: float
    high: float


def pooled_speedup(sums: Floats) -> Floats:
    """Statistic for `bootstrap` on columns (tokens, seconds, AR's tokens, AR's seconds): ratio of sums."""
    pooled = sums.sum(-2)
    return np.asarray((pooled[..., 0] / pooled[..., 1]) / (pooled[..., 2] / pooled[..., 3]))


def geomean_speedup(sums: Floats) -> Floats:
    """Statistic for `bootstrap`, the same columns: geometric mean over strata of each one's ratio of sums."""
    each = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    return np.asarray(np.exp(np.log(each).mean(-1)))


def pooled_tau(sums: Floats) -> Floats:
    """Statistic for `bootstrap`: committed tokens (column 4) over rounds (column 5)."""
    pooled = sums.sum(-2)
    return np.asarray(pooled[..., 4] / pooled[..., 5])


def bootstrap(
    table: ArrayLike,
    strata: Sequence[str],
    statistic: Statistic,
    *,
    seed: int,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """An interval for `statistic` by resampling the rows of `table` within their strata.

    table:     [n, columns], one row a prompt: the sums the statistic is made of.
    statistic: [..., strata, columns] sums -> [...] values, so that all resamples are evaluated at once.
    Returns None below MIN_PROMPTS rows, where the strata are too small to show a spread, and where a resample
    has no value.

    The percentiles are expanded by sqrt(n / (n - strata)) and Student's t (Hesterberg 2015, section 5.3):
    plain percentiles cover too rarely at 10 to 30 prompts, because the bootstrap's spread is that of the
    sample, not of the population.
    """
    rows = np.asarray(table, float)
    groups = [np.flatnonzero(np.asarray(strata) == name) for name in dict.fromkeys(strata)]
    n, freedom = len(rows), len(rows) - len(groups)
    if n < MIN_PROMPTS or freedom < MIN_FREEDOM:
        return None
    generator = np.random.default_rng(seed)
    sums = np.empty((resamples, len(groups), rows.shape[1]))
    for index, group in enumerate(groups):
        counts = generator.multinomial(len(group), np.full(len(group), 1 / len(group)), size=resamples)
        sums[:, index] = counts @ rows[group]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(sums)
    if not np.isfinite(values).all():
        return None
    tail = NormalDist().cdf(-math.sqrt(n / freedom) * _student(1 - (1 - confidence) / 2, freedom))
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _student(probability: float, freedom: int) -> float:
    """A quantile of Student's t, Cornish-Fisher (Abramowitz and Stegun 26.7.5); 3 digits from 5 up."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
