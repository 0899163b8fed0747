"""A profile: step curves, drafting beside them, experts, and the share of this machine's peaks that is reached.

Nothing is printed here (`cli/profile.py`). The curves are what others read (`curve.py`); the rest of a profile is kept
beside them in the same file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Protocol

from sparkbench import machine
from sparkbench.decoding.method import Method
from sparkbench.decoding.target import Target
from sparkbench.profiling.curve import StepCurve, StepCurves
from sparkbench.profiling.experts import ExpertCount, expected_distinct
from sparkbench.profiling.lookups import LookupTime, lookup_time
from sparkbench.profiling.measure import (
    StepTime,
    curve_of,
    distinct_experts,
    draft_seconds,
    gathered,
    node_widths,
    step_times,
)
from sparkbench.profiling.roofline import Peaks, Work, measure_peaks
from sparkbench.profiling.shapes import require


class Progress(Protocol):
    """What is told of progress."""

    def start(self, total: int) -> None: ...

    def advance(self, label: str) -> None: ...

    def note(self, message: str) -> None: ...


@dataclass(frozen=True)
class Grid:
    """What is measured: every batch size with every context, at these numbers of tokens a forward."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class Row:
    """One point of a curve. `of_bandwidth`: read_bytes / raw_s / measured bandwidth; `of_peak`: the same of flops."""

    batch_size: int
    context: int
    tokens: int
    pack_s: float
    raw_s: float
    smooth_s: float
    read_bytes: float
    flops: float
    of_bandwidth: float
    of_peak: float


@dataclass(frozen=True)
class DraftTime:
    """Median seconds of a method's drafting in a warm round (stage `draft`)."""

    method: str
    drafter: str
    batch_size: int
    context: int
    draft_s: float


@dataclass(frozen=True)
class Profile:
    """All that was measured of one target."""

    curves: StepCurves
    peaks: Peaks
    rows: tuple[Row, ...]
    drafts: tuple[DraftTime, ...]
    experts: tuple[ExpertCount, ...]
    lookups: tuple[LookupTime, ...]


def measure(
    target: Target, methods: Mapping[str, Method], grid: Grid, progress: Progress, indices: Sequence[str] = ()
) -> Profile:
    """Measure a target, the drafting of `methods`, by name, and look-ups in n-gram indices, by file.

    UsageError: a number that is not allowed, or a broken index.   RunError: the memory is not enough.
    """
    places = list(product(grid.batch_sizes, grid.contexts))
    for batch_size, context in places:
        node_widths(target, batch_size, context, grid.tokens, grid.repeats)
    work = Work.of(target)
    largest = max(grid.batch_sizes), max(grid.contexts), max(*grid.tokens, *grid.batch_sizes)
    require(f"profiling {target.name}", work.memory_bytes(*largest, target.vocab_size), target.device)
    progress.start(1 + len(places) * (1 + len(methods)) + len(indices))
    peaks = measure_peaks(target.device, target.dtype)
    progress.advance("bandwidth and peak")
    lookups = []  # first, since a file may be broken
    for source in indices:
        lookups.append(lookup_time(source, grid.repeats))
        progress.advance(f"index {source}")
    curves: list[StepCurve] = []
    rows: list[Row] = []
    drafts: list[DraftTime] = []
    experts: list[ExpertCount] = []
    for batch_size, context in places:
        where = f"batch size {batch_size}, context {context}"
        times = step_times(target, batch_size, context, grid.tokens, grid.repeats)
        curve = curve_of(batch_size, context, times)
        hit = distinct_experts(target, batch_size, context, curve.tokens) if work.experts else {}
        curves.append(curve)
        experts += [
            ExpertCount(batch_size, context, tokens, count, expected_distinct(work.experts, work.active, tokens))
            for tokens, count in hit.items()
        ]
        rows += _rows(work, peaks, curve, times, hit)
        progress.advance(f"target, {where}")
        for name, method in methods.items():
            seconds = draft_seconds(target, method, batch_size, context, grid.repeats)
            if seconds is None:
                progress.note(f"{name}: its context is too short for {where}")
            else:
                drafts.append(DraftTime(name, method.drafter.source, batch_size, context, seconds))
            progress.advance(f"{name}, {where}")
    beside = {
        "machine": machine.describe(target.device),
        "peaks": asdict(peaks),
        "rows": [asdict(row) for row in rows],
        "drafts": [asdict(draft) for draft in drafts],
        "experts": [asdict(count) for count in experts],
        "lookups": [asdict(each) for each in lookups],
    }
    curve_file = gathered(target, curves, beside)
    return Profile(curve_file, peaks, tuple(rows), tuple(drafts), tuple(experts), tuple(lookups))


def _rows(work: Work, peaks: Peaks, curve: StepCurve, times: Sequence[StepTime], hit: Mapping[int, float]) -> list[Row]:
    rows = []
    for time, raw_s, smooth_s in zip(times, curve.raw_s, curve.smooth_s, strict=True):
        place = curve.batch_size, curve.context, time.tokens
        read_bytes, flops = work.read_bytes(*place, hit.get(time.tokens, 0.0)), work.flops(*place)
        of_bandwidth, of_peak = read_bytes / raw_s / peaks.bytes_per_s, flops / raw_s / peaks.flops_per_s
        rows.append(Row(*place, time.pack_s, raw_s, smooth_s, read_bytes, flops, of_bandwidth, of_peak))
    return rows
