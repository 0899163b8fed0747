"""The one decode loop: propose, verify, accept, commit, until every row has stopped.

    prefill prompt                                       -> first token, target features
    until every row has stopped:
        tree = method.propose(context)                   stages: draft, build
        out  = target.verify(tree)                       stages: pack, verify
        path = accept(tree, out)                         stage:  accept
        target.commit(path); method.observe(...)         stage:  commit

Every method runs through it, autoregressive decoding included. The host learns one small array a round: what each row
accepted. A stop token or the length limit inside an accepted path truncates there: what lies beyond is neither output
nor counted as committed. Rows that have stopped leave the batch.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparkbench.decoding.accept import Acceptance, match
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.rounds import Fact, Round, to_host
from sparkbench.decoding.sampling import Sampling, draw
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import StageTimer
from sparkbench.decoding.tree import DraftTree
from sparkbench.decoding.verifier import Verifier
from sparkbench.errors import UsageError

Observer = Callable[[Context, DraftTree, Acceptance], None]


@dataclass(frozen=True)
class Request:
    """A prompt and the key of its noise (sampling.noise_key)."""

    prompt_ids: tuple[int, ...]
    noise_key: int = 0


@dataclass(frozen=True)
class DecodeConfig:
    """How a batch is decoded. `stop_ids`: None means the target's. `profile`: barriers at stage edges on a GPU."""

    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens {self.max_new_tokens} is not allowed: 1 or more")


@dataclass(frozen=True)
class Generation:
    """What became of a request. Times in seconds.

    output_ids:  generated tokens, a stop token included.     stop_reason: "stop" or "length".
    ttft_s:      start of prefill to the first token (of the batch).
    decode_s:    from then until this row stopped, the drafter's own prefill included.
    batch_wall_s: the same until the last row of the batch stopped.
    cpu_s:       CPU time of the process during the batch's decode.
    forwards:    forwards of the target this row took part in, prefill included.
    """

    output_ids: tuple[int, ...]
    stop_reason: str
    rounds: tuple[Round, ...]
    ttft_s: float
    decode_s: float
    cpu_s: float
    batch_wall_s: float
    forwards: int

    @property
    def rounds_drafted(self) -> int:
        """Rounds in which something was drafted."""
        return sum(round_.nodes > 0 for round_ in self.rounds)


@dataclass
class _Row:
    """A request on its way."""

    index: int
    output: list[int] = field(default_factory=list)
    rounds: list[tuple[Fact, dict[str, int]]] = field(default_factory=list)
    stop_reason: str | None = None
    decode_s: float = 0.0


@torch.inference_mode()
def generate(
    target: Target,
    method: Method,
    requests: Sequence[Request],
    config: DecodeConfig,
    observer: Observer | None = None,
) -> list[Generation]:
    """Decode one batch; generations in the order of `requests`.

    The caller has left out requests that do not fit the target's context. Drafting stops for the rest of a batch when
    one of its rows outgrows the drafter's context; `rounds_drafted` tells.
    `observer` sees every round, outside all stages.
    """
    longest = max(len(request.prompt_ids) for request in requests)
    capacity = longest + config.max_new_tokens + method.max_nodes + 1
    verifier = target.session(len(requests), capacity, method.feature_layers)
    try:
        return _decode(target, method, requests, config, verifier, capacity, observer)
    finally:
        verifier.close()


def _decode(
    target: Target,
    method: Method,
    requests: Sequence[Request],
    config: DecodeConfig,
    verifier: Verifier,
    capacity: int,
    observer: Observer | None,
) -> list[Generation]:
    sampling = config.sampling
    stop_ids = target.stop_ids if config.stop_ids is None else config.stop_ids
    timer = StageTimer(target.device, recording=config.profile or target.device.type == "cpu")
    keys = torch.tensor([request.noise_key for request in requests], device=target.device)
    cache = verifier.cache

    started = time.perf_counter()
    prefill = verifier.prefill([request.prompt_ids for request in requests])
    at_root = torch.zeros(len(requests), 1, dtype=torch.int64, device=target.device)
    anchors = draw(prefill.logits, at_root, cache.lengths - 1, keys, 0, sampling)[:, 0]
    first_tokens = anchors.tolist()
    first_at = time.perf_counter()
    cpu_at = time.process_time()

    rows = [_Row(index) for index in range(len(requests))]
    live = rows
    for row, token in zip(rows, first_tokens, strict=True):
        _append(row, [token], stop_ids, config.max_new_tokens)
    with timer.stage("draft") if method.drafter_kind else nullcontext():  # counted in round 0
        method.begin(target, len(rows), capacity)
    drafting = True
    context = Context(
        target=target,
        anchors=anchors,
        lengths=cache.lengths,
        features=prefill.features,
        tokens=prefill.ids,
        counts=cache.host_lengths,
        temperature=sampling.temperature,
        stop_ids=stop_ids,
        round=0,
        timer=timer,
    )
    del prefill
    finished_at = first_at
    while True:
        if any(row.stop_reason is not None for row in live):
            going = [place for place, row in enumerate(live) if row.stop_reason is None]
            if not going:
                break
            live = [live[place] for place in going]
            verifier.keep(going)
            method.keep(going)
            index = torch.tensor(going, device=target.device)
            keys = keys[index]
            context.anchors = context.anchors[index]
            context.tokens = context.tokens[index]
            context.counts = [context.counts[place] for place in going]
            if context.features is not None:
                context.features = context.features[index]
        context.lengths = cache.lengths
        drafting = drafting and (method.max_length is None or cache.max_length <= method.max_length)

        tree = method.propose(context) if drafting else DraftTree.root(context.anchors)
        with timer.stage("pack"):
            packed = verifier.pack(tree)
        with timer.stage("verify"):
            verified = verifier.verify(packed)
        with timer.stage("accept"):
            drawn = draw(verified.logits, tree.depths, cache.lengths, keys, tree.max_depth, sampling)
            acceptance = match(tree, drawn)
            facts = to_host(tree, acceptance)
        with timer.stage("commit"):
            counts = [fact.accepted + 1 for fact in facts]
            with timer.stage("commit/compact"):
                in_place = all(fact.in_place for fact in facts)
                verifier.commit(None if in_place else acceptance.path[:, : max(counts)], counts)
            with timer.stage("commit/carry"):
                method.observe(context, tree, acceptance)
                context.tokens = torch.cat([context.anchors[:, None], acceptance.tokens[:, : max(counts) - 1]], 1)
                context.anchors = acceptance.bonus
                context.features = _carry(verified.features, acceptance.path, max(counts), in_place)
                context.counts = counts
            for row, fact in zip(live, facts, strict=True):
                fact.committed = _append(row, fact.tokens, stop_ids, config.max_new_tokens)
        if observer is not None:
            observer(context, tree, acceptance)
        stages = timer.take()
        finished_at = time.perf_counter()
        for row, fact in zip(live, facts, strict=True):
            row.rounds.append((fact, stages))
            row.decode_s = finished_at - first_at
        context.round += 1

    batch_wall_s = finished_at - first_at
    cpu_s = time.process_time() - cpu_at
    return [
        Generation(
            output_ids=tuple(row.output),
            stop_reason=row.stop_reason or "length",
            rounds=tuple(fact.as_round(number == 0, stages) for number, (fact, stages) in enumerate(row.rounds)),
            ttft_s=first_at - started,
            decode_s=row.decode_s,
            cpu_s=cpu_s,
            batch_wall_s=batch_wall_s,
            forwards=len(row.rounds) + 1,
        )
        for row in rows
    ]


def _carry(features: Tensor | None, path: Tensor, steps: int, in_place: bool) -> Tensor | None:
    """The features of the accepted path, [B, steps, F * H]."""
    if features is None:
        return None
    if in_place:
        return features[:, :steps]
    return features.gather(1, path[:, :steps, None].expand(-1, -1, features.shape[2]))


def _append(row: _Row, tokens: Sequence[int], stop_ids: frozenset[int], limit: int) -> int:
    """Add tokens to a row's output up to a stop token or the limit; return how many were added."""
    for added, token in enumerate(tokens, 1):
        row.output.append(token)
        if token in stop_ids:
            row.stop_reason = "stop"
            return added
        if len(row.output) == limit:
            row.stop_reason = "length"
            return added
    return len(tokens)
