"""Compares the tree builders: time of `heap` over time of `level`, on one machine, in one process.

    python benchmarks/bench_tree_builders.py

For each vocabulary and budget the builders take turns, and the median of the paired ratios is printed, so
that a machine busy with something else slows both alike. Three ratios, above 1 where `level` is faster:

- search: the builder alone, from ranked tokens to a tree;
- build:  ranking included, the same ranking for both; what a round pays;
- classic: the construction as it is usually written (torch.topk, logsumexp, copy, heap; ties left open) over
  rank + level.

Logits are a sharp peak over noise; the best token has a probability of 0.3 to 0.9. The last line is one JSON
object. It covers time alone; that the trees are equal is checked once a row and tested in
tests/test_search.py.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sparkbench.search import BUILDERS, Ranked, rank


def peaked_logits(batch: int, depth: int, vocab: int, generator: torch.Generator) -> Tensor:
    """[batch, depth, vocab] float32: noise of deviation 3 and one token a row raised to a probability of 0.3
    to 0.9."""
    logits = torch.randn(batch, depth, vocab, generator=generator) * 3
    chance = 0.3 + 0.6 * torch.rand(batch, depth, 1, generator=generator)
    token = torch.randint(vocab, (batch, depth, 1), generator=generator)
    return logits.scatter(2, token, logits.logsumexp(-1, keepdim=True) + torch.logit(chance))


def classic_rank(logits: Tensor, k: int) -> Ranked:
    best, ids = logits.topk(min(k, logits.shape[-1]))
    return Ranked(best - logits.logsumexp(-1, keepdim=True), ids)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time to the end of the device's work; on a CPU the process's own time, which other processes
    hardly move."""
    if device.type != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(logits: Tensor, budget: int, repeats: int) -> dict[str, float]:
    """Median milliseconds and median paired ratios of one table row."""
    anchors = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    heap, level = BUILDERS["heap"], BUILDERS["level"]
    ranked = rank(logits, budget)
    if not torch.equal(heap(ranked, anchors, budget).tokens, level(ranked, anchors, budget).tokens):
        raise SystemExit(f"the builders disagree at budget {budget}")
    work: dict[str, Callable[[], object]] = {
        "heap": lambda: heap(ranked, anchors, budget),
        "level": lambda: level(ranked, anchors, budget),
        "rank_heap": lambda: heap(rank(logits, budget), anchors, budget),
        "rank_level": lambda: level(rank(logits, budget), anchors, budget),
        "classic": lambda: heap(classic_rank(logits, budget), anchors, budget),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 2):
        for name, run in work.items():
            elapsed = seconds(run, logits.device)
            if turn >= 2:  # the first turns warm up
                times[name].append(elapsed)

    def ratio(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))

    row = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in times.items()}
    row["search_ratio"] = ratio("heap", "level")
    row["build_ratio"] = ratio("rank_heap", "rank_level")
    row["classic_ratio"] = ratio("classic", "rank_level")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 151_936])
    parser.add_argument("--budget", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--rows", type=int, default=15, help="draft rows, the depth limit of the tree")
    parser.add_argument("--batch", type=int, default=1, help="sequences a batch")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)

    rows = []
    print("  vocab budget  rank+level     level      heap   heap/level: search  build  classic")
    with torch.inference_mode():
        for vocab in options.vocab:
            logits = peaked_logits(options.batch, options.rows, vocab, generator).to(options.device)
            for budget in options.budget:
                row = measure(logits, budget, options.repeats)
                rounded = {key: round(value, 4) for key, value in row.items()}
                rows.append({"vocab": vocab, "budget": budget, **rounded})
                print(
                    f"{vocab:>7} {budget:>6} {row['rank_level_ms']:>8.3f} ms {row['level_ms']:>6.3f} ms"
                    f" {row['heap_ms']:>6.3f} ms{row['search_ratio']:>21.2f} {row['build_ratio']:>6.2f}"
                    f" {row['classic_ratio']:>8.2f}",
                    flush=True,
                )
    setting = {key: getattr(options, key) for key in ("rows", "batch", "repeats", "threads", "device", "seed")}
    print(json.dumps({"benchmark": "tree_builders", "torch": torch.__version__, **setting, "results": rows}))


if __name__ == "__main__":
    main()
