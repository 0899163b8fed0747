"""Reads the golden folder `dflash_ddtree`, and states where its recording differs from this project's loop.

- The reference keeps its rounds in full: a round that a stop token or the limit cuts short is recorded with all it
  accepted. Here that is `Round.accepted`; `Round.committed` is cut. So recorded length = accepted + 1 always.
- The reference runs one round even if the prefill token ends the generation. Here there is none, so a recording may
  have more rounds than a generation, never fewer before the output is complete.
- Its token buffer clips the last blocks of small budgets. `acceptance_lengths_unclipped` is what counts there, and the
  trace is right up to `first_clipped_round`.
- A block's first slot predicts nothing. The reference records its hidden state, this project does not compute it.

Sizes, layers, methods and cases are all read from the folder.
"""

import json
from dataclasses import dataclass
from typing import Any

from conftest import golden_folder
from safetensors.torch import load_file
from torch import Tensor

from sparkbench import drafters, registry
from sparkbench.decoding.loop import Generation
from sparkbench.decoding.method import Method
from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter

FOLDER = golden_folder("dflash_ddtree")


def document(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


@dataclass(frozen=True)
class Pair:
    """The target and its drafter."""

    target: Target
    drafter: BlockDrafter

    @classmethod
    def load(cls) -> "Pair":
        target = Target.load(str(FOLDER / "target"), dtype="float32", device="cpu")
        return cls(target, drafters.load("dflash", str(FOLDER / "draft"), target))

    def method(self, recorded: str, builder: str = "level") -> Method:
        """The method of a recorded name: ar, dflash, ddtree_BUDGET."""
        name, _, budget = recorded.partition("_")
        variant = f"{name}:builder={builder}" if budget else name
        return registry.build(
            registry.Variant.parse(variant), drafter=self.drafter, budget=int(budget) if budget else None
        )


def stops_of(case: dict[str, Any]) -> frozenset[int]:
    return frozenset(case["stop_token_ids"] or ())


def generated(case: dict[str, Any]) -> tuple[int, ...]:
    """The output without the prompt."""
    return tuple(case["output_ids"][len(case["prompt_ids"]) :])


def lengths(case: dict[str, Any], method: str) -> list[int]:
    """Recorded A + 1 of each round, as a buffer that is long enough gives them."""
    recorded = case["methods"][method]
    return list(recorded["acceptance_lengths_unclipped"] or recorded["acceptance_lengths"])


def check_generation(generation: Generation, case: dict[str, Any], method: str) -> None:
    """Output, stop reason and the accepted length of every round that the output needs."""
    output, recorded = generated(case), lengths(case, method)
    assert generation.output_ids == output
    assert generation.stop_reason == ("stop" if output[-1] in stops_of(case) else "length")
    needed, covered = 0, 1
    while covered < len(output):
        covered += recorded[needed]
        needed += 1
    assert [round_.accepted + 1 for round_ in generation.rounds] == recorded[:needed]
