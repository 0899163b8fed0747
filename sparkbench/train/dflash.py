"""Training a DFlash drafter (Chen et al., arXiv 2602.06036) on the target's answers.

A block begins at an anchor, a token of an answer drawn at random, and predicts the tokens behind it. All blocks
of an answer run in one forward. A mask shows each block the features of the positions before its anchor and its
own slots: it cannot see other blocks, nor the text it is to predict. The pieces are those of inference; only the
way context reaches them differs (all positions at once, masked, instead of a growing cache). Embedding, head and
features are the frozen target's.

Not covered: the DeepSpec layout, which the embedded drafter does not use, and sliding windows while training: the
drafter's window is as long as the longest sequence it is trained on.
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
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.dflash import DFlashDrafter
from sparkbench.drafters.dflash_config import DFlashConfig
from sparkbench.train.fit import Fit, Progress, compiled, epoch_batch, fit, step_generator
from sparkbench.train.recipe import DrafterRecipe, fingerprint
from sparkbench.train.responses import Responses
from sparkbench.train.storage import digest, save_json, save_tensors


def checkpoint_config(recipe: DrafterRecipe, target: Target, mask_token_id: int) -> dict[str, Any]:
    """config.json in the z-lab layout."""
    return {
        "architectures": ["DFlashDraftModel"],
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
        "rope_theta": recipe.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_context,
        "attention_bias": False,
        "layer_types": ["sliding_attention"] * recipe.layers,
        "use_sliding_window": True,
        "sliding_window": recipe.max_length,
        "block_size": recipe.block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(recipe.target_layer_ids)},
    }


def build(recipe: DrafterRecipe, config: dict[str, Any], seed: int) -> DFlashDrafter:
    """A drafter with random weights that depend only on the seed."""
    drafter = DFlashDrafter(DFlashConfig.read(Checkpoint("recipe", Path(), None, config)))
    generator = step_generator(seed)
    for weight in drafter.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=recipe.init_std, generator=generator)
    return drafter


def block_logits(
    drafter: DFlashDrafter, target: Target, features: Tensor, anchor_ids: Tensor, anchors: Tensor
) -> Tensor:
    """What the drafter predicts at K anchors a row.

    features:   [B, S, F * H], the target's features of the rows' tokens.
    anchor_ids: [B, K], the anchors' tokens.   anchors: [B, K], their positions.
    Returns logits [B, K, L, V] of the L drafted slots.
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
    hidden = drafter.norm(x.unflatten(1, (-1, block))[:, :, config.first_slot :])
    return drafter.head(hidden, target)


def train(
    recipe: DrafterRecipe,
    config: dict[str, Any],
    target: Target,
    responses: Responses,
    seed: int,
    checkpoint: Path,
    progress: Progress,
    stop_after: int | None = None,
) -> tuple[DFlashDrafter, Fit]:
    """Train a drafter for `target` twice, from `checkpoint` and its sequel if they are there; it and its curve.

    `stop_after` ends in the first training.
    """
    drafter = build(recipe, config, seed)
    features_of = _feature_reader(target, recipe.target_layer_ids)
    block_loss = _block_loss(drafter, target, recipe)
    answered = responses.ends - responses.starts > 1
    usable = (answered & (responses.ends <= recipe.max_length)).nonzero()[:, 0]
    all_ids = F.pad(responses.ids, (0, max(0, recipe.max_length - responses.ids.shape[1])))
    number_type = getattr(torch, recipe.precision)

    def batch_of(step: int) -> tuple[Tensor, ...]:
        index = usable[epoch_batch(len(usable), recipe.sequences_per_step, step, seed)]
        starts, ends = responses.starts[index, None], responses.ends[index, None]
        draws = torch.rand(len(index), recipe.anchors, generator=step_generator(seed, step, 1))
        anchors = starts + (draws * (ends - 1 - starts)).long()  # nothing follows the last token
        ids = all_ids[index, : recipe.max_length]
        with torch.autocast("cpu", dtype=number_type, enabled=number_type != torch.float32):
            features = features_of(ids)
        return features, ids, ends, anchors

    if recipe.compile:
        example = (*batch_of(0), _slot_weights(recipe.block_size, recipe.decay))
        block_loss = compiled(block_loss, example, progress)
    identity = fingerprint(seed, config, asdict(recipe), digest(responses.ids, responses.starts))
    weights = dict(drafter.named_parameters())
    early, late = (_slot_weights(recipe.block_size, decay) for decay in (recipe.decay, recipe.late_decay))
    steps = recipe.optimisation.steps
    result = fit(
        weights,
        lambda step: block_loss(*batch_of(step), early),
        recipe.optimisation,
        checkpoint,
        identity,
        progress,
        stop_after,
    )
    if stop_after is None:
        sequel = checkpoint.with_name(f"polished-{checkpoint.name}")
        second = fit(
            weights,
            lambda step: block_loss(*batch_of(steps + step), late),
            recipe.polish,
            sequel,
            identity,
            progress,
        )
        result = Fit(result.losses + second.losses, result.wall_s + second.wall_s, result.cpu_s + second.cpu_s)
    return drafter.eval(), result


def export(drafter: DFlashDrafter, config: dict[str, Any], folder: Path) -> None:
    """Write the drafter in the z-lab layout, bfloat16 safetensors."""
    save_json(folder / "config.json", config)
    weights = {name: weight.to(torch.bfloat16) for name, weight in drafter.state_dict().items()}
    save_tensors(folder / "model.safetensors", weights)


def _block_loss(drafter: DFlashDrafter, target: Target, recipe: DrafterRecipe) -> Callable[..., Tensor]:
    """(features [B, S, F * H], ids [B, S], ends [B, 1], anchors [B, K], slot weights [L]) -> the weighted mean loss."""
    number_type = getattr(torch, recipe.precision)
    offsets = torch.arange(1, recipe.block_size)

    def block_loss(features: Tensor, ids: Tensor, ends: Tensor, anchors: Tensor, by_slot: Tensor) -> Tensor:
        places = anchors[..., None] + offsets
        labels = ids[:, None].expand(-1, anchors.shape[1], -1).gather(2, places.clamp(max=ids.shape[1] - 1))
        weights = by_slot * (places < ends[..., None])
        with torch.autocast("cpu", dtype=number_type, enabled=number_type != torch.float32):
            logits = block_logits(drafter, target, features, ids.gather(1, anchors), anchors)
        losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()

    return block_loss


def _slot_weights(block_size: int, decay: float) -> Tensor:
    """Weights [L] of the slots in the loss, exp(-(j - 1) / decay) for slot j (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(block_size - 1) / decay)


def _feature_reader(target: Target, layers: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """ids [B, S] -> the target's features [B, S, F * H], without gradients."""

    @torch.no_grad()
    def features_of(ids: Tensor) -> Tensor:
        taps = FeatureTaps(target, layers)
        try:
            target.decoder(input_ids=ids, use_cache=False)
            features = taps.take()
        finally:
            taps.remove()
        assert features is not None
        return features.float()

    return features_of
