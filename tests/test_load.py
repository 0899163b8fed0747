"""Sweeps under load: batches by length, streams of requests, memory that runs out, rules, switching to AR."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest
from test_runner import Models, rows, settings  # noqa: F401 (a fixture)

from sparkbench import arrivals
from sparkbench.decoding.loop import DecodeConfig, Generation, Request
from sparkbench.errors import UsageError
from sparkbench.results import read_run
from sparkbench.runner import run
from sparkbench.sweep import SweepConfig, plan


def prompts(settings: dict[str, Any], lengths: list[int]) -> None:  # noqa: F811
    lines = [json.dumps({"id": f"p{i}", "prompt": "x" * length}) for i, length in enumerate(lengths)]
    Path(settings["data"]).write_text("\n".join(lines))


def test_batches_hold_prompts_of_like_length(settings: dict[str, Any]) -> None:  # noqa: F811
    prompts(settings, [50, 3, 40, 2, 60, 1, 30, 4])
    found = {unit.batch_size: unit for unit in plan(SweepConfig(**settings, batch_sizes=(1, 4))).units}
    batches = [[len(p.turns[0]) for p in found[4].prompts[part]] for part in found[4].parts()]
    assert batches == [[1, 2, 3, 4], [30, 40, 50, 60]]
    assert [p.prompt_id for p in found[1].prompts] == [f"p{i}" for i in range(8)]


def test_equal_prompts_keep_their_numbers_in_any_order(settings: dict[str, Any]) -> None:  # noqa: F811
    prompts(settings, [9, 5, 9, 5, 9])
    for size in (1, 2):
        units = plan(SweepConfig(**settings, batch_sizes=(size,))).units
        copies = {p.prompt_id: copy for unit in units for p, copy in zip(unit.prompts, unit.copies, strict=True)}
        assert copies == {"p0": 0, "p1": 0, "p2": 1, "p3": 1, "p4": 2}


def test_a_stream_is_one_batch_of_all_prompts(settings: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    models = Models()
    config = SweepConfig(**settings, arrivals="poisson:4", batch_sizes=(2,), repeats=2)
    outcome = run(config, tmp_path / "out", tools=models.tools)
    assert (outcome.exit_code, outcome.units, outcome.rows) == (0, 1, 48)
    assert {slots for _, _, slots in models.streams} == {2}
    times = {tuple(moments) for _, moments, _ in models.streams}
    assert len(times) == 2, "each repeat has a stream of its own, the same for all arms"
    for row in rows(tmp_path / "out"):
        assert row["arrival_s"] is not None
        assert row["latency_s"] == row["ttft_s"] + row["decode_s"]
        assert row["batch_rounds"] == 9
        assert row["batch_size"] == 2
    assert len({row["batch_id"] for row in rows(tmp_path / "out")}) == 1


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals.moments("poisson:5", 4001, seed=3)
    assert times[0] == 0
    assert kstest(np.diff(times), "expon", args=(0, 1 / 5)).pvalue > 1e-3
    assert arrivals.moments("poisson:5", 10, seed=3) == times[:10]
    assert arrivals.moments("poisson:5", 10, seed=3, stream=1) != times[:10]
    assert arrivals.moments("poisson:2.5", 10, seed=3)[9] == pytest.approx(2 * times[9])
    assert arrivals.moments("poisson:1", 0, seed=0) == []


def test_memory_that_runs_out_names_the_size_and_spares_the_rest(
    settings: dict[str, Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    class Small(Models):
        def generate(self, target: Any, method: Any, requests: Any, config: DecodeConfig) -> list[Generation]:
            if len(requests) > 2 and method.label != "autoregressive":
                raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
            return super().generate(target, method, requests, config)

    config = SweepConfig(**settings, batch_sizes=(1, 2, 3, 6))
    outcome = run(config, tmp_path / "out", tools=Small().tools)
    found = rows(tmp_path / "out")
    assert outcome.exit_code == 4
    assert {(row["batch_size"], row["status"]) for row in found if row["method"] == "dflash"} == {
        (1, "ok"),
        (2, "ok"),
        (3, "error"),
        (6, "error"),
    }
    assert all(row["status"] == "ok" for row in found if row["method"] == "autoregressive")
    for row in found:
        if row["status"] == "error":
            assert row["error"].startswith(f"out of memory at batch size {row['batch_size']}, prompts of up to ")
    mended = run(config, tmp_path / "out", tools=Models().tools)
    assert (mended.exit_code, mended.measured) == (0, 2)


def test_a_rule_of_its_own_is_a_column_and_has_no_verdict(settings: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    config = SweepConfig(**{**settings, "methods": ("dflash", "dflash:rule=rejection")}, temperatures=(1,))
    models = Models(wrong="dflash:rule=rejection")
    assert run(config, tmp_path / "out", tools=models.tools).exit_code == 0
    found = {row["variant"]: (row["rule"], row["exactness"]) for row in rows(tmp_path / "out")}
    assert found == {
        "autoregressive": ("match", None),
        "dflash": ("match", "identical"),
        "dflash:rule=rejection": ("rejection", None),
    }


def test_the_rule_of_a_sweep_is_for_methods_that_name_none() -> None:
    config = SweepConfig(methods=("ar", "dflash", "dspark:rule=match"), rule="rejection")
    assert config.methods == ("autoregressive", "dflash:rule=rejection", "dspark")
    with pytest.raises(UsageError, match=r"method ddtree: rule=rejection needs .*tree-draft=sampled"):
        SweepConfig(methods=("ddtree",), rule="rejection")
    assert SweepConfig(methods=("ddtree:tree-draft=sampled",), rule="rejection").methods[1].startswith("ddtree:rule")


def test_ignoring_stop_tokens_is_for_the_outputs_alone(settings: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    lines = [{"id": "chat", "turns": ["ab", "cd"]}]
    Path(settings["data"]).write_text("\n".join(map(json.dumps, lines)))
    seen: list[Any] = []

    class Watched(Models):
        def generate(self, target: Any, method: Any, requests: Any, config: DecodeConfig) -> list[Generation]:
            seen.append(config.stop_ids)
            return super().generate(target, method, requests, config)

    run(SweepConfig(**settings, ignore_eos=True), tmp_path / "out", tools=Watched().tools)
    assert seen[0] is None, "the answer that the second turn continues ends where it ends"
    assert set(seen[1:]) == {frozenset()}


class Timed(Models):
    """Models whose methods lose to AR from a batch size on."""

    def generate(self, target: Any, method: Any, requests: Any, config: DecodeConfig) -> list[Generation]:
        made = super().generate(target, method, requests, config)
        slow = {"autoregressive": 1.0, "dflash": 0.5 + 0.2 * len(requests)}.get(method.label, 2.0)
        return [replace(each, batch_wall_s=slow) for each in made]

    def build(self, arm: Any, drafter: object) -> Any:
        method = super().build(arm, drafter)
        self.built = {**getattr(self, "built", {}), arm.label: method}
        return method


def test_the_measured_break_even_says_how_many_rows_are_drafted_for(
    settings: dict[str, Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    models = Timed()
    config = SweepConfig(**settings, batch_sizes=(1, 6), switch_to_ar="auto", temperatures=(0.5,))
    assert run(config, tmp_path / "out", tools=models.tools).exit_code == 0
    most = {label: method.most_rows for label, method in models.built.items()}
    assert most == {"autoregressive": None, "dflash": 2, "ddtree @16": 0, "ddtree @32": 0}
    assert read_run(tmp_path / "out")["loaded"]["most_rows_drafted"] == {"0.5": most}


def test_a_given_number_of_rows_is_not_measured(settings: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    models = Timed()
    run(SweepConfig(**settings, switch_to_ar=3), tmp_path / "out", tools=models.tools)
    assert {label: method.most_rows for label, method in models.built.items()} == {
        "autoregressive": None,
        "dflash": 3,
        "ddtree @16": 3,
        "ddtree @32": 3,
    }
    assert Request((1,)).arrival_s == 0
