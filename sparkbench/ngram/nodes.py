"""From sorted (key, count) pairs to the nodes of each depth, in one pass.

Sorted keys are the trie in preorder, and inside a depth that is the index's order: by parent, then token. A node is
opened when its first window comes and closed when a window comes that does not continue it; then its count is known.
Depth 1 is dense and stays in memory; the deeper ones are written to files as they come, and write.py joins them.

The pairs are windows, whose counts belong to all nodes on their way, or (`given`) nodes with their own counts; those
must have come after their parent, and children may not have more occurrences than their parent has.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.errors import UsageError
from sparkbench.ngram.jit import compiled
from sparkbench.ngram.runs import MAX_COUNT, Packing

Array = NDArray[Any]
FINE, TOO_MANY, NO_PARENT, TOO_FEW = range(4)
FAULTS = ("", f"occurs more than {MAX_COUNT:,} times", "has no parent", "occurs less often than its children together")
NODE_BYTES = 16  # of a node in the buffers here: token, count and first child
TOKENS, COUNTS, FIRST = "tokens", "counts", "first"
DTYPES: dict[str, np.dtype[Any]] = {TOKENS: np.dtype(np.uint32), COUNTS: np.dtype(np.uint32), FIRST: np.dtype(np.int64)}


@dataclass(frozen=True)
class Levels:
    """Nodes by depth.

    counts, children: [V] int64, of depth 1: occurrences of a token, and how many nodes continue it.
    sizes:            nodes of depths 2 to the order. Their files hold tokens and counts (uint32), and the place of each
                      one's first child among the next depth's nodes (int64).
    """

    order: int
    counts: Array
    children: Array
    sizes: tuple[int, ...]
    folder: Path

    @property
    def nodes(self) -> int:
        return 1 + len(self.counts) + sum(self.sizes)

    def read(self, name: str, depth: int, step: int) -> Iterator[Array]:
        """The file `name` of a depth from 2 on, `step` entries at a time."""
        dtype, size = DTYPES[name], self.sizes[depth - 2]
        for start in range(0, size, step):
            yield np.fromfile(file_of(self.folder, name, depth), dtype, step, offset=start * dtype.itemsize)


def file_of(folder: Path, name: str, depth: int) -> Path:
    return folder / f"{name}-{depth}"


def make_levels(
    blocks: Iterable[tuple[Array, Array]],
    packing: Packing,
    vocab_size: int,
    folder: Path,
    memory_bytes: int,
    *,
    given: bool,
) -> Levels:
    """The nodes of rising (key, count) pairs, as `Sorter.merged` gives them; their tokens are below `vocab_size`.

    given: the pairs are nodes with their own counts.   memory_bytes: of the buffers, those of depth 1 left out.
    UsageError: counts that cannot be. OSError: the disk is full.
    """
    order = packing.order
    step = max(1, memory_bytes // (NODE_BYTES * (order + 1)) - 1)
    buffers = {name: np.empty((order + 1, step + 1), dtype) for name, dtype in DTYPES.items()}
    dense = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    path = np.zeros((3, order + 1), np.int64)
    filled = np.zeros((3, order + 2), np.int64)
    before = np.zeros(2, np.int64)
    end = np.zeros(1, np.int64), np.zeros(1, np.uint32)  # the root's key: it continues no node, so all are closed
    with ExitStack() as stack:
        files = {
            (name, depth): stack.enter_context(open(file_of(folder, name, depth), "wb"))
            for depth in range(2, order + 1)
            for name in DTYPES
        }
        for keys, counts in chain(_cut(blocks, step), [end]):
            filled[1:] = 0
            fault, key = add_nodes(
                keys, counts, order, packing.bits, given, before, path, filled, *dense, *buffers.values()
            )
            if fault:
                raise UsageError(f"the n-gram of tokens {packing.unpack(int(key))} {FAULTS[fault]}")
            for (name, depth), file in files.items():
                file.write(buffers[name][depth, : filled[CLOSED if name == COUNTS else OPENED, depth]].data)
    return Levels(order, *dense, tuple(int(size) for size in filled[MADE, 2:-1]), folder)


def _cut(blocks: Iterable[tuple[Array, Array]], step: int) -> Iterator[tuple[Array, Array]]:
    for keys, counts in blocks:
        for start in range(0, len(keys), step):
            yield keys[start : start + step], counts[start : start + step]


MADE, OPENED, CLOSED = range(3)  # rows of `filled`: nodes of a depth so far, and of this call
COUNT, CHILDREN, START = range(
    3
)  # rows of `path`: of the open node of a depth: occurrences, its children's, first child


@compiled
def add_nodes(
    keys: Array,
    key_counts: Array,
    order: int,
    bits: int,
    given: bool,
    before: Array,
    path: Array,
    filled: Array,
    dense_counts: Array,
    dense_children: Array,
    tokens: Array,
    counts: Array,
    first: Array,
) -> tuple[int, int]:
    """Open and close nodes for a block of pairs; a fault, and the key of the node that has it, or zeros.

    before: [2] the last key and its depth.   path: [3, order + 1], filled: [3, order + 2]: see above.
    tokens, counts, first: [order + 1, n], written from their beginning.
    """
    mask = (1 << bits) - 1
    for entry in range(len(keys)):
        key, last = keys[entry], before[0]
        length = 0
        while length < order and (key >> bits * (order - 1 - length)) & mask > 0:
            length += 1
        same = 0
        while same < min(length, before[1]) and key >> bits * (order - 1 - same) == last >> bits * (order - 1 - same):
            same += 1
        for depth in range(before[1], same, -1):
            low = bits * (order - depth)
            total = path[COUNT, depth]
            if total > MAX_COUNT:
                return TOO_MANY, last >> low << low
            if given and path[CHILDREN, depth] > total:
                return TOO_FEW, last >> low << low
            if depth == 1:
                token = (last >> low) - 1
                dense_counts[token] = total
                dense_children[token] = filled[MADE, 2] - path[START, 1]
            else:
                counts[depth, filled[CLOSED, depth]] = total
                filled[CLOSED, depth] += 1
                path[CHILDREN, depth - 1] += total
        if given and same < length - 1:
            return NO_PARENT, key
        for depth in range(same + 1, length + 1):
            path[COUNT, depth] = path[CHILDREN, depth] = 0
            path[START, depth] = filled[MADE, depth + 1]
            if depth > 1:
                place = filled[OPENED, depth]
                tokens[depth, place] = ((key >> bits * (order - depth)) & mask) - 1
                first[depth, place] = filled[MADE, depth + 1]
                filled[OPENED, depth] += 1
            filled[MADE, depth] += 1
        for depth in range(length if given else 1, length + 1):
            path[COUNT, depth] += np.int64(key_counts[entry])
        before[0], before[1] = key, length
    return FINE, 0
