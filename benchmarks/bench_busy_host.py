"""What DART's host-side search costs on a host that is busy: alone, and beside N workers, warm and cold.

    python benchmarks/bench_busy_host.py [--workers 0 1 2 4] [--tokens 15000000]

The index is a file (benchmarks/bench_ngram.py makes its text), the search that of a round at batch size 1. A worker is
a process that adds up an array larger than the caches, again and again, so it takes both a core and memory bandwidth.
The numbers of workers take turns. Warm: another draft each time, on a mapped index; medians of wall time with the parts
of look-ups and of the rest, the 95th percentile, and the median of the thread's CPU time. Cold: the file's pages are
dropped and the file is mapped anew before each search. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_continuity import STOPS, draft, shortlist_of
from bench_ngram import VOCAB, text

from sparkbench.decoding.timing import StageTimer
from sparkbench.ngram.build import BuildSpec, Document, build
from sparkbench.ngram.index import NgramIndex
from sparkbench.profiling.lookups import drop_pages
from sparkbench.search.continuity import ContinuitySpec, Shortlist, search, warm_up

STAGES = ("build/lookup", "build/search")
Times = dict[str, list[float]]


def burn() -> None:
    """Add up 128 MiB for ever."""
    array = np.ones(1 << 24)
    while True:
        array.sum()


def warm(index: NgramIndex, drafts: list[Shortlist], spec: ContinuitySpec, times: Times) -> None:
    timer = StageTimer(torch.device("cpu"), recording=True)
    for short in drafts:
        started, cpu = time.perf_counter(), time.thread_time()
        search(short, index, spec, STOPS, timer.stage)
        times["wall"].append(time.perf_counter() - started)
        times["cpu"].append(time.thread_time() - cpu)
        taken = timer.take()
        for stage in STAGES:
            times[stage].append(taken[stage] / 1e9)


def cold(path: Path, drafts: list[Shortlist], spec: ContinuitySpec, times: Times) -> None:
    for short in drafts:
        drop_pages(path)
        index = NgramIndex.open(path)
        started = time.perf_counter()
        search(short, index, spec, STOPS)
        times["cold"].append(time.perf_counter() - started)
        del index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--tokens", type=int, default=15_000_000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--drafts", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = ContinuitySpec(60)
    found: dict[int, Times] = {
        count: {name: [] for name in ("wall", "cpu", *STAGES, "cold")} for count in options.workers
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.safetensors"
        documents = list(text(options.tokens))
        build((Document(document.ids) for document in documents), path, BuildSpec(VOCAB, end_token=0))
        words = np.concatenate([document.ids for document in documents])
        index = NgramIndex.open(path)
        warm_up(index)
        draws = np.random.default_rng(0)
        drafts = [shortlist_of(draft("text", words, VOCAB, 1, draws), spec) for _ in range(options.drafts)]
        for _ in range(options.turns):
            for count in options.workers:
                workers = [multiprocessing.Process(target=burn, daemon=True) for _ in range(count)]
                for worker in workers:
                    worker.start()
                time.sleep(1.0)  # until they have made their arrays
                warm(index, drafts, spec, found[count])
                del index  # pages that are mapped would stay
                cold(path, drafts[:10], spec, found[count])
                index = NgramIndex.open(path)
                for worker in workers:
                    worker.terminate()
                    worker.join()
                warm(index, drafts, spec, {name: [] for name in ("wall", "cpu", *STAGES)})  # pages come back
        facts = {"cores": len(os.sched_getaffinity(0)), "nodes": index.nodes, "bytes": index.bytes}
    print(f"{facts['cores']} cores, index of {facts['nodes']:,} nodes, {facts['bytes'] / 1e6:.0f} MB; milliseconds")
    print("workers   warm    p95    CPU  look-up  search   cold")
    rows = []
    for count, times in found.items():
        row = {name: statistics.median(each) * 1e3 for name, each in times.items()}
        row["p95"] = float(np.quantile(times["wall"], 0.95)) * 1e3
        rows.append({"workers": count, **row})
        shown = (row["wall"], row["p95"], row["cpu"], row["build/lookup"], row["build/search"], row["cold"])
        print(f"{count:7}" + "".join(f"{value:7.3f}" for value in shown))
    print(json.dumps({"benchmark": "busy_host", **facts, "results": rows}))


if __name__ == "__main__":
    main()
