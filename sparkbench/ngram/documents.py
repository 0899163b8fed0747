"""Documents for an n-gram index: text or token ids from files, one document at a time.

    .jsonl   an object a line, with `text` or with `ids`
    .txt     one document
    .npy     a one-dimensional array of unsigned integers, mapped; documents end with the end token

Folders are searched for these, at any depth; files are read in sorted order, each once. Whatever cannot be read is
refused with the file's name and line: a corpus that is silently short gives plausible numbers. Not here: what an index
is, and the `.trie` format.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sparkbench.errors import UsageError
from sparkbench.ngram.build import Document

KINDS = (".jsonl", ".txt", ".npy")
TRIE = ".trie"
BATCH_CHARACTERS = 1 << 20  # of text encoded at once
SCAN = 1 << 20  # tokens searched for the end token at once
Encode = Callable[[list[str]], list[list[int]]]


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The files of the inputs, folders searched. UsageError: one is missing, of another kind, or holds none."""
    found: list[Path] = []
    for place in inputs:
        if place.is_dir():
            inside = sorted(path for path in place.rglob("*") if path.suffix in KINDS and path.is_file())
            if not inside:
                raise UsageError(f"{place}: the folder holds no {', '.join(KINDS)} file")
            found += inside
        elif not place.exists():
            raise UsageError(f"{place}: there is no such file or folder")
        elif place.suffix not in (*KINDS, TRIE):
            raise UsageError(f"{place} is not allowed: a folder, or a {', '.join(KINDS)} or {TRIE} file")
        else:
            found.append(place)
    return list(dict.fromkeys(found))


def has_text(paths: Iterable[Path]) -> bool:
    """Whether any of the files needs a tokenizer, as far as the first line of each tells."""
    return any(path.suffix == ".txt" or _starts_with_text(path) for path in paths)


def _starts_with_text(path: Path) -> bool:
    if path.suffix != ".jsonl":
        return False
    return next((isinstance(found, str) for _, found in _read_lines(path)), False)


def read_documents(path: Path, encode: Encode | None, end_token: int | None) -> Iterator[Document]:
    """The documents of one file, without end tokens. UsageError, naming the file: it cannot be read.

    encode: token ids of texts; None: texts are refused.   end_token: that of .npy files; None: those are refused.
    """
    if path.suffix == ".npy":
        yield from _from_array(path, end_token)
        return
    lines = [(str(path), _read_text(path))] if path.suffix == ".txt" else _read_lines(path)
    texts: list[tuple[str, str]] = []
    held = 0
    for source, found in chain(lines, [("", None)]):
        if isinstance(found, str):
            texts.append((source, found))
            held += len(found)
            if held < BATCH_CHARACTERS:
                continue
        if texts:
            if encode is None:
                raise UsageError(f"{texts[0][0]}: text needs --tokenizer ID")
            for (name, _), ids in zip(texts, encode([text for _, text in texts]), strict=True):
                yield Document(np.array(ids, np.int64), name)
            texts, held = [], 0
        if isinstance(found, np.ndarray):
            yield Document(found, source)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not valid UTF-8, at byte {error.start}") from None


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line's document is, and its text, or its ids [n] int64."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    source = f"{path} line {number}"
                    yield source, _from_line(source, line)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _from_line(source: str, line: bytes) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{source} is no JSON") from None
    match row:
        case {"text": str(text)} if "ids" not in row:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UsageError(f"{source}: the text holds half of a surrogate pair") from None
            return text
        case {"ids": list(ids)} if "text" not in row:
            if all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
                return np.array(ids, np.int64)
            raise UsageError(f"{source}: ids are not all whole numbers, 0 or above")
    raise UsageError(f'{source} is not allowed: {{"text": "..."}} or {{"ids": [...]}}')


def _from_array(path: Path, end_token: int | None) -> Iterator[Document]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise UsageError(f"{path} is no .npy file of whole numbers, or it is cut short") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise UsageError(f"{path} is not allowed: a one-dimensional array of unsigned integers")
    if end_token is None:
        raise UsageError(f"{path}: token files need --end-token ID, which ends each document")
    start = 0
    for scanned in range(0, len(tokens), SCAN):
        for place in np.flatnonzero(tokens[scanned : scanned + SCAN] == end_token).tolist():
            yield Document(tokens[start : scanned + place], str(path))
            start = scanned + place + 1
    if start < len(tokens):
        yield Document(tokens[start:], str(path))
