"""The n-gram index: a trie in breadth-first order, three plain arrays in one safetensors file.

Nodes are numbered by depth, and inside a depth by (parent, token). Node 0 is the root. Depth 1 is dense: node 1 + t is
token t, with count 0 where it never occurs. So the children of a node are consecutive nodes of rising tokens.

    tokens       [N] uint32      token of each node (root: 0)
    counts       [N] uint32      occurrences; the root counts all tokens, capped at 2^32 - 1
    first_child  [M + 1] uint32, uint64 where N >= 2^32; M inner nodes: all depths but the last.
                                 The children of inner node j are first_child[j] to first_child[j + 1] - 1.

A node costs 8 bytes at the last depth and 12 above it. The metadata are texts: format, version, order, vocab_size,
total_tokens (exact), documents, corpus, tokenizer, and a digest of the rest of the file.

The arrays are memory maps: processes share one copy, and a cold start reads only what it touches. `open` checks what
the header says against the file's size; the digest of all bytes only up to 64 MiB, above that `verify` does. The
look-up stays inside the arrays whatever they hold. Not here: making an index (build.py, trie.py, write.py).
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sparkbench.errors import UsageError

FORMAT = "sparkbench-ngram"
VERSION = "1"
FACTS = ("format", "version", "order", "vocab_size", "total_tokens", "documents", "corpus", "tokenizer", "digest")
ARRAYS = ("first_child", "tokens", "counts")
DTYPES: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "U64": np.dtype("<u8")}
DIGEST_BYTES = 16
DIGEST_AT_OPEN = 64 << 20  # files up to this size are read whole when opened
MAX_HEADER = 1 << 20
TRIE_NODE_BYTES, TRIE_EXTRA_BYTES = 36, 4  # a `.trie` of N nodes has 36 N + 4 bytes


def field_bits(order: int, vocab_size: int) -> int:
    """Bits of one token in a packed window of `order` tokens. ValueError: a window does not fit into 63 bits."""
    if order < 2:
        raise ValueError(f"order {order} is not allowed: 2 or more")
    if vocab_size < 1:
        raise ValueError(f"vocabulary of {vocab_size} tokens is not allowed: 1 or more")
    bits = (vocab_size + 1).bit_length()
    if order * bits > 63:
        raise ValueError(
            f"order {order} does not fit a vocabulary of {vocab_size:,} tokens; allowed: order up to {63 // bits}"
        )
    return bits


@dataclass(frozen=True, eq=False)
class NgramIndex:
    """An index: its arrays (see the module's docstring), and the file's metadata as `facts`."""

    source: str
    order: int
    vocab_size: int
    tokens: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    first_child: NDArray[np.unsignedinteger[Any]]
    facts: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ARRAYS:  # one kind of array, whether mapped or made: the look-up is compiled for it once
            array = getattr(self, name).view(np.ndarray)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @property
    def nodes(self) -> int:
        """All nodes, the root and the tokens that never occur included."""
        return len(self.tokens)

    @property
    def inner(self) -> int:
        """Nodes of all depths but the last."""
        return len(self.first_child) - 1

    @property
    def bytes(self) -> int:
        """Of the three arrays."""
        return self.tokens.nbytes + self.counts.nbytes + self.first_child.nbytes

    @property
    def bytes_per_node(self) -> float:
        return self.bytes / self.nodes

    @property
    def depths(self) -> list[int]:
        """Where each depth's nodes begin, from the root's 0 on, and at last their number: order + 2 entries."""
        ends = [0, 1]
        while len(ends) < self.order + 2:
            ends.append(int(self.first_child[min(ends[-1], self.inner)]))
        return ends

    @property
    def total_tokens(self) -> int:
        """Of the text, exact where the root's count is capped."""
        return int(self.facts["total_tokens"])

    @classmethod
    def open(cls, path: str | Path) -> "NgramIndex":
        """The index in a file, as memory maps. UsageError, naming the file: missing, foreign, truncated or damaged."""
        path = Path(path)
        try:
            if stat.S_ISFIFO(os.stat(path).st_mode):
                raise _foreign(path, "is a pipe, which cannot be mapped")
            with open(path, "rb") as file:
                return _open(cls, path, file)
        except IsADirectoryError:
            raise UsageError(f"{path} is a folder; name an n-gram index file") from None
        except FileNotFoundError:
            raise UsageError(f"n-gram index {path}: there is no such file") from None
        except OSError as error:
            raise UsageError(f"n-gram index {path} cannot be read: {error.strerror or error}") from None

    def verify(self) -> None:
        """Read the whole file: its digest, and that each node's children lie where they must.

        UsageError: it is damaged, or has changed since it was opened.
        """
        try:
            with open(self.source, "rb") as file:
                _check_digest(Path(self.source), file, self.facts["digest"])
        except OSError as error:
            raise UsageError(f"n-gram index {self.source} cannot be read: {error.strerror or error}") from None
        from sparkbench.ngram.check import first_fault

        fault = first_fault(self)
        if fault is not None:
            raise UsageError(f"n-gram index {self.source} is damaged: {fault}")


def _open(cls: type[NgramIndex], path: Path, file: BinaryIO) -> NgramIndex:
    size = os.fstat(file.fileno()).st_size
    start, header = _read_header(path, file, size)
    facts = _facts(path, header.pop("__metadata__", None))
    order, vocab_size = int(facts["order"]), int(facts["vocab_size"])
    try:
        field_bits(order, vocab_size)
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    places = _places(path, header, size - start)
    if size <= DIGEST_AT_OPEN:
        _check_digest(path, file, facts["digest"])
    arrays = {
        name: np.memmap(file, dtype=dtype, mode="r", offset=start + begin, shape=(length,))
        for name, (dtype, begin, length) in places.items()
    }
    index = cls(str(path), order, vocab_size, arrays["tokens"], arrays["counts"], arrays["first_child"], facts)
    _check_shape(path, index)
    return index


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header's JSON object."""
    first = file.read(16)
    _refuse_trie(path, first, size)
    length = int.from_bytes(first[:8], "little")
    if len(first) < 16 or first[8:9] != b"{" or length > MAX_HEADER:
        raise _foreign(path, "is no n-gram index")
    if 8 + length > size:
        raise _damaged(path, "it is cut short")
    file.seek(8)
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise _damaged(path, "its header cannot be read") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header cannot be read")
    return 8 + length, header


def _refuse_trie(path: Path, first: bytes, size: int) -> None:
    order, nodes = int.from_bytes(first[:8], "little"), int.from_bytes(first[8:], "little")
    if path.suffix == ".trie" or (1 <= order <= 64 and TRIE_NODE_BYTES * nodes + TRIE_EXTRA_BYTES == size):
        raise UsageError(f"{path} is in the .trie format; convert it: sparkbench ngram build {path} --out FILE")


def _facts(path: Path, found: object) -> dict[str, str]:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _foreign(path, "is a safetensors file, but no n-gram index")
    if found.get("version") != VERSION:
        raise _foreign(path, f"is of format version {str(found.get('version'))[:20]!r}; this program reads {VERSION}")
    facts = {name: found.get(name) for name in FACTS}
    for name, value in facts.items():
        if not isinstance(value, str):
            raise _damaged(path, f"its header has no text {name}")
    for name in ("order", "vocab_size", "total_tokens", "documents"):
        text = str(facts[name])
        if not (text.isascii() and text.isdecimal() and len(text) <= 20):
            raise _damaged(path, f"its header's {name} is no number")
    return {name: str(value) for name, value in facts.items()}


def _places(path: Path, header: dict[str, Any], size: int) -> dict[str, tuple[np.dtype[Any], int, int]]:
    """dtype, offset in the data and length of each array; together they must fill the `size` bytes of data."""
    if sorted(header) != sorted(ARRAYS):
        raise _damaged(path, f"its arrays are not {', '.join(ARRAYS)}")
    places: dict[str, tuple[np.dtype[Any], int, int]] = {}
    spans = []
    for name in ARRAYS:
        dtype, length, begin, end = _place(header[name])
        wide = dtype.itemsize == 8 and name != "first_child"
        if wide or length < 1 or begin < 0 or end - begin != length * dtype.itemsize:
            raise _damaged(path, f"array {name} has another type or shape")
        places[name] = dtype, begin, length
        spans.append((begin, end))
    spans.sort()
    if [begin for begin, _ in spans] != [0] + [end for _, end in spans[:-1]]:
        raise _damaged(path, "its arrays overlap or leave a gap")
    if spans[-1][1] != size:
        change = "cut short" if size < spans[-1][1] else "longer than its header says"
        raise _damaged(path, f"it is {change}: {size:,} bytes of data where {spans[-1][1]:,} belong")
    return places


def _place(entry: object) -> tuple[np.dtype[Any], int, int, int]:
    """dtype, length, begin and end of an array's entry in the header; a length of 0 where it is none of ours."""
    match entry:
        case {"dtype": "U32" | "U64" as kind, "shape": [int(length)], "data_offsets": [int(begin), int(end)]}:
            return DTYPES[kind], length, begin, end
    return DTYPES["U32"], 0, 0, 0


def _check_shape(path: Path, index: NgramIndex) -> None:
    """What must hold of the arrays' lengths and a few of their values; touches a page a depth."""
    if len(index.counts) != index.nodes:
        raise _damaged(path, "it has not one count for each node")
    if not 1 + index.vocab_size <= index.inner <= index.nodes:
        raise _damaged(path, "it has not one node for each token")
    if any(not array.flags.aligned for array in (index.tokens, index.counts, index.first_child)):
        raise _damaged(path, "its arrays are not aligned")
    ends = index.depths
    if ends != sorted(ends) or ends[2] != 1 + index.vocab_size or ends[-2:] != [index.inner, index.nodes]:
        raise _damaged(path, "its depths do not follow each other")


def digest_of(file: BinaryIO, written: str) -> str:
    """The digest of an open index file: blake2b of all its bytes, those of the text `written` in the header as zeros.

    So the header is covered too, which holds the digest itself.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    file.seek(0)
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    state.update(length + header.replace(written.encode(), b"0" * len(written), 1))
    while block := file.read(1 << 20):
        state.update(block)
    return state.hexdigest()


def _check_digest(path: Path, file: BinaryIO, written: str) -> None:
    if not written or digest_of(file, written) != written:
        raise _damaged(path, "its digest does not fit its bytes")


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"n-gram index {path} is damaged: {what}")


def _foreign(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} {what}; make one: sparkbench ngram build INPUT --out FILE")
