"""Runs a sweep into a folder: what is done stays, what is missing is measured, and the verdict is of all of
it.

The same command again continues: units whose files are intact and carry the same fingerprint are skipped,
those that failed, are damaged or are missing are measured. Interrupting loses at most the unit in work. How a
unit is measured is `measure.py`, where it runs is `executors`, how it is kept is `store.py`.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sparkbench.executors import Executor
from sparkbench.executors.local import LocalExecutor
from sparkbench.models import Tools
from sparkbench.results import read_samples
from sparkbench.store import Store
from sparkbench.sweep import Plan, SweepConfig, plan


class Progress(Protocol):
    """Who is told how far a run is."""

    def start(self, total: int) -> None: ...

    def advance(self, label: str) -> None: ...

    def note(self, message: str) -> None: ...


class Silent:
    """A `Progress` that tells nobody."""

    def start(self, total: int) -> None:
        pass

    def advance(self, label: str) -> None:
        pass

    def note(self, message: str) -> None:
        pass


@dataclass(frozen=True)
class RunOutcome:
    """What is in a run's folder now.

    units: of the sweep; measured: of these, now.
    rows: samples, of which `failed` have status error and `skipped` are too long for the context or empty.
    violations, tie_flips: outputs that are not AR's.
    notes: one line each.
    """

    out: Path
    units: int
    measured: int
    rows: int
    violations: int
    tie_flips: int
    failed: int
    skipped: int
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1: a method returned what AR does not. 4: something failed. 0: neither."""
        return 1 if self.violations else 4 if self.failed else 0


def run(
    config: SweepConfig,
    out: Path,
    progress: Progress | None = None,
    *,
    tools: Tools | None = None,
    executor: Executor | None = None,
) -> RunOutcome:
    """Run a sweep into `out`, or continue it there.

    UsageError: `out` holds something else, or a source does not exist. RunError: models cannot be loaded, the
    disk is full. KeyboardInterrupt passes; finished units are kept.
    """
    progress = progress or Silent()
    planned = plan(config)
    notes = list(planned.notes)
    measured = 0
    with Store(out, planned.identity()) as store:
        todo = [unit for unit in planned.units if not store.done(unit.name, unit.fingerprint, notes)]
        notes += _strangers(planned, out)
        if todo:
            executor = executor or LocalExecutor(tools)
            store.describe(executor.start(planned, store.run))
            answers = store.answers()
            progress.start(executor.steps(todo))
            for result in executor.results(todo, answers, progress.advance):
                if result.answers:
                    answers.update(result.answers)
                    store.keep_answers(answers)
                store.write(result.unit, result.fingerprint, result.samples, result.rounds, complete=not result.failed)
                measured += 1
    return _outcome(out, planned, measured, notes)


def _strangers(planned: Plan, out: Path) -> list[str]:
    names = {unit.name for unit in planned.units}
    files = sorted(file for file in (out / "samples").glob("*.parquet") if file.stem not in names)
    return [f"{file} is no unit of this run; reports will show it" for file in files]


def _outcome(out: Path, planned: Plan, measured: int, notes: list[str]) -> RunOutcome:
    loaded = read_samples([out])
    status = Counter(loaded.table["status"].to_pylist())
    exactness = Counter(loaded.table["exactness"].to_pylist())
    return RunOutcome(
        out=out,
        units=len(planned.units),
        measured=measured,
        rows=loaded.table.num_rows,
        violations=exactness["violation"],
        tie_flips=exactness["tie_flip"],
        failed=status["error"],
        skipped=status["context"] + status["empty"],
        notes=(*notes, *loaded.notes),
    )
