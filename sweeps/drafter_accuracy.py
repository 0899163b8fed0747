"""Coverage of every drafter of the embedded target by offset: hit@1, and the true token among the ten best.

    python sweeps/drafter_accuracy.py [DRAFTER ...] [--limit N] [--json FILE]

DRAFTER is a name, a folder, or two joined as A+B or A+none. The text is what the target says to the bundled prompts at
temperature 0. Intervals: 95 %, bootstrap over prompts.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from sparkbench import catalog, drafters, registry
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.target import Target
from sparkbench.errors import UsageError
from sparkbench.intervals import Floats, bootstrap
from sparkbench.prompts import dataset_names, encode_chat, load_prompts
from sparkbench.train.coverage import covered

BEST = (1, 10)
DEFAULT = ("dflash", "dspark-b7+none", "dspark-b7", "dspark-b16+none", "dspark-b16", "dart")
LONGEST = 256  # tokens; the window of the embedded drafters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=DEFAULT, metavar="DRAFTER")
    parser.add_argument("--limit", type=int, default=None, help="prompts a data set")
    parser.add_argument("--json", type=Path, default=None, help="write all offsets to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(catalog.resolve_target("embedded"), name="embedded", dtype="float32", device="cpu")
    texts, strata = _texts(target, options.limit)
    print(f"{len(texts)} prompts; offset: hit@1 [interval], top 10 [interval]")
    whole = {}
    for name in options.drafters:
        drafter = _load(name, target)
        counts = np.stack([covered(drafter, target, ids, start, BEST).numpy() for ids, start in texts])
        rows = [_row(counts[:, :, offset], strata) for offset in range(counts.shape[2])]
        whole[name] = rows
        print(f"\n{name}")
        for offset, row in enumerate(rows, 1):
            shown = ", ".join(f"{part['share']:6.1%} [{part['low']:.1%}, {part['high']:.1%}]" for part in row)
            print(f"  {offset:2}: {shown}")
    if options.json is not None:
        options.json.write_text(json.dumps(whole, indent=1))


def _texts(target: Target, limit: int | None) -> tuple[list[tuple[list[int], int]], list[str]]:
    """(prompt and answer, start of the answer), and the data set of each."""
    method = registry.build(registry.Variant.parse("autoregressive"))
    texts, strata = [], []
    for dataset in dataset_names():
        for prompt in load_prompts(dataset, limit=limit).prompts:
            ids = encode_chat(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            (answer,) = generate(target, method, [Request(ids)], DecodeConfig(128))
            texts.append(([*ids, *answer.output_ids][:LONGEST], len(ids)))
            strata.append(dataset)
    kept = [place for place, (ids, start) in enumerate(texts) if start + 1 < len(ids)]
    return [texts[place] for place in kept], [strata[place] for place in kept]


def _load(name: str, target: Target) -> Any:
    """A drafter of whatever kind: one with a Markov head is refused as DFlash."""
    source = catalog.resolve_drafter("dspark", "embedded", name)
    try:
        return drafters.load("dflash", source, target)
    except UsageError:
        return drafters.load("dspark", source, target)


def _row(counts: np.ndarray, strata: list[str]) -> list[dict[str, float]]:
    """Share and interval for each of BEST; counts [prompts, 1 + len(BEST)]."""
    found = []
    for column in range(1, counts.shape[1]):

        def share(sums: Floats, column: int = column) -> Floats:
            pooled = sums.sum(-2)
            return np.asarray(pooled[..., column] / pooled[..., 0])

        interval = bootstrap(counts, strata, share, seed=0) or (float("nan"), float("nan"))
        low, high = interval
        found.append({"share": float(counts[:, column].sum() / counts[:, 0].sum()), "low": low, "high": high})
    return found


if __name__ == "__main__":
    main()
