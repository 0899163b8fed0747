"""The summary of results: one table a data set, temperature and batch size, and one over all data sets.

`summarise` gives plain rows, one an arm, with every estimator of `stats.py` that the tables and `--json`
need, and the warnings that belong next to them. What cannot be computed is None (null), never NaN. Not
covered: plots and files.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from sparkbench import stats
from sparkbench.intervals import Interval
from sparkbench.report import batches
from sparkbench.report.tables import framed, number, printable, short
from sparkbench.results import read_samples

if TYPE_CHECKING:
    from rich.console import RenderableType

EMBEDDED = "embedded"
REFERENCE = "autoregressive"
ALL = "all data sets"
SCENE = ("target", "temperature", "batch_size")
COLUMNS = ("method", "budget", "tau", "speedup [95 %]", "tok/s", "TTFT", "same/tie/viol")
GEOMEAN = "geomean"
RESTING = 0.5  # share of rounds with drafts below which a method is said to have rested
LEGEND = (
    "speedup: decode tokens/s over AR's, ratio of sums, with a 95 % bootstrap over prompts;",
    "tau: tokens a round, bonus included, pooled; TTFT in ms;",
    "same/tie/viol: outputs identical to AR's, tie flips, violations; rejection draws its own.",
)


@dataclass(frozen=True)
class Summary:
    """Rows, one an arm and data set (and over all data sets, where several), and what to know of them."""

    rows: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS

    def document(self) -> dict[str, Any]:
        """JSON values: rows, warnings and the meaning of the headline numbers."""
        return {
            "rows": list(self.rows),
            "break_even": batches.break_evens(self.rows),
            "warnings": list(self.warnings),
            "legend": " ".join(LEGEND),
        }

    def tables(self) -> list["RenderableType"]:
        """What a terminal shows, at most 80 columns wide; every text is shown literally."""
        from rich.text import Text

        shown: list[RenderableType] = []
        marks = _marks(list(self.rows))
        scenes = dict.fromkeys((row["dataset"], *(row[name] for name in SCENE)) for row in self.rows)
        for dataset, target, temperature, batch_size in scenes:
            rows = [row for row in self.rows if _scene(row) == (dataset, target, temperature, batch_size)]
            prompts = max(row["prompts"] for row in rows)
            here = {row["variant"] for row in rows}
            settings = f"temperature {temperature:g}, batch size {batch_size}, {prompts} prompts"
            shown += [
                Text(printable(f"{dataset}: {short(target)}, {settings}"), style="bold"),
                _table(rows, marks),
                *(Text(printable(f"{mark} {variant}")) for variant, mark in marks.items() if variant in here),
                Text(""),
            ]
        shown += batches.tables(self.rows, ALL, lambda row: _name(row, marks))
        shown += [Text(line, style="dim") for line in LEGEND] if self.rows else []
        return shown + [Text(printable(f"warning: {warning}"), style="yellow") for warning in self.warnings]


def summarise(paths: str | Path | Iterable[str | Path]) -> Summary:
    """Summarise runs, folders or files as `results.read_samples` takes them. UsageError: nothing readable."""
    loaded = read_samples([paths] if isinstance(paths, str | Path) else paths)
    return summary_of(loaded.table, loaded.notes)


def summary_of(samples: pa.Table, notes: Iterable[str] = ()) -> Summary:
    """The summary of a table of samples. Runs count together; each is compared with its own AR."""
    samples = samples.drop_columns(["output_ids"])
    rows: list[dict[str, Any]] = []
    scenes = list(_groups(samples, SCENE))
    targets = list(dict.fromkeys(scene["target"] for scene, _ in scenes))
    scenes.sort(key=lambda each: (targets.index(each[0]["target"]), *(each[0][name] or 0 for name in SCENE[1:])))
    for scene, table in scenes:
        datasets = list(_groups(table, ("dataset",)))
        parts = [(name["dataset"], part) for name, part in datasets]
        for dataset, part in [*parts, (ALL, table)] if len(parts) > 1 else parts:
            rows += _rows({"dataset": dataset, **scene}, part)
    return Summary(tuple(rows), tuple(_warnings(samples, rows, notes)))


def _rows(scene: dict[str, Any], samples: pa.Table) -> Iterator[dict[str, Any]]:
    arms = list(_groups(samples, ("method", "variant", "budget")))
    arms.sort(key=lambda arm: (arm[0]["method"] != REFERENCE, arm[0]["variant"], arm[0]["budget"] or 0))
    measured = [stats.measurements(table) for _, table in arms]
    reference = next((m for (arm, _), m in zip(arms, measured, strict=True) if arm["method"] == REFERENCE), None)
    for (arm, table), mine in zip(arms, measured, strict=True):
        found = stats.compare(mine, reference or stats.Measured({}, ()))
        alone = stats.compare(mine, mine)
        exactness = Counter(table["exactness"].to_pylist())
        status = Counter(table["status"].to_pylist())
        is_reference = arm["method"] == REFERENCE
        timed = table.filter(pc.and_(pc.equal(table["pass"], "clean"), pc.equal(table["status"], "ok")))
        times = {name: timed[f"{name}_s"].to_pylist() for name in ("latency", "ttft")}
        yield {
            **scene,
            **arm,
            "rule": next(iter(pc.unique(table["rule"]).to_pylist()), None),
            "stream": any(moment is not None for moment in timed["arrival_s"].to_pylist()),
            "prompts": alone.prompts,
            "tau": alone.tau,
            "tau_interval": _pair(alone.tau_interval),
            "tau_per_response": alone.tau_per_response,
            "tokens_per_s": alone.throughput,
            "speedup": found.speedup,
            "speedup_interval": None if is_reference else _pair(found.interval),
            "speedup_geomean_over_datasets": found.geomean,
            "speedup_geomean_interval": None if is_reference else _pair(found.geomean_interval),
            "speedup_mean_of_ratios": found.mean_of_ratios,
            "speedup_geometric_mean_of_ratios": found.geometric_mean_of_ratios,
            "speedup_ratio_of_mean_tpot": found.ratio_of_mean_tpot,
            "fill": stats.fill(mine),
            "drafted": _share(timed, "rounds_drafted", "rounds"),
            **{
                f"{name}_p{share}_s": stats.percentile(values, share / 100)
                for name, values in times.items()
                for share in (50, 95, 99)
            },
            "ttft_s": pc.mean(table.filter(pc.equal(table["pass"], "clean"))["ttft_s"]).as_py(),
            "identical": exactness["identical"],
            "tie_flips": exactness["tie_flip"],
            "violations": exactness["violation"],
            "failed": status["error"],
            "skipped": status["context"] + status["empty"],
            "degenerate": pc.sum(table["degenerate"]).as_py() or 0,
            "left_out": list(found.left_out),
            "warnings": [] if is_reference else list(found.warnings),
        }


def _warnings(samples: pa.Table, rows: list[dict[str, Any]], notes: Iterable[str]) -> Iterator[str]:
    yield from notes
    if EMBEDDED in pc.unique(samples["target"]).to_pylist():
        yield "these are numbers of the embedded model; a ranking on it is no evidence for real models"
    counts = ("violations", "degenerate", "failed", "skipped")
    total = {name: sum(row[name] for row in rows if row["dataset"] != ALL) for name in counts}
    if total["violations"]:
        yield f"{total['violations']} outputs violate exactness: they are not what AR returns"
    if total["degenerate"]:
        yield f"{total['degenerate']} outputs are degenerate (repetitive), which flatters every method"
    resting = [
        printable(f"{row['variant']} at batch size {row['batch_size']}")
        for row in rows
        if row["method"] != REFERENCE and row["drafted"] is not None and row["drafted"] < RESTING
    ]
    if resting:
        yield f"drafted in less than half of their rounds: {_listing(list(dict.fromkeys(resting)))}"
    if total["failed"]:
        reasons = Counter(reason for reason in samples["error"].to_pylist() if reason is not None)
        shown = "; ".join(reason for reason, _ in reasons.most_common(3))
        yield f"{total['failed']} rows failed and are left out: {shown}"
    if total["skipped"]:
        yield f"{total['skipped']} rows were skipped: too long for the context, or empty prompts"
    lost = dict.fromkeys(name for row in rows for name in row["left_out"])
    if lost:
        yield f"left out of the speedup, since an arm lacks them: {_listing(list(lost))}"
    for reason, cells in Counter(text for row in rows for text in row["warnings"]).items():
        yield f"{reason} ({cells} of {len(rows)} rows)"


def _groups(table: pa.Table, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """The parts of a table by the values of some columns (null is a value), in order of appearance."""
    for key in table.group_by(list(names), use_threads=False).aggregate([]).to_pylist():
        mask = None
        for name, value in key.items():
            here = pc.is_null(table[name]) if value is None else pc.fill_null(pc.equal(table[name], value), False)
            mask = here if mask is None else pc.and_(mask, here)
        yield key, table.filter(mask)


def _marks(rows: list[dict[str, Any]]) -> dict[str, str]:
    """(a), (b), ... by variant, for those with options: their names are too long for a column."""
    variants = dict.fromkeys(row["variant"] for row in rows if row["variant"] != row["method"])
    return {variant: f"({_letters(number)})" for number, variant in enumerate(variants)}


def _letters(number: int) -> str:
    """0, 1, ... as a, b, ..., z, aa, ab, ..."""
    rest, last = divmod(number, 26)
    return (_letters(rest - 1) if rest else "") + chr(ord("a") + last)


def _table(rows: list[dict[str, Any]], marks: dict[str, str]) -> "RenderableType":
    columns = COLUMNS if rows[0]["dataset"] != ALL else (*COLUMNS[:4], GEOMEAN, *COLUMNS[4:])
    cells = [
        {
            "method": _name(row, marks),
            "budget": number(row["budget"], "d"),
            "tau": number(row["tau"], ".2f"),
            "speedup [95 %]": number(row["speedup"], ".2f") + _brackets(row["speedup_interval"]),
            GEOMEAN: number(row["speedup_geomean_over_datasets"], ".2f"),
            "tok/s": number(row["tokens_per_s"], ".0f"),
            "TTFT": number(row["ttft_s"] and row["ttft_s"] * 1000, ".1f"),
            "same/tie/viol": _exactness(row),
        }
        for row in rows
    ]
    return framed(columns, COLUMNS[:1], [[each[name] for name in columns] for each in cells])


def _share(table: pa.Table, part: str, whole: str) -> float | None:
    """The sum of a column over that of another; None where one has no values, or nothing to divide by."""
    sums = pc.sum(table[part]).as_py(), pc.sum(table[whole]).as_py()
    return sums[0] / sums[1] if sums[0] is not None and sums[1] else None


def _name(row: dict[str, Any], marks: dict[str, str]) -> str:
    return printable(f"{row['method']} {marks.get(row['variant'], '')}".strip())


def _exactness(row: dict[str, Any]) -> str:
    if row["method"] == REFERENCE:
        return "reference"
    if row["rule"] not in (None, "match"):
        return str(row["rule"])
    return f"{row['identical']}/{row['tie_flips']}/{row['violations']}"


def _brackets(interval: list[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _scene(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["dataset"], *(row[name] for name in SCENE))
