"""The continuity search against recorded trees of the published code."""

import golden_dart as golden
import numpy as np
import pytest
from golden_dart import Case, paths_of, row_paths, search_inputs

from sparkbench.search import ContinuitySpec, continuity_tree
from sparkbench.search.continuity import DRAFT_BASE, EPSILON, LEVEL_EXPONENT, search, shortlist

CASES: list[Case] = golden.document("cases/tree_search")
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])


def test_constants_are_the_recorded_ones() -> None:
    recorded = golden.document("manifest")["tree_search"]
    assert not recorded["ngram_at_level_0"]
    assert recorded["level_weight_exponent"] == LEVEL_EXPONENT
    assert recorded["logit_weight_base"] == DRAFT_BASE
    assert recorded["epsilon"] == EPSILON
    spec = ContinuitySpec()
    assert recorded["ngram_weight"] == spec.ngram_weight
    assert (recorded["default"]["k"], recorded["default"]["w"]) == (spec.candidates, spec.beam)
    assert recorded["default"]["theta"] == ContinuitySpec(score="paper").theta == spec.theta - 1


@cases
def test_candidates_are_the_recorded_ones(case: Case) -> None:
    logits, anchors, history, _, spec, _ = search_inputs(case)
    short = shortlist(logits, anchors, history, spec)
    assert short.known[0].tolist() == case["prompt_tokens"]
    assert short.tokens.shape[1] == case["d"] == len(case["level_topk"])
    for level, recorded in enumerate(case["level_topk"]):
        assert short.tokens[0, level].tolist() == recorded["tokens"]
        chances = np.exp(short.terms[0, level].astype(np.float64) / DRAFT_BASE**level)
        np.testing.assert_allclose(chances, recorded["probs"], rtol=0, atol=1e-4)


@cases
def test_trees_are_the_recorded_ones(case: Case) -> None:
    logits, anchors, history, index, spec, stops = search_inputs(case)
    expected = case["expected"]
    wanted = dict(zip(paths_of(expected["tokens"], expected["parents"]), expected["scores"], strict=True))
    tree = continuity_tree(logits, anchors, history, index, spec, stops)
    paths = row_paths(tree, 0)
    assert tree.tokens[0, 0] == expected["tokens"][0]
    assert set(paths) == wanted.keys()
    assert len(paths) - len({path[:-1] for path in paths[1:]}) == case["n_leaves"]
    found = search(shortlist(logits, anchors, history, spec), index, spec, stops)
    assert found.nodes[0, 0].tolist() == tree.tokens[0].tolist()
    np.testing.assert_allclose(found.scores[0], [wanted[path] for path in paths], rtol=0, atol=1e-4)
    assert found.scores[0].tolist() == sorted(found.scores[0].tolist(), reverse=True)
