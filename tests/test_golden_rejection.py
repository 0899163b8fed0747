"""Golden values of rejection sampling: odds, what is left of p, blocks with given uniforms, a real DSpark proposal."""

from typing import Any

import golden_dspark as golden
import pytest
import torch
from probes import close
from torch import Tensor

from sparkbench.decoding.accept import Acceptance, rejection
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.tree import DraftTree

Case = dict[str, Any]

CASES = golden.document("cases/rejection")
NEAR = 1e-3  # relative; the recorded uniforms keep as far from the odds


def tried(p: Tensor, q: Tensor, drafts: list[int], tests: list[float]) -> tuple[Acceptance, Tensor]:
    """A chain of `drafts` against p [L + 1, V] and q [L, V]: what was accepted, and the next token's distribution."""
    left: list[Tensor] = []

    def settle(accepted: Tensor, rest: Tensor) -> Tensor:
        left.append(rest[0] / rest[0].sum())
        return rest.argmax(1)

    tree = DraftTree.chain_of(torch.tensor([0]), torch.tensor([drafts]), draft_probs=q[None])
    found = rejection(tree, p[None], torch.tensor([[0.5, *tests]], dtype=torch.float64), settle)
    return found, left[0]


@pytest.mark.parametrize("case", CASES["single"], ids=lambda case: case["name"])
def test_one_draft(case: Case) -> None:
    p, q = torch.tensor(case["p"]), torch.tensor(case["q"])
    if "temperature" in case:
        sampling = Sampling(case["temperature"])
        close(sampling.probabilities(torch.tensor(case["target_logits"])), p)
        close(sampling.probabilities(torch.tensor(case["draft_logits"])), q)
    pair, one = torch.stack([p, p]), q[None]
    for token, odds in enumerate(case["token_accept_prob"]):
        if q[token] == 0:  # never drafted
            continue
        refused, left = tried(pair, one, [token], [min(1.0, odds * (1 + NEAR))])
        if odds > 0:
            accepted, _ = tried(pair, one, [token], [odds * (1 - NEAR)])
            assert accepted.accepted.tolist() == [1]
            assert int(accepted.tokens[0, 0]) == token
        if odds < 1:
            assert refused.accepted.tolist() == [0]
        else:  # never refused, unless by a number that is none; what is left then counts all the same
            refused, left = tried(pair, one, [token], [float("inf")])
            assert refused.accepted.tolist() == [0]
        close(left, p if case["residual_fallback_to_p"] else torch.tensor(case["residual"]))
    close(torch.minimum(p, q).sum(), torch.tensor(case["accept_prob"]))


@pytest.mark.parametrize("case", CASES["block"], ids=lambda case: case["name"])
def test_a_block(case: Case) -> None:
    p, q, drafts = torch.tensor(case["p"]), torch.tensor(case["q"]), case["draft_tokens"]
    found, left = tried(p, q, drafts, case["uniforms"])
    accepted = int(found.accepted)
    if case["terminated_by_stop"]:  # the recording ends at the stop token, the loop cuts there later
        assert accepted >= case["n_accepted"]
        assert drafts[case["n_accepted"] - 1] in case["stop_token_ids"]
    else:
        assert accepted == case["n_accepted"]
        close(left, torch.tensor(case["extra_token_distribution"]))
    assert found.tokens[0, :accepted].tolist() == drafts[:accepted]
    close(torch.minimum(p[:-1], q).sum(1), torch.tensor(case["accept_prob_per_position"]))


def test_a_proposal_of_a_drafter() -> None:
    case, values = CASES["dspark"], golden.tensors("cases/rejection")
    p, q = values["p"], values["q"]
    close(Sampling(case["temperature"]).probabilities(values["draft_corrected_logits"]), q)
    close(torch.minimum(p[:-1], q).sum(1), values["accept_prob"])
    for slot, token in enumerate(case["draft_tokens"]):
        odds = float(values["token_accept_prob"][slot])
        below, _ = tried(p[slot : slot + 2], q[slot : slot + 1], [token], [odds * (1 - NEAR)])
        assert below.accepted.tolist() == [1]
        if odds < 1 - NEAR:
            above, left = tried(p[slot : slot + 2], q[slot : slot + 1], [token], [odds * (1 + NEAR)])
            assert above.accepted.tolist() == [0]
            close(left, values["residual"][slot])
