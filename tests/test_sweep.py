"""Settings of a sweep: what is taken, what is refused, and the units they become."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sparkbench.errors import UsageError
from sparkbench.settings import MAX_SEED
from sparkbench.sweep import Plan, SweepConfig, default_out, dry_run, plan, source_identity


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """Settings with a target, a drafter and 20 prompts in files, none of which is ever loaded."""
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    lines = [json.dumps({"id": f"p{i}", "prompt": f"say {i % 18}"}) for i in range(20)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    return {
        "target": str(tmp_path / "target"),
        "drafters": {"dflash": str(tmp_path / "drafter")},
        "data": str(tmp_path / "mine.jsonl"),
        "methods": ("dflash", "ddtree"),
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperatures", (-0.5,), "temperature -0.5"),
        ("temperatures", ("warm",), "temperature 'warm'"),
        ("temperatures", (float("nan"),), "temperature nan"),
        ("temperatures", (), "temperatures"),
        ("budgets", (-1,), "budget -1 .*0 to 4096"),
        ("budgets", (4097,), "budget 4097 .*0 to 4096"),
        ("budgets", (1.5,), "budget 1.5"),
        ("budgets", (True,), "budget True"),
        ("batch_sizes", (0,), "batch size 0 .*1 or above"),
        ("max_new_tokens", 0, "max-new-tokens 0 .*1 or above"),
        ("max_new_tokens", "many", "max-new-tokens 'many'"),
        ("limit", 0, "limit 0"),
        ("repeats", 0, "repeats 0"),
        ("threads", 0, "threads 0"),
        ("top_k", -1, "top-k -1"),
        ("top_p", 0, "top-p 0"),
        ("min_p", 1.5, "min-p 1.5"),
        ("repetition_penalty", 0, "repetition-penalty 0"),
        ("rule", "hope", "rule 'hope' .*match, rejection"),
        ("arrivals", "poisson", "arrivals 'poisson' .*poisson:R"),
        ("arrivals", "poisson:0", "arrivals 'poisson:0'"),
        ("arrivals", "poisson:nan", "arrivals 'poisson:nan'"),
        ("arrivals", "poisson:1e-300", "arrivals 'poisson:1e-300' .*1e-06 to 1e"),
        ("arrivals", "uniform:3", "arrivals 'uniform:3'"),
        ("switch_to_ar", "soon", "switch-to-ar 'soon' .*auto or off"),
        ("switch_to_ar", -1, "switch-to-ar -1"),
        ("ignore_eos", "yes", "ignore_eos 'yes' .*true or false"),
        ("seed", -1, "seed -1"),
        ("seed", MAX_SEED + 1, "seed"),
        ("dtype", "int4", "dtype 'int4' .*auto, float32, bfloat16"),
        ("thinking", "on", "thinking 'on'"),
        ("methods", ("warp",), "unknown method 'warp'; known: autoregressive"),
        ("methods", ("ddtree:speed=9",), "unknown option 'speed'"),
        ("datasets", ("poems",), "unknown data set 'poems'; bundled has: alpaca"),
        ("data", "nowhere", "no such data"),
        ("drafters", {"warp": "x"}, "unknown method 'warp'; known"),
        ("prompts", "text", "prompts 'text'"),
        ("target", "", "target ''"),
    ],
)
def test_bad_values_are_one_line(field: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        SweepConfig(**{field: value})  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_lists_are_split_normalised_and_without_duplicates() -> None:
    values: dict[str, Any] = {
        "methods": ["ddtree, ar", "dflash", "autoregressive"],
        "datasets": ["gsm8k,gsm8k"],
        "temperatures": ["0,1", 1.0],
        "budgets": "16, 64,16",
        "batch_sizes": [1, "2"],
    }
    config = SweepConfig(**values)
    assert config.methods == ("autoregressive", "ddtree", "dflash")
    assert config.datasets == ("gsm8k",)
    assert config.temperatures == (0.0, 1.0)
    assert config.budgets == (16, 64)
    assert config.batch_sizes == (1, 2)
    every = SweepConfig(methods=("all",))
    assert every == SweepConfig()
    assert every.methods[0] == "autoregressive"
    assert len(every.datasets) == 6


def test_prompts_by_text_keep_their_commas(place: dict[str, Any]) -> None:
    config = SweepConfig(**place | {"prompts": ("a, b", "[/]\x1b")})
    (unit,) = plan(config).units
    assert [prompt.turns for prompt in unit.prompts] == [("a, b",), ("[/]\x1b",)]


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text('methods = ["dflash"]\ntemperatures = [0, 1.0]\nlimit = 3\n[drafters]\ndflash = "x/y"\n')
    config = SweepConfig(**SweepConfig.from_toml(path))
    assert (config.temperatures, config.limit, config.drafters) == ((0.0, 1.0), 3, {"dflash": "x/y"})
    for text, message in (
        ("speed = 1", "unknown key 'speed'; allowed: target, methods"),
        ("= 1", "is no TOML file"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            SweepConfig.from_toml(path)
    with pytest.raises(UsageError, match="cannot read"):
        SweepConfig.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "sweeps").glob("*.toml")), ids=lambda p: p.stem)
def test_sweeps_that_come_along_are_valid(path: Path) -> None:
    config = SweepConfig(**SweepConfig.from_toml(path))
    assert len(config.methods) > 2
    assert f"--config sweeps/{path.name}" in path.read_text() or path.with_name("verify_length.py").is_file()


def test_an_automatic_budget_is_an_option_of_the_variant(place: dict[str, Any]) -> None:
    changes = {"methods": ("ddtree", "ddtree:budget=auto", "dflash"), "budgets": (16, "auto", "auto")}
    planned = plan(SweepConfig(**place | changes))
    labels = [arm.label for arm in planned.arms]
    assert labels == ["autoregressive", "ddtree @16", "ddtree:budget=auto", "dflash"]
    with pytest.raises(UsageError, match=r"budget 'some' is not allowed: .* or auto"):
        SweepConfig(budgets=("some",))


def test_files_of_options_are_part_of_the_fingerprint(place: dict[str, Any], tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    changes = {"methods": (f"ddtree:budget=auto:curve={curve}",)}
    with pytest.raises(UsageError, match=f"curve={curve}: there is no such file"):
        plan(SweepConfig(**place | changes))
    prints = set()
    for text in ("1", "2", "1"):
        curve.write_text(text)
        prints.add(plan(SweepConfig(**place | changes)).units[0].fingerprint)
    assert len(prints) == 2


def test_units_hold_at_most_eight_prompts_or_one_batch(place: dict[str, Any]) -> None:
    planned = plan(SweepConfig(**place | {"batch_sizes": (1, 3, 16), "budgets": (16, 32)}))
    sizes = {size: [len(u.prompts) for u in planned.units if u.batch_size == size] for size in (1, 3, 16)}
    assert sizes == {1: [8, 8, 4], 3: [6, 6, 6, 2], 16: [16, 4]}
    assert [arm.label for arm in planned.arms] == ["autoregressive", "dflash", "ddtree @16", "ddtree @32"]
    assert [arm.budget for arm in planned.arms] == [None, None, 16, 32]
    assert len({unit.name for unit in planned.units}) == len(planned.units)
    assert planned.generations(planned.units[0]) == 8 * 4
    assert [copy for unit in planned.units[:3] for copy in unit.copies] == [0] * 18 + [1, 1]
    limited = plan(SweepConfig(**place | {"limit": 5}))
    assert [len(unit.prompts) for unit in limited.units] == [5]


def test_dry_run_counts_what_a_run_does(place: dict[str, Any]) -> None:
    document = dry_run(SweepConfig(**place | {"temperatures": (0, 1), "repeats": 2}))
    json.dumps(document, allow_nan=False)
    assert document["prompts"] == 20
    assert len(document["units"]) == 6
    assert document["generations"] == 20 * 2 * 2 * 3


def test_fingerprints_cover_what_changes_an_outcome(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def first(**changes: Any) -> str:
        return plan(SweepConfig(**place | changes)).units[0].fingerprint

    base = first()
    assert first() == base
    # Other units of a larger sweep do not touch this one.
    assert first(temperatures=(0, 1), batch_sizes=(1, 2)) == base
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"max_new_tokens": 64},
        {"dtype": "float32"},
        {"budgets": (32,)},
        {"methods": ("dflash",)},
        {"temperatures": (1,)},
        {"batch_sizes": (2,)},
        {"top_p": 0.9},
        {"thinking": True},
        {"repeats": 2},
        {"revision": "v2"},
        {"limit": 3},
    ]
    seen = [first(**change) for change in changes]
    assert len({base, *seen}) == len(seen) + 1
    for path, text in (
        (Path(place["target"]) / "config.json", "{ }"),
        (Path(place["data"]), '{"prompt": "new"}'),
    ):
        path.write_text(text)
        seen.append(first())
    monkeypatch.setattr("sparkbench.sweep.__version__", "99")
    seen.append(first())
    assert len({base, *seen}) == len(seen) + 1


def test_fingerprints_cover_how_often_a_prompt_came_before(place: dict[str, Any]) -> None:
    def second_unit(first_prompt: str) -> str:
        lines = [{"id": str(i), "prompt": text} for i, text in enumerate([first_prompt, *"bcdefgh", "last"])]
        Path(place["data"]).write_text("\n".join(map(json.dumps, lines)))
        return plan(SweepConfig(**place)).units[1].fingerprint

    assert second_unit("a") == second_unit("z") != second_unit("last")


def test_same_settings_share_a_folder(place: dict[str, Any]) -> None:
    config = SweepConfig(**place)
    assert default_out(config) == default_out(SweepConfig(**place)) == Path("results") / f"target-{config.hash[:8]}"
    assert SweepConfig(**place | {"seed": 1}).hash != config.hash
    assert SweepConfig(**place | {"strict": True}).hash == config.hash
    assert dataclasses.replace(config) == config


def test_identity_of_sources(tmp_path: Path) -> None:
    assert source_identity("org/model", None) == "org/model@main"
    assert source_identity("org/model", "abc") == "org/model@abc"
    (tmp_path / "weights").write_bytes(b"x" * 200_000)
    before = source_identity(str(tmp_path), None)
    (tmp_path / "weights").write_bytes(b"x" * 200_001)
    assert source_identity(str(tmp_path), None) != before


def test_missing_sources_are_refused(place: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        plan(SweepConfig(**place | {"target": str(tmp_path / "gone")}))
    with pytest.raises(UsageError, match="no dflash drafter is known"):
        plan(SweepConfig(**place | {"drafters": {}}))


def test_plan_identity_is_json(place: dict[str, Any]) -> None:
    planned: Plan = plan(SweepConfig(**place))
    json.dumps(planned.identity(), allow_nan=False)
    assert {"target", f"drafter {place['drafters']['dflash']}", "prompts mine"} == set(planned.sources)
