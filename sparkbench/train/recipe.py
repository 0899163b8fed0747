"""What `sparkbench train` does, as numbers: one frozen dataclass a stage, and the recipe that holds them.

Everything that decides the outcome stands here, so that the model card can quote it, a work folder can be
checked against it, and further drafters can be trained on the same tokens for the same number of steps as the
first one.

Not covered: how a stage works; see the module of the stage.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Optimisation:
    """AdamW with linear warm-up and a cosine to zero.

    warmup: share of the steps.   clip: largest norm of the gradient.   save_every: steps between checkpoints.
    """

    steps: int
    lr: float
    warmup: float = 0.04
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    save_every: int = 200

    def lr_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..., steps - 1."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class CorpusRecipe:
    """The tokenizer and the training text.

    vocab_size:          entries of the byte-level BPE, special tokens included.
    tokenizer_documents: documents it is learnt from.
    documents:           documents the target is trained on, from index 0.
    row_length:          tokens of a packed row.
    prompt_weight:       loss weight of what the assistant does not write.
    polish_documents:    documents of the second training, the first ones again, of which a share is varied.
    prompt_documents:    documents whose user turns the target answers; their indices follow; a share is varied.
    varied:              that share (vary.py).
    """

    vocab_size: int = 2048
    tokenizer_documents: int = 20_000
    documents: int = 150_000
    row_length: int = 320
    prompt_weight: float = 0.1
    polish_documents: int = 50_000
    prompt_documents: int = 5_000
    varied: float = 0.6


@dataclass(frozen=True)
class TargetRecipe:
    """A Qwen3 model and its two trainings on packed rows: on plain text, then on text that is partly varied.

    precision: number type of the matrix products; the weights are float32 while training.
    compile:   compile the training step where the machine can (1.5 times as fast; needs a C++ compiler).
    """

    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    init_std: float = 0.03
    rows_per_step: int = 13
    precision: str = "bfloat16"
    compile: bool = True
    optimisation: Optimisation = field(default_factory=lambda: Optimisation(steps=4400, lr=3e-3))
    polish: Optimisation = field(default_factory=lambda: Optimisation(steps=1200, lr=1.5e-3))


@dataclass(frozen=True)
class ResponseRecipe:
    """The target's own answers to user turns, which drafters are trained on.

    sampled: share of them answered at temperature 1; the others are answered greedily.
    """

    sampled: float = 0.5
    max_new_tokens: int = 160
    batch: int = 128


@dataclass(frozen=True)
class Phase:
    """A part of a drafter's training. decay: slot j = 0, 1, ... of a block weighs exp(-j / decay) in the loss."""

    optimisation: Optimisation
    decay: float


def _phase(steps: int, lr: float, decay: float) -> Phase:
    return Phase(Optimisation(steps=steps, lr=lr, weight_decay=0.01), decay)


@dataclass(frozen=True)
class DrafterRecipe:
    """Tokens and steps of drafter training, the same for every drafter of the family.

    sequences_per_step: responses a step.
    anchors:            blocks drawn from each, anew every time it is seen.
    max_length:         tokens of the longest sequence that is used, prompt and answer together.
    phases:             DFlash's later ones care for the first slots, since most drafts end there.
    markov_rank:        0 makes a DFlash drafter; above 0 it is a DSpark drafter, with a confidence head.
    ce_weight, l1_weight, confidence_weight: of the loss's terms (loss.py).
    """

    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    init_std: float = 0.03
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 3, 4)
    sequences_per_step: int = 8
    anchors: int = 32
    max_length: int = 256
    precision: str = "bfloat16"
    compile: bool = True
    phases: tuple[Phase, ...] = (_phase(2000, 3e-3, 7.0), _phase(1600, 2e-3, 3.5), _phase(800, 1.5e-3, 3.5))
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    ce_weight: float = 1.0
    l1_weight: float = 0.0
    confidence_weight: float = 0.0
    kl_weight: ClassVar[float] = 0.0


@dataclass(frozen=True)
class DartRecipe(DrafterRecipe):
    """A DART drafter, whose loss is the weighted divergence of its paper.

    block_size: tokens drafted, d.   shifted: the last prefix row drafts the first of them; else a mask does.
    """

    layers: int = 1
    block_size: int = 8
    phases: tuple[Phase, ...] = ()
    ce_weight: float = 0.0
    kl_weight: float = 1.0  # type: ignore[misc]
    shifted: bool = True


def _dart(gamma: float, *steps: tuple[int, float]) -> DartRecipe:
    """Phases of (steps, learning rate); slot j weighs gamma^j."""
    return DartRecipe(phases=tuple(_phase(count, rate, -1 / math.log(gamma)) for count, rate in steps))


def _dspark(block_size: int, *phases: Phase) -> DrafterRecipe:
    """A DSpark drafter with the loss of the paper."""
    return DrafterRecipe(
        block_size=block_size, phases=phases, markov_rank=64, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0
    )


@dataclass(frozen=True)
class CalibrationRecipe:
    """Rounds on which a DSpark drafter's confidences are calibrated.

    documents:   whose user turns are answered, of those behind the held-out ones.
    temperature: of the target's draws; acceptance depends on it, so a calibration holds for one temperature.
    judged:      share of the prompts that the fit does not see and is judged on.
    """

    documents: int = 600
    temperature: float = 0.0
    judged: float = 1 / 3
    max_new_tokens: int = 128
    batch: int = 16


@dataclass(frozen=True)
class NgramRecipe:
    """The n-gram index of DART, counted on the first documents of the target's second training."""

    documents: int = 50_000
    order: int = 3


@dataclass(frozen=True)
class FigureRecipe:
    """What the figures of the model card are measured on.

    held_out: documents that nothing was trained on.   prompts: of each bundled set, None for all.
    """

    held_out: int = 400
    prompts: int | None = None
    max_new_tokens: int = 128


@dataclass(frozen=True)
class Recipe:
    """The embedded family: seed of everything, and the stages.

    dspark_b16 begins with the weights of dspark_b7; dflash takes as many steps as both together.
    """

    seed: int = 0
    corpus: CorpusRecipe = field(default_factory=CorpusRecipe)
    target: TargetRecipe = field(default_factory=TargetRecipe)
    responses: ResponseRecipe = field(default_factory=ResponseRecipe)
    dflash: DrafterRecipe = field(default_factory=DrafterRecipe)
    dspark_b7: DrafterRecipe = field(
        default_factory=lambda: _dspark(7, _phase(2000, 3e-3, 4.0), _phase(1600, 2e-3, 4.0))
    )
    dspark_b16: DrafterRecipe = field(default_factory=lambda: _dspark(16, _phase(800, 1.5e-3, 4.0)))
    dart: DrafterRecipe = field(default_factory=lambda: _dart(0.6, (2000, 3e-3), (1600, 2e-3), (800, 1.5e-3)))
    ngram: NgramRecipe = field(default_factory=NgramRecipe)
    calibration: CalibrationRecipe = field(default_factory=CalibrationRecipe)
    figures: FigureRecipe = field(default_factory=FigureRecipe)

    def as_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON values, to tell whether a stored stage belongs to this recipe."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
