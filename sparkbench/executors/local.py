"""Runs units one after the other in this process, with the models loaded once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparkbench.measure import Advance, first_turns, run_unit
from sparkbench.models import Tools, load
from sparkbench.rows import UnitResult
from sparkbench.settings import OFF
from sparkbench.sweep import Plan, Unit
from sparkbench.switching import most_rows


class LocalExecutor:
    """An `Executor` on this machine; `start` must come first."""

    def __init__(self, tools: Tools | None = None) -> None:
        self._tools = tools

    def start(self, plan: Plan, run: str) -> dict[str, Any]:
        self._plan = plan
        self._loaded = load(plan, run, self._tools)
        if plan.config.switch_to_ar != OFF:
            self._loaded.most_rows = most_rows(plan.config, self._loaded, first_turns(plan, self._loaded))
        return self._loaded.describe()

    def steps(self, units: Sequence[Unit]) -> int:
        return sum(self._plan.generations(unit) for unit in units) * len(self._loaded.passes)

    def results(
        self, units: Sequence[Unit], answers: Mapping[str, list[int]], advance: Advance
    ) -> Iterator[UnitResult]:
        for unit in units:
            yield run_unit(unit, self._loaded, answers, advance)
