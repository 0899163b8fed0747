"""The embedded models through the real runner: exact at every temperature and batch size, and worth comparing."""

import os
import statistics
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from sparkbench import drafters
from sparkbench.decoding.target import Target
from sparkbench.paths import embedded_folder
from sparkbench.prompts import dataset_names, encode_chat, load_prompts
from sparkbench.results import read_samples
from sparkbench.runner import run
from sparkbench.scheduling import calibration_table
from sparkbench.settings import SweepConfig
from sparkbench.train.calibrate import collect
from sparkbench.train.recipe import CalibrationRecipe

SHARED = Path(os.environ.get("SPARKBENCH_SHARED", Path(__file__).parents[2] / "shared")) / "datasets"
METHODS = ("dflash", "ddtree")


def samples_of(out: Path, **settings: Any) -> Any:
    """All rows of a run that failed nothing."""
    outcome = run(SweepConfig(**{"methods": METHODS} | settings), out)
    assert outcome.exit_code == 0, outcome
    assert (outcome.failed, outcome.skipped) == (0, 0)
    return read_samples([out]).table


def assert_identical(table: Any) -> None:
    others = table.filter(pc.not_equal(table["method"], "autoregressive"))
    assert others.num_rows > 0
    assert set(others["exactness"].to_pylist()) == {"identical"}


def test_exact_on_a_few_prompts(tmp_path: Path) -> None:
    assert_identical(
        samples_of(
            tmp_path / "run",
            methods=(*METHODS, "ddtree:builder=level"),
            temperatures=(0.0, 1.0),
            batch_sizes=(3,),
            budgets=(16,),
            limit=3,
            max_new_tokens=32,
            datasets=("gsm8k", "mt-bench"),
        )
    )


@pytest.mark.slow
def test_exact_and_worth_comparing_on_the_bundled_prompts(tmp_path: Path) -> None:
    table = samples_of(
        tmp_path / "run", temperatures=(0.0, 0.7, 1.0), batch_sizes=(1, 3, 8), budgets=(16, 64), max_new_tokens=64
    )
    assert_identical(table)

    def tau(variant: str, budget: int | None, dataset: str | None = None) -> float:
        wanted = pc.and_(pc.equal(table["variant"], variant), pc.equal(table["temperature"], 0.0))
        wanted = pc.and_(wanted, pc.equal(table["batch_size"], 1))
        for name, value in (("budget", budget), ("dataset", dataset)):
            if value is not None:
                wanted = pc.and_(wanted, pc.equal(table[name], value))
        rows = table.filter(pc.fill_null(wanted, False))
        return pc.sum(rows["committed_sum"]).as_py() / pc.sum(rows["rounds"]).as_py()

    assert 2.5 <= tau("dflash", None) <= 7
    assert tau("ddtree", 64) >= 3.5
    for dataset in sorted(set(table["dataset"].to_pylist())):
        assert tau("ddtree", 64, dataset) > tau("dflash", None, dataset), dataset


SPARK = (
    "dspark",
    "dspark:drafter=dspark-b7",
    "dspark:drafter=dflash+dspark-b16",
    "dspark:confidence-threshold=0.6",
    "dspark:verify-length=scheduled",
    "dspark:verify-length=delayed",
    "sparklingtree",
    "sparklingtree:drafter=dspark-b7+none",
    "sparklingtree:candidates=16:fanout=8",
    "sparklingtree:builder=heap:candidates=128",
    "sparklingtree:builder=beam",
    "sparklingtree:budget=auto",
    "ddtree:budget=auto",
)


def test_spark_exact_on_a_few_prompts(tmp_path: Path) -> None:
    settings = {"methods": SPARK, "datasets": ("humaneval", "mt-bench"), "limit": 2, "max_new_tokens": 24}
    assert_identical(samples_of(tmp_path / "run", temperatures=(0.0, 1.0), batch_sizes=(2,), budgets=(24,), **settings))


@pytest.mark.slow
def test_spark_exact_on_the_bundled_prompts(tmp_path: Path) -> None:
    settings = {"methods": SPARK, "limit": 8, "max_new_tokens": 48}
    assert_identical(
        samples_of(tmp_path / "run", temperatures=(0.0, 1.0), batch_sizes=(1, 4), budgets=(64,), **settings)
    )


DART = (
    "dart",
    "dart:index=none",
    "dart:score=paper:order=2:ngram-weight=2",
    "dart:drafter=dspark-b7+none:beam=5",
    "dflash:drafter=dart",
    "ddtree:drafter=dart",
)


def test_dart_exact_on_a_few_prompts(tmp_path: Path) -> None:
    settings = {"methods": DART, "datasets": ("humaneval", "mt-bench"), "limit": 2, "max_new_tokens": 24}
    assert_identical(samples_of(tmp_path / "run", temperatures=(0.0, 1.0), batch_sizes=(2,), budgets=(24,), **settings))


@pytest.mark.slow
def test_dart_exact_on_the_bundled_prompts(tmp_path: Path) -> None:
    """And its tree holds more than its chain, with and without the n-gram term."""
    settings = {"methods": DART, "limit": 6, "max_new_tokens": 48}
    table = samples_of(tmp_path / "run", temperatures=(0.0, 1.0), batch_sizes=(1, 4), budgets=(60,), **settings)
    assert_identical(table)

    def tau(variant: str) -> float:
        rows = table.filter(pc.equal(table["variant"], variant))
        return pc.sum(rows["committed_sum"]).as_py() / pc.sum(rows["rounds"]).as_py()

    assert min(tau("dart"), tau("dart:index=none")) > tau("dflash:drafter=dart") > 1.8


@pytest.mark.slow
def test_a_tree_accepts_more_than_its_chain(tmp_path: Path) -> None:
    """SparklingTree's 64 nodes hold more than DSpark's chain, pooled over the six sets, for both blocks."""
    variants = [
        f"{method}:drafter={name}" for method in ("dspark", "sparklingtree") for name in ("dspark-b7", "dspark-b16")
    ]
    table = samples_of(tmp_path / "run", methods=variants, budgets=(64,))
    assert_identical(table)

    def tau(variant: str) -> float:
        rows = table.filter(pc.equal(table["variant"], variant))
        return pc.sum(rows["committed_sum"]).as_py() / pc.sum(rows["rounds"]).as_py()

    for block in ("dspark-b7", "dspark-b16"):
        assert tau(f"sparklingtree:drafter={block}") > tau(f"dspark:drafter={block}") > 2.5


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real prompts are not at {SHARED}")
def test_exact_on_real_prompts(tmp_path: Path) -> None:
    assert_identical(
        samples_of(
            tmp_path / "run",
            data=str(SHARED),
            temperatures=(0.0, 0.7, 1.0),
            batch_sizes=(1, 3, 8),
            budgets=(16, 64),
            limit=4,
            max_new_tokens=64,
        )
    )


def test_the_family_is_small_and_says_what_it_is() -> None:
    files = list(embedded_folder().rglob("*.safetensors"))
    assert len(files) >= 2
    assert sum(file.stat().st_size for file in files) < 40e6
    card = (embedded_folder() / "README.md").read_text(encoding="utf-8")
    assert "no evidence for real" in card


def test_a_round_that_ends_at_a_stop_token_tells_nothing_of_later_slots() -> None:
    target = Target.load(str(embedded_folder() / "target"), dtype="float32", device="cpu")
    drafter = drafters.load("dspark", str(embedded_folder() / "dspark-b7"), target)
    prompts = [
        encode_chat(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for prompt in load_prompts("alpaca", limit=12).prompts
    ]
    rounds = collect(target, drafter, prompts, CalibrationRecipe(max_new_tokens=64), seed=0)
    cut = rounds.lengths < 7
    assert 0 < cut.sum() <= len(prompts)
    assert (rounds.accepted[cut] == rounds.lengths[cut]).all()
    assert (rounds.accepted < rounds.lengths)[~cut].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark-b7", "dspark-b16"])
def test_the_calibration_holds_on_rounds_it_has_not_seen(name: str) -> None:
    """On the bundled prompts, which nothing was fitted on, the confidences are off by less than without it."""
    target = Target.load(str(embedded_folder() / "target"), dtype="float32", device="cpu")
    drafter = drafters.load("dspark", str(embedded_folder() / name), target)
    prompts = [
        encode_chat(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for dataset in dataset_names()
        for prompt in load_prompts(dataset, limit=12).prompts
    ]
    rounds = collect(target, drafter, prompts, CalibrationRecipe(max_new_tokens=64), seed=0)
    assert drafter.calibration is not None
    table = calibration_table(rounds.logits, rounds.accepted, drafter.calibration, rounds.lengths)
    before, after = (statistics.fmean(getattr(row, f"ece_{when}") for row in table) for when in ("before", "after"))
    assert after < before
