"""The DSpark drafter and its method: heads by their formulas, composites, lengths, refusals, and exact outputs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import golden_dspark as golden
import pytest
import torch
from conftest import autoregressive, plain_continuation, requests_of, run, tiny_model
from probes import close, context_of, drafted_blocks
from safetensors.torch import load_file, save_file
from tiny_drafters import config_of, dspark_config, features_of, save_drafter
from torch import Tensor

from sparkbench import drafters, machine, registry
from sparkbench.decoding.method import Method
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.heads import MARKOV_KINDS, BlockHead, MarkovHead
from sparkbench.drafters.parts import Block
from sparkbench.errors import SparkbenchError, UsageError
from sparkbench.models import equip
from sparkbench.profiling.costs import RoundCosts
from sparkbench.profiling.curve import StepCurve, StepCurves
from sparkbench.scheduling import Calibration, admit, admit_capacity, capacity

VOCAB, RANK, HIDDEN = 97, 4, 32


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.wrap(tiny_model(), name="tiny")


@pytest.fixture
def dspark(target: Target, tmp_path: Path) -> BlockDrafter:
    return drafters.load("dspark", str(save_drafter(tmp_path / "dspark", dspark_config("vanilla"))), target)


def random_head(kind: str, seed: int = 0) -> MarkovHead:
    head = MarkovHead(kind, VOCAB, RANK, HIDDEN)
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator))
    return head


def random_tensor(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_step(head: MarkovHead, previous: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bias [V] and new state [r] of one slot, from the weights by the formulas of the paper and the checkpoints."""
    weights = head.state_dict()
    e, w2 = weights["markov_w1.weight"][previous], weights["markov_w2.weight"]
    if head.kind == "gated":
        gate = weights["gate_proj.weight"] @ torch.cat([hidden, e]) + weights["gate_proj.bias"]
        return w2 @ (e / (1 + torch.exp(-gate))), state
    if head.kind == "rnn":
        z = weights["joint_proj.weight"] @ torch.cat([state, e, hidden]) + weights["joint_proj.bias"]
        keep = 1 / (1 + torch.exp(-z[:RANK]))
        return w2 @ z[2 * RANK :].tanh(), keep * state + (1 - keep) * z[RANK : 2 * RANK].tanh()
    return w2 @ e, state


def plain_chain(head: MarkovHead, logits: Tensor, hidden: Tensor, anchor: int) -> tuple[list[int], Tensor]:
    """Greedy tokens of a block and its biased logits [L, V]."""
    tokens, rows, state = [anchor], [], torch.zeros(RANK)
    for base, h in zip(logits, hidden, strict=True):
        bias, state = plain_step(head, tokens[-1], h, state)
        rows.append(base + bias)
        tokens.append(int(rows[-1].argmax()))
    return tokens[1:], torch.stack(rows)


# Heads


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_forced_biases(kind: str) -> None:
    """Whole blocks at once, slot by slot, and by the formulas."""
    head, hidden = random_head(kind), random_tensor(3, 5, HIDDEN)
    previous = torch.randint(VOCAB, (3, 5), generator=torch.Generator().manual_seed(2))
    biases = head.forced(previous, hidden)
    assert biases.shape == (3, 5, VOCAB)
    state = None
    for slot in range(5):
        latent, state = head.step(previous[:, slot], hidden[:, slot], state)
        close(head.bias(latent), biases[:, slot])
    for row in range(3):
        plain = torch.zeros(RANK)
        for slot in range(5):
            bias, plain = plain_step(head, int(previous[row, slot]), hidden[row, slot], plain)
            close(biases[row, slot], bias)


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_chain(kind: str) -> None:
    head, hidden, logits = random_head(kind), random_tensor(4, 6, HIDDEN), random_tensor(4, 6, VOCAB, seed=3) * 2
    biased = logits.clone()
    tokens = head.chain(biased, hidden, torch.tensor([5, 6, 7, 5]))
    for row, anchor in enumerate((5, 6, 7, 5)):
        plain, rows = plain_chain(head, logits[row], hidden[row], anchor)
        assert tokens[row].tolist() == plain
        close(biased[row], rows)
    assert not torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_biases_for_the_search(kind: str) -> None:
    """Many parents of one depth at once, with the hidden state of that depth's slot."""
    head, hidden = random_head(kind), random_tensor(2, 3, HIDDEN)
    parents = torch.tensor([[1, 9, 9, 4], [0, 96, 2, 3]])
    seen = BlockHead(head, hidden)
    for depth in range(3):
        biases = seen.latents(depth, parents) @ seen.w2.T
        for row in range(2):
            for place, token in enumerate(parents[row].tolist()):
                close(biases[row, place], plain_step(head, token, hidden[row, depth], torch.zeros(RANK))[0])


@pytest.mark.parametrize("kind", MARKOV_KINDS)
@pytest.mark.parametrize("reads", ["markov", "hidden"])
def test_confidence(target: Target, tmp_path: Path, kind: str, reads: str) -> None:
    """The formula; and a slot's confidence never depends on the slot's own token or a later one."""
    folder = save_drafter(tmp_path, dspark_config(kind, confidence=reads))
    drafter = drafters.load("dspark", str(folder), target)
    method: Any = registry.build(registry.Variant.parse("dspark"), drafter=drafter)
    weights = load_file(folder / "model.safetensors")
    hidden, tokens = random_tensor(1, 6, HIDDEN), [3, 5, 8, 13, 21, 34, 55]
    block = Block(hidden, hidden.new_zeros(1, 6, VOCAB))

    def confidence(tokens: Sequence[int]) -> Tensor:
        return method.confidence(block, torch.tensor(tokens[:1]), torch.tensor([tokens[1:]]))[0]

    logits = confidence(tokens)
    for slot in range(6):
        read = [hidden[0, slot]]
        if reads == "markov":
            read.append(weights["markov_head.markov_w1.weight"][tokens[slot]])
        plain = weights["confidence_head.proj.weight"][0] @ torch.cat(read) + weights["confidence_head.proj.bias"][0]
        close(logits[slot], plain)
    for place in range(7):
        changed = confidence([*tokens[:place], 90, *tokens[place + 1 :]])
        differs = (changed != logits).nonzero().flatten().tolist()
        assert differs == ([place] if reads == "markov" and place < 6 else [])


# The drafter and its method


def proposal(method: Any, target: Target, rows: int = 8) -> tuple[DraftTree, Block]:
    """What a method makes of random features behind anchors 1, 2, ...; the block's logits without biases."""
    features = torch.cat([features_of(5, seed) for seed in range(rows)])
    anchors = range(1, rows + 1)
    context = context_of(target, features, [5] * rows, list(anchors))
    with torch.inference_mode():
        method.begin(target, rows, 40)
        logits = method.session.draft(context).logits.clone()
        method.begin(target, rows, 40)
        with drafted_blocks() as blocks:
            tree = method.propose(context)
    return tree, Block(blocks[0].hidden, logits)


@pytest.mark.parametrize("depth", [0, 1, 4, 6, 9])
@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_proposal(target: Target, tmp_path: Path, kind: str, depth: int) -> None:
    """The greedy chain with cumulative log-probabilities, cut to the depth that is asked for."""
    drafter = drafters.load("dspark", str(save_drafter(tmp_path, dspark_config(kind))), target)
    method = registry.build(registry.Variant.parse(f"dspark:depth={depth}"), drafter=drafter)
    length = min(depth or 6, 6)
    assert method.max_nodes == length
    tree, block = proposal(method, target, 3)
    assert tree.chain
    assert tree.tokens.shape == (3, 1 + length)
    assert drafter.markov_head is not None
    assert tree.log_probs is not None
    for row in range(3):
        tokens, logits = plain_chain(drafter.markov_head, block.logits[row], block.hidden[row], row + 1)
        assert tree.tokens[row].tolist() == [row + 1, *tokens]
        steps = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        close(tree.log_probs[row, 1:], steps.cumsum(0))


def test_no_head(target: Target, tmp_path: Path) -> None:
    """`A+none` proposes what A's block says, slot by slot."""
    folder = save_drafter(tmp_path, dspark_config("gated"))
    drafter = drafters.load("dspark", f"{folder}+none", target)
    assert drafter.source == f"{folder}+none"
    assert drafter.markov_head is None
    assert drafter.confidence_head is None
    tree, block = proposal(registry.build(registry.Variant.parse("dspark"), drafter=drafter), target)
    assert torch.equal(tree.tokens[:, 1:], block.logits.argmax(-1))


def test_composite(target: Target, tmp_path: Path) -> None:
    """`A+B` is A's block with B's Markov head, of whatever kind, and without a confidence head."""
    folder = save_drafter(tmp_path / "a", dspark_config("vanilla"))
    other = save_drafter(tmp_path / "b", dspark_config("rnn"), seed=1)
    plain = save_drafter(tmp_path / "c", config_of("deepspec"), seed=2)
    first, second = (drafters.load("dspark", str(source), target) for source in (folder, other))
    both = drafters.load("dspark", f"{folder}+{other}", target)
    assert both.confidence_head is None
    assert both.source == f"{folder}+{other}"
    assert second.markov_head is not None
    head = {name: weight for name, weight in both.state_dict().items() if name.startswith("markov_head")}
    assert head.keys() == {f"markov_head.{name}" for name in second.markov_head.state_dict()}
    for name, weight in both.state_dict().items():
        assert torch.equal(weight, (second if name in head else first).state_dict()[name]), name
    headed = drafters.load("dspark", f"{plain}+{folder}", target)
    assert isinstance(headed.markov_head, MarkovHead)
    assert headed.markov_head.kind == "vanilla"


@pytest.mark.parametrize("copied", [(), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_equal_copies_are_shared(target: Target, tmp_path: Path, copied: tuple[str, ...]) -> None:
    """A checkpoint's own embedding and head take memory only where they differ from the target's."""
    folder = save_drafter(tmp_path, dspark_config("vanilla"))
    theirs = {"embed_tokens": target.model.model.embed_tokens.weight, "lm_head": target.model.lm_head.weight}
    weights = load_file(folder / "model.safetensors")
    for name in copied:
        weights[f"{name}.weight"] = theirs[name].detach().clone()
    save_file(weights, folder / "model.safetensors")
    drafter = drafters.load("dspark", str(folder), target)
    for name, weight in theirs.items():
        own = drafter.get_parameter(f"{name}.weight")
        assert (own.data_ptr() == weight.data_ptr()) == (name in copied)
        assert torch.equal(own, weights[f"{name}.weight"])


@pytest.mark.parametrize("builder", ["level", "reference", "heap", "table"])
@pytest.mark.parametrize(("candidates", "fanout"), [(0, 0), (0, 2), (3, 0), (3, 2)])
def test_tree_options(target: Target, dspark: BlockDrafter, builder: str, candidates: int, fanout: int) -> None:
    """Which tokens may be nodes, and how many children a node has."""
    variant = f"sparklingtree:builder={builder}:candidates={candidates}:fanout={fanout}"
    method = registry.build(registry.Variant.parse(variant), drafter=dspark, budget=24)
    tree, block = proposal(method, target)
    children = [max(row.count(parent) for parent in row) for row in tree.parents.tolist()]
    assert max(children) == fanout if fanout else max(children) > 2
    outside = 0
    for row, tokens in enumerate(tree.tokens.tolist()):
        listed = set(block.logits[row].topk(3).indices.flatten().tolist())
        outside += len(set(tokens) - listed - {row + 1})
    assert (outside == 0) == (candidates == 3)
    assert nodes_of(tree) == [24] * 8


def test_beam_widths(target: Target, dspark: BlockDrafter) -> None:
    method = registry.build(registry.Variant.parse("sparklingtree:builder=beam:widths=5/3/1"), drafter=dspark, budget=9)
    tree, _ = proposal(method, target)
    for row in tree.depths:
        assert row.bincount().tolist() == [1, 5, 3, 1]


# Lengths


def curves_of(seconds: Callable[[int], float]) -> StepCurves:
    tokens = tuple(range(1, 65))
    raw = [seconds(count) for count in tokens]
    device = machine.device_name(torch.device("cpu"))
    curves = tuple(StepCurve.measured(rows, 32, tokens, raw) for rows in (1, 4))
    return StepCurves("tiny", None, device, "float32", 1, {}, curves)


def nodes_of(tree: DraftTree) -> list[int]:
    return (tree.valid.sum(1) - 1).tolist()


@pytest.mark.parametrize("lengths", [[3, 1, 0], [2, 2, 2], [0, 0, 0], [4, 4, 4], [0, 4, 4]])
def test_chains_of_different_lengths(lengths: list[int]) -> None:
    anchors, drafts, scores = torch.tensor([7, 8, 9]), torch.arange(12).view(3, 4) + 20, -random_tensor(3, 4).abs()
    tree = DraftTree.chain_of(anchors, drafts, scores, lengths)
    assert tree.chain == (len(set(lengths)) == 1)
    assert tree.max_depth == max(lengths) == tree.width - 1
    assert nodes_of(tree) == lengths
    assert tree.log_probs is not None
    for row, length in enumerate(lengths):
        padding = max(lengths) - length
        assert tree.tokens[row].tolist() == [int(anchors[row]), *drafts[row, :length].tolist(), *[0] * padding]
        assert tree.parents[row].tolist() == [*range(-1, length), *[-1] * padding]
        assert tree.depths[row].tolist() == [*range(length + 1), *[0] * padding]
        assert tree.valid[row].tolist() == [True] * (length + 1) + [False] * padding
        assert tree.log_probs[row, : length + 1].tolist() == [0.0, *scores[row, :length].tolist()]


@pytest.mark.parametrize("nodes", [0, 1, 2, 4, 5, 9])
def test_first_nodes(nodes: int) -> None:
    """A tree cut to its first nodes; a chain stays one."""
    parents = torch.tensor([[-1, 0, 1, 0, 2, 4], [-1, 0, 0, 1, -1, -1]])
    depths = torch.tensor([[0, 1, 2, 1, 3, 4], [0, 1, 1, 2, 0, 0]])
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    tree = DraftTree(torch.arange(12).view(2, 6), parents, depths, valid, 4, -depths.float())
    first = tree.first(nodes)
    width = min(nodes, 5) + 1
    for name in ("tokens", "parents", "depths", "valid", "log_probs"):
        assert torch.equal(getattr(first, name), getattr(tree, name)[:, :width]), name
    assert first.max_depth == max(row[:width].max().item() for row in depths)
    assert (first.width, first.chain) == (width, False)
    chain = DraftTree.chain_of(torch.tensor([1]), torch.tensor([[2, 3, 4, 5, 6]])).first(nodes)
    assert (chain.chain, chain.width, chain.max_depth) == (True, width, width - 1)
    assert chain.log_probs is None


def test_thresholds(target: Target, dspark: BlockDrafter) -> None:
    """The prefix before the first slot below the threshold: 0 keeps all, 1 nothing, between them it shrinks."""
    found = []
    for threshold in ("0", "0.3", "0.5", "0.7", "1"):
        method: Any = registry.build(registry.Variant.parse(f"dspark:confidence-threshold={threshold}"), drafter=dspark)
        tree, block = proposal(method, target)
        whole = proposal(registry.build(registry.Variant.parse("dspark"), drafter=dspark), target)[0].tokens
        confidences = method.confidence(block, whole[:, 0], whole[:, 1:]).sigmoid().tolist()
        below = [[*(value < float(threshold) for value in row), True].index(True) for row in confidences]
        assert nodes_of(tree) == below
        assert tree.tokens.where(tree.valid, 0).tolist() == whole[:, : tree.width].where(tree.valid, 0).tolist()
        found.append(below)
    assert found[0] == [6] * 8
    assert found[-1] == [0] * 8
    assert all(sum(after) < sum(before) for before, after in pairwise(found))


@pytest.mark.parametrize("calibrated", ["own", "given", "none"])
def test_curve_and_calibration_reach_the_method(target: Target, tmp_path: Path, calibrated: str) -> None:
    """A scheduled proposal is Algorithm 1 on a file's curve, with the drafter's own temperatures or a file's."""
    folder = save_drafter(tmp_path / "drafter", dspark_config("vanilla"))
    temperatures = {"own": (2.5, 0.4, 2.5, 0.4, 2.5, 0.4), "given": (0.2,) * 6, "none": (1.0,) * 6}
    Calibration(temperatures["own"]).save(folder / "calibration.json")
    Calibration(temperatures["given"]).save(tmp_path / "given.json")
    curves = curves_of(lambda tokens: 1 + 0.03 * tokens)
    curves.save(tmp_path / "curve.json")
    choice = {"own": "", "given": f":calibration={tmp_path / 'given.json'}", "none": ":calibration=none"}[calibrated]
    variant = registry.Variant.parse(f"dspark:verify-length=scheduled:curve={tmp_path / 'curve.json'}{choice}")
    method: Any = registry.build(variant, drafter=drafters.load("dspark", str(folder), target))
    assert method.needs_costs
    equip([method], target, [1])
    assert method.costs.curves == curves
    method.costs = RoundCosts(curves)
    assert method.calibration == (None if calibrated == "none" else Calibration(temperatures[calibrated]))

    tree, block = proposal(method, target)
    whole = proposal(registry.build(registry.Variant.parse("dspark"), drafter=method.drafter), target)[0].tokens
    logits = method.confidence(block, whole[:, 0], whole[:, 1:])
    survival = {
        name: (logits / torch.tensor(values)).sigmoid().double().cumprod(1).tolist()
        for name, values in temperatures.items()
    }
    lengths = {name: admit(rows, curves.curves[1].seconds) for name, rows in survival.items()}
    assert nodes_of(tree) == lengths[calibrated]
    assert sorted(lengths.values())[0] != sorted(lengths.values())[1] != sorted(lengths.values())[2]


@pytest.mark.parametrize("verify", ["scheduled", "delayed"])
def test_costs_decide_lengths(target: Target, dspark: BlockDrafter, verify: str) -> None:
    """Where a token costs as much as a round nothing is verified; where it is free, everything is."""
    for seconds, kept in ((lambda tokens: float(tokens), 0), (lambda tokens: 1.0, 6)):
        method: Any = registry.build(registry.Variant.parse(f"dspark:verify-length={verify}"), drafter=dspark)
        method.costs = RoundCosts(curves_of(seconds))
        generations = run(target, method, requests_of([(1, 2, 3), (4, 5)]), 12)
        settled = 2 if verify == "delayed" else 0  # its first rounds know nothing yet
        for generation in generations:
            rounds = generation.rounds
            assert len(rounds) > settled
            assert [record.nodes for record in rounds[:settled]] == [6] * settled
            assert {record.nodes for record in rounds[settled:]} == {kept}


def test_delayed_lengths_when_rows_leave(target: Target, dspark: BlockDrafter) -> None:
    """The capacity of a round is that of the rows still there, by their confidences of two rounds before."""
    method: Any = registry.build(registry.Variant.parse("dspark:verify-length=delayed"), drafter=dspark)
    curves = curves_of(lambda tokens: 1 + 0.1 * tokens)
    method.costs = RoundCosts(curves)
    method.begin(target, 8, 40)
    rows, past = list(range(8)), []
    for number, kept in enumerate((8, 5, 2, 2)):
        if kept < len(rows):
            method.keep(range(1, kept + 1))
            rows = rows[1 : kept + 1]
        features = torch.cat([features_of(5, 10 * number + row) for row in rows])
        with torch.inference_mode(), drafted_blocks() as blocks:
            tree = method.propose(context_of(target, features, [5] * kept, [row + 1 for row in rows]))
        # The chain is greedy, so its tokens are those of the biased logits, which the method leaves in the block.
        whole = blocks[0].logits.argmax(-1)
        confidences = method.confidence(blocks[0], tree.tokens[:, 0], whole).sigmoid().double()
        survival = dict(zip(rows, confidences.cumprod(1).tolist(), strict=True))
        past.append(survival)
        expected = [6] * kept
        if number >= 2:
            most = capacity([past[number - 2][row] for row in rows], curves.at(kept, 0).seconds)
            assert 0 < most < 6 * kept
            expected = admit_capacity(list(survival.values()), most)
        assert nodes_of(tree) == expected


# Refusals


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(SparkbenchError) as caught:
        call()
    assert isinstance(caught.value, UsageError), str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"markov_head_type": "lstm"}, "Markov head 'lstm' of rank 4; known kinds: vanilla, gated, rnn"),
        ({"markov_rank": -1}, "has markov_rank -1, and 0 to"),
        ({"markov_rank": "4"}, "has markov_rank '4', and int is needed"),
        ({"confidence_head_with_markov": None}, "lacks confidence_head_with_markov (bool)"),
        ({"confidence_head_with_markov": 1}, "has confidence_head_with_markov 1, and bool is needed"),
        ({"markov_rank": 0}, "confidence head reads a Markov head that it lacks"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architecture Gemma4DSparkModel is not supported"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "architecture Qwen3Eagle3Model is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"mask_token_id": 97}, "mask_token_id 97 is outside the vocabulary"),
        ({"target_layer_ids": []}, "target_layer_ids is missing or impossible"),
        ({"target_layer_ids": None}, "target_layer_ids is missing or impossible"),
        ({"markov_rank": 5}, "wrong shape"),
        ({"markov_head_type": "rnn"}, "lacks markov_head.joint_proj"),
        ({"enable_confidence_head": False}, "unknown confidence_head.proj"),
        ({"confidence_head_with_markov": False}, "wrong shape for confidence_head.proj.weight"),
    ],
)
def test_config_refusals(target: Target, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = save_drafter(tmp_path, dspark_config("vanilla"))
    (folder / "config.json").write_text(json.dumps(dspark_config("vanilla") | change))
    message = refusal(lambda: drafters.load("dspark", str(folder), target))
    assert said in message
    assert str(folder) in message


def test_eagle_config(target: Target, tmp_path: Path) -> None:
    config = {key: value for key, value in dspark_config("vanilla").items() if key != "mask_token_id"}
    folder = save_drafter(tmp_path, dspark_config("vanilla"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Eagle3Model"]}))
    assert "no DFlash, DSpark or DART drafter" in refusal(lambda: drafters.load("dspark", str(folder), target))


def test_kinds(target: Target, tmp_path: Path) -> None:
    """A checkpoint of one method is refused by the other, and composites only where they make sense."""
    dspark = save_drafter(tmp_path / "dspark", dspark_config("vanilla"))
    dflash = save_drafter(tmp_path / "dflash", config_of("deepspec"))
    z_lab = save_drafter(tmp_path / "z-lab", config_of("z-lab"))
    for kind, source, said in (
        ("dflash", dspark, f"drafter {dspark}: it has a Markov head, so it is a DSpark drafter"),
        ("dspark", dflash, f"drafter {dflash}: it has no Markov head, so it is no DSpark drafter"),
        ("dspark", z_lab, f"drafter {z_lab}: it has no Markov head, so it is no DSpark drafter"),
        ("dspark", f"{dspark}+{dflash}", f"drafter {dflash}: it has no Markov head"),
        ("dflash", f"{dflash}+{dspark}", "takes no Markov head; use the method dspark"),
        ("dspark", f"{dspark}+{tmp_path / 'nowhere'}", f"drafter {tmp_path / 'nowhere'}: neither a folder nor"),
        ("dart-like", dspark, "known: dflash, dspark, dart"),
    ):
        assert said in refusal(lambda kind=kind, source=source: drafters.load(kind, str(source), target))  # type: ignore[misc]


def test_folder_with_a_plus(target: Target, tmp_path: Path) -> None:
    """A folder's own name may hold the sign that joins two."""
    folder = save_drafter(tmp_path / "a+b", dspark_config("vanilla"))
    other = save_drafter(tmp_path / "c+d", dspark_config("gated"), seed=1)
    assert drafters.load("dspark", str(folder), target).markov_head is not None
    assert drafters.load("dspark", f"{folder}+none", target).markov_head is None
    head = drafters.load("dspark", f"{folder}+{other}", target).markov_head
    assert head is not None
    assert head.kind == "gated"


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("dspark:depth=-1", "depth -1 is not allowed: 0 or above"),
        ("dspark:depth=two", "option depth=two is not allowed: a whole number"),
        ("dspark:confidence-threshold=1.5", "confidence-threshold 1.5 is not allowed: 0 to 1"),
        ("dspark:confidence-threshold=-0.1", "confidence-threshold -0.1 is not allowed: 0 to 1"),
        ("dspark:confidence-threshold=nan", "confidence-threshold nan is not allowed: 0 to 1"),
        ("dspark:verify-length=most", "option verify-length=most is not allowed: full, scheduled, delayed"),
        ("dspark:confidence-threshold=0.5:verify-length=scheduled", "exclude each other"),
        ("dspark:budget=4", "unknown option 'budget'"),
        ("sparklingtree:depth=-1", "depth -1 is not allowed: 0 or above"),
        ("sparklingtree:candidates=-1", "candidates -1 is not allowed: 0 or above"),
        ("sparklingtree:fanout=-1", "fanout -1 is not allowed: 0 or above"),
        ("sparklingtree:builder=magic", "level, reference, heap, table, beam"),
        ("sparklingtree:budget=auto:builder=beam", "exclude each other"),
        ("sparklingtree:budget=12", "option budget=12 is not allowed"),
        ("sparklingtree:shortlist=all", "union, depth"),
        ("sparklingtree:normalise=none", "candidates, full"),
        ("sparklingtree:builder=beam:widths=steep", "widths must be"),
        ("ddtree:budget=some", "option budget=some is not allowed"),
    ],
)
def test_bad_options(variant: str, said: str) -> None:
    assert said in refusal(lambda: registry.Variant.parse(variant))


def test_options_that_the_drafter_cannot_serve(target: Target, tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "shy", dspark_config("vanilla", confidence="none"))
    headless = save_drafter(tmp_path / "rnn", dspark_config("rnn"))
    cases = [
        ("dspark:confidence-threshold=0.5", str(folder), "it has no confidence head"),
        ("dspark:verify-length=scheduled", str(folder), "it has no confidence head"),
        ("dspark:verify-length=delayed", f"{headless}+none", "it has no confidence head"),
        ("sparklingtree", str(headless), "an rnn Markov head"),
        ("sparklingtree", f"{folder}+{headless}", "an rnn Markov head"),
    ]
    for variant, source, said in cases:
        drafter = drafters.load("dspark", source, target)
        parsed = registry.Variant.parse(variant)
        message = refusal(lambda parsed=parsed, drafter=drafter: registry.build(parsed, drafter=drafter, budget=8))  # type: ignore[misc]
        assert said in message
        assert source in message


@pytest.mark.parametrize("option", ["curve", "calibration"])
def test_files_that_options_name(target: Target, dspark: BlockDrafter, tmp_path: Path, option: str) -> None:
    """Missing, and broken: one line that names the file."""
    file = tmp_path / "named.json"
    method = registry.build(registry.Variant.parse(f"dspark:verify-length=delayed:{option}={file}"), drafter=dspark)
    assert str(file) in refusal(lambda: equip([method], target, [1]))
    file.write_text("{}")
    assert str(file) in refusal(lambda: equip([method], target, [1]))


def test_broken_calibration_of_a_drafter(target: Target, tmp_path: Path) -> None:
    folder = save_drafter(tmp_path, dspark_config("vanilla"))
    (folder / "calibration.json").write_text("[]")
    assert "calibration.json" in refusal(lambda: drafters.load("dspark", str(folder), target))


# Exactness: whatever is drafted, and however much of it is verified, the output is that of plain decoding.

LIMIT = 24
BUDGET = 16
MAIN = golden.document("cases/trees")["drafter"]
KINDS = {path.name: golden.config_of(path.name).get("markov_rank") for path in (golden.FOLDER / "drafters").iterdir()}
DSPARK = sorted(name for name, rank in KINDS.items() if rank)
DFLASH = sorted(name for name, rank in KINDS.items() if rank == 0)

SHORTENED = (
    "dspark:confidence-threshold=0.5",
    "dspark:verify-length=scheduled",
    "dspark:verify-length=delayed",
    "sparklingtree:budget=auto",
    "ddtree:budget=auto",
)
ARMS = [
    *(("dspark", name, "") for name in DSPARK),
    ("dspark", MAIN, "none"),
    ("dspark:depth=3", MAIN, ""),
    *((variant, DFLASH[0] if variant.startswith("ddtree") else MAIN, "") for variant in SHORTENED),
    ("sparklingtree", MAIN, ""),
    ("sparklingtree", MAIN, "none"),
    ("sparklingtree:depth=3", MAIN, ""),
    ("sparklingtree:candidates=8", MAIN, ""),
    ("sparklingtree:fanout=2", MAIN, ""),
    ("sparklingtree:builder=reference:candidates=8", MAIN, ""),
    ("sparklingtree:builder=heap:candidates=8", MAIN, ""),
    ("sparklingtree:builder=table:candidates=8", MAIN, ""),
    ("sparklingtree:builder=beam", MAIN, ""),
    ("sparklingtree:builder=beam:candidates=8:widths=geometric", MAIN, ""),
]


@pytest.fixture(scope="module")
def models() -> golden.Models:
    return golden.Models.load()


@pytest.fixture(scope="module")
def truths(models: golden.Models) -> Callable[[float], tuple[list[list[int]], list[tuple[int, ...]], tuple[int, ...]]]:
    """At a temperature: four prompts of different lengths, what AR makes of them, and stop tokens that end two rows."""

    @cache
    def made(temperature: float) -> tuple[list[list[int]], list[tuple[int, ...]], tuple[int, ...]]:
        ordered = sorted((prompt["token_ids"] for prompt in golden.PROMPTS.values()), key=len)
        prompts = [ordered[-1], ordered[0], ordered[len(ordered) // 2], ordered[0][:5]]
        sampling = Sampling(temperature)
        free = run(models.target, autoregressive(), requests_of(prompts), LIMIT, sampling=sampling)
        plain = plain_continuation(models.target, prompts[0], LIMIT, requests_of(prompts)[0].noise_key, sampling)
        assert list(free[0].output_ids) == plain
        stops = (free[0].output_ids[LIMIT // 2], free[1].output_ids[LIMIT // 3])
        cut = run(models.target, autoregressive(), requests_of(prompts), LIMIT, sampling=sampling, stops=stops)
        assert len({len(generation.output_ids) for generation in cut}) > 1
        return prompts, [generation.output_ids for generation in cut], stops

    return made


@pytest.mark.parametrize(("variant", "drafter", "head"), ARMS)
def test_output_is_that_of_plain_decoding(
    models: golden.Models, truths: Callable[..., Any], variant: str, drafter: str, head: str
) -> None:
    """At both temperatures, alone and as a batch whose rows differ in length and stop at different times."""
    method = exact_method(models, variant, drafter, head)
    drafted, deepest, accepted = set(), 0, 0
    for temperature in (0.0, 1.0):
        prompts, outputs, stops = truths(temperature)
        for rows in ([0], [0, 1, 2, 3]):
            requests = [requests_of(prompts)[row] for row in rows]
            found = run(models.target, method, requests, LIMIT, sampling=Sampling(temperature), stops=stops)
            assert [generation.output_ids for generation in found] == [outputs[row] for row in rows]
            records = [record for generation in found for record in generation.rounds]
            drafted |= {record.nodes for record in records}
            deepest = max(deepest, *(record.max_depth for record in records))
            accepted += sum(record.accepted for record in records)
    assert (len(drafted) > 1) == (variant in SHORTENED)
    assert variant in SHORTENED or (deepest == 3) == ("depth=3" in variant)
    assert accepted or drafter != MAIN


def exact_method(models: golden.Models, variant: str, drafter: str, head: str) -> Method:
    parsed = registry.Variant.parse(variant)
    budget = None if "budget=auto" in variant else BUDGET
    method = registry.build(parsed, drafter=models.drafter(drafter, head), budget=budget)
    if method.needs_costs:
        method.costs = RoundCosts(curves_of(lambda tokens: 1 + 0.05 * tokens))
    return method


@pytest.mark.parametrize("source", ["+", "dspark-b7+", "+none", "a+b+c"])
def test_two_drafters_are_joined_and_no_other_number(source: str) -> None:
    with pytest.raises(UsageError, match=r"joined as A\+B, or A\+none"):
        drafters.split_source(source)


def test_a_curve_of_another_machine_is_refused(target: Target, tmp_path: Path) -> None:
    curves = curves_of(lambda tokens: 1 + 0.03 * tokens)
    for changed, said in (
        (replace(curves, device="another"), "measured on another"),
        (replace(curves, dtype="bfloat16"), "in bfloat16"),
    ):
        changed.save(tmp_path / "curve.json")
        variant = registry.Variant.parse(f"dspark:verify-length=scheduled:curve={tmp_path / 'curve.json'}")
        folder = save_drafter(tmp_path / "drafter", dspark_config("vanilla"))
        method = registry.build(variant, drafter=drafters.load("dspark", str(folder), target))
        with pytest.raises(UsageError, match=said):
            equip([method], target, [1])


@pytest.mark.parametrize("temperatures", [3, 9])
def test_a_calibration_of_another_length_is_refused(target: Target, tmp_path: Path, temperatures: int) -> None:
    Calibration((1.0,) * temperatures).save(tmp_path / "calibration.json")
    option = f"dspark:verify-length=delayed:calibration={tmp_path / 'calibration.json'}"
    folder = save_drafter(tmp_path / "drafter", dspark_config("vanilla"))
    method = registry.build(registry.Variant.parse(option), drafter=drafters.load("dspark", str(folder), target))
    with pytest.raises(UsageError, match=rf"it has {temperatures} slots, the drafter .* has 6"):
        equip([method], target, [1])


def test_weights_that_are_no_numbers_are_refused(target: Target, tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", dspark_config("vanilla"))
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][1] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"norm\.weight holds no finite"):
        drafters.load("dspark", str(folder), target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 0}, "has block_size 0, and 1 to 256 is allowed"),
        ({"max_position_embeddings": 6}, "has max_position_embeddings 6, and 7 to"),
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps nan"),
        ({"head_dim": -1}, "has head_dim -1"),
        ({"mask_token_id": True}, "mask_token_id or target_layer_ids"),
        ({"rope_parameters": [1]}, "has rope_parameters [1], and an object is needed"),
        ({"layer_types": [[1], [1]]}, "layer_types"),
        ({"num_attention_heads": 10**12}, "has num_attention_heads 1000000000000"),
        ({"enable_confidence_head": "true"}, "has enable_confidence_head 'true'"),
    ],
)
def test_impossible_shapes(target: Target, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = save_drafter(tmp_path, dspark_config("vanilla"))
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as caught:
        drafters.load("dspark", str(folder), target)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
