"""Reads the golden folder `dart`: its n-gram counts and its tree searches.

Sizes, constants, cases and counts are all read from the folder. Its drafters and generations are not covered here.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from conftest import golden_folder
from safetensors.torch import load_file
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.ngram.index import NgramIndex
from sparkbench.search import ContinuitySpec

FOLDER = golden_folder("dart")

Case = dict[str, Any]
Counts = Mapping[tuple[int, ...], int]


def document(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


def index_of(counts: Counts, vocab: int, order: int) -> NgramIndex:
    """The index of n-grams and their counts, in memory. An n-gram's beginning must be there, too."""
    levels: list[list[tuple[int, ...]]] = [[()], [(token,) for token in range(vocab)]]
    levels += [sorted(gram for gram in counts if len(gram) == length) for length in range(2, order + 1)]
    nodes = [gram for level in levels for gram in level]
    places = {gram: place for place, gram in enumerate(nodes)}
    children = np.zeros(len(nodes) - len(levels[-1]), np.int64)
    for gram in nodes[1:]:
        children[places[gram[:-1]]] += 1
    return NgramIndex(
        source="made of counts",
        order=order,
        vocab_size=vocab,
        tokens=np.array([0, *(gram[-1] for gram in nodes[1:])], np.uint32),
        counts=np.array([counts.get(gram, 0) for gram in nodes], np.uint32),
        first_child=np.concatenate([[1], 1 + children.cumsum()]).astype(np.uint32),
        facts={},
    )


@cache
def index(name: str) -> NgramIndex:
    """The index `full`, `small` or `empty`, from the counts that the folder gives as JSON."""
    manifest = document("manifest")
    counts: dict[tuple[int, ...], int] = {}
    if name != "empty":
        rows = document(f"ngram/counts_{name}")
        for kind in ("unigrams", "bigrams", "trigrams"):
            counts |= {tuple(gram): count for *gram, count in rows[kind]}
    return index_of(counts, manifest["vocab_size"], manifest["ngram"]["order"])


def target_logits(logits: Tensor, drafter: str | None) -> Tensor:
    """Logits [..., V'] over the vocabulary of a drafter (None: the target's), as ones over the target's."""
    if drafter is None:
        return logits
    offsets = load_file(FOLDER / drafter / "model.safetensors")["d2t"]
    whole = logits.new_full((*logits.shape[:-1], document("manifest")["vocab_size"]), -torch.inf)
    whole[..., torch.arange(len(offsets)) + offsets] = logits
    return whole


def search_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, NgramIndex, ContinuitySpec, frozenset[int]]:
    """What `continuity_tree` takes, for a case of `tree_search`."""
    logits = target_logits(tensors("cases/tree_search")[case["logits_key"]], case["draft_vocab_map"])
    *history, anchor = case["prompt_tokens"]
    spec = ContinuitySpec(case["theta"], case["k"], case["w"], case["ngram_weight"])
    return (
        logits[None],
        torch.tensor([anchor]),
        torch.tensor([history], dtype=torch.int64),
        index(case["ngram"]),
        spec,
        frozenset([case["eos_token_id"]]),
    )


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Each node's tokens below the root. A parent comes before its children."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        assert 0 <= parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


def row_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The paths of one row's nodes, in their order, once it is checked that they make a tree."""
    valid = tree.valid[row]
    count = int(valid.sum())
    assert valid[:count].all()
    tokens, parents, depths = (part[row].tolist() for part in (tree.tokens, tree.parents, tree.depths))
    assert parents[0] == -1
    assert tokens[count:] == depths[count:] == [0] * (len(tokens) - count)
    assert parents[count:] == [-1] * (len(tokens) - count)
    paths = paths_of(tokens[:count], parents[:count])
    assert depths[:count] == [len(path) for path in paths]
    assert len(set(paths)) == count
    assert max(depths) <= tree.max_depth
    return paths
