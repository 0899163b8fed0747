"""Exactness on a device: how often DFlash and DDTree differ from AR on the golden models, and how they are classed.

    python benchmarks/gpu_exactness.py [--device cuda]

float32 must give no violation; bfloat16 shows how many outputs are tie flips there. The last line is one JSON object.
"""

import argparse
import collections
import json
from pathlib import Path

import torch

from sparkbench import drafters, exactness, registry
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.sampling import Sampling, noise_key
from sparkbench.decoding.target import Target

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "dflash_ddtree"
ARMS = (("dflash", None), ("ddtree", 16), ("ddtree", 64), ("ddtree:builder=heap", 64))


def count(device: str, dtype: str, temperature: float, batch: int, prompts: int) -> dict[str, int]:
    """Exactness classes over all arms, for random prompts of 5 to 60 bytes."""
    target = Target.load(str(GOLDEN / "target"), device=device, dtype=dtype)
    drafter = drafters.load("dflash", str(GOLDEN / "draft"), target)
    draws = torch.Generator().manual_seed(1)
    requests = []
    for _ in range(prompts):
        length = int(torch.randint(5, 60, (1,), generator=draws))
        ids = tuple(torch.randint(32, 127, (length,), generator=draws).tolist())
        requests.append(Request(ids, noise_key(ids, 0)))
    sampling = Sampling(temperature)
    config = DecodeConfig(64, sampling)
    reference_method = registry.build(registry.Variant.parse("autoregressive"))
    classes: collections.Counter[str] = collections.Counter()
    noise: dict[int, float] = {}
    for start in range(0, prompts, batch):
        part = requests[start : start + batch]
        references = generate(target, reference_method, part, config)
        if not noise:
            widths = [(budget or drafter.config.draft_length) + 1 for _, budget in ARMS]
            noise = exactness.width_noise(target, part[0], references[0].output_ids, widths, len(part))
        for name, budget in ARMS:
            method = registry.build(registry.Variant.parse(name), drafter=drafter, budget=budget)
            for request, reference, other in zip(part, references, generate(target, method, part, config), strict=True):
                verdict = exactness.classify(target, request, reference, other, sampling, noise, len(part))
                classes[verdict.exactness] += 1
    return dict(classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    for dtype in ("float32", "bfloat16"):
        for temperature in (0.0, 0.7, 1.0):
            for batch in (1, 8):
                key = f"{dtype} T={temperature} batch={batch}"
                found[key] = count(arguments.device, dtype, temperature, batch, arguments.prompts)
                print(f"{key:<26} {found[key]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
