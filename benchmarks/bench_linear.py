"""Products of a few rows with a weight stored by rows and by columns, on a CPU.

    python benchmarks/bench_linear.py [--threads 1]

Prints (time by rows) / (time by columns) for the shapes of the embedded target, medians of interleaved pairs of the
process's CPU time. Above 1, storing by columns is faster. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ((256, 256), (128, 256), (640, 256), (256, 640))  # (out, in)
ROWS = (1, 16, 17, 65)


def ratio(rows: int, repeats: int, layers: int = 6) -> float:
    """Median over pairs of the time of all products of `layers` layers, weights by rows over weights by columns."""
    draws = torch.Generator().manual_seed(rows)
    by_rows = [torch.randn(shape, generator=draws) for shape in SHAPES for _ in range(layers)]
    by_columns = [weight.t().contiguous().t() for weight in by_rows]
    inputs = [torch.randn(rows, weight.shape[1], generator=draws) for weight in by_rows]
    ratios = []
    for repeat in range(repeats + 1):
        pair = (by_rows, by_columns) if repeat % 2 else (by_columns, by_rows)
        times = [_seconds(inputs, weights) for weights in pair]
        if repeat:
            ratios.append(times[0] / times[1] if repeat % 2 else times[1] / times[0])
    return statistics.median(ratios)


def _seconds(inputs: list[Tensor], weights: list[Tensor]) -> float:
    started = time.process_time()
    for x, weight in zip(inputs, weights, strict=True):
        F.linear(x, weight)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=201)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        ratios = {rows: ratio(rows, arguments.repeats) for rows in ROWS}
    for rows, found in ratios.items():
        print(f"{rows:>3} rows: stored by rows takes {found:.2f} times as long as by columns")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
