"""The run folder on disk: one file a finished unit, written whole or not at all, by one writer at a time.

    OUT/run.json                 what was run, on what, with which versions and models
    OUT/samples/<unit>.parquet   and   OUT/rounds/<unit>.parquet
    OUT/answers.json             the answers to the first turns that later turns continue

A file is written under a temporary name, flushed to the disk and renamed, so a reader never sees half of one
and an interrupted run leaves its finished units. Writing the samples last makes them the sign that a unit is
done. A unit is taken as done when both files are intact, carry its fingerprint and hold no failed row;
anything else is named and measured again.

Two writers: a run holds an exclusive lock on `OUT/.lock` (released by the system when the process ends,
however it ends), and a second run into the same folder is refused. Where a file system has no locks, unique
temporary names and atomic renames still keep every file whole. Reading is in `results.py`.
"""

import json
import os
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkbench.errors import RunError, UsageError
from sparkbench.files import TEMPORARY, write_whole
from sparkbench.results import (
    METADATA_PREFIX,
    RUN_FILE,
    SCHEMA_VERSION,
    TABLES,
    metadata,
    read_file,
    read_run,
)

ANSWERS_FILE = "answers.json"
LOCK_FILE = ".lock"
LOADED = "loaded"


class Store:
    """An opened run folder; use it as a context manager, so that the lock is released.

    identity: what must be the same for a run to continue in this folder; a flat mapping of JSON values.
    UsageError: another process writes here, another configuration lives here, or the folder holds something
    else.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out = out
        existed = out.exists()
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._lock = open(out / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 (held until __exit__)
        except OSError as error:
            raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder") from None
        try:
            if self._acquire():
                self._clean()
            self.document = self._open_run(dict(identity), existed)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    @property
    def run(self) -> str:
        """The id of the run, unique among runs: the folder's name, the time it began, a random tail."""
        return str(self.document["run"])

    def describe(self, details: Mapping[str, Any]) -> None:
        """Record what is known once the models are loaded, or check that it is what the run began with.

        `details["must_match"]` is compared (UsageError when it differs); the rest is kept from the first
        time.
        """
        plain = json.loads(_strict_json(dict(details)))
        before = self.document.get(LOADED)
        if before is None:
            self.document[LOADED] = plain
            self._write_text(RUN_FILE, _strict_json(self.document))
        else:
            self._refuse_difference(before["must_match"], plain["must_match"])

    def path(self, kind: str, unit: str) -> Path:
        return self.out / kind / f"{unit}.parquet"

    def done(self, unit: str, fingerprint: str, notes: list[str]) -> bool:
        """Whether the unit's files can stay; why not goes to `notes`, unless there are simply none."""
        for kind in ("samples", "rounds"):
            path = self.path(kind, unit)
            if not path.exists():
                return False
            try:
                marks = metadata(read_file(path))
            except ValueError as error:
                notes.append(f"{path} is damaged and measured again: {error}")
                return False
            if marks.get("fingerprint") != fingerprint:
                notes.append(f"{path} is not of this run's unit and measured again")
                return False
            if marks.get("complete") != "yes":
                notes.append(f"{path} holds failed rows and is measured again")
                return False
        return True

    def write(self, unit: str, fingerprint: str, samples: pa.Table, rounds: pa.Table, complete: bool) -> None:
        """Write a unit's two files. RunError: the disk is full or unwritable; what was there before stays."""
        marks = {
            "schema_version": str(SCHEMA_VERSION),
            "fingerprint": fingerprint,
            "run": self.run,
            "complete": "yes" if complete else "errors",
        }
        for kind, table in (("rounds", rounds), ("samples", samples)):
            schema = TABLES[kind].with_metadata({METADATA_PREFIX + key: value for key, value in marks.items()})
            sink = pa.BufferOutputStream()
            pq.write_table(table.cast(schema), sink, compression="zstd", write_page_checksum=True)
            self._write(Path(kind) / f"{unit}.parquet", sink.getvalue().to_pybytes())

    def answers(self) -> dict[str, list[int]]:
        """Stored answers to earlier turns, token ids by key; empty without an intact file."""
        try:
            stored = json.loads((self.out / ANSWERS_FILE).read_text(encoding="utf-8"))
            return {str(key): [int(token) for token in ids] for key, ids in stored.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def keep_answers(self, answers: Mapping[str, list[int]]) -> None:
        self._write_text(ANSWERS_FILE, json.dumps(answers, sort_keys=True))

    def _open_run(self, identity: dict[str, Any], existed: bool) -> dict[str, Any]:
        identity = json.loads(_strict_json(identity))
        if (self.out / RUN_FILE).exists():
            document = read_run(self.out)
            if not isinstance(document.get("identity"), dict) or "run" not in document:
                raise UsageError(f"{self.out / RUN_FILE} is not of this program; choose another folder")
            self._refuse_difference(document["identity"], identity)
            return document
        if existed and any(entry.name != LOCK_FILE for entry in self.out.iterdir()):
            raise UsageError(f"{self.out} holds other files and no {RUN_FILE}; choose another folder")
        now = datetime.now(UTC)
        document = {
            "schema_version": SCHEMA_VERSION,
            "run": f"{self.out.resolve().name}-{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}",
            "created": now.isoformat(timespec="seconds"),
            "identity": identity,
            LOADED: None,
        }
        self._write_text(RUN_FILE, _strict_json(document))
        return document

    def _refuse_difference(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        keys = sorted({*there, *here})
        differ = [key for key in keys if there.get(key) != here.get(key)]
        if differ:
            shown = "; ".join(f"{key}: {_short(there.get(key))} there, {_short(here.get(key))} here" for key in differ)
            raise UsageError(f"{self.out} holds a run of another configuration ({shown}); choose another folder")

    def _acquire(self) -> bool:
        """Whether the lock is held; False where the system or the file system has no such locks."""
        try:
            import fcntl
        except ImportError:
            return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            raise UsageError(f"another run (process {holder}) writes to {self.out}; wait for it or stop it") from None
        except OSError:
            return False
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        return True

    def _clean(self) -> None:
        """Remove what an interrupted writer left under a temporary name; only the lock's holder may."""
        for folder in (self.out, *(self.out / kind for kind in TABLES)):
            for leftover in folder.glob(f"*{TEMPORARY}*"):
                leftover.unlink(missing_ok=True)

    def _write_text(self, name: str, text: str) -> None:
        self._write(Path(name), text.encode())

    def _write(self, name: Path, content: bytes) -> None:
        path = self.out / name
        try:
            write_whole(path, content)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}; finished units are kept") from error


def _strict_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
