"""Golden values of DFlash and DDTree, reproduced by the project's own parts. Trees alone: test_search.py."""

from typing import Any

import golden_dflash as golden
import pytest
import torch
from probes import close, context_of, whole_forward
from torch import Tensor

from sparkbench.decoding.accept import Acceptance, match
from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.sampling import Sampling, noise_key
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.block import BlockSession

DRAFTS = golden.document("draft_forward")["cases"]
VERIFIED = golden.document("tree_verify")["entries"]
E2E = golden.document("e2e")
TRACE = golden.document("e2e_trace")
PREFIXES = golden.document("sampling")["prefixes"]
CASES = {case["name"]: case for case in E2E["cases"]}


@pytest.fixture(scope="module")
def pair() -> golden.Pair:
    return golden.Pair.load()


def test_target(pair: golden.Pair) -> None:
    expected = golden.tensors("draft_forward")
    logits, features = whole_forward(
        pair.target, expected["target/input_ids"].long(), pair.drafter.config.target_layer_ids
    )
    close(logits, expected["target/logits"])
    close(features, expected["target/context_features"])


@pytest.mark.parametrize("case", DRAFTS, ids=lambda case: case["name"])
def test_draft_forward(pair: golden.Pair, case: dict[str, Any]) -> None:
    """Round by round on one cache: features, block, hidden states, logits, drafts, and what the target accepts."""
    expected = golden.tensors("draft_forward")
    target, drafter = pair.target, pair.drafter
    first = drafter.config.first_slot
    with torch.inference_mode():
        session = BlockSession(drafter, target, 1, max(round_["start"] for round_ in case["rounds"]))
        for round_ in case["rounds"]:
            part = {key.rsplit("/", 1)[1]: value for key, value in expected.items()
                    if key.startswith(f"{case['name']}/round_{round_['round']}/")}  # fmt: skip
            start, cached = round_["start"], round_["draft_cache_len"]
            prefix = torch.tensor([round_["prefix_ids"]])
            assert prefix.shape[1] == start == cached + round_["context_len"]
            _, features = whole_forward(target, prefix, drafter.config.target_layer_ids)
            close(features[:, cached:], part["target_hidden"])

            masks = [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
            assert part["noise_ids"].tolist() == [[round_["root_token"], *masks]]
            close(drafter.embed(part["noise_ids"].long(), target), part["noise_embedding"])
            assert part["position_ids"].tolist() == [list(range(cached, start + drafter.config.block_size))]

            assert session.cache.host_lengths == [cached]
            context = context_of(target, part["target_hidden"], [round_["context_len"]], [round_["root_token"]])
            block = session.draft(context)
            assert session.cache.host_lengths == [start]
            close(block.hidden, part["draft_hidden"][:, first:])
            close(block.logits, part["draft_logits"])
            drafts = block.logits.argmax(-1)
            assert drafts[0].tolist() == round_["greedy_draft_tokens"]

            verifier = target.session(1, 256)
            verifier.prefill([round_["prefix_ids"]])
            tree = DraftTree.chain_of(torch.tensor([round_["root_token"]]), drafts)
            drawn = verifier.verify(verifier.pack(tree)).logits.argmax(-1)
            assert match(tree, drawn).accepted.item() + 1 == round_["accepted_len"]


@pytest.mark.parametrize("entry", VERIFIED, ids=lambda entry: entry["name"])
def test_tree_verify(pair: golden.Pair, entry: dict[str, Any]) -> None:
    name = f"{entry['name']}/"
    expected = {key[len(name):]: value for key, value in golden.tensors("tree_verify").items()
                if key.startswith(name)}  # fmt: skip
    depths = expected["position_ids"].long() - entry["start"]
    tree = DraftTree(
        expected["input_ids"].long(),
        torch.tensor([entry["parents"]]),
        depths,
        torch.ones_like(depths, dtype=torch.bool),
        int(depths.max()),
    )
    assert torch.equal(tree.visibility[0], expected["visibility"].bool())
    verifier = pair.target.session(1, 256, pair.drafter.config.target_layer_ids)
    try:
        with torch.inference_mode():
            verifier.prefill([entry["prefix_ids"]])
            packed = verifier.pack(tree)
            verified = verifier.verify(packed)
    finally:
        verifier.close()
    assert torch.equal(packed.positions, expected["position_ids"].long())
    assert verified.features is not None
    close(verified.logits, expected["logits"])
    close(verified.features, expected["context_features"])
    accepted = match(tree, verified.logits.argmax(-1))
    count = len(entry["accepted_indices"])
    assert accepted.accepted.item() + 1 == count
    assert accepted.path[0, :count].tolist() == entry["accepted_indices"]
    assert accepted.bonus.item() == entry["bonus_token"]


def decode(pair: golden.Pair, method: str, cases: list[dict[str, Any]], builder: str = "level") -> list[Generation]:
    """All cases of one limit and one set of stop tokens as one batch."""
    requests = [Request(tuple(case["prompt_ids"])) for case in cases]
    config = DecodeConfig(cases[0]["max_new_tokens"], Sampling(), golden.stops_of(cases[0]))
    return generate(pair.target, pair.method(method, builder), requests, config)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", E2E["methods"])
def test_end_to_end(pair: golden.Pair, name: str, method: str) -> None:
    (generation,) = decode(pair, method, [CASES[name]])
    golden.check_generation(generation, CASES[name], method)


@pytest.mark.parametrize("method", E2E["methods"])
def test_end_to_end_as_one_batch(pair: golden.Pair, method: str) -> None:
    """Prompts of all lengths in one batch accept what they accept alone."""
    limit = min(case["max_new_tokens"] for case in CASES.values() if case["num_output_tokens"] > 8)
    free = [case | {"max_new_tokens": limit, "stop_token_ids": None} for case in CASES.values()]
    alone = [decode(pair, method, [case])[0] for case in free]
    together = decode(pair, method, free)
    for one, other in zip(alone, together, strict=True):
        assert one.output_ids == other.output_ids
        assert [r.accepted for r in one.rounds] == [r.accepted for r in other.rounds]
        assert [r.accepted_node for r in one.rounds] == [r.accepted_node for r in other.rounds]


@pytest.mark.parametrize(
    ("method", "builder"),
    [(method, builder) for method in TRACE["methods"] for builder in ("level", "heap")[: 1 + ("_" in method)]],
)
def test_trace(pair: golden.Pair, method: str, builder: str) -> None:
    """Every round of one case: anchor, position, draft or tree in its order, accepted path, bonus token."""
    case = CASES[TRACE["case"]]
    seen: list[tuple[DraftTree, Acceptance]] = []
    config = DecodeConfig(case["max_new_tokens"], Sampling(), golden.stops_of(case))
    (generation,) = generate(
        pair.target,
        pair.method(method, builder),
        [Request(tuple(case["prompt_ids"]))],
        config,
        observer=lambda context, tree, acceptance: seen.append((tree, acceptance)),
    )
    clipped = case["methods"][method]["first_clipped_round"]
    recorded = TRACE["methods"][method][:clipped]
    start = len(case["prompt_ids"])
    assert seen
    assert clipped is not None or len(seen) <= len(recorded)
    for (tree, acceptance), round_ in zip(seen, recorded, strict=False):
        count = round_["acceptance_length"]
        assert start == round_["start"]
        assert tree.tokens[0, 0] == round_["root_token"]
        assert acceptance.accepted.item() + 1 == count
        assert acceptance.bonus.item() == round_["bonus_token"]
        start += count
        if method == "dflash":
            assert tree.chain
            assert tree.tokens[0, 1:].tolist() == round_["draft_tokens"]
            assert acceptance.tokens[0].tolist() == round_["target_argmax"]
            continue
        assert tree.tokens[0, 1:].tolist() == round_["node_token_ids"]
        assert tree.depths[0, 1:].tolist() == round_["node_depths"]
        assert tree.parents[0].tolist() == round_["parents"]
        assert tree.log_probs is not None
        scores = torch.tensor(round_["node_log_probs"], dtype=torch.float64)
        torch.testing.assert_close(tree.log_probs[0, 1:].double(), scores, atol=2e-5, rtol=0)
        assert acceptance.path[0, :count].tolist() == round_["accepted_indices"]
    golden.check_generation(generation, case, method)


# Sampling: every method returns the same tokens, so AR's are tested against the exact probabilities.

RUNS = 1500


def sampled(pair: golden.Pair, prefix: dict[str, Any], temperature: float, method: str) -> list[tuple[int, ...]]:
    prompt = tuple(prefix["prompt_ids"])
    requests = [Request(prompt, noise_key(prompt, seed)) for seed in range(RUNS)]
    config = DecodeConfig(3, Sampling(temperature), frozenset())
    return [g.output_ids for g in generate(pair.target, pair.method(method), requests, config)]


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Chi-square over cells with an expected count of 5 or more; all else, listed or not, is one cell."""
    large = probabilities * RUNS >= 5
    observed, expected = counts[large].double(), probabilities[large] * RUNS
    rest = RUNS - expected.sum()
    if rest > 1:
        observed = torch.cat([observed, (RUNS - observed.sum())[None]])
        expected = torch.cat([expected, rest[None]])
    else:
        expected = expected * (observed.sum() / expected.sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: prefix["name"])
@pytest.mark.parametrize("temperature", sorted({t for p in PREFIXES for t in p["temperatures"]}))
def test_sampling(pair: golden.Pair, prefix: dict[str, Any], temperature: str) -> None:
    outputs = torch.tensor(sampled(pair, prefix, float(temperature), "ar"))
    name = f"{prefix['name']}/temperature_{temperature}/"
    exact = {key[len(name):]: value for key, value in golden.tensors("sampling").items()
             if key.startswith(name)}  # fmt: skip
    vocab = exact["token1_probs"].shape[0]
    assert p_value(torch.bincount(outputs[:, 0], minlength=vocab), exact["token1_probs"]) > 1e-4
    assert p_value(torch.bincount(outputs[:, 1], minlength=vocab), exact["token2_marginal_probs"]) > 1e-4
    for width, which in ((2, "pair"), (3, "triple")):
        listed = exact[f"{which}_ids"].long()
        counts = (outputs[:, None, :width] == listed).all(2).sum(0)
        assert p_value(counts, exact[f"{which}_probs"]) > 1e-4


def test_sampling_is_the_same_for_every_method(pair: golden.Pair) -> None:
    """One batch of prompts of all prefixes, each row with its own key, at each temperature."""
    requests = [
        Request(tuple(prefix["prompt_ids"]), noise_key(prefix["prompt_ids"], seed))
        for seed in range(12)
        for prefix in PREFIXES
    ]
    temperatures = sorted({float(t) for prefix in PREFIXES for t in prefix["temperatures"]})
    for temperature in temperatures:
        config = DecodeConfig(12, Sampling(temperature), frozenset())
        outputs = {
            method: [g.output_ids for g in generate(pair.target, pair.method(method), requests, config)]
            for method in E2E["methods"]
        }
        assert len(set(outputs["ar"])) > len(requests) // 2
        for method, found in outputs.items():
            assert found == outputs["ar"], method
