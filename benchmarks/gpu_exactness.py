"""Exactness on a device: how often DFlash, DDTree and DART differ from AR on golden models, and how that is classed.

    python benchmarks/gpu_exactness.py [--device cuda]

float32 must give no violation; bfloat16 shows how many outputs are tie flips there. The last line is one JSON object.
"""

import argparse
import collections
import json
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch

from sparkbench import drafters, exactness, registry
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.sampling import Sampling, noise_key
from sparkbench.decoding.target import Target
from sparkbench.ngram.build import BuildSpec, Document, build
from sparkbench.ngram.index import NgramIndex

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
Arms = tuple[tuple[str, int | None], ...]
FAMILIES: tuple[tuple[str, str, Arms], ...] = (  # folder, drafter, arms
    (
        "dflash_ddtree",
        "draft",
        (
            ("dflash", None),
            ("dflash:draft=sampled", None),
            ("dflash:draft-noise=shared", None),
            ("ddtree", 16),
            ("ddtree", 64),
            ("ddtree:builder=heap", 64),
            ("ddtree:tree-draft=sampled", 64),
            ("ddtree:draft-noise=shared", 64),
        ),
    ),
    ("dart", "drafter", (("dflash", None), ("dart", 16), ("dart", 60), ("dart:index=none", 60))),
)


def indexed(folder: Path, target: Target) -> NgramIndex | None:
    """The n-gram index of a golden family's text, whose tokens are bytes; None where it has none."""
    corpus = folder / "ngram" / "corpus.jsonl"
    if not corpus.is_file():
        return None
    texts = [json.loads(line)["text"].encode() for line in corpus.read_text(encoding="utf-8").splitlines()]
    documents = (Document(np.frombuffer(text, np.uint8)) for text in texts)
    with tempfile.TemporaryDirectory() as out:
        return build(documents, Path(out) / "index.safetensors", BuildSpec(target.vocab_size, end_token=0))


def count(family: int, device: str, dtype: str, temperature: float, batch: int, prompts: int) -> dict[str, int]:
    """Exactness classes over all arms of a family, for random prompts of 5 to 60 bytes."""
    name, own, arms = FAMILIES[family]
    target = Target.load(str(GOLDEN / name / "target"), device=device, dtype=dtype)
    drafter = drafters.load("dflash", str(GOLDEN / name / own), target)
    index = indexed(GOLDEN / name, target)
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
            widths = [(budget or drafter.config.draft_length) + 1 for _, budget in arms]
            noise = exactness.width_noise(target, part[0], references[0].output_ids, widths, len(part))
        for text, budget in arms:
            method = registry.build(registry.Variant.parse(text), drafter=drafter, budget=budget)
            method.index = None if "index=none" in text else index
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
    settings = product(range(len(FAMILIES)), ("float32", "bfloat16"), (0.0, 0.7, 1.0), (1, 8))
    for family, dtype, temperature, batch in settings:
        key = f"{FAMILIES[family][0]} {dtype} T={temperature} batch={batch}"
        found[key] = count(family, arguments.device, dtype, temperature, batch, arguments.prompts)
        print(f"{key:<40} {found[key]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
