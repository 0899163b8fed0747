"""What a user may choose for a sweep, and what is refused.

`SweepConfig` takes its values from the command line or from a TOML file, brings them into one form (tuples
without duplicates, canonical variants) and refuses bad ones in one line, before any model loads. What a sweep
makes of it is `sweep.py`.
"""

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkbench import arrivals, prompts, registry
from sparkbench.decoding.accept import RULES
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import DTYPES
from sparkbench.errors import UsageError

AUTOREGRESSIVE = "autoregressive"
AUTO = "auto"
OFF = "off"
MAX_BUDGET = 4096
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SweepConfig:
    """What is to be run. Lists may come as sequences or as comma-separated text; duplicates are dropped.

    methods: variants, `name[:key=value...]`; empty or `all` is every method; AR is always first.
    datasets: empty is all that `data` has, the six bundled sets by default; unused where `prompts` is given.
    budgets: draft nodes of a tree, or `auto`, which chooses them each round.
    drafters: source by method name or drafter kind.  limit: prompts a data set, None for all.
    rule: of acceptance, for the methods that do not name one as an option.
    ignore_eos: outputs go on to `max_new_tokens`, so that all arms do equal work.
    arrivals: `poisson:R`, a stream of R requests a second for batches of at most `batch_sizes` rows; None decodes
        closed batches.
    switch_to_ar: most rows of a batch that are drafted for: a number, `auto` (up to the measured break-even), or `off`.
    UsageError, one line, for every value that is not allowed.
    """

    target: str = "embedded"
    methods: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    budgets: tuple[int | str, ...] = (64,)
    batch_sizes: tuple[int, ...] = (1,)
    drafters: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    data: str = "bundled"
    prompts: tuple[str, ...] = ()
    thinking: bool = False
    limit: int | None = None
    max_new_tokens: int = 128
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    rule: str = "match"
    ignore_eos: bool = False
    arrivals: str | None = None
    switch_to_ar: int | str = OFF
    seed: int = 0
    repeats: int = 1
    threads: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UsageError(f"rule {self.rule!r} is not allowed: {', '.join(RULES)}")
        self._set("methods", _methods(_texts("methods", self.methods), self.rule))
        self._set("prompts", _strings("prompts", self.prompts))
        self._set("datasets", self._datasets())
        self._set("temperatures", _unique(float(_number("temperature", t)) for t in _items(self.temperatures)))
        self._set("budgets", _unique(_budget(b) for b in _items(self.budgets)))
        self._set("batch_sizes", _unique(_integer("batch size", b, 1) for b in _items(self.batch_sizes)))
        self._set("drafters", _drafters(self.drafters))
        for name in ("temperatures", "budgets", "batch_sizes"):
            if not getattr(self, name):
                raise UsageError(f"{name}: give at least one value")
        for name in ("target", "device"):
            _string(name, getattr(self, name))
        for name in ("thinking", "strict", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {getattr(self, name)!r} is not allowed: true or false")
        if self.revision is not None:
            _string("revision", self.revision)
        if self.dtype not in ("auto", *DTYPES):
            raise UsageError(f"dtype {self.dtype!r} is not allowed: auto, {', '.join(DTYPES)}")
        for name, low in (("limit", 1), ("threads", 1)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low)
        _integer("max-new-tokens", self.max_new_tokens, 1)
        _integer("repeats", self.repeats, 1)
        _integer("top-k", self.top_k, 0)
        _integer("seed", self.seed, 0, MAX_SEED)
        for name in ("top_p", "min_p", "repetition_penalty"):
            self._set(name, float(_number(name.replace("_", "-"), getattr(self, name))))
        if self.arrivals is not None:
            arrivals.parse(_string("arrivals", self.arrivals))
        self._set("switch_to_ar", _switch(self.switch_to_ar))
        for temperature in self.temperatures:
            self.sampling(temperature)

    @staticmethod
    def from_toml(path: str | Path) -> dict[str, Any]:
        """Fields set in a TOML file, for `SweepConfig(**fields)`. UsageError: unreadable, unknown key."""
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no TOML file: {error}") from None
        allowed = [each.name for each in dataclasses.fields(SweepConfig)]
        unknown = [key for key in values if key not in allowed]
        if unknown:
            raise UsageError(f"{path}: unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}")
        return values

    @property
    def hash(self) -> str:
        """16 hex digits: a function of all settings that change an outcome."""
        return digest(self.settings())[:16]

    def settings(self) -> dict[str, Any]:
        """All fields but `strict`, which only decides what is refused, as JSON values."""
        values = dataclasses.asdict(self)
        del values["strict"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def _datasets(self) -> tuple[str, ...]:
        names = _texts("datasets", self.datasets)
        if self.prompts:
            return ()
        known = prompts.available(_string("data", self.data))
        for name in names:
            if name not in known:
                raise UsageError(f"unknown data set {name!r}; {self.data} has: {', '.join(known) or 'none'}")
        return names or tuple(known)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def digest(value: object) -> str:
    """sha256 of canonical JSON: sorted keys, no blanks, ASCII; NaN is refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# Values of settings -----------------------------------------------------------------


def _methods(texts: Sequence[str], rule: str) -> tuple[str, ...]:
    known = registry.names()
    wanted = [name for text in texts or ("all",) for name in (known if text == "all" else [text])]
    return _unique([AUTOREGRESSIVE, *(_variant(text, rule).canonical for text in wanted)])


def _variant(text: str, rule: str) -> registry.Variant:
    """A variant by its text, with `rule` where it drafts and names none itself; `match` is what methods do anyway."""
    drafts = registry.get(text.partition(":")[0].strip()).name != AUTOREGRESSIVE
    return registry.Variant.parse(text, {"rule": rule} if drafts and rule != "match" else None)


def _drafters(given: object) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise UsageError(f"drafters {given!r} is not allowed: a table of METHOD = SOURCE")
    kinds = {registry.get(name).drafter_kind for name in registry.names()} - {None}
    allowed = sorted({*registry.names(), *(str(kind) for kind in kinds)})
    for name, source in given.items():
        if name not in allowed:
            raise UsageError(f"drafter for unknown method {name!r}; known: {', '.join(allowed)}")
        _string(f"drafter of {name}", source)
    return dict(sorted(given.items()))


def _items(value: object) -> list[object]:
    """A value, a sequence of values, or comma-separated text at any place of the sequence, as a flat list."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    flat: list[object] = []
    for each in values:
        flat += [part.strip() for part in each.split(",") if part.strip()] if isinstance(each, str) else [each]
    return flat


def _texts(name: str, value: object) -> tuple[str, ...]:
    return _unique(_string(name, each) for each in _items(value))


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{name} {value!r} is not allowed: a list of texts")
    return tuple(each if isinstance(each, str) else _string(name, each) for each in value)


def _string(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} {value!r} is not allowed: a text that is not empty")
    return value


def _number(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name} {value!r} is not allowed: a finite number")
    return number


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    allowed = f"a whole number, {low} or above" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise UsageError(f"{name} {value!r} is not allowed: {allowed}")
    return value


def _switch(value: object) -> int | str:
    if value in (AUTO, OFF):
        return str(value)
    try:
        return _integer("switch-to-ar", value, 0)
    except UsageError as error:
        raise UsageError(f"{error}, {AUTO} or {OFF}") from None


def _budget(value: object) -> int | str:
    if value == AUTO:
        return AUTO
    try:
        return _integer("budget", value, 0, MAX_BUDGET)
    except UsageError as error:
        raise UsageError(f"{error}, or {AUTO}") from None


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
