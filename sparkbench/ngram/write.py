"""An index file from the nodes of each depth, whole or not at all.

The depths' files are read in blocks and joined; the places of first children become node numbers on the way. The digest
is taken while writing, and put into the header at the end.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkbench.files import TEMPORARY
from sparkbench.ngram.index import DIGEST_BYTES, FORMAT, VERSION
from sparkbench.ngram.nodes import COUNTS, FIRST, TOKENS, Levels
from sparkbench.ngram.runs import MAX_COUNT

ALIGNMENT = 64  # of the data in the file
STEP = 1 << 16  # entries joined at once
NO_DIGEST = b"0" * (2 * DIGEST_BYTES)


def write_index(path: Path, levels: Levels, texts: Mapping[str, str]) -> None:
    """Write the index to `path`. OSError: it cannot be written, and nothing is left behind.

    texts: documents, corpus and tokenizer of the metadata.
    """
    total = int(levels.counts.sum())
    places = np.dtype(np.uint64 if levels.nodes > MAX_COUNT else np.uint32)
    header = _header(levels, places, {"total_tokens": str(total), **texts})
    state = hashlib.blake2b(header, digest_size=DIGEST_BYTES)
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb") as file:
            file.write(header)
            for blocks in (_first_children(levels, places), _tokens(levels), _counts(levels, min(total, MAX_COUNT))):
                for block in blocks:
                    state.update(block.data)
                    file.write(block.data)
            file.seek(header.index(NO_DIGEST))
            file.write(state.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _header(levels: Levels, places: np.dtype[Any], texts: Mapping[str, str]) -> bytes:
    """Length and JSON of the header, with zeros for the digest, which stands first so that it can be found."""
    facts = {"digest": NO_DIGEST.decode(), "format": FORMAT, "version": VERSION, "order": str(levels.order)}
    facts |= {"vocab_size": str(len(levels.counts)), **texts}
    inner = levels.nodes - levels.sizes[-1]
    lengths = {"first_child": (places, inner + 1), "tokens": (np.dtype(np.uint32), levels.nodes)}
    lengths["counts"] = lengths["tokens"]
    header: dict[str, Any] = {"__metadata__": facts}
    end = 0
    for name, (dtype, length) in lengths.items():
        begin, end = end, end + length * dtype.itemsize
        header[name] = {"dtype": f"U{8 * dtype.itemsize}", "shape": [length], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _first_children(levels: Levels, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    yield np.ones(1, dtype)
    below = 1 + len(levels.counts)  # the first node of the next depth
    yield (below + np.cumsum(levels.children) - levels.children).astype(dtype)
    for depth, size in enumerate(levels.sizes[:-1], 2):
        below += size
        for block in levels.read(FIRST, depth, STEP):
            yield (below + block).astype(dtype)
    yield np.full(1, levels.nodes, dtype)


def _tokens(levels: Levels) -> Iterator[NDArray[Any]]:
    yield np.zeros(1, np.uint32)
    yield np.arange(len(levels.counts), dtype=np.uint32)
    for depth in range(2, levels.order + 1):
        yield from levels.read(TOKENS, depth, STEP)


def _counts(levels: Levels, total: int) -> Iterator[NDArray[Any]]:
    yield np.full(1, total, np.uint32)
    yield levels.counts.astype(np.uint32)
    for depth in range(2, levels.order + 1):
        yield from levels.read(COUNTS, depth, STEP)
