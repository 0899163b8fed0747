"""An n-gram index from documents of token ids, in one pass over them and in bounded memory.

From each position of a document a window of `order` tokens is counted, shorter at its end; no window crosses from one
document into the next. The windows go through a sorter on disk (runs.py), the sorted ones become nodes (nodes.py), and
those a file (write.py). The same documents give the same file, byte by byte, whatever the memory.

Not here: where documents come from (documents.py).
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkbench.errors import RunError, UsageError, first_line
from sparkbench.ngram.index import NgramIndex, field_bits
from sparkbench.ngram.jit import compiled
from sparkbench.ngram.nodes import make_levels
from sparkbench.ngram.runs import Packing, Sorter
from sparkbench.ngram.write import write_index

LEAST_MEMORY, MOST_MEMORY = 64 << 10, 1 << 40
DENSE_BYTES = 32  # of a token: its count and children, and copies of them while they are written
PIECE = 1 << 16  # windows packed at once
Tell = Callable[[str], None]


class Document(NamedTuple):
    """Token ids [n] of any integer type, and where they come from, for messages."""

    ids: NDArray[Any]
    source: str = "a document"


@dataclass(frozen=True)
class BuildSpec:
    """What is built, and within what.

    vocab_size:   token ids are below it.    order: tokens of the longest n-gram.
    end_token:    is put behind every document; None: nothing is.
    corpus:       a note for the index's metadata.   tokenizer: its label (tokens.py); may be empty.
    memory_bytes: of all buffers together; the program itself, and the documents at hand, come on top.
    temp:         where temporary files go; None: beside the index. They take 12 bytes for each distinct window of each
                  run, twice that while runs are merged.
    UsageError: a value that is not allowed.
    """

    vocab_size: int
    order: int = 3
    end_token: int | None = None
    corpus: str = ""
    tokenizer: str = ""
    memory_bytes: int = 1 << 30
    temp: Path | None = None

    def __post_init__(self) -> None:
        try:
            field_bits(self.order, self.vocab_size)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.end_token is not None and not 0 <= self.end_token < self.vocab_size:
            raise UsageError(f"end token {self.end_token} is not allowed: 0 to {self.vocab_size - 1}")
        least = LEAST_MEMORY + 2 * DENSE_BYTES * self.vocab_size
        if not least <= self.memory_bytes <= MOST_MEMORY:
            raise UsageError(
                f"memory of {self.memory_bytes:,} bytes is not allowed: "
                f"{least:,} to {MOST_MEMORY:,} for {self.vocab_size:,} tokens"
            )

    @property
    def packing(self) -> Packing:
        return Packing(self.order, field_bits(self.order, self.vocab_size))


def build(documents: Iterable[Document], out: Path, spec: BuildSpec, tell: Tell = lambda line: None) -> NgramIndex:
    """Count the documents and write the index to `out`; `tell` is called with lines about the progress.

    UsageError: a token outside the vocabulary, naming the document; an n-gram that occurs too often.
    RunError: a file cannot be written, or memory is short. Nothing is left behind then, nor after an interruption.
    """
    with workspace(out, spec.temp) as folder:
        sorter = Sorter(folder, spec.packing, spec.memory_bytes * 7 // 8, distinct=False)
        count, told = 0, 0
        for count, document in enumerate(documents, 1):
            _add_windows(sorter, document, spec)
            if len(sorter.runs) > told:
                told = len(sorter.runs)
                tell(f"{count:,} documents read, sorted runs: {told}")
        finish(sorter, out, spec, count, tell)
    return NgramIndex.open(out)


def finish(sorter: Sorter, out: Path, spec: BuildSpec, documents: int, tell: Tell) -> None:
    """Make the index of all that the sorter took."""
    tell(f"sorted runs to merge: {len(sorter.runs) + 1}")
    half = (spec.memory_bytes - DENSE_BYTES * spec.vocab_size) // 2
    levels = make_levels(sorter.merged(half), spec.packing, spec.vocab_size, sorter.folder, half, given=sorter.distinct)
    tell(f"writing {levels.nodes:,} nodes")
    texts = {"documents": str(documents), "corpus": spec.corpus, "tokenizer": spec.tokenizer}
    write_index(out, levels, texts)


@contextmanager
def workspace(out: Path, temp: Path | None) -> Iterator[Path]:
    """A folder for temporary files, gone afterwards. RunError: something cannot be written, or memory is short."""
    parent = out.parent if temp is None else temp
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{out.name}.part-") as folder:
            yield Path(folder)
    except OSError as error:
        raise RunError(
            f"cannot write {out}, with temporary files in {parent}: {error.strerror or first_line(error)}"
        ) from None
    except MemoryError as error:
        raise RunError(f"the memory is not enough: {first_line(error)}") from None


def _add_windows(sorter: Sorter, document: Document, spec: BuildSpec) -> None:
    ends = [] if spec.end_token is None else [spec.end_token]
    total = len(document.ids) + len(ends)
    ahead = spec.order - 1
    for start in range(0, total, PIECE):
        tokens = np.asarray(document.ids[start : start + PIECE + ahead], np.int64)
        if start + PIECE + ahead > len(document.ids):
            tokens = np.append(tokens, np.array(ends, np.int64))
        keys = np.empty(min(PIECE, total - start), np.int64)
        bad = pack(tokens, spec.packing.order, spec.packing.bits, spec.vocab_size, keys)
        if bad >= 0:
            raise UsageError(
                f"{document.source}: token {tokens[bad]} is outside the vocabulary of {spec.vocab_size:,} tokens"
            )
        sorter.add(keys)


@compiled
def pack(tokens: NDArray[Any], order: int, bits: int, vocab_size: int, keys: NDArray[Any]) -> int:
    """The window at each of the first len(keys) tokens, packed; the place of a token that is none, or -1."""
    for place in range(len(tokens)):
        if tokens[place] < 0 or tokens[place] >= vocab_size:
            return place
    for start in range(len(keys)):
        key = np.int64(0)
        for place in range(start, start + order):
            key <<= bits
            if place < len(tokens):
                key |= tokens[place] + 1
        keys[start] = key
    return -1
