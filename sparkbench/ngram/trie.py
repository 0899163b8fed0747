"""The published `.trie` format of DART, checked and converted to an index in bounded memory.

A `.trie` is little-endian without padding: u64 order, u64 number of nodes N, and for each node in the order of its id
i32 token, u64 parent, i32 count, u64 number of children, then i32 token and u64 id of each child: 36 N + 4 bytes. Node
0 is the root; a parent comes before its children; siblings are in any order.

The file is read in blocks. A node's path needs its parent's, so the packed paths of all nodes are kept in a temporary
file of 8 N bytes that is mapped: the system holds as much of it in memory as it can spare. Paths and counts then go
through the sorter and the writer of build.py.

The lists of children say nothing that the nodes do not. They are compared by sums of hashes of all links (parent,
token, id), which differ, but for an accident, where the links do. The root's count is not read: it may have overflowed
(and in pruned files it means nothing). Any other count below 0 has overflowed, and is refused.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sparkbench.errors import UsageError
from sparkbench.ngram.build import BuildSpec, Tell, finish, workspace
from sparkbench.ngram.index import TRIE_EXTRA_BYTES, TRIE_NODE_BYTES, NgramIndex
from sparkbench.ngram.jit import compiled
from sparkbench.ngram.runs import Sorter

Array = NDArray[Any]
HEADER_BYTES, FIXED_BYTES, CHILD_BYTES = 16, 24, 12
BLOCK_BYTES = 1 << 20
MAX_NODES = 1 << 40
BLOCKS_TOLD = 256  # between two lines of progress


@dataclass(frozen=True)
class Block:
    """Consecutive nodes, the first of which has id `start`: tokens, parents and counts, [n] int64 each."""

    start: int
    tokens: Array
    parents: Array
    counts: Array


def convert(
    path: Path,
    out: Path,
    vocab_size: int | None = None,
    corpus: str = "",
    tokenizer: str = "",
    memory_bytes: int = 1 << 30,
    temp: Path | None = None,
    tell: Tell = lambda line: None,
) -> NgramIndex:
    """Convert a `.trie` file to an index in `out`. vocab_size: None takes the largest token and one.

    UsageError, naming the file: it is no `.trie`, or a damaged one, or does not fit an index.
    RunError: a file cannot be written. Nothing is left behind then.
    """
    try:
        order, nodes = _read_header(path)
        if vocab_size is None:
            tell("looking for the largest token")
            vocab_size = 1 + max(int(block.tokens.max()) for block in blocks(path))
        spec = BuildSpec(vocab_size, order, None, corpus, tokenizer, memory_bytes, temp)
        with workspace(out, temp) as folder:
            sorter = Sorter(folder, spec.packing, memory_bytes * 3 // 4, distinct=True)
            with _paths(folder, nodes) as (known, file):
                for place, block in enumerate(blocks(path)):
                    sorter.add(*_pairs(block, known, file, spec))
                    if place % BLOCKS_TOLD == BLOCKS_TOLD - 1:
                        tell(f"{block.start:,} of {nodes:,} nodes read")
            finish(sorter, out, spec, 0, tell)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return NgramIndex.open(out)


def read_order(path: Path) -> int:
    """UsageError, naming the file: it is no `.trie`."""
    try:
        return _read_header(path)[0]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_header(path: Path) -> tuple[int, int]:
    """Order and number of nodes, which must fit the file's size. UsageError."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from None
    order, nodes = (int.from_bytes(part, "little") for part in (header[:8], header[8:]))
    if len(header) < HEADER_BYTES or not 1 <= nodes <= MAX_NODES or size != TRIE_NODE_BYTES * nodes + TRIE_EXTRA_BYTES:
        raise UsageError(
            f"is no .trie file: one of N nodes has 36 N + 4 bytes, and this has {size:,} and N = {nodes:,}"
        )
    return order, nodes


def blocks(path: Path) -> Iterator[Block]:
    """All nodes, as read. UsageError: links that do not fit together, or bytes that are left over or missing."""
    _, nodes = _read_header(path)
    state = np.array([0, 0, 0, nodes], np.int64)
    links = np.zeros(2, np.uint64)
    rest = b""
    try:
        with open(path, "rb") as file:
            file.seek(HEADER_BYTES)
            while more := file.read(BLOCK_BYTES):
                data = np.frombuffer(rest + more, np.uint8)
                found = np.empty((3, len(data) // FIXED_BYTES + 1), np.int64)
                start = int(state[NODE])
                used, fault = parse(data, found, state, links)
                if fault:
                    raise UsageError(f"node {state[NODE]}: {PARSE_FAULTS[fault]}")
                rest = data[used:].tobytes()
                count = int(state[NODE]) - start
                if count:
                    yield Block(start, *found[:, :count])
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from None
    if rest or state[NODE] != nodes or state[LEFT]:
        raise UsageError("its nodes end before or after the file does: the numbers of children do not add up")
    if links[0] != links[1]:
        raise UsageError("its lists of children do not fit its nodes")


NODE, LEFT, LISTED, NODES = range(4)  # of a parser's state: nodes begun, children left of the last one, children listed
PARSE_FAULTS = ("", "the numbers of children do not add up", "its parent does not come before it")


@compiled
def parse(data: Array, found: Array, state: Array, links: Array) -> tuple[int, int]:
    """Read whole records of bytes `data`: tokens, parents and counts of nodes to found [3, n].

    Returns how many bytes were used, and a fault. state [4] goes on from call to call; so do links [2] uint64, the sums
    over the lists of children and over the nodes.
    """
    place, count = 0, 0
    while True:
        if state[LEFT] > 0:
            if place + CHILD_BYTES > len(data):
                break
            token, child = np.int64(read_i32(data, place)), read_i64(data, place + 4)
            links[0] += link(state[NODE] - 1, token, child)
            state[LEFT] -= 1
            place += CHILD_BYTES
            continue
        if place + FIXED_BYTES > len(data) or state[NODE] == state[NODES]:
            break
        token, parent = np.int64(read_i32(data, place)), read_i64(data, place + 4)
        children = read_i64(data, place + 16)
        if children < 0 or children > state[NODES] - 1 - state[LISTED]:
            return place, 1
        if parent < 0 or parent >= max(state[NODE], 1):
            return place, 2
        if state[NODE] > 0:
            links[1] += link(parent, token, state[NODE])
        found[0, count], found[1, count], found[2, count] = token, parent, np.int64(read_i32(data, place + 12))
        state[NODE] += 1
        state[LEFT] = children
        state[LISTED] += children
        count += 1
        place += FIXED_BYTES
    return place, 0


@compiled
def read_i32(data: Array, place: int) -> Any:
    value = np.uint32(0)
    for byte in range(4):
        value |= np.uint32(data[place + byte]) << np.uint32(8 * byte)
    return np.int32(value)


@compiled
def read_i64(data: Array, place: int) -> Any:
    value = np.uint64(0)
    for byte in range(8):
        value |= np.uint64(data[place + byte]) << np.uint64(8 * byte)
    return np.int64(value)


@compiled
def link(parent: Any, token: Any, child: Any) -> Any:
    """A hash of a link, uint64: odd constants spread its parts, shifts bring high bits down."""
    value = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(32))) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(child)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@contextmanager
def _paths(folder: Path, nodes: int) -> Iterator[tuple[mmap.mmap, BinaryIO]]:
    """A file of one int64 a node: a read-only map of all of it, and the open file, written from the beginning.

    Written through the file, since a full disk is an error there, and a crash in a map.
    """
    name = folder / "paths"
    with open(name, "wb") as file, open(name, "rb") as reader:
        os.truncate(name, 8 * nodes)
        with mmap.mmap(reader.fileno(), 8 * nodes, access=mmap.ACCESS_READ) as known:
            yield known, file
    name.unlink()


def _pairs(block: Block, known: mmap.mmap, file: BinaryIO, spec: BuildSpec) -> tuple[Array, Array]:
    """Packed paths and counts [n] of a block's nodes, without the root; the paths are written to `file`, too."""
    paths = np.empty(len(block.tokens), np.int64)
    before = np.frombuffer(known, np.int64)
    where, fault = extend_paths(
        block.start,
        block.tokens,
        block.parents,
        block.counts,
        before,
        spec.packing.order,
        spec.packing.bits,
        spec.vocab_size,
        paths,
    )
    del before  # the map can only be closed when nothing refers to it
    if fault:
        raise UsageError(f"node {block.start + where}: {PATH_FAULTS[fault]}")
    file.write(paths.data)
    file.flush()
    if hasattr(mmap, "MADV_DONTNEED"):
        known.madvise(mmap.MADV_DONTNEED)  # keeps the map out of the process's resident size
    first = int(block.start == 0)
    return paths[first:], block.counts[first:].astype(np.uint32)


PATH_FAULTS = ("", "it is deeper than the order", "its token is outside the vocabulary", "its count is negative")


@compiled
def extend_paths(
    start: int,
    tokens: Array,
    parents: Array,
    counts: Array,
    known: Array,
    order: int,
    bits: int,
    vocab_size: int,
    paths: Array,
) -> tuple[int, int]:
    """The packed paths of nodes that follow each other, to paths [n]; known: those of all nodes before.

    Returns the first node that has a fault, and the fault.
    """
    for place in range(len(tokens)):
        if start + place == 0:
            paths[0] = 0
            continue
        parent = parents[place]
        path = paths[parent - start] if parent >= start else known[parent]
        shift = bits * (order - 1)
        while shift >= 0 and (path >> shift) & ((1 << bits) - 1) > 0:
            shift -= bits
        if shift < 0:
            return place, 1
        if tokens[place] < 0 or tokens[place] >= vocab_size:
            return place, 2
        if counts[place] < 0:
            return place, 3
        paths[place] = path | (tokens[place] + 1) << shift
    return 0, 0
