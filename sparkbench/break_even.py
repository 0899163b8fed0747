"""The batch size at which a method stops being faster than autoregressive decoding (AR), from its measured speedups.

What a speedup is, is `stats.py`; what is shown of it, `report/batches.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BreakEven:
    """The batch size at which a method's speedup over AR falls to 1.

    batch_size: None where no measured interval holds it; `text` says on which side it lies: `<2`, `>32`, or `-`.
    monotone:   False if a larger batch size was faster than AR again.
    """

    batch_size: float | None
    text: str
    monotone: bool = True


def break_even(speedups: Mapping[int, float | None]) -> BreakEven:
    """The break-even of speedups by batch size.

    It lies between the last size before the first at which the method is slower than AR, and that size, interpolated
    in the logarithms of both: beyond it the method is not known to be safe, even where a larger size is faster again.
    """
    known = sorted((size, value) for size, value in speedups.items() if value is not None and value > 0)
    if len(known) < 2:
        return BreakEven(None, "-")
    slower = next((place for place, (_, value) in enumerate(known) if value < 1), None)
    if slower is None:
        return BreakEven(None, f">{known[-1][0]}")
    monotone = all(value < 1 for _, value in known[slower:])
    mark = "" if monotone else "?"
    if slower == 0:
        return BreakEven(None, f"<{known[0][0]}{mark}", monotone)
    (low, above), (high, below) = known[slower - 1], known[slower]
    share = math.log(above) / (math.log(above) - math.log(below))
    size = low * (high / low) ** share
    return BreakEven(size, f"{size:.1f}{mark}", monotone)
