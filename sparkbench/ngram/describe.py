"""What an index holds, for people: nodes by depth, size, and its most frequent tokens.

An index of another tokenizer answers every look-up, and its numbers look plausible. Its most frequent tokens, decoded,
show it at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkbench.ngram.index import NgramIndex


@dataclass(frozen=True)
class Description:
    """nodes: by depth from 1 on, those that occur.   frequent: (token, count) of the most frequent, falling.

    bytes_per_node: of the arrays, for each node that occurs.
    """

    order: int
    vocab_size: int
    total_tokens: int
    documents: int
    nodes: tuple[int, ...]
    bytes: int
    bytes_per_node: float
    corpus: str
    tokenizer: str
    frequent: tuple[tuple[int, int], ...]


def describe(index: NgramIndex, frequent: int = 10) -> Description:
    """Reads depth 1, and a few places more."""
    ends = index.depths
    counts: Any = index.counts[1 : 1 + index.vocab_size]
    nodes = int(np.count_nonzero(counts)), *np.diff(ends[2:]).tolist()
    best = np.argsort(-counts.astype(np.int64), kind="stable")[:frequent]
    return Description(
        index.order,
        index.vocab_size,
        index.total_tokens,
        int(index.facts["documents"]),
        nodes,
        index.bytes,
        index.bytes / (1 + sum(nodes)),
        index.facts["corpus"],
        index.facts["tokenizer"],
        tuple((int(token), int(counts[token])) for token in best if counts[token]),
    )
