"""Data set specifications, and prompts made from the original rows they name.

`datasets/NAME.toml` declares everything about a data set: title, domain, licence, the hub repository, file
and revision, the source columns, and how columns become turns. No data set has code of its own. `turns` holds
one list a turn; its strings are `str.format` templates over the columns and are joined. The first is
required, the others are optional: one is left out where a value it names is empty. `select`, where present,
names the rows to take, in order, by digest of their text.

A file comes from the hub (one file, no remote code, no pickle) or from an installed package. Not covered:
prompts that are already finished text (`promptfile.py`), and drawing a few of them (`prompts.py`).
"""

import gzip
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any

from sparkbench.errors import RunError, UsageError, first_line
from sparkbench.paths import datasets_folder

Row = Mapping[str, Any]
Turns = tuple[str, ...]
Downloader = Callable[[str, str, str], Path]  # (repository, file, revision) -> path of the local copy

_FORMATTER = Formatter()


@dataclass(frozen=True)
class HubFile:
    """One file of a data set repository on the hub, at a commit (or a branch, resolved at download)."""

    repo: str
    file: str
    revision: str


@dataclass(frozen=True)
class PackageFile:
    """The same rows inside an installable package: its name for pip, its module, and the file in it."""

    name: str
    module: str
    file: str


@dataclass(frozen=True)
class DatasetSpec:
    """One data set as its TOML file declares it; `rows` is the number of prompts it has."""

    name: str
    title: str
    domain: str
    licence: str
    rows: int
    columns: tuple[str, ...]
    turns: tuple[tuple[str, ...], ...]
    select: tuple[str, ...]
    hub: HubFile
    package: PackageFile | None


def dataset_names() -> list[str]:
    """Names of all declared data sets, sorted."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in datasets_folder().iterdir() if entry.name.endswith(".toml")
    )


def spec(name: str) -> DatasetSpec:
    """Read `datasets/NAME.toml`; an unknown name is a UsageError that lists the known ones."""
    known = dataset_names()
    if name not in known:
        raise UsageError(f"unknown data set {name!r}; known: {', '.join(known)}")
    table = tomllib.loads((datasets_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    return DatasetSpec(
        name=name,
        title=table["title"],
        domain=table["domain"],
        licence=table["licence"],
        rows=table["rows"],
        columns=tuple(table["columns"]),
        turns=tuple(tuple(parts) for parts in table["turns"]),
        select=tuple(table.get("select", ())),
        hub=HubFile(**table["hub"]),
        package=PackageFile(**table["package"]) if "package" in table else None,
    )


def download(repo: str, file: str, revision: str) -> Path:
    """Fetch one file of a hub data set into the hub's cache; any failure is a RunError of one line."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except Exception as error:  # the client raises its own, the HTTP library's and OS errors, by version
        raise RunError(f"cannot download {file} of {repo} at {revision}: {first_line(error)}") from error


def from_hub(spec: DatasetSpec, download: Downloader = download) -> tuple[list[Turns], str]:
    """Prompts of `spec` from the hub, in order, and the commit they come from.

    `download` is a parameter so that tests and mirrors need no network. A branch name in the spec is resolved
    by the hub cache's layout (`snapshots/COMMIT/...`); where the path does not say, the spec's own revision
    is returned.
    """
    path = download(spec.hub.repo, spec.hub.file, spec.hub.revision)
    commit = re.search(r"/snapshots/([0-9a-f]{40})/", path.as_posix())
    return prompts_of(spec, read_rows(path, spec.columns)), commit[1] if commit else spec.hub.revision


def from_package(spec: DatasetSpec) -> list[Turns]:
    """Prompts of `spec` from the installed package it names; the package is located, never imported."""
    if spec.package is None:
        raise UsageError(f"no package carries the data set {spec.name}; packages exist for: {', '.join(packaged())}")
    found = find_spec(spec.package.module)
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"data set {spec.name} needs the package {spec.package.name}: install `sparkbench[prompts]`")
    path = Path(found.submodule_search_locations[0]) / spec.package.file
    return prompts_of(spec, read_rows(path, spec.columns))


def packaged() -> list[str]:
    """Names of the data sets that an installable package carries."""
    return [name for name in dataset_names() if spec(name).package is not None]


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Rows of a .parquet, .jsonl or .jsonl.gz file, the named columns only; a damaged file is a RunError."""
    try:
        if path.suffix == ".parquet":
            rows = _parquet_rows(path, columns)
        else:
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rb") as stream:
                rows = [json.loads(line) for line in stream.read().split(b"\n") if line.strip()]
        return [{column: row[column] for column in columns} for row in rows]
    except KeyError as error:
        raise RunError(f"{path}: no column {error}; needed: {', '.join(columns)}") from error
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise RunError(f"{path}: cannot be read: {first_line(error)}") from error


def _parquet_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    missing = next((column for column in columns if column not in file.schema_arrow.names), None)
    if missing is not None:
        raise KeyError(missing)
    return list(file.read(columns=list(columns)).to_pylist())


def prompts_of(spec: DatasetSpec, rows: Iterable[Row]) -> list[Turns]:
    """The turns of each row by the spec's templates, selected and counted as the spec says.

    RunError: a row lacks a required value, a selected row is missing, or the count is not the declared one;
    each means that the file is not the one the spec names.
    """
    if spec.select:
        prompts = _selected(spec, rows)
    else:
        prompts = []
        for number, row in enumerate(rows, start=1):
            turns = next(_forms(spec, row), None)
            if turns is None:
                raise RunError(f"{spec.hub.repo}: row {number} has no text in {', '.join(spec.columns)}")
            prompts.append(turns)
    if len(prompts) != spec.rows:
        raise RunError(f"{spec.hub.repo}: {len(prompts)} prompts of {spec.name} found, {spec.rows} expected")
    return prompts


def digest(turns: Turns) -> str:
    """How `select` names a prompt: 16 hex digits of the SHA-256 of its UTF-8 text (turns joined by NUL)."""
    return hashlib.sha256("\0".join(turns).encode()).hexdigest()[:16]


def _selected(spec: DatasetSpec, rows: Iterable[Row]) -> list[Turns]:
    wanted = set(spec.select)
    found: dict[str, Turns] = {}
    for row in rows:
        for turns in _forms(spec, row):
            if (key := digest(turns)) in wanted:
                found.setdefault(key, turns)
    return [found[key] for key in spec.select if key in found]


def _forms(spec: DatasetSpec, row: Row) -> Iterator[Turns]:
    """A row's turns with their optional parts, then without; nothing where a required value is missing."""
    full = tuple(_fill(parts, row) for parts in spec.turns)
    if all(full):
        yield full
        if (bare := tuple(_fill(parts[:1], row) for parts in spec.turns)) != full:
            yield bare


def _fill(parts: Sequence[str], row: Row) -> str:
    """Join the filled parts; empty where the first part misses a value."""
    filled = [part.format(**row) if _complete(part, row) else "" for part in parts]
    return "".join(filled) if filled[0] else ""


def _complete(part: str, row: Row) -> bool:
    """True where every value a template names is text and not empty."""
    fields = [field for _, field, _, _ in _FORMATTER.parse(part) if field is not None]
    try:
        values = [_FORMATTER.get_field(field, (), row)[0] for field in fields]
    except (IndexError, TypeError):
        return False
    return all(isinstance(value, str) and value for value in values)
