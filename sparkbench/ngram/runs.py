"""Sorting more (key, count) pairs than fit in memory: sorted runs on disk, merged in blocks.

A key is a window of tokens packed into a non-negative int64: `order` fields of equal width, the first token highest,
token + 1 in each, 0 behind the window's end. So a window sorts before those that continue it.

There are two kinds of pairs: windows of a text, each with count 1, where equal keys are added up; and nodes of a trie
with their counts, where no key may come twice. A count has 32 bits; a larger sum is refused, never wrapped.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.errors import UsageError
from sparkbench.ngram.jit import compiled

Array = NDArray[Any]
MAX_COUNT = (1 << 32) - 1
ENTRY_BYTES = 12  # a key and its count
MOVED_BYTES = 32  # the same while counts are moved along with sorted keys
FAN_IN = 64  # runs merged at once, at most
SMALL_BLOCK = 1024  # entries read at once, at least: with fewer, opening files takes the time
DONE, REFILL, FULL, TOO_MANY, TWICE = range(5)


@dataclass(frozen=True)
class Packing:
    """How a window of up to `order` tokens is packed: `bits` a token."""

    order: int
    bits: int

    def unpack(self, key: int) -> tuple[int, ...]:
        fields = [key >> self.bits * place & (1 << self.bits) - 1 for place in reversed(range(self.order))]
        return tuple(field - 1 for field in fields if field)


@dataclass(frozen=True)
class Run:
    """`entries` pairs of rising keys, in two files."""

    keys: Path
    counts: Path
    entries: int

    def read(self, start: int, count: int) -> tuple[Array, Array]:
        """Keys and counts from `start` on, `count` of them at most."""
        count = min(count, self.entries - start)
        keys = np.fromfile(self.keys, np.int64, count, offset=8 * start)
        counts = np.fromfile(self.counts, np.uint32, count, offset=4 * start)
        if len(keys) != count or len(counts) != count:
            raise OSError(f"{self.keys} was cut short by another program")
        return keys, counts


class Sorter:
    """Takes pairs in any order and gives them back sorted. OSError: its folder cannot be written, the disk is full."""

    def __init__(self, folder: Path, packing: Packing, memory_bytes: int, *, distinct: bool) -> None:
        """memory_bytes: of all buffers.   distinct: keys come once, with their counts; else equal ones are added up."""
        self.folder, self.packing, self.distinct = folder, packing, distinct
        entries = min(memory_bytes // (MOVED_BYTES if distinct else ENTRY_BYTES), 1 << 31)
        self._keys: Array = np.empty(entries, np.int64)
        self._counts: Array = np.empty(entries, np.uint32)
        self._filled = self._made = 0
        self.runs: list[Run] = []

    def add(self, keys: Array, counts: Array | None = None) -> None:
        """keys [n] int64; counts [n] uint32, where keys are distinct."""
        start = 0
        while start < len(keys):
            taken = slice(start, start + len(self._keys) - self._filled)
            start = min(taken.stop, len(keys))
            end = self._filled + start - taken.start
            self._keys[self._filled : end] = keys[taken]
            if counts is not None:
                self._counts[self._filled : end] = counts[taken]
            self._filled = end
            if end == len(self._keys):
                self._sort()

    def merged(self, memory_bytes: int) -> Iterator[tuple[Array, Array]]:
        """All pairs by rising, distinct keys, in blocks; the next block overwrites one. Nothing can be added any more.

        UsageError: counts add up to more than MAX_COUNT; a key came twice and was to be distinct.
        """
        self._sort()
        self._keys = self._counts = np.empty(0)
        fan_in = max(2, min(FAN_IN, memory_bytes // (ENTRY_BYTES * SMALL_BLOCK) - 1))
        while len(self.runs) > fan_in:
            taken, self.runs = self.runs[:fan_in], self.runs[fan_in:]
            self._save(self._merge(taken, memory_bytes))
        yield from self._merge(self.runs, memory_bytes)

    def _sort(self) -> None:
        keys, counts = self._keys[: self._filled], self._counts[: self._filled]
        self._filled = 0
        if self.distinct:
            order = np.argsort(keys)
            keys, counts = keys[order], counts[order]
        else:
            keys.sort()
            found = fold(keys, counts)
            keys, counts = keys[:found], counts[:found]
        self._save([(keys, counts)])

    def _save(self, blocks: Iterable[tuple[Array, Array]]) -> None:
        run = self.folder / f"run-{self._made}.keys", self.folder / f"run-{self._made}.counts"
        self._made += 1
        entries = 0
        with open(run[0], "wb") as keys_file, open(run[1], "wb") as counts_file:
            for keys, counts in blocks:
                keys_file.write(keys.data)
                counts_file.write(counts.data)
                entries += len(keys)
        self.runs.append(Run(*run, entries))

    def _merge(self, runs: Sequence[Run], memory_bytes: int) -> Iterator[tuple[Array, Array]]:
        size = max(1, memory_bytes // (ENTRY_BYTES * (len(runs) + 1)))
        keys, counts = np.empty((len(runs), size), np.int64), np.empty((len(runs), size), np.uint32)
        place, filled, heap = (np.zeros(len(runs), np.int64) for _ in range(3))
        taken = [0] * len(runs)
        out_keys, out_counts = np.empty(size, np.int64), np.empty(size, np.uint32)
        written, state = 0, REFILL
        while state != DONE:
            for row, run in enumerate(runs):
                if place[row] == filled[row]:
                    some = run.read(taken[row], size)
                    place[row], filled[row] = 0, len(some[0])
                    taken[row] += len(some[0])
                    keys[row, : filled[row]], counts[row, : filled[row]] = some
            written, state = merge(keys, counts, place, filled, heap, out_keys, out_counts, written, self.distinct)
            if state in (TOO_MANY, TWICE):
                gram = self.packing.unpack(int(out_keys[written - 1]))
                fault = "occurs twice" if state == TWICE else f"occurs more than {MAX_COUNT:,} times"
                raise UsageError(f"the n-gram of tokens {gram} {fault}")
            if state in (FULL, DONE):
                yield out_keys[:written], out_counts[:written]
                written = 0
        for run in runs:
            os.unlink(run.keys)
            os.unlink(run.counts)


@compiled
def fold(keys: Array, counts: Array) -> int:
    """Make sorted keys distinct in place, and write how often each occurred; returns how many are left."""
    found = 0
    for place in range(len(keys)):
        if found > 0 and keys[found - 1] == keys[place]:
            counts[found - 1] += 1
        else:
            keys[found] = keys[place]
            counts[found] = 1
            found += 1
    return found


@compiled
def merge(
    keys: Array,
    counts: Array,
    place: Array,
    filled: Array,
    heap: Array,
    out_keys: Array,
    out_counts: Array,
    written: int,
    distinct: bool,
) -> tuple[int, int]:
    """Merge rows of keys [R, n] from place [R] to filled [R] behind the `written` entries of the output.

    Returns how many are written, and why it stopped: a row was used up (REFILL), the output is full and the next key
    is another (FULL), all rows are empty (DONE); or the last key written is at fault.
    """
    size = 0
    for row in range(len(keys)):
        if place[row] < filled[row]:
            heap[size] = row
            size += 1
    for root in range(size // 2 - 1, -1, -1):
        sift(heap, size, root, keys, place)
    while size > 0:
        row = heap[0]
        key, count = keys[row, place[row]], np.int64(counts[row, place[row]])
        if written > 0 and out_keys[written - 1] == key:
            count += np.int64(out_counts[written - 1])
            if distinct:
                return written, TWICE
            if count > MAX_COUNT:
                return written, TOO_MANY
            out_counts[written - 1] = count
        else:
            if written == len(out_keys):
                return written, FULL
            out_keys[written], out_counts[written] = key, count
            written += 1
        place[row] += 1
        if place[row] == filled[row]:
            return written, REFILL
        sift(heap, size, 0, keys, place)
    return written, DONE


@compiled
def sift(heap: Array, size: int, root: int, keys: Array, place: Array) -> None:
    """Let the row at `root` of a heap sink below those whose next key is smaller."""
    row = heap[root]
    key = keys[row, place[row]]
    while 2 * root + 1 < size:
        child = 2 * root + 1
        smaller = keys[heap[child], place[heap[child]]]
        if child + 1 < size:
            other = keys[heap[child + 1], place[heap[child + 1]]]
            if other < smaller:
                child, smaller = child + 1, other
        if smaller >= key:
            break
        heap[root] = heap[child]
        root = child
    heap[root] = row
