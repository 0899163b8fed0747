"""The recipe of `sparkbench train drafter`: a TOML file that holds everything that decides the outcome.

No key has a default, so that a file says all there is to say and none can change its meaning later. Unknown keys,
missing keys and impossible values are refused in one line. Some recipes come with the package and are known by name.

Not covered: what a stage does with the values; see the module of the stage.
"""

import json
import tomllib
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sparkbench.drafters.heads import MARKOV_KINDS
from sparkbench.errors import UsageError
from sparkbench.train.recipe import Optimisation

BUNDLED = Path(__file__).resolve().parent / "recipes"
HUB = "hub"
PRECISIONS = ("bfloat16", "float32")
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list of two numbers"}


@dataclass(frozen=True)
class ModelPart:
    """What is trained. target, start: embedded or a known name, a folder, or a hub id.

    start: the DSpark drafter whose weights training begins with; the Markov and confidence keys must be its own.
    block_size, num_anchors: slots of a block, and blocks of a sequence. Neither changes the shape of a weight.
    """

    target: str
    start: str
    block_size: int
    num_anchors: int
    markov_rank: int
    markov_kind: str
    confidence_with_markov: bool


@dataclass(frozen=True)
class DataPart:
    """Conversations. source: `hub` (then repo, revision and split count) or a JSONL file (conversations.py).

    rows: how many of the first ones, 0 for all.   eval_share: of them, held out by a draw with the recipe's seed.
    system_prompt: added where a conversation has none.   max_length: tokens at which a conversation is cut.
    """

    source: str
    repo: str
    revision: str
    split: str
    rows: int
    eval_share: float
    system_prompt: str
    max_length: int


@dataclass(frozen=True)
class LossPart:
    """Weights of the three terms (loss.py), and the decay of a slot's weight, exp(-j / decay)."""

    ce_weight: float
    l1_weight: float
    confidence_weight: float
    decay: float


@dataclass(frozen=True)
class TrainingPart:
    """AdamW, linear warm-up over a share of the steps, cosine to zero; global_batch sequences a step.

    precision: number type of the target and the products.   save_every, log_every: steps between checkpoints and lines.
    """

    steps: int
    global_batch: int
    lr: float
    warmup: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    precision: str
    save_every: int
    log_every: int

    @property
    def optimisation(self) -> Optimisation:
        return Optimisation(self.steps, self.lr, self.warmup, self.betas, self.weight_decay, self.clip, self.save_every)


@dataclass(frozen=True)
class PublishedRecipe:
    """A whole recipe. UsageError at construction: an impossible value."""

    seed: int
    model: ModelPart
    data: DataPart
    loss: LossPart
    training: TrainingPart

    def __post_init__(self) -> None:
        for key, possible, allowed in self._rules():
            if not possible:
                part, _, name = key.rpartition(".")
                value = getattr(getattr(self, part) if part else self, name)
                raise UsageError(f"{key} {value!r} is not allowed: {allowed}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        """(key, whether its value is possible, what is allowed)."""
        model, data, loss, training = self.model, self.data, self.loss, self.training
        weights = (loss.ce_weight, loss.l1_weight, loss.confidence_weight)
        return [
            ("seed", 0 <= self.seed < 1 << 63, "a whole number from 0 to 2^63 - 1"),
            ("model.target", bool(model.target), "a known name, a folder or a hub id"),
            ("model.start", bool(model.start), "a known name, a folder or a hub id"),
            ("model.block_size", 1 <= model.block_size <= 256, "1 to 256"),
            ("model.num_anchors", model.num_anchors >= 1, "1 or above"),
            ("model.markov_rank", model.markov_rank >= 1, "1 or above"),
            ("model.markov_kind", model.markov_kind in MARKOV_KINDS, ", ".join(MARKOV_KINDS)),
            ("data.source", data.source == HUB or data.source.endswith(".jsonl"), "hub or a file FILE.jsonl"),
            ("data.rows", data.rows >= 0, "0 (all) or above"),
            ("data.eval_share", 0 < data.eval_share < 1, "above 0 and below 1"),
            ("data.max_length", data.max_length > model.block_size, "above model.block_size"),
            *((f"loss.{name}", getattr(loss, name) >= 0, "0 or above") for name in _names(LossPart)[:3]),
            ("loss.ce_weight", sum(weights) > 0, "above 0, or another weight must be"),
            ("loss.decay", loss.decay > 0, "above 0"),
            *((f"training.{name}", getattr(training, name) >= 1, "1 or above") for name in _COUNTS),
            ("training.lr", training.lr > 0, "above 0"),
            ("training.warmup", 0 <= training.warmup <= 1, "0 to 1"),
            ("training.betas", all(0 <= beta < 1 for beta in training.betas), "two numbers, 0 or above and below 1"),
            ("training.weight_decay", training.weight_decay >= 0, "0 or above"),
            ("training.clip", training.clip > 0, "above 0"),
            ("training.precision", training.precision in PRECISIONS, ", ".join(PRECISIONS)),
        ]

    @property
    def least_loss_tokens(self) -> int:
        """Tokens of answers that a sequence must have to be used: two blocks' worth, as published."""
        return 2 * self.model.block_size

    def override(
        self,
        target: str | None = None,
        start: str | None = None,
        source: str | None = None,
        steps: int | None = None,
        precision: str | None = None,
    ) -> "PublishedRecipe":
        """The recipe with the values that are given."""
        model = replace(self.model, **_given(target=target, start=start))
        training = replace(self.training, **_given(steps=steps, precision=precision))
        return replace(self, model=model, data=replace(self.data, **_given(source=source)), training=training)

    def as_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def computation(self) -> dict[str, Any]:
        """What of the recipe a training state depends on, besides the weights, features and tokens it is given."""
        values = self.as_json()
        del values["data"]
        for part, names in (("model", ("target", "start")), ("training", ("save_every", "log_every"))):
            for name in names:
                del values[part][name]
        return values


_COUNTS = ("steps", "global_batch", "save_every", "log_every")


def bundled() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in BUNDLED.glob("*.toml"))


def find(recipe: str) -> Path:
    """The file of a recipe: a path that ends in .toml, or a bundled name. UsageError: neither."""
    path = Path(recipe) if recipe.endswith(".toml") else BUNDLED / f"{recipe}.toml"
    if not path.is_file():
        raise UsageError(f"unknown recipe {recipe!r}; allowed: a file FILE.toml, or one of {', '.join(bundled())}")
    return path


_LARGEST = (1 << 63) - 1  # of any number in a recipe


def read(path: Path) -> PublishedRecipe:
    """Read a recipe. UsageError: unreadable, an unknown or missing key, or an impossible value."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file: {error}") from None
    try:
        recipe: PublishedRecipe = _part(PublishedRecipe, table, "")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return recipe


def _part(kind: Any, table: dict[str, Any], prefix: str) -> Any:
    """A dataclass from a table with exactly its keys."""
    names = _names(kind)
    for key in table:
        if key not in names:
            raise UsageError(f"unknown key {prefix}{key}; allowed here: {', '.join(names)}")
    missing = [name for name in names if name not in table]
    if missing:
        raise UsageError(f"the key {prefix}{missing[0]} is missing")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], table[name], f"{prefix}{name}") for name in names})


def _value(kind: Any, value: Any, key: str) -> Any:
    """`value` in the type of a field: a part, a pair of numbers, or a plain value."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise UsageError(f"{key} is not allowed: a table [{key}] is needed")
        return _part(kind, value, f"{key}.")
    if get_args(kind):
        if not isinstance(value, list) or len(value) != len(get_args(kind)):
            raise UsageError(f"{key} {value!r} is not allowed: {WORDS[tuple]}")
        return tuple(_value(float, each, key) for each in value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number if kind is float else type(value) is kind) or (number and not abs(value) <= _LARGEST):
        raise UsageError(f"{key} {value!r} is not allowed: {WORDS[kind]}")
    return kind(value)


def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
