"""When the requests of a stream arrive: `poisson:R` is R requests a second on average, independent of each other.

A stream measures what users feel under load: requests join while others run, and wait when there are more of them than
slots. The times are drawn from a generator of their own, the same for all methods.
"""

import math

import numpy as np

from sparkbench.errors import UsageError

KIND = "poisson"
LEAST, MOST = 1e-6, 1e6  # requests a second; beyond, the clock's float64 has no microseconds left


def parse(text: str) -> float:
    """Requests a second of `poisson:R`. UsageError: another form, or a rate outside of [LEAST, MOST]."""
    kind, colon, rate = text.partition(":")
    try:
        value = float(rate) if kind == KIND and colon else math.nan
    except ValueError:
        value = math.nan
    if not LEAST <= value <= MOST:
        raise UsageError(f"arrivals {text!r} is not allowed: {KIND}:R with R requests a second, {LEAST:g} to {MOST:g}")
    return value


def moments(text: str, count: int, seed: int, stream: int = 0) -> list[float]:
    """Arrival times in seconds of `count` requests, the first at 0; `stream` tells streams of one seed apart."""
    gaps = np.random.Generator(np.random.PCG64([seed, stream])).exponential(1 / parse(text), max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
