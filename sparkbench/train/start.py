"""What `sparkbench train drafter` begins with: another drafter, checked against the recipe, or random weights.

A start must fit the target and have all its weights, and its shape must be the recipe's: only how many tokens are
drafted may differ, which changes no weight. DART drafters alone can begin with random weights: fc, layer, norms and
mask vector, and a head that is a copy of the target's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkbench import catalog, drafters
from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.dart import DartDrafter
from sparkbench.drafters.dart_config import DartConfig
from sparkbench.errors import UsageError
from sparkbench.train.block import Drafter, dart_config, initialise, trainable
from sparkbench.train.drafter_recipe import DartModel, DsparkModel, PublishedRecipe

EXPORTED = {"dtype": "bfloat16"}


@dataclass(frozen=True, eq=False)
class Start:
    """drafter: in training mode; its own weights are float32 and have gradients.

    config: the config.json it is written with.   source: the checkpoint it begins with, None for random weights.
    """

    drafter: Drafter
    config: dict[str, Any]
    source: Checkpoint | None


def begin(recipe: PublishedRecipe, target: Target) -> Start:
    """The drafter that training begins with. UsageError: the start, or the length of the sequences, does not fit."""
    model = recipe.model
    begun = _continued(model, target) if model.start else _random(model, target, recipe.seed)
    longest = _longest(begun.drafter, target)
    if recipe.data.max_length > longest:
        raise UsageError(
            f"data.max_length {recipe.data.max_length} is not allowed: target and drafter see {longest} tokens at most"
        )
    for weight in trainable(begun.drafter).values():
        weight.data = weight.data.float().contiguous()
        weight.requires_grad_(True)
    begun.drafter.train()
    return begun


def _continued(model: DsparkModel | DartModel, target: Target) -> Start:
    source = Checkpoint.open(catalog.resolve_drafter(model.kind, model.target, model.start))
    drafter = drafters.load(model.kind, source.source, target, source.revision)
    changed = _adapt_dart(drafter, model) if isinstance(model, DartModel) else _adapt_dspark(drafter, model)
    return Start(drafter, source.config | changed | EXPORTED, source)


def _random(model: DsparkModel | DartModel, target: Target, seed: int) -> Start:
    assert isinstance(model, DartModel)  # DSpark recipes name a start
    config = dart_config(model, model.draft_length - 1, target)
    drafter = DartDrafter(DartConfig.read(Checkpoint("of the recipe", Path(), None, config), target.num_layers))
    initialise(drafter, target, model.init_std, seed)
    return Start(drafter.to(target.device), config, None)


def _adapt_dspark(drafter: BlockDrafter, model: DsparkModel) -> dict[str, Any]:
    """Give a drafter the recipe's block size; what changes in its config.json."""
    config = drafter.config
    with_markov = None if config.confidence_rank is None else config.confidence_rank > 0
    own = {
        "markov_rank": config.markov_rank,
        "markov_kind": config.markov_kind,
        "confidence_with_markov": with_markov,
    }
    _check_same(drafter, model, own)
    drafter.config = replace(config, block_size=model.block_size)
    return {"block_size": model.block_size, "num_anchors": model.num_anchors}


def _adapt_dart(drafter: Drafter, model: DartModel) -> dict[str, Any]:
    """Give a drafter the recipe's draft length; what changes in its config.json."""
    if not isinstance(drafter, DartDrafter):
        raise UsageError(f"start {drafter.source}: no DART drafter")
    config = drafter.config
    if config.draft_vocab_size < config.vocab_size or drafter.target_ids is not None:
        raise UsageError(
            f"start {drafter.source}: its head has {config.draft_vocab_size} tokens of its own choice and order; "
            f"allowed: a head over the target's {config.vocab_size}"
        )
    shape = ("heads", "kv_heads", "head_dim", "intermediate_size", "rope_theta")
    _check_same(drafter, model, {key: getattr(config, key) for key in shape})
    masks = model.draft_length - config.shifted
    drafter.config = replace(config, masks=masks)
    return {"draft_length": masks}


def _check_same(drafter: Drafter, model: DsparkModel | DartModel, own: dict[str, Any]) -> None:
    for key, value in own.items():
        if value != getattr(model, key):
            raise UsageError(f"start {drafter.source}: its {key} is {value}, and the recipe says {getattr(model, key)}")


def _longest(drafter: Drafter, target: Target) -> int:
    """Tokens of the longest sequence that both can be trained on."""
    if isinstance(drafter, DartDrafter):
        return target.max_context
    windows = (window for window in drafter.config.windows if window is not None)
    return min([drafter.config.max_context, target.max_context, *windows])
