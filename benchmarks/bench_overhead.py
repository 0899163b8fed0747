"""What the loop itself costs: the share of a round outside model forwards and the method's own drafting.

A round is draft, build, pack, verify, accept, commit, and what no stage covers. The loop's own are pack, accept, commit
and the rest. A share is the sum over rounds without the first; medians over repeats whose methods are interleaved.

    python benchmarks/bench_overhead.py [--target embedded] [--batch-sizes 1,16] [--tokens 64] [--repeats 5]

`carry` is the part of commit in which methods take in what was accepted. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from sparkbench import models
from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.timing import covered
from sparkbench.measure import first_turns
from sparkbench.settings import SweepConfig
from sparkbench.sweep import plan

LOOP = ("pack", "accept", "commit")
BUDGET = 64


def shares(generations: list[Generation]) -> dict[str, float]:
    """Share of each part of the loop in the time of a batch, its first round left out, `other` being what no stage has.

    The rounds of the longest row are those of the batch.
    """
    longest = max(generations, key=lambda generation: len(generation.rounds))
    stages: dict[str, int] = {}
    for round_ in longest.rounds[1:]:
        for stage, nanoseconds in round_.stages_ns.items():
            stages[stage] = stages.get(stage, 0) + nanoseconds
    total = longest.decode_s * 1e9 - covered(longest.rounds[0].stages_ns)
    parts = {stage: stages.get(stage, 0) / total for stage in (*LOOP, "commit/carry", "draft", "build", "verify")}
    parts["other"] = 1 - covered(stages) / total
    parts["loop"] = parts["other"] + sum(parts[stage] for stage in LOOP)
    parts["ms_a_round"] = total / 1e6 / max(1, len(longest.rounds) - 1)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--batch-sizes", default="1,16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    config = SweepConfig(
        target=arguments.target,
        methods=arguments.methods,
        budgets=(BUDGET,),
        batch_sizes=tuple(sizes),
        device=arguments.device,
        limit=4,
    )
    planned = plan(config)
    loaded = models.load(planned, "bench")
    ids = first_turns(planned, loaded)
    decode = DecodeConfig(arguments.tokens, config.sampling(arguments.temperature), frozenset(), profile=True)
    result = {}
    for size in sizes:
        found_shares: dict[str, list[dict[str, float]]] = {arm.label: [] for arm in loaded.arms}
        for repeat in range(arguments.repeats + 1):
            requests = [Request(ids[(row + repeat * size) % len(ids)], row) for row in range(size)]
            for arm, method in zip(loaded.arms, loaded.methods, strict=True):
                generations = generate(loaded.target, method, requests, decode)
                if repeat:  # the first warms up
                    found_shares[arm.label].append(shares(generations))
        for label, several in found_shares.items():
            middle = {part: statistics.median(each[part] for each in several) for part in several[0]}
            result[f"{label} b{size}"] = middle
            shown = "  ".join(
                f"{part} {100 * middle[part]:.1f}" for part in (*LOOP, "other", "draft", "build", "verify")
            )
            print(
                f"{label:<20} b{size:<3} loop {100 * middle['loop']:5.1f} %   {middle['ms_a_round']:7.2f} ms   {shown}"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
