"""Training drafters on the target's answers: DFlash (arXiv 2602.06036), DSpark (2607.05147) and DART (2601.19278).

A block begins at an anchor, a token of an answer drawn at random, and predicts the tokens behind it (`slots.py`). The
features are the frozen target's; so are embedding and head, but for DART's head, which begins as a copy. The loss is
in `loss.py`.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkbench.decoding.target import Target
from sparkbench.decoding.verifier import FeatureTaps
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.dart import DartDrafter
from sparkbench.drafters.dart_config import DartConfig
from sparkbench.train.fit import Fit, Progress, compiled, epoch_batch, fit, restore_weights, step_generator
from sparkbench.train.loss import BlockTargets, LossWeights, block_loss, slot_weights
from sparkbench.train.recipe import DartRecipe, DrafterRecipe, fingerprint
from sparkbench.train.responses import Responses
from sparkbench.train.slots import hidden_at
from sparkbench.train.storage import digest, save_json, save_tensors

Drafter = BlockDrafter | DartDrafter
LOOK_BACK = 4.0


class Shape(Protocol):
    """What a drafter's layers are like, whatever its kind."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...


def checkpoint_config(recipe: DrafterRecipe, target: Target, mask_token_id: int) -> dict[str, Any]:
    """config.json: in the z-lab layout (DFlash), with a Markov head in the DeepSpec layout (DSpark), or in DART's."""
    layers = {"target_layer_ids": list(recipe.target_layer_ids)}
    if isinstance(recipe, DartRecipe):
        return dart_config(recipe, recipe.block_size - recipe.shifted, target) | layers | {"shifted": recipe.shifted}
    rope = {"rope_theta": recipe.rope_theta, "rope_scaling": None}
    shape = _shape(recipe, recipe.layers, target) | {
        "model_type": "qwen3",
        "num_target_layers": target.num_layers,
        "layer_types": ["sliding_attention"] * recipe.layers,
        "use_sliding_window": True,
        "sliding_window": recipe.max_length,
        "block_size": recipe.block_size,
    }
    inner = {"mask_token_id": mask_token_id} | layers
    if not recipe.markov_rank:
        return {"architectures": ["DFlashDraftModel"]} | shape | rope | {"dflash_config": inner}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **shape,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "tie_word_embeddings": False,
        **inner,
        "num_anchors": recipe.anchors,
        "markov_rank": recipe.markov_rank,
        "markov_head_type": recipe.markov_kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def dart_config(shape: Shape, masks: int, target: Target) -> dict[str, Any]:
    """config.json of a DART drafter for `target`, as published: its head covers the vocabulary, and the layers it
    reads follow from the target's number of layers."""
    return {
        "architectures": ["LlamaForCausalLMDart"],
        "model_type": "llama",
        **_shape(shape, 1, target),
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "draft_length": masks,
        "draft_vocab_size": target.vocab_size,
    }


def _shape(shape: Shape, layers: int, target: Target) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": target.max_context,
        "attention_bias": False,
    }


def build(recipe: DrafterRecipe, config: dict[str, Any], target: Target, seed: int) -> Drafter:
    """A drafter with random weights that depend only on the seed; embedding and head are copies of the target's."""
    checkpoint = Checkpoint("recipe", Path(), None, config)
    drafter: Drafter
    if isinstance(recipe, DartRecipe):
        drafter = DartDrafter(DartConfig.read(checkpoint, target.num_layers))
    else:
        drafter = BlockDrafter(BlockConfig.read(checkpoint))
    initialise(drafter, target, recipe.init_std, seed)
    return drafter


def initialise(drafter: Drafter, target: Target, std: float, seed: int) -> None:
    """Random weights that depend only on the seed; embedding and head are the target's, or DART's head a copy."""
    generator = step_generator(seed)
    for name, weight in trainable(drafter).items():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=std, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    if isinstance(drafter, DartDrafter):
        nn.init.normal_(drafter.midlayer.mask_rep, generator=generator)
        drafter.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight)
        look_back(drafter, target, generator)
    elif drafter.config.own_embedding:
        drafter.embed_tokens.weight = target.model.get_input_embeddings().weight
        drafter.lm_head.weight = target.model.get_output_embeddings().weight


@torch.no_grad()
def look_back(drafter: DartDrafter, target: Target, generator: torch.Generator) -> None:
    """Make the masks of a new drafter attend to the rows just before them.

    All masks ask the same question, and neither queries nor keys are normed, so with plain random weights a mask sees
    the mean of the whole prefix and takes thousands of steps to find its end. Here the vector that inputs have in
    common gets a key of ones, and the mask vector a query of ones: under RoPE their product falls with the distance.
    """
    layer, config = drafter.midlayer, drafter.config
    ids = torch.randint(target.vocab_size, (4, 64), generator=generator)
    session = target.session(len(ids), ids.shape[1], config.target_layer_ids)
    features = session.prefill(ids.tolist()).features
    session.close()
    assert features is not None
    weight = drafter.fc.weight
    embedded = target.embed(ids[:, 1:].to(target.device)).to(weight)
    common = layer.inputs(embedded, drafter.fc(features[:, :-1].to(weight))).mean((0, 1))
    for projection, vector in ((layer.self_attn.k_proj, common), (layer.self_attn.q_proj, layer.mask_rep)):
        projection.weight.mul_(2.0)
        projection.weight.add_(LOOK_BACK * vector / vector.pow(2).sum())  # every row alike: the outer product with ones


def trainable(drafter: Drafter) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name: all but what is the target's own."""
    frozen = ("embed_tokens.", "lm_head.") if isinstance(drafter, BlockDrafter) else ()
    named = drafter.named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in named if not name.startswith(frozen)}


def train(
    recipe: DrafterRecipe,
    config: dict[str, Any],
    target: Target,
    responses: Responses,
    seed: int,
    folder: Path,
    name: str,
    progress: Progress,
    *,
    start: Path | None = None,
    stop_after: int | None = None,
) -> tuple[Drafter, Fit]:
    """Train a drafter for `target` in the recipe's phases; it and its curve.

    The state of phase n is `folder/state_name(name, n)`; training continues from those that are there.
    start: the state of another drafter that this one begins with.   stop_after: end at this step of the first phase.
    """
    drafter = build(recipe, config, target, seed)
    weights = trainable(drafter)
    if start is not None:
        restore_weights(start, weights)
    read = reader(target, recipe.target_layer_ids, recipe.precision)
    answered = responses.ends - responses.starts > 1
    usable = (answered & (responses.ends <= recipe.max_length)).nonzero()[:, 0]
    all_ids = F.pad(responses.ids, (0, max(0, recipe.max_length - responses.ids.shape[1])))

    def batch_of(step: int) -> tuple[Tensor, ...]:
        index = usable[epoch_batch(len(usable), recipe.sequences_per_step, step, seed)]
        starts, ends = responses.starts[index, None], responses.ends[index, None]
        draws = torch.rand(len(index), recipe.anchors, generator=step_generator(seed, step, 1))
        anchors = starts + (draws * (ends - 1 - starts)).long()  # nothing follows the last token
        ids = all_ids[index, : recipe.max_length]
        return *read(ids), ids, ends, anchors

    loss = _step_loss(drafter, target, recipe)
    length = drafter.config.draft_length
    if recipe.compile:
        loss = compiled(loss, (*batch_of(0), slot_weights(length, recipe.phases[0].decay)), progress)
    identity = fingerprint(seed, config, asdict(recipe), digest(responses.ids, responses.starts))
    result = Fit((), 0.0, 0.0)
    first = 0
    for number, phase in enumerate(recipe.phases):
        by_slot = slot_weights(length, phase.decay)
        made = fit(
            weights,
            lambda step, first=first, by_slot=by_slot: loss(*batch_of(first + step), by_slot),  # type: ignore[misc]
            phase.optimisation,
            folder / state_name(name, number),
            identity,
            progress,
            stop_after,
        )
        result = Fit(result.losses + made.losses, result.wall_s + made.wall_s, result.cpu_s + made.cpu_s)
        if stop_after is not None:
            break
        first += phase.optimisation.steps
    return drafter.eval(), result


def state_name(name: str, phase: int) -> str:
    """File name of a drafter's training state."""
    return f"{name}-state-{phase + 1}.safetensors"


def export(drafter: Drafter, config: dict[str, Any], folder: Path) -> None:
    """Write the drafter in its published layout, bfloat16 safetensors."""
    save_json(folder / "config.json", config)
    weights = {name: weight.to(torch.bfloat16).clone() for name, weight in drafter.state_dict().items()}
    save_tensors(folder / "model.safetensors", weights)


def reader(target: Target, layers: tuple[int, ...], precision: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """ids [B, S] -> the target's features [B, S, F * H] and final hidden states [B, S, H], without gradients."""
    number_type = getattr(torch, precision)
    size = target.hidden_size

    @torch.no_grad()
    def read(ids: Tensor) -> tuple[Tensor, Tensor]:
        taps = FeatureTaps(target, (*layers, target.num_layers - 1))
        try:
            with torch.autocast(ids.device.type, dtype=number_type, enabled=number_type != torch.float32):
                target.decoder(input_ids=ids, use_cache=False)
            joined = taps.take()
        finally:
            taps.remove()
        assert joined is not None
        joined = joined.float()
        return joined[..., :-size], joined[..., -size:]

    return read


def _step_loss(drafter: Drafter, target: Target, recipe: DrafterRecipe) -> Callable[..., Tensor]:
    """The weighted mean loss, of features, final states, ids [B, S], ends [B, 1], anchors [B, K], slot weights [L]."""
    number_type = getattr(torch, recipe.precision)
    terms = LossWeights(recipe.ce_weight, recipe.l1_weight, recipe.confidence_weight, recipe.kl_weight)
    offsets = torch.arange(drafter.config.draft_length)

    def step_loss(
        features: Tensor, final: Tensor, ids: Tensor, ends: Tensor, anchors: Tensor, by_slot: Tensor
    ) -> Tensor:
        places = anchors[..., None] + offsets  # of each slot's predecessor
        inside = places.clamp(max=ids.shape[1] - 2)
        rows = torch.arange(len(ids))[:, None, None]
        with torch.autocast(ids.device.type, dtype=number_type, enabled=number_type != torch.float32):
            hidden = hidden_at(drafter, target, features, ids, anchors)
            with torch.no_grad():
                wanted = target.head(final[rows, inside]) if terms.l1 or terms.kl else None
            targets = BlockTargets(
                ids[rows, inside], ids[rows, inside + 1], by_slot * (places + 1 < ends[..., None]), wanted
            )
            return block_loss(drafter, target, hidden, targets, terms)

    return step_loss
