"""Stages: where the time of a round goes.

A stage is opened by name around the work it covers; times of one name add up within a round. On a CPU the clock is
simply read at both edges. On a GPU a stage means something only between device barriers, and barriers cost time, so
stages are recorded in the profile pass alone: `recording=False` makes a stage free.
"""

import time
from collections.abc import Mapping
from types import TracebackType

import torch

STAGES: tuple[str, ...] = (
    "draft",
    "build",
    "build/topk",
    "build/transfer",
    "build/bias",
    "build/expand",
    "build/mask",
    "build/markov",
    "build/confidence",
    "build/lookup",
    "build/search",
    "pack",
    "verify",
    "accept",
    "commit",
    "commit/compact",
    "commit/carry",
)


def covered(stages: Mapping[str, int]) -> int:
    """Nanoseconds that stages cover together; sub-stages are inside their parents and not added."""
    return sum(nanoseconds for stage, nanoseconds in stages.items() if "/" not in stage)


class StageTimer:
    """Adds up nanoseconds by stage until `take` hands them over.

    recording: False makes every stage a no-op.
    device:    a CUDA device is synchronised at each edge while recording.
    """

    def __init__(self, device: torch.device, recording: bool) -> None:
        self.recording = recording
        self.nanoseconds: dict[str, int] = {}
        self._device = device
        self._barrier = recording and device.type == "cuda"
        self._stages: dict[str, _Stage] = {}

    def stage(self, name: str) -> "_Stage":
        """A context manager that adds its duration to `name`, one of STAGES (KeyError otherwise)."""
        stage = self._stages.get(name)
        if stage is None:
            if name not in STAGES:
                raise KeyError(f"unknown stage {name!r}; known: {', '.join(STAGES)}")
            stage = self._stages[name] = _Stage(self, name)
        return stage

    def now(self) -> int:
        """The clock in nanoseconds, after a barrier where there is one."""
        if self._barrier:
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def take(self) -> dict[str, int]:
        """The stages since the last call; empty when not recording."""
        taken, self.nanoseconds = self.nanoseconds, {}
        return taken


class _Stage:
    __slots__ = ("_barrier", "_name", "_started", "_timer")

    def __init__(self, timer: StageTimer, name: str) -> None:
        self._timer = timer
        self._name = name
        self._started = 0

    def __enter__(self) -> None:
        if self._timer.recording:
            if self._timer._barrier:
                torch.cuda.nvtx.range_push(self._name)
            self._started = self._timer.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer.recording:
            elapsed = self._timer.now() - self._started
            total = self._timer.nanoseconds
            total[self._name] = total.get(self._name, 0) + elapsed
            if self._timer._barrier:
                torch.cuda.nvtx.range_pop()
