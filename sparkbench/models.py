"""What a process holds to run units: the target, the drafters, and a method instance for each arm.

`Tools` names the functions that loading and measuring call, so that both can be tried without a model.
Measuring is `measure.py`.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparkbench import catalog, drafters, exactness, machine, registry
from sparkbench.decoding import loop
from sparkbench.decoding.loop import DecodeConfig, Generation, Request
from sparkbench.decoding.target import Target, dtype_name
from sparkbench.errors import UsageError
from sparkbench.exactness import Verdict
from sparkbench.profiling.costs import RoundCosts, measure_curves, measure_overheads
from sparkbench.profiling.curve import StepCurves
from sparkbench.prompts import encode_chat
from sparkbench.scheduling import Calibration
from sparkbench.settings import SweepConfig
from sparkbench.sweep import Arm, Plan

CLEAN, PROFILE = "clean", "profile"
TINY = 50_000_000  # parameters below which one CPU thread is fastest


def load_target(config: SweepConfig) -> Target:
    source = catalog.resolve_target(config.target)
    target = Target.load(source, name=config.target, revision=config.revision, dtype=config.dtype, device=config.device)
    if target.tokenizer is None:
        raise UsageError(f"target {config.target}: it has no tokenizer, so prompts cannot be encoded")
    return target


def _build(arm: Arm, drafter: object) -> Any:
    return registry.build(registry.Variant.parse(arm.variant), drafter=drafter, budget=arm.budget)


def equip(methods: Sequence[Any], target: Any, batch_sizes: Sequence[int]) -> None:
    """Give methods what lies outside them: an n-gram index, a calibration, and what rounds cost on this machine.

    UsageError: an option names a file that is missing or broken.
    """
    from sparkbench.ngram.sources import load as load_index

    indices: dict[str, Any] = {}
    for method in methods:
        if hasattr(method.options, "index"):
            source = catalog.resolve_index(target.name, method.options.index)
            if source is not None and source not in indices:
                indices[source] = load_index(source, target)
            method.index = None if source is None else indices[source]
    deciding = [method for method in methods if method.needs_costs]
    measured = None
    if any(not method.options.curve for method in deciding):
        measured = measure_curves(target, batch_sizes, max(method.max_nodes for method in deciding))
    for method in methods:
        chosen = getattr(method.options, "calibration", "")
        if chosen != "none":
            own = getattr(method.drafter, "calibration", None)
            method.calibration = Calibration.load(Path(chosen)) if chosen else own
        if method.calibration is not None and hasattr(method.options, "calibration"):
            slots, length = len(method.calibration.temperatures), method.drafter.config.draft_length
            if slots != length:
                what = f"calibration {chosen or method.drafter.source}"
                raise UsageError(f"{what}: it has {slots} slots, the drafter {method.drafter.source} has {length}")
    for method in deciding:
        file = method.options.curve
        curves = _known(file, target) if file else measured
        assert curves is not None
        method.costs = RoundCosts(curves, measure_overheads(target, method, curves, batch_sizes))


def _known(file: str, target: Any) -> StepCurves:
    """Curves of a file. UsageError: broken, or measured on another device or in another number type."""
    curves = StepCurves.load(file)
    here = machine.device_name(target.device), dtype_name(target.dtype)
    if (curves.device, curves.dtype) != here:
        raise UsageError(
            f"curve {file}: it was measured on {curves.device} in {curves.dtype}, and this is {here[0]} in {here[1]}"
        )
    return curves


@dataclass(frozen=True)
class Tools:
    """What loading and measuring call; tests put stand-ins here."""

    load_target: Callable[[SweepConfig], Any] = load_target
    load_drafter: Callable[[str, str, Any], Any] = drafters.load
    build: Callable[[Arm, object], Any] = _build
    equip: Callable[[Sequence[Any], Any, Sequence[int]], None] = equip
    generate: Callable[[Any, Any, Sequence[Request], DecodeConfig], list[Generation]] = loop.generate
    serve: Callable[[Any, Any, Sequence[Request], DecodeConfig, int], list[Generation]] = loop.serve
    classify: Callable[..., Verdict] = exactness.classify
    width_noise: Callable[..., dict[int, float]] = exactness.width_noise
    encode: Callable[..., tuple[int, ...]] = encode_chat


@dataclass(eq=False)
class Loaded:
    """A process ready to run units: models, one method instance an arm, and what it has learnt so far.

    load_s: seconds each arm took to load, its drafter included.  warm: (arm, rows, temperature).
    noise:  the width noise by number of rows, measured on a text of AR when an output first differs.
    most_rows: batch size up to which each arm drafts, by temperature; empty without `switch_to_ar`.
    """

    config: SweepConfig
    run: str
    arms: tuple[Arm, ...]
    methods: tuple[Any, ...]
    target: Any
    drafters: Mapping[str, Any]
    load_s: tuple[float, ...]
    tools: Tools
    warm: set[tuple[int, int, float]] = field(default_factory=set)
    noise: dict[int, dict[int, float]] = field(default_factory=dict)
    most_rows: Mapping[float, Sequence[int | None]] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[str, ...]:
        return (CLEAN, PROFILE) if self.target.device.type == "cuda" else (CLEAN,)

    def describe(self) -> dict[str, Any]:
        """For run.json: the machine, versions and models; `must_match` is what a continued run must share."""
        device = self.target.device
        return {
            "machine": machine.describe(device),
            "versions": machine.versions(),
            "git_commit": machine.git_commit(),
            "indices": {
                arm.index: dict(method.index.facts)
                for arm, method in zip(self.arms, self.methods, strict=True)
                if arm.index is not None and getattr(method, "index", None) is not None
            },
            "round_costs": {
                arm.label: dataclasses.asdict(method.costs)
                for arm, method in zip(self.arms, self.methods, strict=True)
                if getattr(method, "costs", None) is not None
            },
            "most_rows_drafted": {
                f"{temperature:g}": {arm.label: rows for arm, rows in zip(self.arms, most, strict=True)}
                for temperature, most in self.most_rows.items()
            },
            "must_match": {
                "target": self.target.name,
                "target_revision": self.target.revision,
                "drafter_revisions": {name: getattr(d, "revision", None) for name, d in self.drafters.items()},
                "dtype": dtype_name(self.target.dtype),
                "attention": getattr(self.target.model.config, "_attn_implementation", None),
                "device_name": machine.device_name(device),
                "torch": machine.versions()["torch"],
                "transformers": machine.versions()["transformers"],
            },
        }


def load(plan: Plan, run: str, tools: Tools | None = None) -> Loaded:
    """Load the target, the drafters and all arms. Errors of loading pass through (UsageError, RunError)."""
    tools = tools or Tools()
    started = time.perf_counter()
    target = tools.load_target(plan.config)
    target_s = time.perf_counter() - started
    set_threads(plan.config.threads, target)
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    methods = []
    for arm in plan.arms:
        if arm.drafter in found:
            drafters.check_kind(str(arm.drafter_kind), found[arm.drafter])
        elif arm.drafter is not None:
            started = time.perf_counter()
            found[arm.drafter] = tools.load_drafter(str(arm.drafter_kind), arm.drafter, target)
            seconds[arm.drafter] = time.perf_counter() - started
        methods.append(tools.build(arm, None if arm.drafter is None else found[arm.drafter]))
    tools.equip(methods, target, plan.config.batch_sizes)
    load_s = tuple(target_s + seconds.get(arm.drafter or "", 0.0) for arm in plan.arms)
    return Loaded(plan.config, run, plan.arms, tuple(methods), target, found, load_s, tools)


def set_threads(threads: int | None, target: Any) -> None:
    """CPU threads as asked for; by default one for a tiny target on a CPU, else torch's choice."""
    if threads is None and target.device.type == "cpu":
        tiny = sum(parameter.numel() for parameter in target.model.parameters()) < TINY
        threads = 1 if tiny else None
    if threads is not None:
        torch.set_num_threads(threads)
