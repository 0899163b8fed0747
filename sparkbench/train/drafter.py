"""`sparkbench train drafter`: trains a DSpark or DART drafter for a target by a published recipe.

    read       rows of the data set -> conversations
    load       target and what the drafter begins with (start.py); conversations -> tokens and masks
    features   the target runs once over every sequence; kept in WORK/features
    train      AdamW on float32 weights, from the cache alone; kept in WORK/drafter-state.safetensors
    export     the drafter in its published layout, and train.json: what it was made of, and what it is worth

Each part continues where it was interrupted. On a CPU with the same number of threads, training then ends in the very
weights of a run without interruption. Embedding and head are not trained, but for DART's head.

Not covered: writing the answers anew with the target, several GPUs, drafters of other kinds.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkbench import catalog, machine
from sparkbench.decoding.target import Target, resolve_device
from sparkbench.train import conversations, features, samples
from sparkbench.train.anchored import Acceptance, Anchored, draw_anchors
from sparkbench.train.block import export, trainable
from sparkbench.train.drafter_recipe import PublishedRecipe
from sparkbench.train.features import FeatureCache
from sparkbench.train.fit import Fit, Progress, epoch_batch, fit, step_generator
from sparkbench.train.loss import slot_weights
from sparkbench.train.recipe import fingerprint
from sparkbench.train.start import begin
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
    start = begin(recipe, target)
    drafter = start.drafter

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

    drafter.eval()
    export(drafter, start.config, out)
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
        "start": start.source and {"name": start.source.source, "revision": start.source.revision},
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
    terms = recipe.loss.weights
    identity = fingerprint(recipe.computation(), cache.fingerprint, features.signature(weights.items()))

    def step_loss(step: int) -> Tensor:
        """Mean loss of the step's sequences, each with the same weight; leaves the gradients in the weights."""
        batch = epoch_batch(cache.trained, training.global_batch, step, recipe.seed).tolist()
        losses = []
        for place, index in enumerate(batch):
            sequence = cache.read(index, device)
            generator = step_generator(recipe.seed, step, place)
            anchors = draw_anchors(sequence.mask, recipe.model.num_anchors, generator)
            losses.append(anchored.backward(sequence, anchors, by_slot, terms, 1 / len(batch)))
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
