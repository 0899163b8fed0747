"""Training block drafters on the target's answers: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

A block begins at an anchor, a token of an answer drawn at random, and predicts the tokens behind it. All blocks
of an answer run in one forward. A mask shows each block the features of the positions before its anchor and its
own slots: it cannot see other blocks, nor the text it is to predict. The pieces are those of inference; only the
way context reaches them differs (all positions at once, masked, instead of a growing cache). Embedding, head and
features are the frozen target's.

The loss is in `loss.py`. Not covered: sliding windows while training: the drafter's window is as long as the longest
sequence it is trained on.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkbench.decoding.target import Target
from sparkbench.decoding.verifier import FeatureTaps
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.train.fit import Fit, Progress, compiled, epoch_batch, fit, restore_weights, step_generator
from sparkbench.train.loss import BlockTargets, block_loss, slot_weights
from sparkbench.train.recipe import DrafterRecipe, fingerprint
from sparkbench.train.responses import Responses
from sparkbench.train.storage import digest, save_json, save_tensors


def checkpoint_config(recipe: DrafterRecipe, target: Target, mask_token_id: int) -> dict[str, Any]:
    """config.json: in the z-lab layout without a Markov head (DFlash), in the DeepSpec layout with one (DSpark)."""
    shape = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_target_layers": target.num_layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": target.max_context,
        "attention_bias": False,
        "layer_types": ["sliding_attention"] * recipe.layers,
        "use_sliding_window": True,
        "sliding_window": recipe.max_length,
        "block_size": recipe.block_size,
    }
    inner = {"mask_token_id": mask_token_id, "target_layer_ids": list(recipe.target_layer_ids)}
    if not recipe.markov_rank:
        rope = {"rope_theta": recipe.rope_theta, "rope_scaling": None}
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


def build(recipe: DrafterRecipe, config: dict[str, Any], target: Target, seed: int) -> BlockDrafter:
    """A drafter with random weights that depend only on the seed; embedding and head are copies of the target's."""
    drafter = BlockDrafter(BlockConfig.read(Checkpoint("recipe", Path(), None, config)))
    generator = step_generator(seed)
    for weight in trainable(drafter).values():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=recipe.init_std, generator=generator)
    if drafter.config.own_embedding:
        drafter.embed_tokens.weight = target.model.get_input_embeddings().weight
        drafter.lm_head.weight = target.model.get_output_embeddings().weight
    return drafter


def trainable(drafter: BlockDrafter) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name: all but the copies of the target's embedding and head."""
    return {
        name: weight
        for name, weight in drafter.named_parameters(remove_duplicate=False)
        if not name.startswith(("embed_tokens.", "lm_head."))
    }


def block_hidden(
    drafter: BlockDrafter, target: Target, features: Tensor, anchor_ids: Tensor, anchors: Tensor
) -> Tensor:
    """Final hidden states [B, K, L, H] of the L drafted slots at K anchors a row.

    features:   [B, S, F * H], the target's features of the rows' tokens.
    anchor_ids: [B, K], the anchors' tokens.   anchors: [B, K], their positions.
    """
    config = drafter.config
    length, block = features.shape[1], config.block_size
    slots = torch.arange(length, device=features.device)
    context = drafter.context_kv(features, drafter.rope(slots, features.dtype))

    masks = torch.full((*anchors.shape, block - 1), config.mask_token_id, device=features.device)
    x = drafter.embed(torch.cat([anchor_ids[..., None], masks], 2).flatten(1), target)
    positions = (anchors[..., None] + torch.arange(block, device=features.device)).flatten(1)
    rope = drafter.rope(positions, x.dtype)
    owner = torch.arange(x.shape[1], device=features.device) // block  # the block of each slot
    own = (owner[:, None] == owner).expand(len(x), -1, -1)
    seen = torch.cat([slots < anchors[:, owner, None], own], 2)[:, None]
    for layer, (context_keys, context_values) in zip(drafter.blocks, map(torch.unbind, context), strict=True):
        queries, keys, values = layer.block_qkv(x, rope)
        keys, values = torch.cat([context_keys, keys], 2), torch.cat([context_values, values], 2)
        x = layer.attend(x, queries, keys, values, seen)
    return drafter.norm(x.unflatten(1, (-1, block))[:, :, config.first_slot :])


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
) -> tuple[BlockDrafter, Fit]:
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


def export(drafter: BlockDrafter, config: dict[str, Any], folder: Path) -> None:
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


def _step_loss(drafter: BlockDrafter, target: Target, recipe: DrafterRecipe) -> Callable[..., Tensor]:
    """The weighted mean loss, of features, final states, ids [B, S], ends [B, 1], anchors [B, K], slot weights [L]."""
    number_type = getattr(torch, recipe.precision)
    offsets = torch.arange(drafter.config.draft_length)

    def step_loss(
        features: Tensor, final: Tensor, ids: Tensor, ends: Tensor, anchors: Tensor, by_slot: Tensor
    ) -> Tensor:
        places = anchors[..., None] + offsets  # of each slot's predecessor
        inside = places.clamp(max=ids.shape[1] - 2)
        rows = torch.arange(len(ids))[:, None, None]
        with torch.autocast(ids.device.type, dtype=number_type, enabled=number_type != torch.float32):
            hidden = block_hidden(drafter, target, features, ids.gather(1, anchors), anchors)
            with torch.no_grad():
                wanted = target.head(final[rows, inside]) if recipe.l1_weight else None
            targets = BlockTargets(
                ids[rows, inside], ids[rows, inside + 1], by_slot * (places + 1 < ends[..., None]), wanted
            )
            return block_loss(drafter, target, hidden, targets, recipe)

    return step_loss
