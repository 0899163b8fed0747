"""From a sweep's settings to units of work.

`plan` reads the prompts and cuts the sweep into units: one data set, temperature, batch size and chunk of
prompts, with autoregressive decoding (AR) and all variants and budgets inside, since they are only compared
within a process. A variant that takes no budget runs once, with budget None. A unit's fingerprint covers all
that changes its outcome; a unit whose fingerprint is on disk already is not run again. The settings are
`settings.py`, running is `runner.py`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkbench import __version__, catalog, drafters, prompts, registry
from sparkbench.errors import UsageError
from sparkbench.prompts import Prompt
from sparkbench.results import SCHEMA_VERSION
from sparkbench.settings import AUTO, SweepConfig, digest

__all__ = ["Arm", "Plan", "SweepConfig", "Unit", "default_out", "dry_run", "plan", "source_identity"]

CHUNK = 8
TEXT_DATASET = "prompt"
FILES = ("curve", "calibration")  # options of methods that name files
AUTO_OPTION = "budget"  # of methods that can choose it


@dataclass(frozen=True)
class Arm:
    """One thing compared: a variant at a budget. `drafter` and `index` are their sources, None without one."""

    method: str
    variant: str
    budget: int | None
    drafter_kind: str | None
    drafter: str | None
    index: str | None = None
    rule: str = "match"

    @property
    def label(self) -> str:
        return self.variant if self.budget is None else f"{self.variant} @{self.budget}"


@dataclass(frozen=True)
class Unit:
    """One piece of work, the same wherever it runs.

    copies: for each prompt, how many equal prompts come before it in its data set (they sample apart).
    arrivals: of a stream, in which all prompts are one batch of at most `batch_size` rows at a time; else None.
    """

    name: str
    dataset: str
    temperature: float
    batch_size: int
    prompts: tuple[Prompt, ...]
    copies: tuple[int, ...]
    fingerprint: str
    arrivals: str | None = None

    def parts(self) -> list[slice]:
        """Which prompts are decoded together."""
        size = len(self.prompts) if self.arrivals else self.batch_size
        return [slice(start, start + size) for start in range(0, len(self.prompts), size)]

    @property
    def batches(self) -> int:
        """Batches of all turns together."""
        return sum(max(len(prompt.turns) for prompt in self.prompts[part]) for part in self.parts())


@dataclass(frozen=True)
class Plan:
    """A sweep cut into units. `sources` names what everything was read from, by content or revision."""

    config: SweepConfig
    arms: tuple[Arm, ...]
    units: tuple[Unit, ...]
    sources: Mapping[str, str]
    notes: tuple[str, ...]

    def generations(self, unit: Unit) -> int:
        """Batches decoded for `unit` in one pass: every arm, turn and repeat."""
        return unit.batches * len(self.arms) * self.config.repeats

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be continued."""
        sources = {f"source of {name}": text for name, text in self.sources.items()}
        return self.config.settings() | {"sparkbench": __version__} | sources


def plan(config: SweepConfig) -> Plan:
    """Read the prompts of a sweep and cut it into units; no model is loaded.

    UsageError: a data set, a target or a drafter that does not exist, or no prompt at all.
    """
    sources = {"target": source_identity(catalog.resolve_target(config.target), config.revision)}
    arms = _arms(config)
    for arm in arms:
        for source in drafters.split_source(arm.drafter or ""):
            if source and source != drafters.NO_HEAD:
                sources[f"drafter {source}"] = source_identity(source, None)
        if arm.index is not None:
            sources[f"index {arm.index}"] = source_identity(arm.index, None)
        for option, text in registry.Variant.parse(arm.variant).options:
            if option in FILES and (option, text) != ("calibration", "none"):
                if not Path(text).is_file():
                    raise UsageError(f"method {arm.method}: {option}={text}: there is no such file")
                sources[f"{option} {text}"] = source_identity(text, None)
    datasets, notes = _prompts(config)
    units = []
    for dataset, found in datasets.items():
        counted = list(zip(found, _copies(found), strict=True))
        for temperature in config.temperatures:
            for batch_size in config.batch_sizes:
                ordered = _grouped(counted) if batch_size > 1 and not config.arrivals else counted
                size = len(found) if config.arrivals else batch_size * max(1, CHUNK // batch_size)
                for start in range(0, len(found), size):
                    some, copies = zip(*ordered[start : start + size], strict=True)
                    print_ = _fingerprint(config, arms, sources, temperature, batch_size, some, copies)
                    name = f"{_slug(dataset)}-t{temperature:g}-b{batch_size}-{start // size:03d}-{print_[:8]}"
                    unit = Unit(name, dataset, temperature, batch_size, some, copies, print_, config.arrivals)
                    units.append(unit)
    if not units:
        raise UsageError("no prompts: the data sets are empty")
    hashes = {name: digest([[p.prompt_id, *p.turns] for p in found]) for name, found in datasets.items()}
    sources |= {f"prompts {name}": text for name, text in hashes.items()}
    return Plan(config, arms, tuple(units), sources, notes)


def dry_run(config: SweepConfig) -> dict[str, Any]:
    """What a run would do, as JSON values: units with their counts, and variants; no model is loaded."""
    planned = plan(config)
    units = [
        {
            "name": unit.name,
            "dataset": unit.dataset,
            "temperature": unit.temperature,
            "batch_size": unit.batch_size,
            "prompts": len(unit.prompts),
            "generations": planned.generations(unit),
        }
        for unit in planned.units
    ]
    return {
        "variants": [arm.label for arm in planned.arms],
        "units": units,
        "prompts": len({(p.dataset, p.prompt_id) for unit in planned.units for p in unit.prompts}),
        "generations": sum(planned.generations(unit) for unit in planned.units),
        "notes": list(planned.notes),
    }


def default_out(config: SweepConfig) -> Path:
    """Where a run goes when nothing is said: the same settings give the same folder, so that it continues."""
    return Path("results") / f"{_slug(Path(config.target).name)}-{config.hash[:8]}"


def source_identity(source: str, revision: str | None) -> str:
    """What identifies weights without loading them: the content of a folder's files, or a hub id with its
    revision.

    Of a large file the size and the first and last 64 KiB are read; its header is in there.
    """
    folder = Path(source)
    if not folder.exists():
        return f"{source}@{revision or 'main'}"
    seen = hashlib.sha256()
    for file in sorted(path for path in ([folder] if folder.is_file() else folder.rglob("*")) if path.is_file()):
        seen.update(f"{file.relative_to(folder)}:{file.stat().st_size}:".encode())
        with open(file, "rb") as content:
            seen.update(content.read(1 << 16))
            content.seek(max(0, file.stat().st_size - (1 << 16)))
            seen.update(content.read())
    return "sha256:" + seen.hexdigest()


def _arms(config: SweepConfig) -> tuple[Arm, ...]:
    arms: list[Arm] = []
    for text in config.methods:
        variant = registry.Variant.parse(text)
        method = registry.get(variant.method)
        kind = method.drafter_kind
        drafter = None
        if kind is not None:
            wanted = dict(variant.options).get("drafter") or config.drafters.get(variant.method)
            drafter = catalog.resolve_drafter(kind, config.target, wanted or config.drafters.get(kind, ""))
        options = variant.typed_options()
        index = catalog.resolve_index(config.target, options.index) if hasattr(options, "index") else None
        for name, budget in _budgets(variant, method, config):
            arms.append(Arm(variant.method, name, budget, kind, drafter, index, getattr(options, "rule", "match")))
    return tuple(dict.fromkeys(arms))


def _budgets(variant: registry.Variant, method: Any, config: SweepConfig) -> list[tuple[str, int | None]]:
    """A variant with each budget; one that finds its budgets by itself has an option that says so, and no number."""
    if not method.takes_budget or (AUTO_OPTION, AUTO) in variant.options:
        return [(variant.canonical, None)]
    if AUTO in config.budgets and not hasattr(method.Options, AUTO_OPTION):
        raise UsageError(f"budget {AUTO} is not allowed for {method.name}, which does not choose budgets")
    automatic = f"{variant.canonical}:{AUTO_OPTION}={AUTO}"
    return [
        (registry.Variant.parse(automatic).canonical, None) if isinstance(each, str) else (variant.canonical, each)
        for each in config.budgets
    ]


def _prompts(config: SweepConfig) -> tuple[dict[str, tuple[Prompt, ...]], tuple[str, ...]]:
    if config.prompts:
        given = (
            Prompt(dataset=TEXT_DATASET, domain="text", source="text", prompt_id=f"text-{index}", turns=(text,))
            for index, text in enumerate(config.prompts)
        )
        return {TEXT_DATASET: tuple(given)}, ()
    datasets: dict[str, tuple[Prompt, ...]] = {}
    notes: list[str] = []
    for name in config.datasets:
        loaded = prompts.load_prompts(name, config.data, limit=config.limit, seed=config.seed, strict=config.strict)
        datasets[name] = tuple(loaded.prompts)
        notes += loaded.bad_lines
    return datasets, tuple(notes)


def _grouped(counted: list[tuple[Prompt, int]]) -> list[tuple[Prompt, int]]:
    """Prompts by the length of their text, so that one long prompt does not decide the padding of all."""
    return sorted(counted, key=lambda each: sum(map(len, each[0].turns)))


def _copies(found: Sequence[Prompt]) -> tuple[int, ...]:
    seen: Counter[tuple[str, ...]] = Counter()
    copies = []
    for prompt in found:
        copies.append(seen[prompt.turns])
        seen[prompt.turns] += 1
    return tuple(copies)


def _fingerprint(
    config: SweepConfig,
    arms: Sequence[Arm],
    sources: Mapping[str, str],
    temperature: float,
    batch_size: int,
    found: Sequence[Prompt],
    copies: Sequence[int],
) -> str:
    lists = ("methods", "datasets", "temperatures", "budgets", "batch_sizes", "drafters", "prompts", "limit")
    return digest(
        {
            "version": [__version__, SCHEMA_VERSION],
            "settings": {key: value for key, value in config.settings().items() if key not in lists},
            "arms": [[arm.variant, arm.budget, arm.drafter] for arm in arms],
            "sources": dict(sources),
            "temperature": temperature,
            "batch_size": batch_size,
            "prompts": [[p.dataset, p.prompt_id, *p.turns] for p in found],
            "copies": list(copies),
        }
    )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:40] or "x"
