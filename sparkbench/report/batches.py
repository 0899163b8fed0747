"""What batch sizes do to speed: speedup, throughput and latency by batch size, the break-even, how full batches were.

Tables for a summary that holds several batch sizes, or a stream of requests. The numbers are those of the summary's
rows (summary.py) and of `break_even.py`; nothing is computed from samples here.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sparkbench.break_even import break_even
from sparkbench.report.tables import framed, number, printable, short

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = dict[str, Any]
ARM = ("method", "variant", "budget")
PLACE = ("target", "temperature")
LEGEND = (
    "break-even: the batch size at which the speedup over AR falls to 1;",
    "~ before a speedup: its interval contains 1; fill: rows a round over batch size.",
)


def break_evens(rows: Iterable[Row]) -> list[Row]:
    """The break-even of each arm on each target, temperature and data set, for arms with several batch sizes."""
    found = []
    for key, several in _grouped(rows, (*PLACE, "dataset", *ARM)).items():
        names = dict(zip((*PLACE, "dataset", *ARM), key, strict=True))
        if len(several) > 1 and names["method"] != "autoregressive":
            speedups = {row["batch_size"]: row["speedup"] for row in several}
            even = break_even(speedups)
            found.append({**names, "batch_size": even.batch_size, "text": even.text, "monotone": even.monotone})
    return found


def tables(rows: Sequence[Row], everything: str, name_of: Callable[[Row], str]) -> list["RenderableType"]:
    """Tables by batch size for the rows over all data sets (`everything`, or the only one), where they say something.

    name_of: what a row's arm is called.
    """
    from rich.text import Text

    shown: list[RenderableType] = []
    for (target, temperature), here in _grouped(rows, PLACE).items():
        whole = [row for row in here if row["dataset"] == everything] or here
        if len({row["dataset"] for row in whole}) > 1:
            continue  # data sets of which no row over all was made
        sizes = sorted({row["batch_size"] for row in whole})
        title = printable(f"{short(target)}, temperature {temperature:g}")
        if len(sizes) > 1:
            evens = {_arm(each): each["text"] for each in break_evens(whole)}
            arms = list(_grouped(whole, ARM).values())
            shown += [Text(f"speedup over AR by batch size: {title}", style="bold")]
            shown += [_by_size(arms, sizes, name_of, _speedup, evens), Text("")]
            for heading, key, form in (("tok/s", "tokens_per_s", ".0f"), ("median latency, s", "latency_p50_s", ".2f")):
                shown += [Text(f"{heading} by batch size: {title}", style="bold")]
                shown += [_by_size(arms, sizes, name_of, _number(key, form), None), Text("")]
        if len(sizes) > 1 or sizes[0] > 1 or any(row["stream"] for row in whole):
            shown += [Text(f"requests: {title}", style="bold"), _requests(whole, name_of), Text("")]
    return [*shown, *(Text(line, style="dim") for line in LEGEND)] if shown else []


def _requests(rows: Sequence[Row], name_of: Callable[[Row], str]) -> "RenderableType":
    """Fill, and percentiles of latency and time to first token."""
    shares = ("p50", "p95", "p99")
    columns = ("method", "budget", "batch", "fill", *(f"{p}, s" for p in shares), *(f"TTFT {p}" for p in shares))
    lines = []
    for row in rows:
        cells = [number(row["batch_size"], "d"), number(row["fill"], ".0%")]
        cells += [number(row[f"latency_{p}_s"], ".2f") for p in shares]
        cells += [number(row[f"ttft_{p}_s"], ".2f") for p in shares]
        lines.append([name_of(row), number(row["budget"], "d"), *cells])
    return framed(columns, columns[:1], lines)


def _by_size(
    arms: Sequence[Sequence[Row]],
    sizes: Sequence[int],
    name_of: Callable[[Row], str],
    cell: Callable[[Row], str],
    evens: dict[tuple[Any, ...], str] | None,
) -> "RenderableType":
    columns = ("method", "budget", *map(str, sizes), *(["break-even"] if evens is not None else []))
    lines = []
    for several in arms:
        by_size = {row["batch_size"]: cell(row) for row in several}
        cells = [by_size.get(size, "-") for size in sizes]
        last = [] if evens is None else [evens.get(_arm(several[0]), "-")]
        lines.append([name_of(several[0]), number(several[0]["budget"], "d"), *cells, *last])
    return framed(columns, columns[:1], lines)


def _speedup(row: Row) -> str:
    """A speedup; one whose interval contains 1 is no win and no loss."""
    interval = row["speedup_interval"]
    unsure = interval is not None and interval[0] <= 1 <= interval[1]
    return ("~" if unsure else "") + number(row["speedup"], ".2f")


def _number(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: number(row[key], form)


def _arm(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ARM)


def _grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
