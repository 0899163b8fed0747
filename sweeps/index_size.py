"""What the size of DART's n-gram index is worth: acceptance, memory and look-up time, by documents counted.

    python sweeps/index_size.py [--out FOLDER] [--limit N]

Indices of the embedded generator's text, from 100 documents to those of the shipped one and beyond, all of order 3, and
one run of DART with each of them and with none. tau with 95 % intervals: bootstrap over prompts. Look-ups as in
`sparkbench profile`.
"""

import argparse
from pathlib import Path

import pyarrow.compute as pc

from sparkbench import catalog, runner, stats
from sparkbench.ngram.index import NgramIndex
from sparkbench.profiling.lookups import lookup_time
from sparkbench.registry import Variant
from sparkbench.results import read_samples
from sparkbench.sweep import SweepConfig
from sparkbench.train import corpus, tokenizer
from sparkbench.train.recipe import NgramRecipe, Recipe

DOCUMENTS = (100, 1_000, 10_000, 50_000, 150_000)
BUDGET = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/index-size"))
    parser.add_argument("--limit", type=int, default=8, help="prompts a data set")
    options = parser.parse_args()
    words = tokenizer.load(Path(catalog.resolve_target("embedded")))
    options.out.mkdir(parents=True, exist_ok=True)
    files = {}
    for documents in DOCUMENTS:
        files[documents] = options.out / f"{documents}.safetensors"
        if not files[documents].is_file():
            corpus.count(Recipe(ngram=NgramRecipe(documents)), words, files[documents])
    variants = {count: Variant.parse(f"dart:index={file}").canonical for count, file in files.items()}
    variants[0] = Variant.parse("dart:index=none").canonical
    runner.run(
        SweepConfig(methods=tuple(variants.values()), budgets=(BUDGET,), limit=options.limit), options.out / "run"
    )
    samples = read_samples([options.out / "run"]).table
    reference = stats.measurements(samples.filter(pc.equal(samples["method"], "autoregressive")))
    print(f"{'documents':>9} {'nodes':>9} {'MB':>6} {'bytes/node':>10} {'cold us':>8} {'warm us':>8}  tau")
    for documents in sorted(variants):
        found = stats.measurements(samples.filter(pc.equal(samples["variant"], variants[documents])))
        compared = stats.compare(found, reference)
        low, high = compared.tau_interval or (float("nan"), float("nan"))
        size = " " * 46
        if documents:
            index, times = NgramIndex.open(files[documents]), lookup_time(str(files[documents]), 9)
            size = (
                f"{index.nodes:9,} {index.bytes / 1e6:6.2f} {index.bytes_per_node:10.2f} "
                f"{times.cold_s * 1e6:8.2f} {times.warm_s * 1e6:8.2f}"
            )
        print(f"{documents:9,} {size}  {compared.tau:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
