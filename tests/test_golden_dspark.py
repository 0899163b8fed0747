"""Golden values of DSpark and SparklingTree, reproduced by the project's own parts."""

from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import golden_dspark as golden
import pytest
import torch
from probes import close, context_of, drafted_blocks, whole_forward
from torch import Tensor

from sparkbench import drafters, registry
from sparkbench.decoding.accept import match
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.block import BlockDrafter, BlockSession
from sparkbench.drafters.heads import MarkovHead
from sparkbench.drafters.parts import Block
from sparkbench.search import CONDITIONAL_BUILDERS
from sparkbench.train.loss import BlockTargets, slot_weights, terms

Case = dict[str, Any]

BLOCKS = golden.document("cases/blocks")
GENERATED = golden.document("cases/generate_dspark")["cases"]
FORMULA = golden.document("formula")
FORMULA_CASES = {name: rounds for name, rounds in FORMULA["cases"].items() if isinstance(rounds, list)}
DRAFTERS = list(dict.fromkeys(case["drafter"] for case in BLOCKS["block_cases"]))
MAIN = golden.document("cases/trees")["drafter"]  # the trained one, of the cases that name none


@pytest.fixture(scope="module")
def models() -> golden.Models:
    return golden.Models.load()


def expected(key: str) -> Tensor:
    return golden.tensors("cases/blocks")[key]


def features_of(models: golden.Models, drafter: BlockDrafter, case: Case) -> Tensor:
    """[1, start, F * H]: the target's features of the prefix of a case."""
    return whole_forward(models.target, torch.tensor([golden.prefix(case)]), drafter.config.target_layer_ids)[1]


def check_lengths(drafter: BlockDrafter, logits: Tensor, recorded: Case) -> None:
    """How much of a chain each threshold keeps, by the method that has it as an option."""
    for threshold, length in recorded.items():
        method: Any = registry.build(
            registry.Variant.parse(f"dspark:confidence-threshold={threshold}"), drafter=drafter
        )
        assert method.lengths(logits) == [length], threshold


def test_target(models: golden.Models) -> None:
    """Logits and the output of every layer, but for the last, which the recording has after the final norm."""
    case = BLOCKS["block_cases"][0]
    layers = tuple(range(-1, models.target.num_layers - 1))
    ids = torch.tensor([golden.prompt_ids(case)])
    logits, features = whole_forward(models.target, ids, layers)
    states = expected("target.hidden_states")
    assert len(states) == len(layers) + 1
    close(logits[0], expected("target.logits"))
    close(features[0].unflatten(-1, (len(layers), -1)).transpose(0, 1), states[:-1])
    close(models.target.head(states[-1]), expected("target.logits"))


@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks(models: golden.Models, name: str) -> None:
    """Round by round on one cache: features, block, both heads, drafts, lengths, and what the target accepts."""
    target, drafter = models.target, models.drafter(name)
    cases = [case for case in BLOCKS["block_cases"] if case["drafter"] == name]
    session = BlockSession(drafter, target, 1, max(case["start"] for case in cases))
    for case in cases:
        key, start, cached = case["key"], case["start"], case["draft_cache_length_before"]
        anchor = case["input_ids"][:1]
        config = drafter.config
        assert case["input_ids"][1:] == [config.mask_token_id] * (config.block_size - 1)
        assert case["position_ids"] == list(range(cached, start + config.block_size))

        features = features_of(models, drafter, case)[:, cached:]
        close(features[0], expected(f"{key}.context_features"))
        assert session.cache.host_lengths == [cached]
        block = session.draft(context_of(target, features, [case["num_new_context"]], anchor))
        assert session.cache.host_lengths == [start]
        close(block.hidden[0], expected(f"{key}.block_hidden"))
        close(block.logits[0], expected(f"{key}.base_logits"))
        for which, what in enumerate(("keys", "values")):
            if (entry := f"{key}.cache_{what}_after") in golden.tensors("cases/blocks"):
                close(session.cache.store[:, which, 0, :, :start], expected(entry))

        drafts = check_heads(drafter, block, anchor, case)
        verifier = target.session(1, start + config.block_size + 1)
        verifier.prefill([golden.prefix(case)])
        tree = DraftTree.chain_of(torch.tensor(anchor), drafts)
        drawn = verifier.verify(verifier.pack(tree)).logits.argmax(-1)
        verifier.close()
        assert match(tree, drawn).accepted.tolist() == [case["n_accepted"]]


def check_heads(drafter: BlockDrafter, block: Block, anchor: list[int], case: Case) -> Tensor:
    """The greedy chain [1, L] of a block, biased if there is a Markov head, and its confidences."""
    logits = block.logits.clone()
    if drafter.markov_head is None:
        drafts = logits.argmax(-1)
        assert drafts[0].tolist() == case["draft_tokens"]
        return drafts
    drafts = drafter.markov_head.chain(logits, block.hidden, torch.tensor(anchor))
    assert drafts[0].tolist() == case["draft_tokens"]
    close(logits[0], expected(f"{case['key']}.corrected_logits"))
    previous = torch.tensor([[*anchor, *case["draft_tokens"][:-1]]])
    assert previous[0].tolist() == case["prev_tokens"]
    close(block.logits + drafter.markov_head.forced(previous, block.hidden), logits)
    method: Any = registry.build(registry.Variant.parse("dspark"), drafter=drafter)
    confidence = method.confidence(block, torch.tensor(anchor), drafts)
    close(confidence[0], expected(f"{case['key']}.confidence_logits"))
    check_lengths(drafter, confidence, case["prefix_length"])
    return drafts


@pytest.mark.parametrize("kind", BLOCKS["markov"])
def test_markov_heads(models: golden.Models, kind: str) -> None:
    """Biases, gates and states; an rnn's entries are one sequence, the others are independent."""
    (name,) = (name for name in DRAFTERS if golden.config_of(name).get("markov_head_type") == kind)
    head = models.drafter(name).markov_head
    assert isinstance(head, MarkovHead)
    previous = torch.tensor(BLOCKS["markov"][kind]["prev_tokens"])
    part = {key.removeprefix(f"markov_{kind}."): value for key, value in golden.tensors("cases/blocks").items()
            if key.startswith(f"markov_{kind}.")}  # fmt: skip
    hidden = part.get("hidden", torch.zeros(len(previous), models.target.hidden_size))
    close(head.forced(previous, hidden), part["bias"])
    if "gate" in part:
        close(head.step(previous, hidden)[0], part["gate"] * head.markov_w1(previous))
    state = None
    for slot, after in enumerate(part.get("state", ())):
        latent, state = head.step(previous[slot], hidden[slot], state)
        close(head.bias(latent), part["bias"][slot])
        assert state is not None
        close(state, after)


@pytest.mark.parametrize("prompt", dict.fromkeys(case["prompt_id"] for case in BLOCKS["confidence"]))
def test_confidence(models: golden.Models, prompt: str) -> None:
    """Several rounds of every prompt, each drafted from its whole prefix."""
    cases = [case for case in BLOCKS["confidence"] if case["prompt_id"] == prompt]
    drafter = models.drafter(MAIN)
    method: Any = registry.build(registry.Variant.parse("dspark"), drafter=drafter)
    for case in cases:
        method.begin(models.target, 1, case["start"])
        anchors = torch.tensor([case["anchor"]])
        features = features_of(models, drafter, case)
        with drafted_blocks() as blocks:
            tree = method.propose(context_of(models.target, features, [case["start"]], [case["anchor"]]))
        assert tree.tokens[0].tolist() == [case["anchor"], *case["draft_tokens"]]
        confidence = method.confidence(blocks[0], anchors, tree.tokens[:, 1:])
        close(confidence[0], torch.tensor(case["confidence_logits"]))
        check_lengths(drafter, confidence, case["prefix_length"])


# Generation


@pytest.mark.parametrize("case", GENERATED, ids=lambda case: case["name"])
def test_generation(models: golden.Models, case: Case) -> None:
    ((generation, rounds),) = golden.decode(models, models.method_of(case), [case])
    golden.check_generation(case, generation, rounds)


def arm(case: Case) -> str:
    """What cases of one batch share."""
    keys = ("drafter", "markov", "confidence_threshold", "max_new_tokens", "stop_token_ids")
    return "-".join(str(case[key]) for key in keys)


BATCHES = {name: batch for name, cases in groupby(sorted(GENERATED, key=arm), arm) if len(batch := list(cases)) > 1}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_generation_as_one_batch(models: golden.Models, batch: list[Case]) -> None:
    """Prompts of all lengths in one batch go through the very rounds they go through alone."""
    found = golden.decode(models, models.method_of(batch[0]), batch)
    for case, (generation, rounds) in zip(batch, found, strict=True):
        golden.check_generation(case, generation, rounds)


# Weights by formula


@pytest.mark.parametrize("name", FORMULA_CASES)
def test_formula(tmp_path: Path, name: str) -> None:
    """Geometry of a published drafter in small: two rounds on one cache."""
    rounds, config = FORMULA_CASES[name], golden.formula_config(FORMULA["model"], name)
    target = golden.formula_target(FORMULA["model"])
    folder = golden.save_formula_drafter(tmp_path / name, config)
    drafter = drafters.load("dspark" if config["markov_rank"] else "dflash", str(folder), target)
    features = golden.formula_features(max(round_["start"] for round_ in rounds), drafter.fc.in_features)
    session = BlockSession(drafter, target, 1, features.shape[1])
    cached = 0
    for round_ in rounds:
        start, anchors = round_["start"], torch.tensor([round_["anchor"]])
        context = context_of(target, features[:, cached:start], [start - cached], [round_["anchor"]])
        block, cached = session.draft(context), start

        def agrees(values: Tensor, key: str, recorded: Case = round_) -> None:
            head = torch.tensor(recorded[f"{key}_first8"])
            close(values[0, :, : head.shape[1]], head)

        agrees(block.hidden, "hidden")
        agrees(block.logits, "base_logits")
        logits, head = block.logits.clone(), drafter.markov_head
        drafts = logits.argmax(-1) if head is None else head.chain(logits, block.hidden, anchors)
        assert drafts[0].tolist() == round_["draft_tokens"]
        agrees(logits, "corrected_logits")
        if round_["confidence_logits"] is None:
            assert drafter.confidence_head is None
        else:
            method: Any = registry.build(registry.Variant.parse("dspark"), drafter=drafter)
            confidence = method.confidence(block, anchors, drafts)
            close(confidence[0], torch.tensor(round_["confidence_logits"]))


def test_loss() -> None:
    """The three terms, as sums over weighted slots and as means, and the acceptance rate of each slot alone."""
    recorded = FORMULA["loss_golden"]
    inputs = golden.LossInputs.read(recorded["inputs"])
    weights = inputs.mask * slot_weights(inputs.mask.shape[1], inputs.decay)

    def losses(weights: Tensor) -> list[float]:
        targets = BlockTargets(inputs.labels, inputs.labels, weights, inputs.target)
        return [float(term) for term in terms(inputs.drafted, inputs.believed, targets)]

    found = losses(weights)
    for value, term in zip(found, ("ce", "l1", "conf"), strict=True):
        name = next(key for key in recorded["sums"] if key.startswith(term)).removesuffix("_num").removesuffix("_den")
        total = float(weights.sum())
        assert value == pytest.approx(recorded[term], abs=1e-4)
        assert total == pytest.approx(recorded["sums"][f"{name}_den"], abs=1e-4)
        assert value * total == pytest.approx(recorded["sums"][f"{name}_num"], abs=1e-4)
    (total_key,) = (key for key in recorded if key.startswith("total_"))
    shares = [float(part.replace("p", ".")) for part in total_key.split("_")[1:]]
    assert sum(share * value for share, value in zip(shares, found, strict=True)) == pytest.approx(
        recorded[total_key], abs=1e-4
    )
    for place in torch.ones_like(weights).nonzero().tolist():
        alone = torch.zeros_like(weights)
        alone[tuple(place)] = 1.0
        rate = 1 - losses(alone)[1] / 2
        assert rate == pytest.approx(recorded["accept_rate"][place[0]][place[1]], abs=1e-4)


# Trees

TREES = golden.document("cases/trees")
PREFIXES = [{"drafter": TREES["drafter"]} | entry for entry in TREES["prefixes"]]
TREE_GENERATED = golden.document("cases/tree_generate")
EXACT = [name for name in CONDITIONAL_BUILDERS if name != "beam"]


@cache
def prefix_features(models: golden.Models, drafter: BlockDrafter, key: str) -> Tensor:
    return features_of(models, drafter, next(case for case in PREFIXES if case["key"] == key))


def propose(models: golden.Models, case: Case, method: Any) -> tuple[DraftTree, Block]:
    """The tree of a prefix, and the block it was made from."""
    method.begin(models.target, 1, case["start"])
    features = prefix_features(models, method.drafter, case["key"])
    with drafted_blocks() as blocks:
        tree = method.propose(context_of(models.target, features, [case["start"]], [case["anchor"]]))
    return tree, blocks[0]


def target_logits(models: golden.Models, case: Case, tree: DraftTree) -> Tensor:
    """[1, N, V] of a tree behind its prefix."""
    verifier = models.target.session(1, case["start"] + tree.width)
    try:
        verifier.prefill([golden.prefix(case)])
        return verifier.verify(verifier.pack(tree)).logits
    finally:
        verifier.close()


@pytest.mark.parametrize("builder", EXACT)
@pytest.mark.parametrize("case", PREFIXES, ids=lambda case: case["key"])
def test_trees(models: golden.Models, case: Case, builder: str) -> None:
    """Every tree in its order: tokens, depths, parents, scores; and the walk of the target through it."""
    assert case["context_length"] == case["start"]
    for entry in case["trees"]:
        tree, _ = propose(models, case, golden.tree_method(models, case, entry, builder))
        assert tree.tokens[0].tolist() == [case["anchor"], *entry["tokens"]]
        assert tree.depths[0].tolist() == [0, *entry["depths"]]
        assert tree.parents[0].tolist() == [-1, *(parent + 1 for parent in entry["parents"])]
        assert tree.log_probs is not None
        close(tree.log_probs[0, 1:], torch.tensor(entry["cum_logprob"]))
        if builder == "level":  # the same tree needs one verification
            accepted = match(tree, target_logits(models, case, tree).argmax(-1))
            path = accepted.path[0, 1 : int(accepted.accepted) + 1]
            assert path.tolist() == [node + 1 for node in entry["accepted_nodes"]]
            assert accepted.bonus.tolist() == [entry["bonus"]]
            walked = [*tree.tokens[0, path].tolist(), entry["bonus"]]
            assert walked[: len(case["true_continuation"])] == case["true_continuation"][: len(walked)]


@pytest.mark.parametrize("case", PREFIXES, ids=lambda case: case["key"])
def test_tree_logits(models: golden.Models, case: Case) -> None:
    """The block's logits without any bias, and the target's under tree attention."""
    recorded = golden.tensors("cases/trees")
    checked = 0
    for key, logits in recorded.items():
        if key.startswith(f"{case['key']}.") and key.endswith("_logits"):
            full = key.endswith("_target_logits")
            entry = {"budget": len(logits) - 1, "top_c": None, "normalisation": "full"}
            tree, block = propose(models, case, golden.tree_method(models, case, entry, "level"))
            close((target_logits(models, case, tree) if full else block.logits)[0], logits)
            checked += 1
    assert checked


def tree_name(case: Case) -> str:
    return f"{case['prompt_id']}-{case['budget']}-{case['top_c'] or 'all'}"


@pytest.mark.parametrize("case", TREE_GENERATED["cases"], ids=tree_name)
def test_tree_generation(models: golden.Models, case: Case) -> None:
    method = golden.tree_method(models, {"drafter": TREE_GENERATED["drafter"]}, case, "level")
    ((generation, rounds),) = golden.decode(models, method, [case])
    assert list(generation.output_ids) == case["output_ids"]
    assert len(rounds) == case["num_rounds"] == len(case["rounds"])
    start = len(golden.prompt_ids(case))
    for seen, recorded in zip(rounds, case["rounds"], strict=True):
        assert start == recorded["start"]
        assert seen.tokens[0] == recorded["anchor"]
        assert [seen.tokens[node] for node in seen.path[1:]] == recorded["accepted"]
        assert (seen.accepted, seen.bonus) == (recorded["n_accepted"], recorded["bonus"])
        assert len(seen.tokens) == 1 + case["budget"]
        start += recorded["acceptance_length"]
    mean = (start - len(golden.prompt_ids(case))) / len(rounds)
    assert mean == pytest.approx(case["mean_acceptance_length"], abs=1e-4)
