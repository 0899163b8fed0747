"""Trains the DART drafters of the training ablations: the decay gamma, shifted prediction, and the teacher.

    sparkbench train embedded --work WORK --out OUT     # once: the target's answers are in WORK
    python sweeps/dart_training.py WORK DRAFTERS --threads 2
    sparkbench run --config sweeps/dart-training.toml   # expects them in results/dart-training

All take the same steps on the same answers, fewer than the embedded drafter. `hard` learns the text's own tokens by
cross-entropy, weighted as the others; `unshifted` drafts its first token at a mask instead of the last prefix row.
"""

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from sparkbench.decoding.target import Target
from sparkbench.train import block
from sparkbench.train.recipe import DartRecipe, Optimisation, Phase, Recipe
from sparkbench.train.responses import Responses

STEPS, RATE = 600, 3e-3


def variants() -> dict[str, DartRecipe]:
    """Recipes by name of drafter."""
    base = Recipe().dart
    assert isinstance(base, DartRecipe)

    def with_gamma(gamma: float) -> DartRecipe:
        decay = -1 / math.log(gamma) if gamma < 1 else math.inf
        return replace(base, phases=(Phase(Optimisation(STEPS, RATE, weight_decay=0.01), decay),))

    found = {f"gamma-{gamma:g}": with_gamma(gamma) for gamma in (0.6, 0.5, 0.8, 1.0)}
    return found | {
        "unshifted": replace(with_gamma(0.6), shifted=False),
        "unshifted-gamma-1": replace(with_gamma(1.0), shifted=False),
        "hard": replace(with_gamma(0.6), kl_weight=0.0, ce_weight=1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Target.load(str(arguments.work / "target"), dtype="float32", device="cpu")
    answers = Responses.load(arguments.work / "responses.safetensors")
    for name, recipe in variants().items():
        folder = arguments.out / name
        if (folder / "model.safetensors").is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        config = block.checkpoint_config(recipe, target, 0)
        states = arguments.out / "states"
        states.mkdir(exist_ok=True)
        drafter, _ = block.train(recipe, config, target, answers, Recipe().seed, states, name, print)
        block.export(drafter, config, folder)


if __name__ == "__main__":
    main()
