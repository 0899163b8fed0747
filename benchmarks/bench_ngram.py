"""An n-gram index of a large vocabulary: how it is built, what it takes, and what a look-up costs, cold and warm.

    python benchmarks/bench_ngram.py [--tokens 45000000] [--memory-mib 512] [--folder FOLDER]

The text is drawn at random, so that an index of any size can be made: each token follows one of the successors of the
token before it, frequent ones more often. Real text repeats itself more; its index has fewer nodes a token, and about
the same bytes a node. Look-ups come in calls of 20 contexts (a beam) with 25 candidates each; present contexts are
pairs that occur, with half of their candidates among their successors; random ones are any two tokens.

Cold: the file's pages are dropped and it is mapped anew. Warm: the same look-ups again, of each call the fastest of
some repeats, since other programs disturb. The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.host import peak_memory, process_memory
from sparkbench.ngram.build import BuildSpec, Document, build
from sparkbench.ngram.describe import describe
from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.lookup import look_up, warm_up
from sparkbench.profiling.lookups import CONTEXTS, drop_pages, known_contexts

VOCAB = 151_936
DOCUMENT = 100_000
SUCCESSORS = 4000
CALLS = 500
REPEATS = 7
MAPPED = "RssFile"  # resident bytes of mapped files
Array = NDArray[Any]


def text(tokens: int) -> Iterator[Document]:
    """Documents drawn from skewed successors; token t's r-th successor is a hash of (t, r)."""
    draws = np.random.default_rng(0)
    for _ in range(0, tokens, DOCUMENT):
        ranks = (SUCCESSORS ** draws.random((DOCUMENT // 100, 100))).astype(np.int64)
        ids = np.empty(ranks.shape, np.int64)
        state = (VOCAB ** draws.random(len(ranks))).astype(np.int64) % VOCAB
        for step in range(ranks.shape[1]):
            mixed = (state * 2_654_435_761 + ranks[:, step] * 40_503_000_011) & ((1 << 40) - 1)
            state = (VOCAB ** ((mixed >> 8) / (1 << 32))).astype(np.int64) % VOCAB
            ids[:, step] = state
        yield Document(ids.ravel())


def times(index: NgramIndex, contexts: Array, candidates: Array) -> Array:
    """Seconds of each call."""
    rows, found = np.arange(CONTEXTS), []
    for start in range(0, len(contexts), CONTEXTS):
        part = slice(start, start + CONTEXTS)
        started = time.perf_counter()
        look_up(index, contexts[part], candidates[part], rows)
        found.append(time.perf_counter() - started)
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=45_000_000)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument(
        "--folder", type=Path, help="For the index, some 300 MB, and temporary files. Default: the system's."
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "index"
        before = peak_memory()
        started = time.perf_counter()
        spec = BuildSpec(VOCAB, end_token=0, memory_bytes=arguments.memory_mib << 20, corpus="synthetic")
        found = describe(build(text(arguments.tokens), path, spec))
        seconds = time.perf_counter() - started
        figures: dict[str, Any] = {
            "tokens": found.total_tokens,
            "nodes": found.nodes,
            "file_bytes": path.stat().st_size,
            "bytes_per_node": found.bytes_per_node,
            "build_s": seconds,
            "peak_bytes": peak_memory(),
            "before_bytes": before,
        }
        for kind in ("present", "random"):
            figures[kind] = measure(path, kind == "present")
    print(f"{found.total_tokens:,} tokens, nodes by depth {found.nodes}, {found.bytes_per_node:.2f} bytes a node")
    print(
        f"file of {figures['file_bytes']:,} bytes, built in {seconds:.0f} s; "
        f"peak of memory {figures['peak_bytes']:,} bytes, {figures['before_bytes']:,} of them before"
    )
    for kind in ("present", "random"):
        print(f"{kind} contexts: " + ", ".join(f"{name} {value:,.0f}" for name, value in figures[kind].items()))
    print(json.dumps(figures))


def measure(path: Path, present: bool) -> dict[str, float]:
    index = NgramIndex.open(path)
    warm_up(index)
    contexts, candidates = known_contexts(index, CALLS * CONTEXTS)
    if not present:
        draws = np.random.default_rng(1)
        contexts, candidates = (draws.integers(0, VOCAB, each.shape) for each in (contexts, candidates))
    del index
    drop_pages(path)
    started = time.perf_counter()
    index = NgramIndex.open(path)
    opened = time.perf_counter() - started
    empty = process_memory(MAPPED) or 0
    cold = times(index, contexts, candidates).sum()
    touched = (process_memory(MAPPED) or 0) - empty
    warm = np.min([times(index, contexts, candidates) for _ in range(REPEATS)], 0).sum()
    return {
        "open us": opened * 1e6,
        "cold look-ups/s": candidates.size / cold,
        "warm look-ups/s": candidates.size / warm,
        "warm ns a context": 1e9 * warm / len(contexts),
        "mapped bytes touched": touched,
    }


if __name__ == "__main__":
    main()
