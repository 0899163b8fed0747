"""The tables a run leaves behind: their schema, and how they are read back.

Two tables, described in `SAMPLES` (one row a prompt, turn, variant, budget, repeat and pass) and `ROUNDS`
(one row a decoding round, joined to its sample by `KEY`). Every file carries the full schema, whatever
happened in it, so that
runs can be put together by putting files together: a budget that is null everywhere is still a nullable
integer. Units are part of a column's name (`_s`, `_ns`, `_bytes`); null means "does not apply", never zero.

Reading takes any number of run folders, folders of runs and files at once. Files of older schemas get nulls
for the columns they lack, unknown columns are kept and named, damaged files are named and left out, a column
of a wrong type is refused. A unit that was delivered twice counts once. Writing is in `store.py`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkbench.decoding.timing import STAGES
from sparkbench.errors import UsageError

SCHEMA_VERSION = 2
METADATA_PREFIX = "sparkbench."
RUN_FILE = "run.json"

KEY = (
    "run",
    "unit",
    "variant",
    "budget",
    "dataset",
    "prompt_id",
    "turn",
    "temperature",
    "batch_size",
    "repeat",
    "pass",
)

SAMPLES = pa.schema(
    [
        ("schema_version", pa.int64()),
        ("run", pa.string()),
        ("unit", pa.string()),
        ("target", pa.string()),
        ("method", pa.string()),
        ("variant", pa.string()),
        ("drafter", pa.string()),
        ("rule", pa.string()),
        ("dataset", pa.string()),
        ("domain", pa.string()),
        ("data_source", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt_tokens_hash", pa.string()),
        ("turn", pa.int64()),
        ("temperature", pa.float64()),
        ("budget", pa.int64()),
        ("batch_size", pa.int64()),
        ("batch_id", pa.string()),
        ("batch_wall_s", pa.float64()),
        ("repeat", pa.int64()),
        ("seed", pa.int64()),
        ("pass", pa.string()),
        ("order", pa.int64()),
        ("tokens_in", pa.int64()),
        ("tokens_out", pa.int64()),
        ("rounds", pa.int64()),
        ("rounds_drafted", pa.int64()),
        ("forwards", pa.int64()),
        ("accepted_sum", pa.int64()),
        ("committed_sum", pa.int64()),
        ("proposed_sum", pa.int64()),
        ("nodes_sum", pa.int64()),
        ("ttft_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("cpu_s", pa.float64()),
        ("load_s", pa.float64()),
        ("peak_device_bytes", pa.int64()),
        ("peak_host_bytes", pa.int64()),
        ("stop_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("output_sha256", pa.string()),
        ("exactness", pa.string()),
        ("first_divergence", pa.int64()),
        ("score_gap", pa.float64()),
        ("width_noise", pa.float64()),
        ("degenerate", pa.bool_()),
        ("device_id", pa.string()),
        ("output_ids", pa.list_(pa.int64())),
        ("batch_rounds", pa.int64()),
        ("arrival_s", pa.float64()),
        ("latency_s", pa.float64()),
    ]
)


def stage_column(stage: str) -> str:
    """The column of a stage or sub-stage: `build/topk` -> `build_topk_ns`."""
    return stage.replace("/", "_") + "_ns"


ROUNDS = pa.schema(
    [
        *(SAMPLES.field(name) for name in KEY),
        pa.field("round", pa.int64()),
        pa.field("cold", pa.bool_()),
        pa.field("max_depth", pa.int64()),
        pa.field("offered_next", pa.bool_()),
        pa.field("nodes", pa.int64()),
        pa.field("accepted", pa.int64()),
        pa.field("committed", pa.int64()),
        pa.field("expected_accepted", pa.float64()),
        pa.field("accepted_node", pa.int64()),
        *(pa.field(stage_column(stage), pa.int64()) for stage in STAGES),
    ]
)

TABLES = {"samples": SAMPLES, "rounds": ROUNDS}


@dataclass(frozen=True)
class Loaded:
    """A table read from one or many runs, and what a reader should know about it, one line each."""

    table: pa.Table
    notes: tuple[str, ...]


def read_samples(paths: Iterable[str | Path]) -> Loaded:
    """All samples under `paths`: run folders, folders that hold runs at any depth, or single files.

    UsageError: nothing readable is there, a file is another kind of table, or a column has a wrong type.
    """
    return _read("samples", paths)


def read_rounds(paths: Iterable[str | Path]) -> Loaded:
    """All rounds under `paths`, like `read_samples`; a samples file means the rounds file beside it."""
    return _read("rounds", paths)


def read_run(out: str | Path) -> dict[str, Any]:
    """`run.json` of a run folder: configuration, machine, versions, models. UsageError: none or broken."""
    path = Path(out) / RUN_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{out} holds no run: {RUN_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is unreadable ({_one_line(error)}); choose another folder") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} is no run file: it must hold a JSON object")
    return document


def read_file(path: Path) -> pa.Table:
    """One Parquet file whole, checksums verified. ValueError, the reason on one line, when it is damaged."""
    try:
        # `pq.read_table` would take a dataset of the folder's files; one file is meant.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(_one_line(error)) from error


def metadata(table: pa.Table) -> dict[str, str]:
    """What `store.py` wrote beside a table: schema_version, fingerprint, complete; empty for others."""
    raw = table.schema.metadata or {}
    texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in raw.items()}
    return {key.removeprefix(METADATA_PREFIX): text for key, text in texts.items() if key.startswith(METADATA_PREFIX)}


def conform(table: pa.Table, schema: pa.Schema, path: str, notes: list[str]) -> pa.Table:
    """`table` with the columns of `schema` in order, missing ones null, then the unknown ones.

    Strings and lists in Arrow's large layout, which other tools write, are taken; any other type that differs
    is a UsageError that names `path` and the column.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for field in schema:
        if field.name not in table.column_names:
            columns[field.name] = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
            continue
        column = table[field.name]
        if column.type != field.type:
            if not _same_but_large(column.type, field.type):
                raise UsageError(f"{path}: column {field.name} has type {column.type}, it must be {field.type}")
            column = column.cast(field.type)
        columns[field.name] = column
    missing = [name for name in schema.names if name not in table.column_names]
    unknown = [name for name in table.column_names if name not in schema.names]
    if missing:
        notes.append(f"{path}: null for the columns that it lacks: {', '.join(missing)}")
    if unknown:
        notes.append(f"{path}: unknown columns kept: {', '.join(unknown)}")
    return pa.table(columns | {name: table[name] for name in unknown})


def _read(kind: str, paths: Iterable[str | Path]) -> Loaded:
    schema, notes = TABLES[kind], []  # type: tuple[pa.Schema, list[str]]
    files = _files(kind, [Path(path) for path in paths])
    tables: list[tuple[str, dict[str, str], pa.Table]] = []
    for path in files:
        try:
            table = read_file(path)
        except ValueError as error:
            notes.append(f"{path} is damaged and left out: {error}")
            continue
        if "unit" not in table.column_names or ("round" in table.column_names) != (kind == "rounds"):
            raise UsageError(
                f"{path} is no table of {kind}: it has the columns {', '.join(table.column_names[:5])}, ..."
            )
        tables.append((str(path), metadata(table), conform(table, schema, str(path), notes)))
    if not tables:
        raise UsageError("no readable results; " + "; ".join(notes))
    return Loaded(_concatenate(_once(tables, notes)), tuple(notes))


def _files(kind: str, paths: Sequence[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_file():
            beside = path.parent.parent / kind / path.name
            here = [beside if path.parent.name in TABLES and beside.is_file() else path]
        elif path.is_dir():
            nested = [file for file in path.rglob("*.parquet") if file.parent.name == kind]
            here = sorted(nested or path.glob("*.parquet"))
        else:
            raise UsageError(f"{path} does not exist; give run folders or Parquet files")
        if not here:
            raise UsageError(f"{path} holds no results: no {kind}/*.parquet in it")
        found |= {file.resolve(): file for file in here}
    return list(found.values())


def _once(tables: list[tuple[str, dict[str, str], pa.Table]], notes: list[str]) -> list[pa.Table]:
    """Leave out files that repeat a unit of the same run and fingerprint (a retry, a copied folder)."""
    kept: dict[object, pa.Table] = {}
    for path, marks, table in tables:
        fingerprint = marks.get("fingerprint")
        key: object = path
        if fingerprint is not None and table.num_rows:
            key = (fingerprint, *(tuple(pc.unique(table[name]).to_pylist()) for name in ("run", "unit")))
        if key in kept:
            notes.append(f"{path} repeats a unit that was read already and is left out")
        else:
            kept[key] = table
    return list(kept.values())


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise UsageError(f"the files do not fit together: {_one_line(error)}") from None


def _same_but_large(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_string(wanted):
        return found in (pa.large_string(), pa.string_view())
    return bool(pa.types.is_list(wanted) and found == pa.large_list(wanted.value_type))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
