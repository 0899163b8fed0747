"""Timing forwards: the target's against its width, and a drafter's beside it.

The forwards are those of the decode loop: the target's own session, a cache filled to `context` by a prefill of random
ids, and a tree behind it. Widths take turns within each repeat, in alternating order, so that a machine that slows
down slows all of them; what is kept are medians. The clock starts and stops with an idle device.

In a batch the rows differ in length by one, as rows of a speculative batch do, so that the path of unequal rows is
timed. Not covered: acceptance and commit, which depend on the drafts and not on the width.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkbench import machine
from sparkbench.decoding.accept import match
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target, dtype_name
from sparkbench.decoding.timing import StageTimer
from sparkbench.decoding.tree import DraftTree
from sparkbench.decoding.verifier import Verifier
from sparkbench.errors import UsageError
from sparkbench.profiling.curve import StepCurve, StepCurves
from sparkbench.profiling.experts import watched

REPEATS = 9
ACCEPTED = 3  # draft tokens accepted in each round of a timed drafter
Clock = Callable[[], float]


@dataclass(frozen=True)
class StepTime:
    """Median seconds of one width; `tokens` are rows x nodes. `pack_s`: making positions and masks."""

    tokens: int
    pack_s: float
    verify_s: float


def step_curve(
    target: Target,
    batch_size: int,
    context: int,
    tokens: Sequence[int],
    repeats: int = REPEATS,
    *,
    clock: Clock = time.perf_counter,
) -> StepCurve:
    """Measure the step curve of one batch size and context.

    tokens: rows x nodes of each forward, in any order; rounded up to whole nodes a row, duplicates dropped.
    clock:  seconds, rising.
    UsageError: a number below 1, or context and tree exceed the target's context.
    """
    return curve_of(batch_size, context, step_times(target, batch_size, context, tokens, repeats, clock=clock))


def curve_of(batch_size: int, context: int, times: Sequence[StepTime]) -> StepCurve:
    return StepCurve.measured(batch_size, context, [t.tokens for t in times], [t.verify_s for t in times])


def gathered(target: Target, curves: Sequence[StepCurve], beside: Mapping[str, Any] | None = None) -> StepCurves:
    """Curves of a target with where they come from."""
    return StepCurves(
        target=target.name,
        revision=target.revision,
        device=machine.device_name(target.device),
        dtype=dtype_name(target.dtype),
        threads=torch.get_num_threads(),
        versions=machine.versions(),
        curves=tuple(curves),
        beside=beside or {},
    )


@torch.inference_mode()
def step_times(
    target: Target,
    batch_size: int,
    context: int,
    tokens: Sequence[int],
    repeats: int = REPEATS,
    *,
    clock: Clock = time.perf_counter,
) -> list[StepTime]:
    """What `step_curve` measures, in ascending order, with the time of packing beside that of the forward."""
    widths = node_widths(target, batch_size, context, tokens, repeats)
    session, draws = _filled(target, batch_size, context, widths[-1])
    trees = [_tree(target, batch_size, width, draws) for width in widths]
    packing: list[list[float]] = [[] for _ in widths]
    verifying: list[list[float]] = [[] for _ in widths]
    for repeat in range(-1, repeats):  # the one before the first warms up
        for place in range(len(widths)) if repeat % 2 == 0 else reversed(range(len(widths))):
            started = _now(target, clock)
            packed = session.pack(trees[place])
            packed_at = _now(target, clock)
            session.verify(packed)
            done = _now(target, clock)
            if repeat >= 0:
                packing[place].append(packed_at - started)
                verifying[place].append(done - packed_at)
    session.close()
    return [
        StepTime(batch_size * width, statistics.median(packs), statistics.median(verifies))
        for width, packs, verifies in zip(widths, packing, verifying, strict=True)
    ]


@torch.inference_mode()
def distinct_experts(target: Target, batch_size: int, context: int, tokens: Sequence[int]) -> dict[int, float]:
    """Distinct experts by number of tokens (rounded as in `step_curve`): the mean over layers, in one forward each.

    The ids are random; on real text a trained router may choose otherwise.
    """
    widths = node_widths(target, batch_size, context, tokens, 1)
    session, draws = _filled(target, batch_size, context, widths[-1])
    found = {}
    with watched(target) as counts:
        for width in widths:
            counts.clear()
            session.verify(session.pack(_tree(target, batch_size, width, draws)))
            found[batch_size * width] = statistics.fmean(counts)
    session.close()
    return found


@torch.inference_mode()
def draft_seconds(
    target: Target, method: Method, batch_size: int, context: int, repeats: int = REPEATS
) -> float | None:
    """Median seconds of the stage `draft` of a method's warm rounds behind `context` tokens.

    Each round accepts ACCEPTED draft tokens where the tree is that deep, so the context grows by a few tokens a round.
    None where the drafter's own context is too short for that.
    """
    grown = context + (repeats + 2) * (ACCEPTED + 1)
    if (method.max_length is not None and grown > method.max_length) or grown > target.max_context:
        return None
    draws = torch.Generator().manual_seed(0)
    session = target.session(batch_size, context, method.feature_layers)
    prefill = session.prefill(_prompts(target, batch_size, context, draws))
    features = prefill.features
    session.close()
    timer = StageTimer(target.device, recording=True)
    anchors = _ids(target, (batch_size,), draws)
    lengths, counts = session.cache.lengths, session.cache.host_lengths
    keys = anchors if method.noise != "none" else None
    sampling = Sampling()
    state = Context(target, anchors, lengths, features, prefill.ids, counts, sampling, target.stop_ids, timer, keys)
    method.begin(target, batch_size, grown + method.max_nodes + 1)
    seconds = []
    for _ in range(repeats + 2):  # the cold round, which takes in the prompt, and one that warms up
        tree = method.propose(state)
        seconds.append(timer.take().get("draft", 0) / 1e9)
        acceptance = match(tree, _agreeing(tree, _ids(target, tuple(tree.tokens.shape), draws)))
        method.observe(state, tree, acceptance)
        timer.take()
        state.counts = [accepted + 1 for accepted in acceptance.accepted.tolist()]
        state.anchors, state.lengths = acceptance.bonus, state.lengths + acceptance.accepted + 1
        taken = torch.arange(max(state.counts), device=target.device) % context
        state.tokens = prefill.ids[:, taken]
        if features is not None:
            state.features = features[:, taken]
        state.round += 1
    return statistics.median(seconds[2:])


def _agreeing(tree: DraftTree, random: Tensor) -> Tensor:
    """Draws [B, N] of a target that agrees with a path of ACCEPTED nodes, or of as many as there are; else `random`."""
    end = torch.where(tree.depths <= ACCEPTED, tree.depths, -1).argmax(1)
    path = tree.ancestors[torch.arange(tree.batch, device=end.device), end]
    agreed = torch.zeros_like(tree.valid).scatter_(1, path, True)
    agreed[:, 0] = False
    # A node's token is what the target draws at its parent; nodes off the path write to a column that is cut off.
    drawn = torch.cat([random, random[:, :1]], 1)
    return drawn.scatter(1, torch.where(agreed, tree.parents, tree.width), tree.tokens)[:, :-1]


def node_widths(target: Target, batch_size: int, context: int, tokens: Sequence[int], repeats: int) -> list[int]:
    """Nodes a row, ascending, for `tokens` of a whole batch. UsageError as in `step_curve`."""
    if not tokens:
        raise UsageError("tokens: give at least one number")
    for name, number in (
        ("batch size", batch_size),
        ("context", context),
        ("tokens", min(tokens)),
        ("repeats", repeats),
    ):
        if number < 1:
            raise UsageError(f"{name} {number} is not allowed: 1 or above")
    widths = sorted({-(-number // batch_size) for number in tokens})
    if context + widths[-1] > target.max_context:
        raise UsageError(
            f"context {context} and {widths[-1]} nodes exceed target {target.name}'s context of {target.max_context}"
        )
    return widths


def _filled(target: Target, batch_size: int, context: int, widest: int) -> tuple[Verifier, torch.Generator]:
    """A session whose rows hold `context` random tokens, and the generator for more."""
    draws = torch.Generator().manual_seed(0)
    session = target.session(batch_size, context + widest)
    session.prefill(_prompts(target, batch_size, context, draws))
    return session, draws


def _prompts(target: Target, batch_size: int, context: int, draws: torch.Generator) -> list[list[int]]:
    """Random prompts: the first row of `context` tokens, the others one shorter (see above)."""
    rows: list[list[int]] = torch.randint(target.vocab_size, (batch_size, context), generator=draws).tolist()
    return [rows[0], *(row[: max(1, context - 1)] for row in rows[1:])]


def _tree(target: Target, batch_size: int, width: int, draws: torch.Generator) -> DraftTree:
    """Trees of `width` random nodes, two children each."""
    nodes = torch.arange(width)
    depths = [(node + 1).bit_length() - 1 for node in range(width)]
    shape, device = (batch_size, width), target.device
    return DraftTree(
        tokens=_ids(target, shape, draws),
        parents=((nodes - 1) // 2).expand(shape).to(device),
        depths=torch.tensor(depths).expand(shape).to(device),
        valid=torch.ones(shape, dtype=torch.bool, device=device),
        max_depth=depths[-1],
    )


def _ids(target: Target, shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
    return torch.randint(target.vocab_size, shape, generator=draws).to(target.device)


def _now(target: Target, clock: Clock) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return clock()
