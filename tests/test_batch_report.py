"""Numbers by batch size: break-even, fill, percentiles, and the tables that show them."""

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_stats import measured, row, table

from sparkbench import stats
from sparkbench.break_even import break_even
from sparkbench.report.summary import Summary, summary_of


@pytest.mark.parametrize(
    ("speedups", "size", "text", "monotone"),
    [
        ({1: 2.0, 2: 2.0, 4: 0.5}, 2 * math.sqrt(2), "2.8", True),
        ({1: 4.0, 16: 0.5}, 16 ** (2 / 3), "6.3", True),
        ({4: 0.5, 1: 2.0, 2: 1.0}, 2.0, "2.0", True),
        ({1: 2.0, 2: 1.5, 32: 1.1}, None, ">32", True),
        ({2: 0.9, 4: 0.8}, None, "<2", True),
        ({2: 0.9, 4: 1.2}, None, "<2?", False),
        ({1: 2.0, 2: 0.5, 4: 2.0, 8: 0.1}, math.sqrt(2), "1.4?", False),
        ({1: 2.0}, None, "-", True),
        ({1: 2.0, 2: None}, None, "-", True),
        ({}, None, "-", True),
    ],
)
def test_break_even(speedups: dict[int, float | None], size: float | None, text: str, monotone: bool) -> None:
    found = break_even(speedups)
    assert (found.text, found.monotone) == (text, monotone)
    assert found.batch_size == (size if size is None else pytest.approx(size))


def test_break_even_agrees_with_a_fine_sweep() -> None:
    """On a curve that is a straight line in both logarithms, the interpolation is exact."""
    curve = {size: 3.0 * size**-0.5 for size in (1, 2, 4, 8, 16, 32)}
    assert break_even(curve).batch_size == pytest.approx(9.0)


def batch(rounds: list[int], size: int, name: str = "b", **values: Any) -> list[dict[str, Any]]:
    """Rows of one batch; row i ran rounds[i] rounds of two tokens."""
    common = {"batch_id": name, "batch_size": size, "batch_rounds": max(rounds), "batch_wall_s": 2.0} | values
    return [row(f"{name}{i}", 2 * count, 1.0, **{"rounds": count, **common}) for i, count in enumerate(rounds)]


def test_fill_counts_what_full_batches_would_have_had() -> None:
    assert stats.fill(measured(*batch([4, 4], 2))) == 1.0
    assert stats.fill(measured(*batch([4, 2], 2))) == 6 / 8
    assert stats.fill(measured(*batch([4], 2))) == 1 / 2, "a last batch of one prompt is half full"
    assert stats.fill(measured(*batch([4, 2], 2), *batch([10, 10], 2, "c"))) == 26 / 28
    assert stats.fill(measured(*batch([5, 5, 5], 1, batch_rounds=15, arrival_s=0.5))) == 1.0
    assert stats.fill(measured(*batch([4, 2], 2, batch_rounds=None))) is None, "an older file does not say"


def test_a_stream_is_timed_once_whatever_its_batch_size() -> None:
    (found,) = measured(*batch([5, 5, 5], 1, batch_rounds=15, arrival_s=0.5)).moments.values()
    assert (found.tokens, found.seconds) == (30, 2.0)


def test_percentiles() -> None:
    values = [float(value) for value in range(101)]
    assert [stats.percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert stats.percentile([3.0, None, 1.0], 0.5) == 2.0
    assert stats.percentile([None], 0.5) is None
    draws = np.random.default_rng(0).exponential(size=57).tolist()
    assert stats.percentile(draws, 0.95) == np.quantile(draws, 0.95)


def several(sizes: tuple[int, ...] = (1, 4, 16)) -> list[dict[str, Any]]:
    """AR takes 4 s a batch of any size; a method 2 s, twice as long with each step."""
    rows = []
    for step, size in enumerate(sizes):
        for name, wall in (("autoregressive", 4.0), ("m", 2.0 * 2**step)):
            for number in range(12):
                values = {"unit": f"u{size}", "method": name, "variant": name, "latency_s": wall + number}
                rows += batch([6] * size, size, f"b{number}", batch_wall_s=wall, **values)
                rows[-1]["decode_s"] = wall
    return rows


def shown(summary: Summary) -> list[str]:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(*summary.tables(), sep="\n")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_a_summary_of_several_batch_sizes_ends_with_the_break_even() -> None:
    summary = summary_of(table(several()))
    (even,) = summary.document()["break_even"]
    assert even["text"] == "4.0"
    assert (even["method"], even["batch_size"]) == ("m", pytest.approx(4.0))
    json.dumps(summary.document(), allow_nan=False)
    lines = shown(summary)
    start = next(place for place, line in enumerate(lines) if line.startswith("speedup over AR by batch size"))
    assert lines[start + 1].split() == ["method", "budget", "1", "4", "16", "break-even"]
    assert lines[start + 3].split() == ["m", "-", "2.00", "~1.00", "0.50", "4.0"]
    sizes = [row["batch_size"] for row in summary.rows if row["method"] == "m"]
    assert sizes == [1, 4, 16]


def test_failed_and_profiled_rows_have_no_latency() -> None:
    rows = batch([6, 6], 2, latency_s=1.0)
    rows += batch([6, 6], 2, "p", latency_s=50.0, **{"pass": "profile"})
    rows += batch([6, 6], 2, "e", latency_s=70.0, status="error")
    (found,) = summary_of(table(rows)).rows
    assert (found["latency_p50_s"], found["latency_p99_s"], found["ttft_p95_s"]) == (1.0, 1.0, 0.5)
    assert found["fill"] == 1.0


def test_one_batch_size_of_one_row_has_no_tables_of_its_own() -> None:
    assert not any("latency" in line or "fill" in line for line in shown(summary_of(table(several((1,))))))
    assert any(line.startswith("requests") for line in shown(summary_of(table(several((4,))))))


def test_rejection_has_no_exactness_to_show() -> None:
    rows = [row("a", 4, 1.0, method="autoregressive", variant="autoregressive")]
    rows += [row("a", 4, 1.0, variant="m:rule=rejection", rule="rejection")]
    assert any(line.split()[-1] == "rejection" for line in shown(summary_of(table(rows))) if line.startswith("m (a)"))


@pytest.mark.parametrize(("drafted", "said"), [(6, False), (3, False), (2, True), (0, True), (None, False)])
def test_a_method_that_rested_is_named(drafted: int | None, said: bool) -> None:
    rows = [row("a", 12, 1.0, method="autoregressive", variant="autoregressive", rounds_drafted=0)]
    rows += [row("a", 12, 1.0, rounds=6, rounds_drafted=drafted)]
    warnings = " ".join(summary_of(table(rows)).warnings)
    assert ("drafted in less than half of their rounds: m at batch size 1" in warnings) == said
