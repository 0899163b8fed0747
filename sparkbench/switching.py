"""Up to which batch size a method is worth its drafts: measured at the start for `--switch-to-ar auto`.

A round verifies a draft tree a row, so its cost grows with the batch faster than that of autoregressive decoding (AR),
and past some batch size AR is faster. Each method and AR decode the same short texts side by side at batch sizes 1, 2,
4, ...; the break-even is the last size before the first at which the method's throughput is below AR's. The texts are
prompts of the run itself: the choice decides about speed alone, never about an output.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkbench.decoding.loop import DecodeConfig, Request
from sparkbench.decoding.sampling import noise_key
from sparkbench.settings import AUTO, SweepConfig

if TYPE_CHECKING:
    from sparkbench.models import Loaded

TOKENS = 32
REPEATS = 3
REFERENCE = 0


def most_rows(
    config: SweepConfig, loaded: "Loaded", prompts: Sequence[Sequence[int]]
) -> Mapping[float, Sequence[int | None]]:
    """By temperature, for each arm the batch size up to which it drafts; None is no limit.

    prompts: token ids, decoded by turns where a batch is larger than there are prompts.
    """
    arms = range(len(loaded.arms))
    if config.switch_to_ar != AUTO:
        given = [None if arm == REFERENCE else int(config.switch_to_ar) for arm in arms]
        return dict.fromkeys(config.temperatures, given)
    found = {}
    for temperature in config.temperatures:
        limits: list[int | None] = [None for _ in arms]
        open_arms = [arm for arm in arms if arm != REFERENCE]
        below = 0
        for size in _sizes(max(config.batch_sizes)):
            speedups = _speedups(size, open_arms, temperature, config, loaded, prompts)
            for arm in list(open_arms):
                if speedups[arm] < 1:
                    limits[arm] = below
                    open_arms.remove(arm)
            below = size
        found[temperature] = limits
    return found


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return [*itertools.takewhile(lambda size: size < largest, (2**power for power in range(64))), largest]


def _speedups(
    size: int,
    arms: Sequence[int],
    temperature: float,
    config: SweepConfig,
    loaded: "Loaded",
    prompts: Sequence[Sequence[int]],
) -> dict[int, float]:
    """Throughput over AR's at a batch size, the median of interleaved repeats."""
    decode = DecodeConfig(min(TOKENS, config.max_new_tokens), config.sampling(temperature), frozenset())
    ratios: dict[int, list[float]] = {arm: [] for arm in arms}
    for repeat in range(REPEATS + 1):
        requests = []
        for row in range(size):
            ids = tuple(prompts[(row + repeat * size) % len(prompts)])
            requests.append(Request(ids, noise_key(ids, config.seed, repeat, row)))
        seconds = {}
        for arm in (REFERENCE, *arms):
            generations = loaded.tools.generate(loaded.target, loaded.methods[arm], requests, decode)
            seconds[arm] = generations[0].batch_wall_s
        if repeat:  # the first warms up
            for arm in arms:
                ratios[arm].append(seconds[REFERENCE] / seconds[arm] if seconds[arm] > 0 else 1.0)
    return {arm: statistics.median(values) for arm, values in ratios.items()}
