"""Why the loop takes the argmax on a CPU by NumPy: torch's reads the same numbers several times as slowly.

    python benchmarks/bench_argmax.py [--vocab 2048]

Prints the ratio of the times for logits [rows, vocab]; the calls are interleaved, a ratio is the median of paired ones.
"""

import argparse
import json
import statistics
import time

import torch

from sparkbench.decoding.sampling import argmax

REPEATS = 51


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=2048)
    vocab = parser.parse_args().vocab
    torch.set_num_threads(1)
    ratios = {}
    for rows in (1, 16, 65, 1040):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
        if not torch.equal(argmax(logits), logits.argmax(-1)):
            raise SystemExit("the two disagree")
        found = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            logits.argmax(-1)
            between = time.perf_counter()
            argmax(logits)
            found.append((between - started) / (time.perf_counter() - between))
        ratios[rows] = statistics.median(found)
        print(f"{rows:>5} rows: torch takes {ratios[rows]:.1f} times as long")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
