"""Where units run: in this process (`local.py`), or elsewhere. An executor moves units and adds nothing to
them.

The contract is `Executor`: `start` loads whatever is needed once, `results` gives one result a unit, in any
order, and may be stopped at any time; what it has given is kept by the caller.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from sparkbench.measure import Advance
from sparkbench.rows import UnitResult
from sparkbench.sweep import Plan, Unit


class Executor(Protocol):
    def start(self, plan: Plan, run: str) -> dict[str, Any]:
        """Load models; return what run.json records (measure.Loaded.describe)."""
        ...

    def steps(self, units: Sequence[Unit]) -> int:
        """How often `advance` will be called for `units`; valid after `start`."""
        ...

    def results(
        self, units: Sequence[Unit], answers: Mapping[str, list[int]], advance: Advance
    ) -> Iterator[UnitResult]:
        """Run units; `answers` are known answers to earlier turns and may grow while this runs."""
        ...
