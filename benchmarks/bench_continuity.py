"""Times one continuity search, from the candidates of a draft to parents and scores, on a synthetic index.

    python benchmarks/bench_continuity.py

The index is made from a synthetic text of Zipf-like words in which each word has few frequent successors, and mapped
from files. Drafts of two kinds take turns: `text` walks the text, so that its contexts are found and one candidate of
each level continues it; `random` has uniform tokens, whose contexts are hardly ever found. Their best token has a
probability that falls from 0.9 to 0.3 with the level. A search is timed warm, on one thread, each turn with another
draft: `new` is a draft's first search, which finds little of what it reads in the caches, `again` is the same search
once more. Printed are medians and minima of wall time, and medians of the thread's CPU time, in milliseconds, with the
parts of look-ups (build/lookup) and of the rest (build/search). The top-k over the vocabulary, with the copy to the
host, is timed apart. The last line is one JSON object. That the trees are right is tested in
tests/test_continuity_search.py.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkbench.decoding.timing import StageTimer
from sparkbench.host import process_memory
from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.jit import compiled
from sparkbench.search.continuity import ContinuitySpec, Shortlist, search, shortlist, warm_up

DEPTH, OTHERS = 8, 64
STOPS = frozenset({0})
MAPPED = "RssFile"  # resident bytes of mapped files
Row = dict[str, Any]


@compiled
def walk(words: NDArray[np.int64], fresh: NDArray[np.bool_], ranks: NDArray[np.int64]) -> None:
    """Turn independent words into a text: one that is not fresh is a successor of the word before, by its rank."""
    size = len(words)
    for place in range(1, len(words)):
        if not fresh[place]:
            mixed = (words[place - 1] * 1_000_003 + ranks[place]) * 2_654_435_761 % 4_294_967_296
            words[place] = words[mixed * (size // 64) // 4_294_967_296]


def synthetic_text(vocab: int, length: int, seed: int = 0) -> NDArray[np.int64]:
    """[length] tokens below `vocab`: word r with a frequency of about 1 / r, two in three chosen by the one before."""
    draws = np.random.default_rng(seed)
    words = np.minimum(np.exp(draws.random(length, np.float32) * np.log(vocab)), vocab) - 1
    ranks = np.exp(draws.random(length, np.float32) * np.log(64))
    text = draws.permutation(vocab)[words.astype(np.int64)]
    walk(text, draws.random(length, np.float32) < 1 / 3, ranks.astype(np.int64))
    return text


def index_of_text(text: NDArray[np.int64], vocab: int) -> NgramIndex:
    """The index of order 3 of one document, in memory."""
    packed = np.sort((text[:-2] << 36) + (text[1:-1] << 18) + text[2:])
    starts = np.flatnonzero(np.r_[True, packed[1:] != packed[:-1]])
    triples, counts3 = packed[starts], np.diff(np.r_[starts, len(packed)])
    starts3 = np.flatnonzero(np.r_[True, triples[1:] >> 18 != triples[:-1] >> 18])
    pairs, counts2 = triples[starts3] >> 18, np.add.reduceat(counts3, starts3)
    starts2 = np.searchsorted(pairs >> 18, np.arange(vocab))
    counts1 = np.bincount(pairs >> 18, counts2, vocab)
    inner = 1 + vocab + len(pairs)
    low = 2**18 - 1
    return NgramIndex(
        "synthetic",
        3,
        vocab,
        np.concatenate([[0], np.arange(vocab), pairs & low, triples & low]).astype(np.uint32),
        np.concatenate([[len(text)], counts1, counts2, counts3]).astype(np.uint32),
        np.concatenate([[1], 1 + vocab + starts2, inner + starts3, [inner + len(triples)]]).astype(np.uint32),
        {},
    )


def draft(
    kind: str, text: NDArray[np.int64], vocab: int, batch: int, draws: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Logits [batch, DEPTH, vocab] with 65 finite entries a row, and the last two known tokens [batch, 2]."""
    starts = draws.integers(len(text) - DEPTH - 2, size=batch)
    window = text[starts[:, None] + np.arange(DEPTH + 2)]
    others = text[draws.integers(len(text), size=(batch, DEPTH, OTHERS))]  # frequent words are frequent here, too
    if kind == "random":
        window, others = (draws.integers(vocab, size=part.shape) for part in (window, others))
    noise = torch.from_numpy(draws.standard_normal(others.shape, np.float32)) * 2
    chances = torch.linspace(0.9, 0.3, DEPTH)[:, None]
    logits = torch.full((batch, DEPTH, vocab), -torch.inf)
    logits.scatter_(2, torch.from_numpy(others), noise)
    best = noise.logsumexp(-1, keepdim=True) + torch.logit(chances)
    logits.scatter_(2, torch.from_numpy(window[:, 2:, None]), best)
    return logits, torch.from_numpy(window[:, :2])


def shortlist_of(draft: tuple[Tensor, Tensor], spec: ContinuitySpec) -> Shortlist:
    logits, known = draft
    return shortlist(logits, known[:, 1], known[:, :1], spec)


def measure(cases: Mapping[str, Sequence[Shortlist]], index: NgramIndex, spec: ContinuitySpec, turns: int) -> list[Row]:
    """Searches of all cases in turn."""
    timer = StageTimer(torch.device("cpu"), recording=True)
    times: dict[tuple[str, str], list[dict[str, float]]] = {}
    for turn in range(turns):
        for case, drafted in cases.items():
            for state in ("new", "again"):
                cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
                search(drafted[turn % len(drafted)], index, spec, STOPS, timer.stage)
                spent: dict[str, float] = {"wall": time.perf_counter_ns() - wall, "cpu": time.thread_time_ns() - cpu}
                times.setdefault((case, state), []).append(spent | timer.take())
    rows = []
    for (case, state), each in times.items():
        middle = {name: statistics.median(one[name] for one in each) / 1e6 for name in each[0]}
        least = min(one["wall"] for one in each) / 1e6
        rows.append({"case": case, "state": state, "least": least, **middle})
        print(
            f"{case:>16}, {state:>5}: {middle['wall']:.3f} ms (least {least:.3f}, CPU {middle['cpu']:.3f}), "
            f"look-up {middle['build/lookup']:.3f}, search {middle['build/search']:.3f}",
            flush=True,
        )
    return rows


def mapped(index: NgramIndex, folder: str) -> NgramIndex:
    """The index as memory maps of files, as one that is opened."""
    arrays = {}
    for name in ("tokens", "counts", "first_child"):
        np.save(f"{folder}/{name}.npy", getattr(index, name))
        arrays[name] = np.load(f"{folder}/{name}.npy", mmap_mode="r")
    return replace(index, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--words", type=int, default=40_000_000, help="tokens of the synthetic text")
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--drafts", type=int, default=100)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(options, folder)


def run(options: argparse.Namespace, folder: str) -> None:
    text = synthetic_text(options.vocab, options.words, options.seed)
    index = mapped(index_of_text(text, options.vocab), folder)
    spec = ContinuitySpec(options.nodes)
    warm_up(index)

    draws = np.random.default_rng(options.seed)
    cases: dict[str, list[Shortlist]] = {}
    ranking: Row = {}
    for batch in options.batch:
        for kind in ("text", "random"):
            times, drafted = [], []
            for _ in range(options.drafts):
                made = draft(kind, text, options.vocab, batch, draws)
                start = time.perf_counter()
                drafted.append(shortlist_of(made, spec))
                times.append((time.perf_counter() - start) * 1e3)
            cases[f"{kind}, batch {batch}"] = drafted
            ranking[f"batch {batch}"] = statistics.median(times)

    held = process_memory(MAPPED) or 0
    rows = measure(cases, index, spec, options.turns)
    facts: Row = {
        "trigrams": index.nodes - index.inner,
        "nodes": index.nodes,
        "bytes_per_node": round(index.bytes_per_node, 2),
        "index_bytes": index.bytes,
        "index_resident_bytes": (process_memory(MAPPED) or 0) - held,
    }
    print(*(f"{name}: {value:,}" for name, value in facts.items()), sep="\n")
    for batch, spent in ranking.items():
        print(f"top-k and copy, {batch}: {spent:.2f} ms")
    print(json.dumps({"benchmark": "continuity", **vars(options), **facts, "topk_ms": ranking, "results": rows}))


if __name__ == "__main__":
    main()
