"""What a look-up in an n-gram index costs, cold and warm.

Contexts are drawn from those that the index holds, all alike, so frequent ones do not stay in a cache as they do on
text. Cold: the system is asked to drop the file's pages and the file is mapped anew; every page that is needed comes
from the disk, unless another process has it mapped. Warm: the same look-ups again, the median of some repeats.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparkbench.errors import UsageError
from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.lookup import look_up, warm_up

CONTEXTS = 20  # of a call: the beam of a depth
CANDIDATES = 25
CALLS = 50
Clock = Callable[[], float]


@dataclass(frozen=True)
class LookupTime:
    """Seconds of one context with its CANDIDATES candidates, in calls of CONTEXTS contexts."""

    index: str
    nodes: int
    file_bytes: int
    bytes_per_node: float
    cold_s: float
    warm_s: float


def lookup_time(source: str, repeats: int, clock: Clock = time.perf_counter) -> LookupTime:
    """Measure the index in the file `source`. UsageError: it is no index."""
    index = NgramIndex.open(source)
    warm_up(index)
    contexts, candidates = known_contexts(index, CALLS * CONTEXTS)
    described = index.nodes, os.path.getsize(source), index.bytes_per_node
    del index
    drop_pages(source)
    mapped = NgramIndex.open(source)
    seconds = []
    for _ in range(1 + repeats):
        started = clock()
        for call in range(CALLS):
            part = slice(call * CONTEXTS, (call + 1) * CONTEXTS)
            look_up(mapped, contexts[part], candidates[part], np.arange(CONTEXTS))
        seconds.append((clock() - started) / len(contexts))
    return LookupTime(source, *described, seconds[0], statistics.median(seconds[1:]))


def drop_pages(path: str | Path) -> None:
    """Ask the system to keep nothing of a file in memory; it keeps what a process has mapped."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def known_contexts(index: NgramIndex, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`count` contexts of full length [count, order - 1] that something follows, and candidates [count, CANDIDATES]:
    half children of the context, as far as there are any, half any tokens. UsageError: none is so long."""
    draws = np.random.default_rng(0)
    begin, end = index.depths[index.order - 1 : index.order + 1]
    if begin == end:
        raise UsageError(f"n-gram index {index.source} has no text of {index.order - 1} tokens to look up")
    drawn = draws.integers(begin, end, 8 * count)
    followed = drawn[index.first_child[drawn + 1] > index.first_child[drawn]]
    nodes = np.resize(followed if len(followed) else drawn, count)
    candidates = draws.integers(0, index.vocab_size, (count, CANDIDATES))
    for place, node in enumerate(nodes):
        children = index.tokens[int(index.first_child[node]) : int(index.first_child[node + 1])]
        taken = children[draws.permutation(len(children))[: CANDIDATES // 2]]
        candidates[place, : len(taken)] = taken
    contexts = np.empty((count, index.order - 1), np.int64)
    for column in reversed(range(index.order - 1)):
        contexts[:, column] = index.tokens[nodes]
        nodes = np.searchsorted(index.first_child, nodes, side="right") - 1  # parents
    return contexts, candidates
