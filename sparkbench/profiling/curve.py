"""The step curve: seconds of one verification forward against the tokens it processes, and the file that keeps it.

A scheduler asks a curve what one more node would cost. Real curves are staircases with noise on top: kernels change
with the width, and no sane scheduler should gain by adding nodes. So a curve is kept raw, as measured, and smoothed:
the closest non-decreasing values by least squares, which keep the steps.

Measuring is `measure.py`. No torch is imported here.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from sparkbench.errors import UsageError
from sparkbench.files import write_text

FORMAT = "sparkbench step curves"
_LARGEST = 1 << 40  # tokens or seconds: what is beyond is no measurement
VERSION = 1


@dataclass(frozen=True)
class StepCurve:
    """Seconds of one verification forward against the tokens it processes (rows x padded nodes, roots included).

    context:  tokens in the cache of each row.      tokens: ascending, distinct.
    raw_s:    medians as measured.                  smooth_s: the same made non-decreasing (`isotonic`).
    ValueError: no points, other lengths, or values that are not positive, finite and in order.
    """

    batch_size: int
    context: int
    tokens: tuple[int, ...]
    raw_s: tuple[float, ...]
    smooth_s: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"curve of batch size {self.batch_size} and context {self.context}"
        numbers = (self.batch_size, self.context, *self.tokens)
        if not all(type(number) is int and 0 < number < _LARGEST for number in numbers):
            raise ValueError(f"{where}: batch size, context and tokens must be whole numbers above 0")
        if not self.tokens or any(after <= before for before, after in pairwise(self.tokens)):
            raise ValueError(f"{where}: tokens must be ascending, one or more")
        for name, values in (("raw_s", self.raw_s), ("smooth_s", self.smooth_s)):
            if len(values) != len(self.tokens):
                raise ValueError(f"{where}: {name} has {len(values)} values for {len(self.tokens)} numbers of tokens")
            if not all(_is_number(value) and 0 < value < _LARGEST for value in values):
                raise ValueError(f"{where}: {name} must hold finite numbers above 0")
        if any(after < before for before, after in pairwise(self.smooth_s)):
            raise ValueError(f"{where}: smooth_s must not decrease")

    @classmethod
    def measured(cls, batch_size: int, context: int, tokens: Sequence[int], raw_s: Sequence[float]) -> "StepCurve":
        """The curve of measured medians."""
        return cls(batch_size, context, tuple(tokens), tuple(raw_s), isotonic(raw_s))

    def seconds(self, tokens: int, *, raw: bool = False) -> float:
        """Seconds of a forward over `tokens`.

        Linear between points; the first value below them; beyond them the last segment's slope continues (where noise
        makes it negative in the raw curve: the last value).
        """
        values = self.raw_s if raw else self.smooth_s
        if tokens <= self.tokens[0] or len(values) == 1:
            return values[0]
        right = min(bisect_right(self.tokens, tokens), len(values) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (self.tokens[right] - self.tokens[left])
        if tokens > self.tokens[-1]:
            return values[-1] + max(slope, 0.0) * (tokens - self.tokens[-1])
        return values[left] + slope * (tokens - self.tokens[left])


@dataclass(frozen=True)
class StepCurves:
    """All curves of one target on one device, and where they come from.

    target:   name; of random weights it says so.        revision: the commit on the hub, None for others.
    device:   the model of the GPU or CPU.               threads:  of the CPU.
    versions: of the libraries that matter.              beside:   what was measured along with the curves, as JSON
                                                                   values that no reader of curves needs.
    ValueError: no curves, or two of the same batch size and context.
    """

    target: str
    revision: str | None
    device: str
    dtype: str
    threads: int
    versions: Mapping[str, str | None]
    curves: tuple[StepCurve, ...]
    beside: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = [(curve.batch_size, curve.context) for curve in self.curves]
        if not places or len(set(places)) < len(places):
            raise ValueError("there must be one or more curves, each of another batch size or context")

    def at(self, batch_size: int, context: int) -> StepCurve:
        """The curve of this batch size, or else of the nearest one (by ratio); of these that of the nearest context.

        Between two equally near ones the smaller is taken.
        """
        sizes = {curve.batch_size for curve in self.curves}
        size = min(sizes, key=lambda known: (abs(math.log(known / batch_size)), known))
        candidates = [curve for curve in self.curves if curve.batch_size == size]
        return min(candidates, key=lambda curve: (abs(curve.context - context), curve.context))

    @classmethod
    def load(cls, path: str | Path) -> "StepCurves":
        """Read a file that `save` wrote. UsageError: missing, another kind of file or version, or bad values."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read step curves from {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UsageError(f"{path} holds no step curves: it is not JSON") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UsageError(f"{path} holds no step curves; `sparkbench profile` writes them")
        if document.get("version") != VERSION or isinstance(document["version"], bool):
            raise UsageError(f"{path}: step curves of version {document.get('version')!r}; allowed: {VERSION}")
        try:
            return cls(
                curves=tuple(_curve(entry) for entry in _typed(document["curves"], list)),
                target=_typed(document["target"], str),
                revision=_typed(document["revision"], str, type(None)),
                device=_typed(document["device"], str),
                dtype=_typed(document["dtype"], str),
                threads=_typed(document["threads"], int),
                versions=_typed(document["versions"], dict),
                beside=_typed(document["beside"], dict),
            )
        except KeyError as error:
            raise UsageError(f"{path}: broken step curves: {error.args[0]!r} is missing") from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path}: broken step curves: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all. RunError: it cannot be written."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_text(Path(path), json.dumps(document, indent=1, allow_nan=False) + "\n")


def isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """The non-decreasing values closest to `values` by least squares, by pooling adjacent violators.

    Neighbours that fall are replaced by their mean until none falls; what rises stays as it is.
    """
    pools: list[tuple[float, int]] = []  # sum and count
    for value in values:
        total, count = float(value), 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, members = pools.pop()
            total, count = total + before, count + members
        pools.append((total, count))
    means = (total / count for total, count in pools for _ in range(count))
    return tuple(accumulate(means, max))  # two pools may round to a fall in the last digit


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _curve(entry: Any) -> StepCurve:
    entry = _typed(entry, dict)
    points = (tuple(_typed(entry[name], list)) for name in ("tokens", "raw_s", "smooth_s"))
    return StepCurve(entry["batch_size"], entry["context"], *points)


def _typed(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{json.dumps(value)[:40]} stands where {kinds[0].__name__} is expected")
    return value
