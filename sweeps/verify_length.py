"""Runs `verify-length.toml` and compares what adapts itself with the best fixed setting chosen on other prompts.

    python sweeps/verify_length.py [--out FOLDER] [--limit N]

The first third of each data set's prompts chooses, for each method and batch size, the fixed setting (depth,
threshold or budget) with the highest pooled speedup. All figures are those of the remaining prompts: a fixed setting
picked on the prompts it is reported on would flatter itself. With `--out` of a finished run only the table is made.
"""

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparkbench import runner, stats
from sparkbench.results import read_samples
from sparkbench.sweep import CHUNK, SweepConfig

HERE = Path(__file__).parent
ADAPTIVE = ("verify-length=", "budget=auto")
Arm = tuple[str, str, int | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/verify-length"))
    parser.add_argument("--limit", type=int, default=None, help="prompts a data set")
    options = parser.parse_args()
    fields = SweepConfig.from_toml(HERE / "verify-length.toml")
    if options.limit is not None:
        fields["limit"] = options.limit
    runner.run(SweepConfig(**fields), options.out)
    samples = read_samples([options.out]).table.drop_columns(["output_ids"])
    for batch_size in sorted(set(samples["batch_size"].to_pylist())):
        _print(batch_size, samples.filter(pc.equal(samples["batch_size"], batch_size)))


def _print(batch_size: int, samples: pa.Table) -> None:
    choosing, reporting = _split(samples)
    chosen, judged = _speedups(choosing), _speedups(reporting)
    exactness = samples["exactness"].to_pylist()
    bad = sum(value not in (None, "identical") for value in exactness)
    failed = sum(status != "ok" for status in samples["status"].to_pylist())
    on, before = (len(set(part["batch_id"].to_pylist())) for part in (reporting, choosing))
    print(f"\nbatch size {batch_size}: {on} batches reported on, settings chosen on {before} others;")
    print(f"outputs that are not AR's: {bad}; rows without output: {failed}")
    for method in ("dspark", "ddtree", "sparklingtree"):
        arms = sorted((arm for arm in judged if arm[0] == method), key=lambda arm: (arm[1], arm[2] or 0))
        fixed = [arm for arm in arms if not any(part in arm[1] for part in ADAPTIVE)]
        best = max(fixed, key=lambda arm: chosen[arm].speedup or 0.0)
        for arm in arms:
            found = judged[arm]
            low, high = found.interval or (float("nan"), float("nan"))
            mark = " <- best fixed, chosen on other prompts" if arm == best else ""
            label = arm[1] if arm[2] is None else f"{arm[1]} @{arm[2]}"
            print(f"{label:36} tau {found.tau:5.2f}  speedup {found.speedup:5.2f} [{low:.2f}, {high:.2f}]{mark}")


def _split(samples: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows of the first third of each data set's units, and of the others."""
    units = [(dataset, int(name.split("-")[-2])) for dataset, name in _columns(samples, "dataset", "unit")]
    last: dict[str, int] = {}
    for dataset, number in units:
        last[dataset] = max(number, last.get(dataset, 0))
    if not all(last.values()):
        raise SystemExit(f"too few prompts to choose on some and report on others: more than {CHUNK} a set are needed")
    first = pa.array([number < max(1, (last[dataset] + 1) // 3) for dataset, number in units])
    return samples.filter(first), samples.filter(pc.invert(first))


def _columns(samples: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(samples[name].to_pylist() for name in names), strict=True))


def _speedups(samples: pa.Table) -> dict[Arm, stats.Comparison]:
    keys = _columns(samples, "method", "variant", "budget")
    parts = {key: samples.filter(pa.array([other == key for other in keys])) for key in dict.fromkeys(keys)}
    reference = next(stats.measurements(table) for key, table in parts.items() if key[0] == "autoregressive")
    return {key: stats.compare(stats.measurements(table), reference) for key, table in parts.items()}


if __name__ == "__main__":
    main()
