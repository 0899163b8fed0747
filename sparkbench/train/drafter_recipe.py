"""The recipe of `sparkbench train drafter`: a TOML file that holds everything that decides the outcome.

No key has a default, so that a file says all there is to say and none can change its meaning later. Which keys [model]
and [loss] hold follows from `kind`, the kind of drafter. Unknown keys, missing keys and impossible values are refused
in one line.

Not covered: reading the file (recipe_file.py), and what a stage does with the values; see the module of the stage.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparkbench.drafters.heads import MARKOV_KINDS
from sparkbench.errors import UsageError
from sparkbench.train.loss import LossWeights
from sparkbench.train.recipe import Optimisation

HUB = "hub"
PRECISIONS = ("bfloat16", "float32")
Rules = list[tuple[str, bool, str]]  # key, whether its value is possible, what is allowed
_NAMED = "a known name, a folder or a hub id"


@dataclass(frozen=True)
class _Model:
    """What is trained. target, start: embedded or a known name, a folder, or a hub id.

    start: the drafter whose weights training begins with.   num_anchors: blocks of a sequence.
    """

    kind: str
    target: str
    start: str
    num_anchors: int

    def rules(self) -> Rules:
        return [
            ("target", bool(self.target), _NAMED),
            ("num_anchors", self.num_anchors >= 1, "1 or above"),
        ]


@dataclass(frozen=True)
class DsparkModel(_Model):
    """A DSpark drafter. The Markov and confidence keys must be those of the start.

    block_size: slots of a block; it changes the shape of no weight.
    """

    block_size: int
    markov_rank: int
    markov_kind: str
    confidence_with_markov: bool

    @property
    def draft_length(self) -> int:
        return self.block_size

    def rules(self) -> Rules:
        return [
            *super().rules(),
            ("start", bool(self.start), _NAMED),
            ("block_size", 1 <= self.block_size <= 256, "1 to 256"),
            ("markov_rank", self.markov_rank >= 1, "1 or above"),
            ("markov_kind", self.markov_kind in MARKOV_KINDS, ", ".join(MARKOV_KINDS)),
        ]


@dataclass(frozen=True)
class DartModel(_Model):
    """A DART drafter, whose head covers the whole vocabulary. An empty start stands for random weights.

    draft_length: tokens drafted, d; the published config.json counts masks under this name, which are one fewer.
    heads, kv_heads, head_dim, intermediate_size, rope_theta: of its layer; those of the start, if there is one.
    init_std:     of the random matrices.
    """

    draft_length: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    init_std: float

    def rules(self) -> Rules:
        return [
            *super().rules(),
            ("draft_length", 1 <= self.draft_length <= 256, "1 to 256"),
            ("kv_heads", self.kv_heads >= 1, "1 or above"),
            ("heads", self.heads >= 1 and self.heads % max(1, self.kv_heads) == 0, "a multiple of model.kv_heads"),
            ("head_dim", self.head_dim >= 2 and self.head_dim % 2 == 0, "an even number, 2 or above"),
            ("intermediate_size", self.intermediate_size >= 1, "1 or above"),
            ("rope_theta", self.rope_theta > 0, "above 0"),
            ("init_std", self.init_std > 0, "above 0"),
        ]


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
class DsparkLoss:
    """Weights of the three terms (loss.py), and the decay of a slot's weight, exp(-j / decay)."""

    ce_weight: float
    l1_weight: float
    confidence_weight: float
    decay: float

    @property
    def weights(self) -> LossWeights:
        return LossWeights(self.ce_weight, self.l1_weight, self.confidence_weight)

    def rules(self) -> Rules:
        return [
            *(
                (name, getattr(self, name) >= 0, "0 or above")
                for name in ("ce_weight", "l1_weight", "confidence_weight")
            ),
            ("ce_weight", self.weights != LossWeights(), "above 0, or another weight must be"),
            ("decay", self.decay > 0, "above 0"),
        ]


@dataclass(frozen=True)
class DartLoss:
    """Weight of the divergence from the target's distribution (loss.py), and gamma: slot j weighs gamma^j."""

    kl_weight: float
    gamma: float

    @property
    def weights(self) -> LossWeights:
        return LossWeights(kl=self.kl_weight)

    @property
    def decay(self) -> float:
        return -1 / math.log(self.gamma) if self.gamma < 1 else math.inf

    def rules(self) -> Rules:
        return [
            ("kl_weight", self.kl_weight > 0, "above 0"),
            ("gamma", 0 < self.gamma <= 1, "above 0 and at most 1"),
        ]


KINDS: dict[str, dict[str, Any]] = {  # kind of drafter -> its parts
    "dspark": {"model": DsparkModel, "loss": DsparkLoss},
    "dart": {"model": DartModel, "loss": DartLoss},
}


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
    model: DsparkModel | DartModel
    data: DataPart
    loss: DsparkLoss | DartLoss
    training: TrainingPart

    def __post_init__(self) -> None:
        for key, possible, allowed in self._rules():
            if not possible:
                part, _, name = key.rpartition(".")
                value = getattr(getattr(self, part) if part else self, name)
                raise UsageError(f"{key} {value!r} is not allowed: {allowed}")

    def _rules(self) -> Rules:
        model, data, loss, training = self.model, self.data, self.loss, self.training
        return [
            ("seed", 0 <= self.seed < 1 << 63, "a whole number from 0 to 2^63 - 1"),
            *((f"model.{key}", possible, allowed) for key, possible, allowed in model.rules()),
            *((f"loss.{key}", possible, allowed) for key, possible, allowed in loss.rules()),
            ("data.source", data.source == HUB or data.source.endswith(".jsonl"), "hub or a file FILE.jsonl"),
            ("data.rows", data.rows >= 0, "0 (all) or above"),
            ("data.eval_share", 0 < data.eval_share < 1, "above 0 and below 1"),
            ("data.max_length", data.max_length > model.draft_length, f"above {model.draft_length}, a block"),
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
        return 2 * self.model.draft_length

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


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
