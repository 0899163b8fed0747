"""The one decode loop: propose, verify, accept, commit, until every row has stopped.

    prefill prompt                                       -> first token, target features
    until every row has stopped:
        one round of the batch                           -> batch.py

Every method runs through it, autoregressive decoding included. Rows that have stopped leave the batch. `generate`
decodes requests that start together, `serve` requests that arrive while others run.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sparkbench.decoding.batch import Batch, Observer, Row
from sparkbench.decoding.method import Method
from sparkbench.decoding.rounds import Round
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.errors import UsageError


@dataclass(frozen=True)
class Request:
    """A prompt and the key of its noise (sampling.noise_key). `arrival_s`: for `serve`, seconds after its start."""

    prompt_ids: tuple[int, ...]
    noise_key: int = 0
    arrival_s: float = 0.0


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
    batch_rounds: rounds of the whole batch.

    From `serve`, `ttft_s` counts from the request's arrival, `arrival_s` after the start (else None); `batch_wall_s`
    and `cpu_s` are those of the whole stream: prefills included, time without anything to do left out.
    """

    output_ids: tuple[int, ...]
    stop_reason: str
    rounds: tuple[Round, ...]
    ttft_s: float
    decode_s: float
    cpu_s: float
    batch_wall_s: float
    forwards: int
    batch_rounds: int = 0
    arrival_s: float | None = None

    @property
    def latency_s(self) -> float:
        """From the start of prefill, or the arrival, until this row stopped."""
        return self.ttft_s + self.decode_s

    @property
    def rounds_drafted(self) -> int:
        """Rounds in which something was drafted."""
        return sum(round_.nodes > 0 for round_ in self.rounds)


@torch.inference_mode()
def generate(
    target: Target,
    method: Method,
    requests: Sequence[Request],
    config: DecodeConfig,
    observer: Observer | None = None,
) -> list[Generation]:
    """Decode one batch; generations in the order of `requests`.

    The caller has left out requests that do not fit the target's context. Nothing is drafted while a row is longer than
    the drafter's context or there are more rows than `method.most_rows`; `rounds_drafted` tells.
    `observer` sees every round, outside all stages.
    """
    batch = Batch(target, method, config, observer, closed=True)
    try:
        rows = batch.admit(requests)
        cpu_at = time.process_time()
        while batch.live:
            batch.round()
        cpu_s = time.process_time() - cpu_at
    finally:
        batch.close()
    wall_s = max(row.finished_at for row in rows) - rows[0].first_at
    return [_generation(row, wall_s, cpu_s, batch.rounds, None) for row in rows]


@torch.inference_mode()
def serve(
    target: Target,
    method: Method,
    requests: Sequence[Request],
    config: DecodeConfig,
    slots: int,
    observer: Observer | None = None,
) -> list[Generation]:
    """Decode requests that arrive at their `arrival_s`, at most `slots` at a time; generations in their order.

    Between two rounds, requests that have arrived are prefilled and join the batch, first come, first served. When
    nothing is left to do, the clock is moved on to the next arrival instead of waiting for it. Else as `generate`.
    """
    if slots < 1:
        raise UsageError(f"slots {slots} is not allowed: 1 or more")
    batch = Batch(target, method, config, observer, closed=False)
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    waiting = deque(order)
    rows: dict[int, Row] = {}
    cpu_at = time.process_time()
    try:
        while waiting or batch.live:
            if not batch.live:
                batch.skip_to(requests[waiting[0]].arrival_s)
            now = batch.now()
            ready: list[int] = []
            while waiting and len(batch.live) + len(ready) < slots and requests[waiting[0]].arrival_s <= now:
                ready.append(waiting.popleft())
            if ready:
                joined = [requests[index] for index in ready]
                rows |= zip(ready, batch.admit(joined, [each.arrival_s for each in joined]), strict=True)
            if batch.live:
                batch.round()
        wall_s, cpu_s = batch.now() - batch.skipped, time.process_time() - cpu_at
    finally:
        batch.close()
    return [_generation(rows[index], wall_s, cpu_s, batch.rounds, rows[index].began) for index in range(len(requests))]


def _generation(row: Row, wall_s: float, cpu_s: float, rounds: int, arrival_s: float | None) -> Generation:
    return Generation(
        output_ids=tuple(row.output),
        stop_reason=row.stop_reason or "length",
        rounds=tuple(fact.as_round(number == 0, stages) for number, (fact, stages) in enumerate(row.rounds)),
        ttft_s=row.first_at - row.began,
        decode_s=row.finished_at - row.first_at,
        cpu_s=cpu_s,
        batch_wall_s=wall_s,
        forwards=len(row.rounds) + 1,
        batch_rounds=rounds,
        arrival_s=arrival_s,
    )
