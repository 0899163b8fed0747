"""DART's drafter, features and greedy generation against values of the published code.

The recording looks at the end of a generation after whole rounds and outputs the bonus token one round later, so it may
have a round more; its `rounds_if_bonus_is_emitted_immediately` are the rounds of this project's loop. What is recorded
of a round, its tree's size, the accepted path and the bonus token, must agree in all rounds that both have.
"""

from functools import cache
from typing import Any

import golden_dart as golden
import pytest
import torch
from conftest import plain_continuation
from golden_dart import FOLDER, Case
from probes import close, context_of
from torch import Tensor

from sparkbench import drafters, registry
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree

DRAFTS: list[Case] = golden.document("cases/drafter")
GENERATIONS: list[Case] = golden.document("cases/generation")


@cache
def target() -> Target:
    return Target.load(str(FOLDER / "target"), dtype="float32", device="cpu")


@cache
def drafter(name: str) -> Any:
    return drafters.load("dart", str(FOLDER / name), target())


def method_of(case: Case) -> Any:
    text = f"dart:candidates={case['k']}:beam={case['w']}:ngram-weight={case['ngram_weight']}"
    method: Any = registry.build(registry.Variant.parse(text), drafter=drafter(case["drafter"]), budget=case["theta"])
    method.index = golden.index(case["ngram"])
    return method


@pytest.mark.parametrize("case", DRAFTS, ids=lambda case: case["name"])
def test_drafter(case: Case) -> None:
    """Features, hidden states before and after the first norm, and logits; on a growing cache, and from scratch."""
    tensors = golden.tensors("cases/drafter")
    recorded = {key: tensors[f"{case['name']}.{key}"] for key in ("tokens", "features", "prompt_last_logits")}
    tokens, features = recorded["tokens"][None], recorded["features"][None]
    found = drafter(case["drafter"])
    assert found.config.draft_length == case["d"]
    assert found.config.draft_vocab_size == case["draft_vocab_size"]

    verifier = target().session(1, tokens.shape[1], found.config.target_layer_ids)
    with torch.inference_mode():
        whole = verifier.prefill([tokens[0, :-1].tolist()]).features
        prompt = verifier.target.model(tokens[:, : case["prompt_len"]], use_cache=False).logits[0, -1]
    verifier.close()
    assert whole is not None
    close(whole, features)
    close(prompt, recorded["prompt_last_logits"])

    with torch.inference_mode():
        growing = found.begin(target(), 1, 200, case["d"])
        for name in ("round0", "later"):
            part = case[name]
            steps = [(growing.cache.max_length, part["past_len"]), (part["past_len"], part["n"])]
            for first, last in steps:  # up to what is cached in the recording, and the pass that is recorded
                if first < last:
                    block = growing.draft(entries(features, tokens, first, last))
            check(case, name, block)
            assert growing.cache.host_lengths == [part["n"]]
            alone = found.begin(target(), 1, 200, case["d"]).draft(entries(features, tokens, 0, part["n"]))
            check(case, name, alone)


def entries(features: Tensor, tokens: Tensor, first: int, last: int) -> Context:
    part = slice(first, last)
    return context_of(target(), features[:, part], [last - first], [int(tokens[0, last])], tokens[:, part])


def check(case: Case, name: str, block: Any) -> None:
    found = drafter(case["drafter"])
    recorded = {
        key: golden.tensors("cases/drafter")[f"{case['name']}.{name}.{key}"]
        for key in ("logits", "hidden_pre_norm", "hidden_post_norm")
    }
    close(block.logits[0], golden.target_logits(recorded["logits"], case["drafter"]))
    close(block.hidden[0], found.norm(recorded["hidden_post_norm"]))
    close(found.normed(recorded["hidden_pre_norm"], 1), recorded["hidden_post_norm"])
    assert block.logits[0].argmax(1).tolist() == case[f"{name}_argmax_target_ids"]


Seen = list[tuple[int, int, list[int], int]]


def decode(cases: list[Case]) -> tuple[list[Generation], Seen]:
    """All cases of one setting as one batch; and (root, nodes, accepted tokens, bonus) a round of the first row."""
    seen: Seen = []

    def watch(context: Context, tree: DraftTree, acceptance: Acceptance) -> None:
        accepted = int(acceptance.accepted[0])
        tokens = acceptance.tokens[0, : accepted + 1].tolist()
        seen.append((int(tree.tokens[0, 0]), int(tree.valid[0].sum()) - 1, tokens[:-1], tokens[-1]))

    case = cases[0]
    config = DecodeConfig(case["max_new_tokens"], Sampling(), frozenset([case["stop_token_id"]]))
    requests = [Request(tuple(each["prompt_ids"])) for each in cases]
    return generate(target(), method_of(case), requests, config, watch), seen


@pytest.mark.parametrize("case", GENERATIONS, ids=lambda case: case["name"])
def test_generation(case: Case) -> None:
    (generation,), seen = decode([case])
    assert list(generation.output_ids) == case["output_ids"]
    assert generation.stop_reason == case["finish_reason"]
    assert len(generation.rounds) == case["rounds_if_bonus_is_emitted_immediately"]
    assert len(generation.rounds) in (len(case["rounds"]), len(case["rounds"]) - 1)
    for found, (root, nodes, accepted, bonus), recorded in zip(generation.rounds, seen, case["rounds"], strict=False):
        assert root == recorded["root_token"]
        assert nodes == found.nodes == recorded["tree_nodes"]
        assert accepted == recorded["accepted_tokens"]
        assert found.accepted == recorded["accepted"]
        assert bonus == recorded["bonus_token"]
    raw = case["reference_raw_ids"]
    mean = sum(each["accepted"] + 1 for each in case["rounds"]) / len(case["rounds"])
    assert mean == pytest.approx(case["mean_accepted_plus_one"])
    assert raw[: len(case["output_ids"])] == case["output_ids"]
    assert plain_continuation(target(), case["prompt_ids"], len(raw)) == raw


def test_one_batch_accepts_what_each_accepts_alone() -> None:
    free = [case for case in GENERATIONS if case["drafter"] == "drafter"]
    limit = min(case["max_new_tokens"] for case in free if case["max_new_tokens"] > 8)
    setting = {key: free[0][key] for key in ("k", "w", "theta", "ngram", "ngram_weight", "stop_token_id", "drafter")}
    together = [case | setting | {"max_new_tokens": limit} for case in free]
    alone = [decode([case])[0][0] for case in together]
    for one, other in zip(alone, decode(together)[0], strict=True):
        assert one.output_ids == other.output_ids
        assert [r.accepted for r in one.rounds] == [r.accepted for r in other.rounds]
        assert [r.accepted_node for r in one.rounds] == [r.accepted_node for r in other.rounds]
