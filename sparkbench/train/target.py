"""The embedded target: a small Qwen3 model trained from scratch on packed chats, and its export.

The loss is the cross-entropy of the next token, weighted: what the assistant writes counts fully, the rest a
little. Weights are float32 while training; matrix products run in the recipe's precision. Export rounds them
to bfloat16, and everything after it (answers, drafters, figures) uses the rounded weights.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkbench.train.fit import Fit, Progress, compiled, epoch_batch, fit, restore_weights
from sparkbench.train.packing import Rows
from sparkbench.train.recipe import Optimisation, Recipe, TargetRecipe, fingerprint
from sparkbench.train.storage import digest


def build(recipe: TargetRecipe, tokenizer: Any, vocab_size: int, seed: int) -> Any:
    """A `Qwen3ForCausalLM` with random weights that depend only on the seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        initializer_range=recipe.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


def train(
    recipe: Recipe,
    optimisation: Optimisation,
    rows: Rows,
    tokenizer: Any,
    checkpoint: Path,
    progress: Progress,
    *,
    start: Path | None = None,
    stop_after: int | None = None,
) -> tuple[Any, Fit]:
    """Train a target on `rows`, from `checkpoint` if there is one; the model in float32 and its curve.

    start: the checkpoint of an earlier training whose weights this one begins with; None begins from nothing.
    """
    shape = recipe.target
    model = build(shape, tokenizer, recipe.corpus.vocab_size, recipe.seed)
    weights = dict(model.named_parameters())
    if start is not None:
        restore_weights(start, weights)
    weighted_loss = _step_loss(model, shape.precision)
    if shape.compile:
        count = shape.rows_per_step
        weighted_loss = compiled(weighted_loss, (rows.ids[:count], rows.weights[:count]), progress)

    def loss_of(step: int) -> Tensor:
        index = epoch_batch(len(rows.ids), shape.rows_per_step, step, recipe.seed)
        return weighted_loss(rows.ids[index], rows.weights[index])

    identity = fingerprint(recipe.seed, asdict(shape), asdict(optimisation), digest(rows.ids))
    result = fit(weights, loss_of, optimisation, checkpoint, identity, progress, stop_after)
    return model.eval(), result


def export(model: Any, tokenizer: Any, window: int, folder: Path) -> None:
    """Write model and tokenizer in the published layout, bfloat16 safetensors; replaces the whole folder.

    window: tokens of the longest training row. Further back the model has learnt to see nothing, and full attention
    would end in noise there, so every layer gets a sliding window of that size. Up to it nothing changes.
    """
    from transformers import GenerationConfig

    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    rounded = model.to(torch.bfloat16)
    rounded.config.use_sliding_window, rounded.config.sliding_window = True, window
    rounded.config.max_window_layers = 0
    rounded.config.layer_types = ["sliding_attention"] * rounded.config.num_hidden_layers
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    rounded.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    rounded.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _step_loss(model: Any, precision: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(ids [R, T], weights [R, T]) -> the weighted mean loss."""
    number_type = getattr(torch, precision)

    def weighted_loss(ids: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=number_type, enabled=number_type != torch.float32):
            logits = model(input_ids=ids, use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        wanted = weights[:, 1:].flatten()
        return (losses * wanted).sum() / wanted.sum()

    return weighted_loss
