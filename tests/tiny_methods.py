"""All methods at work: a target of five windowed layers over twelve tokens, drafters of all kinds, an n-gram index.

With so few tokens even random drafters are right now and then, so that drafts are accepted, refused and, in trees,
picked from the middle.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_target
from golden_dart import index_of
from ngram_helpers import count
from tiny_drafters import DART_LAYERS, config_of, dart_config, dspark_config, save_dart, save_drafter

from sparkbench import drafters, machine, registry
from sparkbench.decoding.batch import Batch, Row
from sparkbench.decoding.loop import Generation, Request
from sparkbench.decoding.method import Method
from sparkbench.decoding.target import Target
from sparkbench.ngram.index import NgramIndex
from sparkbench.profiling.costs import RoundCosts
from sparkbench.profiling.curve import StepCurve, StepCurves

VOCAB = 12
ORDER = 4  # of the n-gram index
BUDGET = 10

FIXED = (  # what a row drafts follows from the row alone
    "autoregressive",
    "dflash",
    "dflash:draft=sampled",
    "dflash:draft-noise=shared",
    "dspark",
    "dspark:draft=sampled",
    "dspark:draft-noise=shared",
    "dspark:confidence-threshold=0.1",
    "ddtree",
    "ddtree:tree-draft=sampled",
    "ddtree:draft-noise=shared",
    "sparklingtree",
    "sparklingtree:tree-draft=sampled",
    "sparklingtree:draft-noise=shared",
    "dart",
    "dart:draft-noise=shared",
)
SHARING = ("dspark:verify-length=scheduled", "dspark:verify-length=delayed", "ddtree:budget=auto")  # a capacity
REJECTING = (
    "dflash:rule=rejection",
    "dspark:rule=rejection",
    "ddtree:rule=rejection:tree-draft=sampled",
    "sparklingtree:rule=rejection:tree-draft=sampled",
)
MATCHING = FIXED + SHARING
PLAIN = ("dflash", "dspark", "ddtree", "sparklingtree", "dart")  # methods that draft, with default options


@dataclass(frozen=True)
class Stage:
    """A target, a drafter of each kind that fits it, and an index. `short`: a DFlash drafter with a context of 30."""

    target: Target
    drafters: dict[str, Any]
    index: NgramIndex

    @classmethod
    def build(cls, folder: Path) -> "Stage":
        target = tiny_target("qwen3-mixed", layers=DART_LAYERS, vocab=VOCAB)
        shape: dict[str, Any] = {"vocab_size": VOCAB, "num_target_layers": DART_LAYERS}
        places = {"mask_token_id": VOCAB - 1, "target_layer_ids": [-1, 1, 4]}
        dflash = config_of("z-lab", window=5) | shape | {"dflash_config": places}
        dspark = dspark_config("gated") | shape | places
        folders = {
            "dflash": save_drafter(folder / "dflash", dflash),
            "short": save_drafter(folder / "short", dflash | {"max_position_embeddings": 30}),
            "dspark": save_drafter(folder / "dspark", dspark, seed=2),  # of these, one that is right more often
            "dart": save_dart(folder / "dart", dart_config(rows=VOCAB) | {"vocab_size": VOCAB}),
        }
        loaded = {
            name: drafters.load("dflash" if name == "short" else name, str(place), target)
            for name, place in folders.items()
        }
        text = [random.Random(5).randrange(VOCAB) for _ in range(300)]
        return cls(target, loaded, index_of(count([text], ORDER), VOCAB, ORDER))

    def method(self, text: str, *, budget: int = BUDGET, drafter: str | None = None) -> Method:
        variant = registry.Variant.parse(text)
        kind = registry.get(variant.method).drafter_kind
        found = registry.build(variant, drafter=self.drafters.get(drafter or kind or ""), budget=budget)
        if "auto" in text:
            found.budget = None
        found.index = self.index
        if found.needs_costs:
            found.costs = RoundCosts(_curves())
        return found


def _curves() -> StepCurves:
    """A step curve on which some drafts pay and others do not."""
    tokens = tuple(range(1, 65))
    raw = [1 + 0.08 * number for number in tokens]
    device = machine.device_name(torch.device("cpu"))
    curves = tuple(StepCurve.measured(rows, 32, tokens, raw) for rows in (1, 4))
    return StepCurves("tiny", None, device, "float32", 1, {}, curves)


def random_requests(number: int, lengths: Sequence[int], seed: int = 0) -> list[Request]:
    """Requests with prompts of these lengths, repeated, and noise keys of their own."""
    draws = random.Random(seed)
    return [
        Request(tuple(draws.randrange(VOCAB) for _ in range(lengths[i % len(lengths)])), draws.getrandbits(40))
        for i in range(number)
    ]


def facts(generation: Generation) -> list[tuple[int, ...]]:
    """What is known of each round, without its times."""
    return [(r.nodes, r.max_depth, r.accepted, r.accepted_node, r.committed, r.offered_next) for r in generation.rounds]


@contextmanager
def live_rows() -> Iterator[list[list[Row]]]:
    """One list, whose only entry is the rows of the batch that makes a round at that moment, in their order."""
    current: list[list[Row]] = [[]]
    round_ = Batch.round

    def watched(batch: Batch) -> None:
        current[0] = batch.live
        round_(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "round", watched)
        yield current
