"""A factorial of DART's parts: which matter, and which only matter together.

    python sweeps/dart_training.py WORK results/dart-training    # the four drafters
    python sweeps/dart_factorial.py [--out FOLDER] [--limit N]

Five factors of two levels each, all 32 combinations on the same prompts: shifted prediction (no, yes), gamma of
training (1, 0.6), the n-gram term (no, yes), the beam (5, 20) and the nodes (16, 60). An effect is the mean tau of the
arms at the second level less that at the first; an interaction is half the difference of one factor's effect between
the levels of another. Intervals: 95 %, bootstrap over prompts, all arms resampled together; none of them is corrected
for there being fifteen.
"""

import argparse
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparkbench import runner
from sparkbench.intervals import Floats, bootstrap
from sparkbench.registry import Variant
from sparkbench.results import read_samples
from sparkbench.sweep import SweepConfig

TRAINED = Path("results/dart-training")
FACTORS = ("shifted", "gamma 0.6", "n-gram", "beam 20", "60 nodes")
DRAFTERS = {
    (0, 0): "unshifted-gamma-1",
    (0, 1): "unshifted",
    (1, 0): "gamma-1",
    (1, 1): "gamma-0.6",
}
BEAMS, BUDGETS = (5, 20), (16, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=Path, default=TRAINED, help="folder of the trained drafters")
    parser.add_argument("--out", type=Path, default=Path("results/dart-factorial"))
    parser.add_argument("--limit", type=int, default=4, help="prompts a data set")
    options = parser.parse_args()
    arms = {levels: _arm(levels, options.drafters) for levels in product((0, 1), repeat=len(FACTORS))}
    methods = tuple(dict.fromkeys(variant for variant, _ in arms.values()))
    runner.run(SweepConfig(methods=methods, budgets=BUDGETS, limit=options.limit), options.out)
    samples = read_samples([options.out]).table
    table, strata = _sums(samples, list(arms.values()))
    signs = 2 * np.array(list(arms)) - 1  # [arms, factors]
    print(f"{len(table)} prompts; pooled tau of all arms: {_tau(table.sum(0)).mean():.3f}")
    effects = [((place,), FACTORS[place]) for place in range(len(FACTORS))]
    effects += [(pair, " x ".join(FACTORS[place] for place in pair)) for pair in combinations(range(len(FACTORS)), 2)]
    for places, name in effects:
        contrast = signs[:, places].prod(1) / (len(signs) / 2)

        def effect(sums: Floats, contrast: Floats = contrast) -> Floats:
            return np.asarray(_tau(sums.sum(-2)) @ contrast)

        low, high = bootstrap(table, strata, effect, seed=0) or (float("nan"), float("nan"))
        print(f"{name:24} {_tau(table.sum(0)) @ contrast:+.3f} [{low:+.3f}, {high:+.3f}]")


def _arm(levels: tuple[int, ...], trained: Path) -> tuple[str, int]:
    """Canonical variant and budget of a combination of levels."""
    shifted, gamma, ngram, beam, nodes = levels
    text = f"dart:drafter={trained / DRAFTERS[shifted, gamma]}:beam={BEAMS[beam]}" + ("" if ngram else ":index=none")
    return Variant.parse(text).canonical, BUDGETS[nodes]


def _sums(samples: pa.Table, arms: list[tuple[str, int]]) -> tuple[Floats, list[str]]:
    """[prompts, 2 * arms]: committed tokens of every arm, then rounds; and the data set of each prompt."""
    columns = ("dataset", "prompt_id", "variant", "budget", "committed_sum", "rounds")
    places = {arm: place for place, arm in enumerate(arms)}
    prompts: dict[tuple[str, str], Floats] = {}
    for dataset, prompt, variant, budget, committed, rounds in zip(
        *(samples[column].to_pylist() for column in columns), strict=True
    ):
        place = places.get((variant, budget))
        if place is not None:
            row = prompts.setdefault((dataset, prompt), np.zeros(2 * len(arms)))
            row[place] += committed
            row[len(arms) + place] += rounds
    return np.stack(list(prompts.values())), [dataset for dataset, _ in prompts]


def _tau(sums: Floats) -> Floats:
    half = sums.shape[-1] // 2
    return np.asarray(sums[..., :half] / sums[..., half:])


if __name__ == "__main__":
    main()
