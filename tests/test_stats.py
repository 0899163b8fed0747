"""Estimators on hand-made numbers, and intervals by simulation."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkbench import intervals, stats
from sparkbench.intervals import Floats, bootstrap, pooled_tau
from sparkbench.report.summary import summary_of
from sparkbench.results import SAMPLES

COMMITTED = [6, 1, 3, 3]
ACCEPTED = [5, 0, 2, 5]


def row(prompt: str, tokens: int, seconds: float, **values: Any) -> dict[str, Any]:
    """A sample at batch size 1 that decoded `tokens` after the first."""
    basis = {
        "run": "r",
        "unit": "u",
        "target": "t",
        "method": "m",
        "variant": "m",
        "dataset": "d",
        "prompt_id": prompt,
        "turn": 0,
        "temperature": 0.0,
        "batch_size": 1,
        "batch_id": prompt,
        "batch_wall_s": 99.0,
        "repeat": 0,
        "pass": "clean",
        "status": "ok",
        "tokens_out": tokens + 1,
        "decode_s": seconds,
        "committed_sum": tokens,
        "rounds": max(1, tokens // 2),
        "ttft_s": 0.5,
        "degenerate": False,
        "output_ids": [1],
    }
    return basis | values


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SAMPLES)


def measured(*rows: dict[str, Any]) -> stats.Measured:
    return stats.measurements(table(rows))


def test_acceptance_counters() -> None:
    assert stats.tau(sum(COMMITTED), len(COMMITTED)) == 3.25
    assert stats.survival(ACCEPTED, 5) == [3 / 4, 3 / 4, 2 / 4, 2 / 4, 2 / 4]
    assert stats.conditional_acceptance(ACCEPTED, 5) == [3 / 4, 1.0, 2 / 3, 1.0, 1.0]
    products = itertools.accumulate(stats.conditional_acceptance(ACCEPTED, 5), lambda a, b: (a or 0) * (b or 0))
    assert sum(value or 0 for value in products) == pytest.approx(np.mean(ACCEPTED))


def test_offered_acceptance_counts_rounds_that_were_offered_a_child() -> None:
    # Three rounds stop at the root, one of which was offered nothing; one round accepts one token, at a leaf.
    accepted, offered = [0, 0, 0, 1], [True, True, False, False]
    assert stats.conditional_acceptance(accepted, 2) == [1 / 4, 0.0]
    assert stats.offered_acceptance(accepted, offered, 2) == [1 / 3, None]


def test_never_and_no_rounds_are_numbers_or_none() -> None:
    assert stats.tau([1, 1, 1], [1, 1, 1]) == 1.0
    assert stats.tau([0], [0]) is None
    assert stats.survival([], 2) == [None, None]
    assert stats.conditional_acceptance([0, 0], 3) == [0.0, None, None]
    assert stats.tau_per_response([3, 0], [1, 0]) == 3.0
    assert stats.tau_per_response([], []) is None
    assert stats.throughput([5], [0.0]) is None
    assert stats.throughput([5], [float("nan")]) is None
    assert stats.tpot([0], [1.0]) is None
    assert stats.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert stats.geometric_mean([2.0, None]) is None
    assert stats.geometric_mean([]) is None


def test_pooled_and_averaged_numbers_have_their_own_names() -> None:
    reference = measured(row("a", 100, 10.0), row("b", 10, 0.5))
    method = measured(row("b", 10, 0.5), row("a", 100, 2.5))
    found = stats.compare(method, reference)
    assert found.speedup == pytest.approx(3.5)
    assert found.mean_of_ratios == pytest.approx(2.5)
    assert found.geometric_mean_of_ratios == pytest.approx(2.0)
    assert found.ratio_of_mean_tpot == pytest.approx(2.0)
    assert found.prompts == 2
    assert found.interval is None
    assert "no interval below 10 prompts" in found.warnings[0]
    assert stats.tau([32, 12], [4, 12]) == 2.75
    assert stats.tau_per_response([32, 12], [4, 12]) == 4.5


def test_what_one_arm_lacks_is_left_out_and_listed() -> None:
    reference = measured(row("a", 100, 10.0), row("b", 10, 0.5), row("c", 50, 5.0))
    failed = row("c", 0, 0.0, status="error", tokens_out=None, decode_s=None, committed_sum=None, rounds=None)
    unfit = failed | {"prompt_id": "e", "batch_id": None, "status": "context"}
    method = measured(row("a", 100, 2.5), row("d", 1000, 0.1), failed, unfit)
    found = stats.compare(method, reference)
    assert found.speedup == pytest.approx(4.0)
    assert sorted(found.left_out) == ["d/b", "d/c", "d/d", "d/e"]
    assert stats.compare(method, stats.Measured({}, ())).speedup is None


def test_no_seconds_and_no_tokens_are_none_with_a_warning() -> None:
    for broken in (row("a", 100, 0.0), row("a", 0, 1.0)):
        found = stats.compare(measured(broken), measured(row("a", 100, 1.0)))
        assert found.speedup is None
        assert found.mean_of_ratios is None
        assert "0 tokens or 0 seconds" in found.warnings[0]


def test_runs_are_only_compared_with_their_own_reference() -> None:
    slow, fast = {"run": "slow"}, {"run": "fast"}
    reference = measured(row("a", 10, 10.0, **slow), row("a", 10, 1.0, **fast))
    found = stats.compare(measured(row("a", 10, 5.0, **slow)), reference)
    assert found.speedup == pytest.approx(2.0)


def test_a_batch_counts_once() -> None:
    batch = {"batch_size": 2, "batch_id": "ab", "batch_wall_s": 2.0}
    both = [row("a", 30, 2.0, **batch), row("b", 10, 1.0, **batch)]
    found = measured(*both, *(each | {"pass": "profile"} for each in both))
    (measurement,) = found.moments.values()
    assert (measurement.tokens, measurement.seconds, measurement.prompt_ids) == (40, 2.0, ("a", "b"))
    half = measured(both[0], both[1] | {"status": "error"})
    assert not half.moments
    assert half.left_out == ("d/a", "d/b")


def test_order_of_rows_changes_nothing() -> None:
    generator = np.random.default_rng(5)
    reference = [row(f"p{i}", int(generator.integers(5, 50)), float(generator.uniform(1, 2))) for i in range(12)]
    method = [each | {"decode_s": each["decode_s"] * float(generator.uniform(0.2, 0.6))} for each in reference]
    found = stats.compare(measured(*method), measured(*reference))
    again = stats.compare(measured(*method[::-1]), measured(*reference[5:], *reference[:5]))
    assert again == found
    assert found.interval is not None
    assert found.speedup is not None
    assert found.interval.low < found.speedup < found.interval.high


def test_geometric_mean_over_data_sets() -> None:
    reference = measured(row("a", 10, 10.0), row("a", 10, 10.0, dataset="e", unit="v"))
    method = measured(row("a", 10, 5.0), row("a", 10, 1.25, dataset="e", unit="v"))
    found = stats.compare(method, reference)
    assert found.by_dataset == {"d": pytest.approx(2.0), "e": pytest.approx(8.0)}
    assert found.geomean == pytest.approx(4.0)
    assert found.speedup == pytest.approx(20 / 6.25)


def test_intervals_need_prompts_and_keep_their_seed() -> None:
    sums = np.random.default_rng(0).uniform(1, 2, (12, 6))
    assert bootstrap(sums[:9], ["a"] * 9, pooled_tau, seed=1) is None
    assert bootstrap(sums, list("abcdefghijkl"), pooled_tau, seed=1) is None
    first = bootstrap(sums, ["a"] * 12, pooled_tau, seed=1)
    assert first == bootstrap(sums, ["a"] * 12, pooled_tau, seed=1)
    assert first != bootstrap(sums, ["a"] * 12, pooled_tau, seed=2)
    sums[:, 5] = 0
    assert bootstrap(sums, ["a"] * 12, pooled_tau, seed=1) is None


def test_students_quantiles() -> None:
    for freedom, quantile in ((5, 2.571), (9, 2.262), (19, 2.093), (99, 1.984)):
        assert intervals._student(0.975, freedom) == pytest.approx(quantile, abs=4e-3)


def rounds_of_prompts(generator: np.random.Generator, prompts: int) -> Floats:
    """Rounds [prompts, 20] whose length depends on the prompt: rounds of one prompt resemble each other."""
    level = generator.gamma(4.0, 1.0, (prompts, 1))
    return np.asarray(1.0 + generator.poisson(level, (prompts, 20)), float)


@pytest.mark.parametrize(("prompts", "strata"), [(10, 1), (24, 6), (30, 2)])
def test_intervals_cover(prompts: int, strata: int) -> None:
    generator = np.random.default_rng(7)
    names = [f"set {index % strata}" for index in range(prompts)]
    by_prompt = by_round = 0
    trials = 300
    for trial in range(trials):
        rounds = rounds_of_prompts(generator, prompts)
        sums = np.zeros((prompts, 6))
        sums[:, 4], sums[:, 5] = rounds.sum(1), rounds.shape[1]
        found = bootstrap(sums, names, pooled_tau, seed=trial, resamples=500)
        assert found is not None
        by_prompt += found.low <= 5.0 <= found.high
        if trial % 3:
            continue
        # The planted error, on every third sample: each round as if it were a prompt of its own.
        single = np.zeros((rounds.size, 6))
        single[:, 4], single[:, 5] = rounds.ravel(), 1
        wrong = bootstrap(single, ["a"] * rounds.size, pooled_tau, seed=trial, resamples=200)
        assert wrong is not None
        by_round += wrong.low <= 5.0 <= wrong.high
    assert 0.91 <= by_prompt / trials <= 0.985
    assert by_round / (trials / 3) < 0.75


def test_summary_groups_warns_and_has_no_nan() -> None:
    ar = {"method": "autoregressive", "variant": "autoregressive"}
    rows = [row(f"p{i}", 20, 2.0, **ar, target="embedded") for i in range(10)]
    rows += [
        each | {"method": "dflash", "variant": "dflash", "exactness": "identical", "decode_s": 1.0} for each in rows
    ]
    tree = {
        "method": "ddtree",
        "variant": "ddtree",
        "budget": 16,
        "exactness": "violation",
        "degenerate": True,
    }
    rows += [row("[bold]x\x1b[31m", 20, 0.5, dataset="[/]", target="embedded", **tree)]
    summary = summary_of(table(rows))
    pooled = [each for each in summary.rows if each["dataset"] == "all data sets"]
    assert [each["variant"] for each in pooled] == ["autoregressive", "ddtree", "dflash"]
    assert [each["budget"] for each in pooled] == [None, 16, None]
    assert [each["speedup"] for each in pooled] == [1.0, None, 2.0]
    assert pooled[2]["speedup_interval"] == pytest.approx([2.0, 2.0])
    text = " ".join(summary.warnings)
    for expected in (
        "no evidence for real models",
        "1 outputs violate",
        "1 outputs are degenerate",
        "left out",
    ):
        assert expected in text
    _print_and_check(summary)


def _print_and_check(summary: Any) -> None:
    import io
    import json

    from rich.console import Console

    json.dumps(summary.document(), allow_nan=False)
    stream = io.StringIO()
    console = Console(file=stream, width=80, color_system=None)
    for each in summary.tables():
        console.print(each)
    printed = stream.getvalue()
    assert "[/]: embedded" in printed
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80
