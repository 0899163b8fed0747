"""`sparkbench train drafter`: trains a DSpark drafter for a target by a published recipe, begun with another drafter.

    read       rows of the data set -> conversations
    load       target and start drafter; conversations -> tokens and masks
    features   the target runs once over every sequence; kept in WORK/features
    train      AdamW on float32 weights, from the cache alone; kept in WORK/drafter-state.safetensors
    export     the drafter in its published layout, and train.json: what it was made of, and what it is worth

Each part continues where it was interrupted. On a CPU with the same number of threads, training then ends in the very
weights of a run without interruption. Embedding and head are not trained.

Not covered: writing the answers anew with the target, several GPUs, other drafters than DSpark's.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkbench import catalog, drafters, machine
from sparkbench.decoding.target import Target, resolve_device
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.errors import UsageError
from sparkbench.train import conversations, features, samples
from sparkbench.train.anchored import Acceptance, Anchored, draw_anchors
from sparkbench.train.block import export, trainable
from sparkbench.train.drafter_recipe import PublishedRecipe
from sparkbench.train.features import FeatureCache
from sparkbench.train.fit import Fit, Progress, epoch_batch, fit, step_generator
from sparkbench.train.loss import slot_weights
from sparkbench.train.recipe import fingerprint
from sparkbench.train.storage import save_json

SHOWN = 10  # bad rows that are named one by one
STATE, FEATURES, RECORD = "drafter-state.safetensors", "features", "train.json"


def train(
    recipe: PublishedRecipe,
    out: Path,
    work: Path,
    *,
    device: str = "auto",
    progress: Progress = print,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """Train by `recipe`, write drafter and record into `out`, and return the record.

    stop_after: end at this step, with a checkpoint and without an export, as an interruption would.
    UsageError: a bad value, file or name, or a work folder of other work.   RunError: the hub, the disk, or a loss
    that is not finite.
    """
    place = resolve_device(device)
    rows, origin = conversations.read(recipe.data)
    progress(f"data: {len(rows)} rows of {origin}")
    source = catalog.resolve_target(recipe.model.target)
    target = Target.load(source, name=recipe.model.target, dtype=recipe.training.precision, device=str(place))
    start = Checkpoint.open(catalog.resolve_drafter("dspark", recipe.model.target, recipe.model.start))
    drafter = warm_start(start, target, recipe)

    found, remarks = samples.make(target.tokenizer, rows, recipe)
    for remark in remarks[:SHOWN]:
        progress(f"data: {remark}")
    kept = f"{len(found.train)} to train on and {len(found.held_out)} held out"
    reasons = "".join(f"; {count} dropped: {reason}" for reason, count in found.dropped.items())
    progress(f"data: {kept}{reasons}")
    cache = features.build(target, drafter.config.target_layer_ids, found, work / FEATURES, progress)
    target.decoder.layers.to("cpu")  # only embedding and head are needed from here on

    anchored = Anchored(drafter, target, recipe.training.precision)
    before = measure(anchored, cache, recipe, place)
    progress(f"start: {describe(before)}")
    curve = run(anchored, cache, recipe, place, work / STATE, progress, stop_after)
    if stop_after is not None:
        return {}
    after = measure(anchored, cache, recipe, place)
    progress(f"trained: {describe(after)}")

    config = start.config | {
        "block_size": recipe.model.block_size,
        "num_anchors": recipe.model.num_anchors,
        "dtype": "bfloat16",
    }
    export(drafter.eval(), config, out)
    record = {
        "recipe": recipe.as_json(),
        "data": {
            "origin": origin,
            "rows": len(rows),
            "trained": len(found.train),
            "held_out": len(found.held_out),
            "dropped": found.dropped,
            "tokens": sum(len(sample.ids) for sample in found.all),
            "answer_tokens": sum(int(sample.mask.sum()) for sample in found.all),
            "hash": found.hash,
        },
        "target": {"name": target.name, "revision": target.revision},
        "start": {"name": start.source, "revision": start.revision},
        "features": cache.fingerprint,
        "fit": asdict(curve),
        "held_out": {"start": asdict(before), "trained": asdict(after)},
        "machine": machine.describe(place),
        "versions": machine.versions(),
        "git_commit": machine.git_commit(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    save_json(out / RECORD, record)
    return record


def warm_start(start: Checkpoint, target: Target, recipe: PublishedRecipe) -> BlockDrafter:
    """The start drafter with the recipe's block size, its own weights float32 and with gradients.

    All weights must be there and fit the target. UsageError: they do not, or its heads are not the recipe's.
    """
    drafter: BlockDrafter = drafters.load("dspark", start.source, target, start.revision)
    config, model = drafter.config, recipe.model
    with_markov = None if config.confidence_rank is None else config.confidence_rank > 0
    for key, own, wanted in (
        ("markov_rank", config.markov_rank, model.markov_rank),
        ("markov_kind", config.markov_kind, model.markov_kind),
        ("confidence_with_markov", with_markov, model.confidence_with_markov),
    ):
        if own != wanted:
            raise UsageError(f"start {start.source}: its {key} is {own}, and the recipe says {wanted}")
    longest = min([config.max_context, target.max_context, *(w for w in config.windows if w is not None)])
    if recipe.data.max_length > longest:
        raise UsageError(
            f"data.max_length {recipe.data.max_length} is not allowed: target and start {start.source} "
            f"see {longest} tokens at most"
        )
    drafter.config = replace(config, block_size=model.block_size)
    for weight in trainable(drafter).values():
        weight.data = weight.data.float().contiguous()
        weight.requires_grad_(True)
    return drafter.train()


def run(
    anchored: Anchored,
    cache: FeatureCache,
    recipe: PublishedRecipe,
    device: torch.device,
    state: Path,
    progress: Progress,
    stop_after: int | None = None,
) -> Fit:
    """Train the drafter of `anchored` in place, continuing from `state` where it exists; the curve."""
    training, weights = recipe.training, trainable(anchored.drafter)
    by_slot = slot_weights(anchored.drafter.config.draft_length, recipe.loss.decay).to(device)
    identity = fingerprint(recipe.computation(), cache.fingerprint, features.signature(weights.items()))

    def step_loss(step: int) -> Tensor:
        """Mean loss of the step's sequences, each with the same weight; leaves the gradients in the weights."""
        batch = epoch_batch(cache.trained, training.global_batch, step, recipe.seed).tolist()
        losses = []
        for place, index in enumerate(batch):
            sequence = cache.read(index, device)
            generator = step_generator(recipe.seed, step, place)
            anchors = draw_anchors(sequence.mask, recipe.model.num_anchors, generator)
            losses.append(anchored.backward(sequence, anchors, by_slot, recipe.loss, 1 / len(batch)))
        return torch.stack(losses).mean()

    return fit(weights, step_loss, training.optimisation, state, identity, progress, stop_after, training.log_every)


def measure(anchored: Anchored, cache: FeatureCache, recipe: PublishedRecipe, device: torch.device) -> Acceptance:
    """Acceptance on what is held out, at anchors that are the same every time."""

    def chances() -> Iterable[tuple[Tensor, Tensor]]:
        for index in range(cache.trained, cache.count):
            sequence = cache.read(index, device)
            generator = step_generator(recipe.seed, index)
            yield anchored.chances(sequence, draw_anchors(sequence.mask, recipe.model.num_anchors, generator))

    return Acceptance.of(chances())


def describe(acceptance: Acceptance) -> str:
    """One line: tau and the acceptance of each slot."""
    slots = " ".join(f"{chance:.3f}" for chance in acceptance.acceptance)
    return f"held-out tau {acceptance.tau:.3f}, acceptance by slot {slots}"
