"""The rows that a measured unit becomes: what each column of `samples` and `rounds` is filled with.

The schema is `results.py`, the measuring `measure.py`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkbench import machine
from sparkbench.decoding.loop import Generation
from sparkbench.decoding.rounds import Round
from sparkbench.exactness import Verdict
from sparkbench.models import Loaded
from sparkbench.prompts import Prompt, prompt_hash
from sparkbench.results import ROUNDS, SAMPLES, SCHEMA_VERSION, stage_column
from sparkbench.sweep import Unit

REPETITION_WINDOW, LONGEST_PERIOD = 64, 16


@dataclass(frozen=True)
class UnitResult:
    """Rows of one unit; `failed` counts those with status `error`; `answers` were made for later turns."""

    unit: str
    fingerprint: str
    samples: pa.Table
    rounds: pa.Table
    failed: int
    answers: Mapping[str, list[int]]


@dataclass(frozen=True)
class Entry:
    """One turn of one prompt, as token ids, with the decision whether it runs."""

    prompt: Prompt
    copy: int
    turn: int
    ids: tuple[int, ...]
    status: str
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one arm made of one batch: generations, or why there are none."""

    generations: Sequence[Generation]
    error: str | None
    order: int
    peak_device_bytes: int | None
    peak_host_bytes: int | None


class Book:
    """Collects the rows of a unit."""

    def __init__(self, unit: Unit, loaded: Loaded) -> None:
        self.unit = unit
        self.loaded = loaded
        self._samples: list[dict[str, Any]] = []
        self._rounds: list[dict[str, Any]] = []
        self._device_id = machine.device_id(loaded.target.device)

    def skip(self, entries: Sequence[Entry], repeat: int) -> None:
        """One row an arm and pass for each entry that cannot run."""
        for entry in entries:
            for name in self.loaded.passes:
                for index in range(len(self.loaded.arms)):
                    row = self._base(entry, repeat, name, index)
                    self._samples.append(row | {"status": entry.status, "error": entry.error})

    def add(
        self,
        entry: Entry,
        batch_id: str,
        repeat: int,
        pass_: str,
        index: int,
        outcome: Outcome,
        generation: Generation | None,
        verdict: Verdict | None,
    ) -> None:
        row = self._base(entry, repeat, pass_, index) | {
            "batch_id": batch_id,
            "order": outcome.order,
            "status": "ok" if generation is not None else "error",
            "error": outcome.error,
            "peak_device_bytes": outcome.peak_device_bytes,
            "peak_host_bytes": outcome.peak_host_bytes,
        }
        if verdict is not None:
            row |= {
                "exactness": verdict.exactness,
                "first_divergence": verdict.first_divergence,
                "score_gap": verdict.score_gap,
                "width_noise": verdict.width_noise,
            }
        if generation is not None:
            row |= generation_columns(generation)
            key = {name: row[name] for name in ROUNDS.names if name in row and name != "rounds"}
            self._rounds += [key | round_columns(number, each) for number, each in enumerate(generation.rounds)]
        self._samples.append(row)

    def result(self, answers: Mapping[str, list[int]]) -> UnitResult:
        return UnitResult(
            self.unit.name,
            self.unit.fingerprint,
            pa.Table.from_pylist(self._samples, schema=SAMPLES),
            pa.Table.from_pylist(self._rounds, schema=ROUNDS),
            sum(row["status"] == "error" for row in self._samples),
            answers,
        )

    def _base(self, entry: Entry, repeat: int, pass_: str, index: int) -> dict[str, Any]:
        unit, loaded, arm = self.unit, self.loaded, self.loaded.arms[index]
        return {
            "schema_version": SCHEMA_VERSION,
            "run": loaded.run,
            "unit": unit.name,
            "target": loaded.config.target,
            "method": arm.method,
            "variant": arm.variant,
            "drafter": arm.drafter,
            "rule": arm.rule,
            "dataset": entry.prompt.dataset,
            "domain": entry.prompt.domain,
            "data_source": entry.prompt.source,
            "prompt_id": entry.prompt.prompt_id,
            "prompt_tokens_hash": prompt_hash(entry.ids) if entry.ids else None,
            "turn": entry.turn,
            "temperature": unit.temperature,
            "budget": arm.budget,
            "batch_size": unit.batch_size,
            "repeat": repeat,
            "seed": loaded.config.seed,
            "pass": pass_,
            "tokens_in": len(entry.ids),
            "load_s": loaded.load_s[index],
            "device_id": self._device_id,
        }


def generation_columns(generation: Generation) -> dict[str, Any]:
    """The columns of `samples` that a generation fills.

    accepted_sum is raw, beyond a stop token too; proposed_sum adds up the depth of what was proposed, so it
    is the most that accepted_sum could be; nodes_sum adds up draft nodes. For chains the last two are equal.
    """
    rounds = generation.rounds
    return {
        "batch_wall_s": generation.batch_wall_s,
        "batch_rounds": generation.batch_rounds,
        "arrival_s": generation.arrival_s,
        "latency_s": generation.latency_s,
        "tokens_out": len(generation.output_ids),
        "rounds": len(rounds),
        "rounds_drafted": generation.rounds_drafted,
        "forwards": generation.forwards,
        "accepted_sum": sum(each.accepted for each in rounds),
        "committed_sum": sum(each.committed for each in rounds),
        "proposed_sum": sum(each.max_depth for each in rounds),
        "nodes_sum": sum(each.nodes for each in rounds),
        "ttft_s": generation.ttft_s,
        "decode_s": generation.decode_s,
        "cpu_s": generation.cpu_s,
        "stop_reason": generation.stop_reason,
        "output_sha256": hashlib.sha256(" ".join(map(str, generation.output_ids)).encode()).hexdigest(),
        "degenerate": is_degenerate(generation.output_ids),
        "output_ids": list(generation.output_ids),
    }


def round_columns(number: int, each: Round) -> dict[str, Any]:
    """The columns of `rounds` of one round, without its key. A stage that the method lacks becomes null."""
    return {
        "round": number,
        "cold": each.cold,
        "max_depth": each.max_depth,
        "offered_next": each.offered_next,
        "nodes": each.nodes,
        "accepted": each.accepted,
        "committed": each.committed,
        "expected_accepted": each.expected_accepted,
        "accepted_node": each.accepted_node,
        **{stage_column(stage): nanoseconds for stage, nanoseconds in each.stages_ns.items()},
    }


def is_degenerate(output_ids: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat with a period of 16 or less; never for a shorter output."""
    tail = output_ids[-REPETITION_WINDOW:]
    if len(tail) < REPETITION_WINDOW:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))
