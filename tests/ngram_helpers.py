"""What the tests of the n-gram index share: counting by brute force, and `.trie` bytes made by hand."""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sparkbench.ngram.build import Document
from sparkbench.ngram.index import NgramIndex

Gram = tuple[int, ...]
TOY = ([1, 2, 3], [1, 2, 4], [1, 2, 5], [9, 8, 7])


def documents(texts: Iterable[Sequence[int]]) -> list[Document]:
    return [Document(np.array(text, np.uint32)) for text in texts]


def count(texts: Iterable[Sequence[int]], order: int) -> Counter[Gram]:
    """Occurrences of all n-grams inside the texts."""
    found: Counter[Gram] = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + order, len(text)) + 1):
                found[tuple(text[start:end])] += 1
    return found


def grams(index: NgramIndex) -> dict[Gram, int]:
    """The n-grams of an index, without tokens that neither occur nor go on."""
    first = index.first_child.astype(np.int64)
    paths: dict[int, Gram] = {0: ()}
    parents = np.flatnonzero(np.diff(first)).tolist()
    kept = {*np.flatnonzero(index.counts[: 1 + index.vocab_size]).tolist(), *parents}
    found = {}
    for node in parents:
        children = range(int(first[node]), int(first[node + 1]))
        for child in children if node else [place for place in children if place in kept]:
            paths[child] = (*paths[node], int(index.tokens[child]))
            found[paths[child]] = int(index.counts[child])
    return found


def expected(counts: Mapping[Gram, int], context: Sequence[int], token: int, order: int) -> tuple[float, int]:
    """The look-up as its definition says, and the matched length."""
    known = list(context)
    if -1 in known:
        known = known[len(known) - known[::-1].index(-1) :]
    for length in range(min(order - 1, len(known)), 0, -1):
        suffix = tuple(known[-length:])
        if (*suffix, token) in counts:
            total = counts[suffix]
            return (counts[*suffix, token] / total if total else 0.0), length
    return 0.0, 0


def trie_bytes(counts: Mapping[Gram, int], order: int, root: int = 0) -> bytes:
    """A `.trie` of these n-grams, which are numbered in the order given; children are listed backwards."""
    ids: dict[Gram, int] = {(): 0} | {gram: place for place, gram in enumerate(counts, 1)}
    children: dict[Gram, list[Gram]] = {gram: [] for gram in ids}
    for gram in counts:
        children[gram[:-1]].insert(0, gram)
    parts = [struct.pack("<QQ", order, len(ids))]
    for gram, below in children.items():
        token, parent = (gram[-1], ids[gram[:-1]]) if gram else (0, 0)
        parts.append(struct.pack("<iQiQ", token, parent, counts[gram] if gram else root, len(below)))
        parts += [struct.pack("<iQ", child[-1], ids[child]) for child in below]
    return b"".join(parts)
