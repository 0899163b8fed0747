"""Golden trees of SparklingTree's published builders, from every builder here. Their README says how they were made."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from conftest import golden_folder
from probes import Vanilla
from safetensors.torch import load_file
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.search import CONDITIONAL_BUILDERS, SearchSpec, fixed_tree, widths
from sparkbench.search.candidates import space_of

FOLDER = golden_folder("sparklingtree")
CASES = {case["name"]: case for case in json.loads((FOLDER / "cases.json").read_text())["cases"]}
EXACT = ("level", "fixed", "heap", "reference", "table")


@dataclass(frozen=True)
class Inputs:
    logits: Tensor
    head: Vanilla | None
    anchors: Tensor

    @classmethod
    def of(cls, name: str) -> "Inputs":
        weights = [tensors().get(f"{name}.markov_{part}") for part in ("w1", "w2")]
        head = Vanilla(*(part.float() for part in weights if part is not None)) if CASES[name]["rank"] else None
        return cls(tensors()[f"{name}.base_logits"][None], head, torch.tensor([CASES[name]["root_token_id"]]))

    def build(self, builder: str, spec: SearchSpec) -> DraftTree:
        if builder == "fixed":
            tree, overflow = fixed_tree(self.logits, self.head, self.anchors, spec)
            assert not overflow.any()
            return tree
        return CONDITIONAL_BUILDERS[builder](self.logits, self.head, self.anchors, spec)


@cache
def tensors() -> dict[str, Tensor]:
    return load_file(FOLDER / "inputs.safetensors")


@cache
def trees() -> dict[str, Any]:
    return json.loads((FOLDER / "trees.json").read_text())


def check(tree: DraftTree, expected: dict[str, Any]) -> None:
    assert tree.valid.all()
    assert tree.tokens[0, 1:].tolist() == expected["tokens"]
    assert tree.depths[0].tolist() == [0, *expected["depths"]]
    assert tree.parents[0].tolist() == expected["parents"]
    assert tree.max_depth >= max(expected["depths"])
    assert tree.log_probs is not None
    scores = torch.tensor([0.0, *expected["cum_logprob"]], dtype=torch.float64)
    torch.testing.assert_close(tree.log_probs[0], scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("builder", EXACT)
@pytest.mark.parametrize("name", CASES)
def test_best_first_trees(name: str, builder: str) -> None:
    """All runs of a case; builders that are no default make the largest trees alone, and no table of 4,096 tokens."""
    inputs, runs = Inputs.of(name), CASES[name]["runs"]
    for run in runs:
        smaller = run["B"] < max(other["B"] for other in runs if (other["C"], other["K"]) == (run["C"], run["K"]))
        if smaller and builder != "level":
            continue
        if builder == "table" and CASES[name]["vocab_size"] > 512 and run["C"] != 16:
            continue
        (tree,) = set(run["builders"].values())
        check(inputs.build(builder, SearchSpec(run["B"], run["C"], run["K"])), trees()[tree])


@pytest.mark.parametrize("name", CASES)
def test_beam_trees(name: str) -> None:
    inputs = Inputs.of(name)
    for run in CASES[name]["beam_runs"]:
        planned = tuple(run["widths"])
        assert widths("flat", run["B"], CASES[name]["depth_limit"]) == planned
        for given in ((), planned):
            check(inputs.build("beam", SearchSpec(run["B"], run["C"], widths=given)), trees()[run["tree"]])


@pytest.mark.parametrize("count", [16, 128])
@pytest.mark.parametrize("name", CASES)
def test_unions(name: str, count: int) -> None:
    inputs, sizes = Inputs.of(name), CASES[name]["unions"][str(count)]
    for root, key in ((True, "size_with_root"), (False, "size_without_root")):
        space = space_of(inputs.logits, inputs.head, inputs.anchors, SearchSpec(64, count), root=root, trim=True)
        assert space.size == sizes[key]
        if root:
            ids = torch.arange(space.size) if space.ids is None else space.ids.flatten()
            assert ids.tolist() == tensors()[f"{name}.union_c{count}"].tolist()
