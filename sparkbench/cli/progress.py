"""Progress of long work on stderr: a bar on a terminal, plain lines elsewhere.

Neither does anything between two calls: a bar that refreshes itself from a thread would disturb what is
measured.

A bar redraws its line with escape codes, so it needs a terminal and colour (console.py says when); anything
else gets a line at the start, one every few seconds, and one at the end.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkbench.cli.console import console, is_terminal, literal, note, wants_colour

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 2.0


class Lines:
    """Plain lines: `done/total label`, not more often than every SECONDS_BETWEEN_LINES."""

    def __init__(self) -> None:
        self._total = 0
        self._done = 0
        self._last = 0.0

    def start(self, total: int) -> None:
        self._total, self._done, self._last = total, 0, 0.0

    def advance(self, label: str) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES or self._done == self._total:
            self._last = now
            note(f"{self._done}/{self._total} {label}")

    def note(self, message: str) -> None:
        note(message)


class Bar:
    """A bar that redraws itself; notes appear above it."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def start(self, total: int) -> None:
        self._progress.reset(self._task, total=total, description="running")
        self._progress.refresh()

    def advance(self, label: str) -> None:
        self._progress.update(self._task, advance=1, description=literal(label), refresh=True)

    def note(self, message: str) -> None:
        self._progress.console.print(literal(message), soft_wrap=True)


@contextmanager
def progress() -> Iterator[Lines | Bar]:
    """What tells of progress while the block runs; nothing of a bar stays behind."""
    if not (is_terminal(sys.stderr) and wants_colour(sys.stderr)):
        yield Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True, auto_refresh=False) as shown:
        yield Bar(shown)
