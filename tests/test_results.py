"""The tables on disk: one schema for all runs, atomic files, damage, two writers, reading by other tools."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sparkbench.errors import RunError, UsageError
from sparkbench.files import TEMPORARY
from sparkbench.results import KEY, ROUNDS, SAMPLES, metadata, read_file, read_rounds, read_run, read_samples
from sparkbench.store import Store

EXACT = 9007199254740993  # 2**53 + 1: a float64 cannot hold it
DOCUMENTED_SAMPLES = """
schema_version, run, unit, target, method, variant, drafter, rule, dataset, domain, data_source, prompt_id,
prompt_tokens_hash, turn, temperature, budget, batch_size, batch_id, batch_wall_s, repeat, seed, pass,
order, tokens_in, tokens_out, rounds, rounds_drafted, forwards, accepted_sum, committed_sum, proposed_sum,
nodes_sum, ttft_s, decode_s, cpu_s, load_s, peak_device_bytes, peak_host_bytes, stop_reason, status, error,
output_sha256, exactness, first_divergence, score_gap, width_noise, degenerate, device_id, output_ids,
batch_rounds, arrival_s, latency_s
"""
DOCUMENTED_ROUNDS = """
run, unit, variant, budget, dataset, prompt_id, turn, temperature, batch_size, repeat, pass, round, cold,
max_depth, offered_next, nodes, accepted, committed, expected_accepted, accepted_node, draft_ns, build_ns,
build_topk_ns, build_transfer_ns, build_bias_ns, build_expand_ns, build_mask_ns, build_markov_ns,
build_confidence_ns, build_lookup_ns, build_search_ns, pack_ns, verify_ns, accept_ns, commit_ns,
commit_compact_ns, commit_carry_ns
"""


def sample(**values: Any) -> dict[str, Any]:
    row = {"run": "r", "unit": "u", "method": "autoregressive", "variant": "autoregressive", "dataset": "d"}
    return row | {"prompt_id": "p", "seed": EXACT, "status": "ok", "pass": "clean", "output_ids": [1, 2]} | values


def tables(*rows: dict[str, Any]) -> tuple[pa.Table, pa.Table]:
    rounds = [{name: row[name] for name in KEY if name in row} | {"round": 0, "nodes": 5} for row in rows]
    return pa.Table.from_pylist(list(rows), SAMPLES), pa.Table.from_pylist(rounds, ROUNDS)


def make_run(out: Path, *rows: dict[str, Any], unit: str = "u") -> Path:
    with Store(out, {"seed": 0}) as store:
        store.write(unit, f"print-{unit}", *tables(*rows), complete=True)
    return out / "samples" / f"{unit}.parquet"


def rewrite(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path)


def test_columns_are_the_documented_ones() -> None:
    assert SAMPLES.names == re.findall(r"\w+", DOCUMENTED_SAMPLES)
    assert ROUNDS.names == re.findall(r"\w+", DOCUMENTED_ROUNDS)
    assert all(field.nullable and field.type != pa.null() for field in [*SAMPLES, *ROUNDS])
    assert {str(ROUNDS.field(name).type) for name in ROUNDS.names if name.endswith("_ns")} == {"int64"}


def test_runs_with_and_without_budgets_load_together(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", sample(), sample(method="dflash", variant="dflash", run="a"))
    make_run(tmp_path / "b", sample(method="ddtree", variant="ddtree", budget=16, run="b"))
    make_run(tmp_path / "d", sample(status="error", error="out of memory", output_ids=None, run="d"))
    old = make_run(tmp_path / "c", sample(run="c"))
    rewrite(old, read_file(old).drop_columns(["score_gap"]))

    assert pq.read_schema(path).field("budget").type == pa.int64()
    loaded = read_samples([tmp_path / name for name in "abcd"])
    assert loaded.table.schema.names == SAMPLES.names
    assert loaded.table.num_rows == 5
    assert loaded.table["budget"].to_pylist() == [None, None, 16, None, None]
    assert loaded.table["seed"].to_pylist() == [EXACT] * 5
    assert loaded.table.group_by("method").aggregate([]).num_rows == 3
    assert loaded.table["score_gap"].null_count == 5
    assert [note for note in loaded.notes if "score_gap" in note and str(old) in note]
    assert read_samples([tmp_path]).table.num_rows == 5
    assert read_rounds([tmp_path]).table.num_rows == 5
    assert read_rounds([path]).table.num_rows == 2


def test_unknown_column_is_kept_and_wrong_type_refused(tmp_path: Path) -> None:
    path = make_run(tmp_path, sample())
    good = read_file(path)
    rewrite(path, good.append_column("mood", pa.array(["fine"])))
    loaded = read_samples([tmp_path])
    assert loaded.table["mood"].to_pylist() == ["fine"]
    assert any("mood" in note for note in loaded.notes)

    at = good.column_names.index("budget")
    rewrite(path, good.set_column(at, "budget", pa.array([16.0])))
    with pytest.raises(UsageError, match=rf"{path}.*budget.*double.*int64"):
        read_samples([tmp_path])


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_damaged_file_is_named_and_not_done(tmp_path: Path, damage: str) -> None:
    path = make_run(tmp_path, sample())
    with Store(tmp_path, {"seed": 0}) as store:
        store.write("v", "print-v", *tables(sample(unit="v")), complete=True)
        content = path.read_bytes()
        middle = len(content) // 4
        flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
        path.write_bytes({"empty": b"", "cut": content[:-5], "flipped": flipped}[damage])
        notes: list[str] = []
        assert not store.done("u", "print-u", notes)
        assert str(path) in notes[0]
        assert store.done("v", "print-v", notes)
    loaded = read_samples([tmp_path])
    assert loaded.table["unit"].to_pylist() == ["v"]
    assert any(str(path) in note for note in loaded.notes)


def test_no_flipped_bit_is_read_as_other_values(tmp_path: Path) -> None:
    path = make_run(tmp_path, sample(output_ids=list(range(50))), sample(prompt_id="other"))
    good, content = read_file(path), path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    caught = 0
    for place in range(4, len(content) - footer - 8, 23):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert read_file(path).equals(good)  # some bytes, such as unused statistics, carry nothing
        except ValueError:
            caught += 1
    assert caught > 40


def test_unit_counts_as_done_only_whole_intact_and_its_own(tmp_path: Path) -> None:
    with Store(tmp_path, {"seed": 0}) as store:
        notes: list[str] = []
        assert not store.done("u", "one", notes)
        assert not notes
        store.write("u", "one", *tables(sample()), complete=False)
        assert not store.done("u", "one", notes)
        store.write("u", "one", *tables(sample()), complete=True)
        assert store.done("u", "one", notes)
        assert not store.done("u", "other", notes)
        store.path("rounds", "u").unlink()
        assert not store.done("u", "one", notes)
        assert len(notes) == 2
        assert metadata(read_file(store.path("samples", "u")))["schema_version"] == "2"


def test_unit_delivered_twice_is_read_once(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", sample())
    copied = tmp_path / "copy" / "samples" / "again.parquet"
    copied.parent.mkdir(parents=True)
    copied.write_bytes(path.read_bytes())
    loaded = read_samples([tmp_path, tmp_path / "run", path])
    assert loaded.table.num_rows == 1
    assert len(loaded.notes) == 1


def test_nothing_to_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_samples([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="holds no results"):
        read_samples([tmp_path])
    make_run(tmp_path, sample())
    with pytest.raises(UsageError, match="is no table of samples"):
        read_samples([next((tmp_path / "rounds").iterdir()).rename(tmp_path / "u.parquet")])


def test_leftovers_go_and_run_file_is_strict_json(tmp_path: Path) -> None:
    make_run(tmp_path, sample())
    leftover = tmp_path / "samples" / f"u.parquet{TEMPORARY}1-2"
    leftover.write_bytes(b"half")
    with Store(tmp_path, {"seed": 0}) as store:
        assert not leftover.exists()
        with pytest.raises(ValueError, match="JSON"):
            store.describe({"must_match": {}, "speed": float("nan")})
        store.describe({"must_match": {"dtype": "float32"}})
        assert read_run(tmp_path)["loaded"] == {"must_match": {"dtype": "float32"}}
        with pytest.raises(UsageError, match='dtype: "float32" there, "bfloat16" here'):
            store.describe({"must_match": {"dtype": "bfloat16"}})
    json.loads((tmp_path / "run.json").read_text(), parse_constant=lambda text: pytest.fail(text))


def test_another_configuration_is_refused_and_named(tmp_path: Path) -> None:
    make_run(tmp_path, sample())
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UsageError, match="seed: 0 there, 1 here"):
        Store(tmp_path, {"seed": 1})
    assert (tmp_path / "run.json").read_bytes() == before
    (tmp_path / "run.json").write_bytes(before[:-9])
    with pytest.raises(UsageError, match="unreadable"):
        Store(tmp_path, {"seed": 0})
    (tmp_path / "run.json").unlink()
    with pytest.raises(UsageError, match="other files"):
        Store(tmp_path, {"seed": 0})


HOLD = "import pathlib, sys; from sparkbench.store import Store\n"
HOLD += "store = Store(pathlib.Path(sys.argv[1]), {'seed': 0}); print('held', flush=True); sys.stdin.read()"


def test_second_writer_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="this system has no file locks")
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {first.pid}"):
            Store(tmp_path, {"seed": 0})
        first.kill()
    with Store(tmp_path, {"seed": 0}) as store:  # a killed writer leaves no lock behind
        store.write("u", "one", *tables(sample()), complete=True)


def test_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs needs root")
    try:
        path = make_run(mounted / "run", sample())
        before = path.read_bytes()
        noise = list(os.urandom(1 << 17))
        with Store(mounted / "run", {"seed": 0}) as store:
            for unit in ("u", "v"):
                with pytest.raises(RunError, match=r"cannot write .*No space left"):
                    store.write(unit, "one", *tables(sample(output_ids=noise)), complete=True)
        assert path.read_bytes() == before
        assert read_samples([mounted]).table.num_rows == 1
        assert not [file for file in mounted.rglob("*") if TEMPORARY in file.name]
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def _pandas(path: Path) -> tuple[int, Any]:
    frame = pytest.importorskip("pandas").read_parquet(path, dtype_backend="pyarrow")
    return int(frame["seed"][0]), None if frame["budget"].isna()[0] else frame["budget"][0]


def _duckdb(path: Path) -> tuple[int, Any]:
    found = pytest.importorskip("duckdb").sql(f"select seed, budget from '{path}'").fetchall()
    return found[0][0], found[0][1]


def _polars(path: Path) -> tuple[int, Any]:
    frame = pytest.importorskip("polars").read_parquet(path)
    return frame["seed"][0], frame["budget"][0]


@pytest.mark.parametrize("read", [_pandas, _duckdb, _polars])
def test_other_tools_read_it(tmp_path: Path, read: Any) -> None:
    assert read(make_run(tmp_path, sample())) == (EXACT, None)


def test_files_that_other_tools_wrote_are_taken(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    path = make_run(tmp_path, sample())
    polars.read_parquet(path).write_parquet(path)
    table = read_samples([path]).table
    assert table.schema.equals(SAMPLES)
    assert pc.sum(table["seed"]).as_py() == EXACT
