"""`sparkbench train drafter` with a DART recipe: its values, what it begins with, gradients, the whole command.

Everything runs on a random Qwen3 of eight layers. What all drafters share is tested in test_train_drafter.py, and what
a slot of DART sees in test_train_dart.py.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import dart_config, save_dart
from tiny_training import save_recipe, save_target, silent

from sparkbench import cli, drafters
from sparkbench.decoding.target import Target
from sparkbench.drafters.dart import DartDrafter
from sparkbench.errors import UsageError
from sparkbench.train import conversations, drafter, features, recipe_file, samples
from sparkbench.train.anchored import Anchored, Blocks, draw_anchors
from sparkbench.train.block import trainable
from sparkbench.train.drafter_recipe import DartLoss, DartModel, PublishedRecipe
from sparkbench.train.features import CachedSequence
from sparkbench.train.loss import slot_weights
from sparkbench.train.slots import hidden_at
from sparkbench.train.start import begin
from sparkbench.train.storage import load_json, load_tensors

NAME = "qwen3-4b-dart"
LAYERS = 8
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 40, "rope_theta": 5000.0}
TINY: Mapping[str, Any] = SHAPE | {"num_anchors": 8, "init_std": 0.1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, talks.jsonl and recipe.toml: 20 steps on tiny shapes."""
    folder = tmp_path_factory.mktemp("dart")
    save_target(folder, LAYERS)
    save_recipe(folder, NAME, TINY)
    return folder


@pytest.fixture(scope="module")
def recipe(made: Path) -> PublishedRecipe:
    return recipe_file.read(made / "recipe.toml")


@pytest.fixture(scope="module")
def target(made: Path) -> Target:
    return Target.load(str(made / "target"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def sequence(made: Path, target: Target, recipe: PublishedRecipe) -> CachedSequence:
    rows, _ = conversations.read(recipe.data)
    found, _ = samples.make(target.tokenizer, rows, recipe)
    layers = begin(recipe, target).drafter.config.target_layer_ids
    return features.build(target, layers, found, made / "features", silent).read(0, target.device)


@pytest.fixture(scope="module")
def whole(made: Path, recipe: PublishedRecipe) -> dict[str, Any]:
    """The record of an uninterrupted run into made/out."""
    return drafter.train(recipe, made / "out", made / "work", device="cpu", progress=silent)


def started(recipe: PublishedRecipe, folder: Path, vocab: int, **changes: Any) -> PublishedRecipe:
    """The recipe, begun with a random published checkpoint in `folder`."""
    config = dart_config() | {"vocab_size": vocab, "draft_vocab_size": vocab} | changes
    return recipe.override(start=str(save_dart(folder, config)))


# The recipe ---------------------------------------------------------------------------


def test_the_bundled_recipe_holds_the_published_values() -> None:
    recipe = recipe_file.read(recipe_file.find(NAME))
    model, loss, training = recipe.model, recipe.loss, recipe.training
    assert isinstance(model, DartModel)
    assert isinstance(loss, DartLoss)
    assert (model.target, model.start, model.draft_length) == ("Qwen/Qwen3-4B", "", 8)
    assert (recipe.data.max_length, recipe.data.rows) == (6400, 0)
    assert (training.lr, training.betas, training.clip) == (2e-5, (0.9, 0.999), 0.5)
    assert training.steps * training.global_batch == 3 * 280_000
    assert training.optimisation.lr_at(training.steps - 1) < 1e-10
    published = 0.6 ** torch.arange(8)
    torch.testing.assert_close(slot_weights(8, loss.decay), published)
    assert loss.weights.kl == pytest.approx(float(published.sum()), rel=1e-4)
    assert (loss.weights.ce, loss.weights.l1, loss.weights.confidence) == (0, 0, 0)
    assert replace(loss, gamma=1.0).decay == float("inf")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gamma = 0.6", "decay = 4.0", "unknown key loss.decay; allowed here: kl_weight, gamma"),
        ("draft_length = 8", "block_size = 8", "unknown key model.block_size; allowed here: kind, target, start"),
        ('kind = "dart"', 'kind = "dspark"', "unknown key model.draft_length"),
        ('kind = "dart"', "kind = 3", "model.kind 3 is not allowed: dspark, dart"),
        ("[model]", "[models]", "the key model.kind is missing"),
        ("init_std = 0.02", "", "the key model.init_std is missing"),
        ("gamma = 0.6", "gamma = 1.2", "loss.gamma 1.2 is not allowed: above 0 and at most 1"),
        ("kl_weight = 2.458", "kl_weight = 0", "loss.kl_weight 0.0 is not allowed: above 0"),
        ("kv_heads = 8", "kv_heads = 0", "model.kv_heads 0 is not allowed: 1 or above"),
        ("kv_heads = 8", "kv_heads = 5", "model.heads 32 is not allowed: a multiple of model.kv_heads"),
        ("head_dim = 128", "head_dim = 9", "model.head_dim 9 is not allowed: an even number"),
        ("max_length = 6400", "max_length = 8", "data.max_length 8 is not allowed: above 8, a block"),
    ],
)
def test_a_bad_recipe_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = (recipe_file.BUNDLED / f"{NAME}.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as error:
        recipe_file.read(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# What training begins with ------------------------------------------------------------


def test_random_weights_come_from_the_seed_and_the_head_is_the_target_s(
    recipe: PublishedRecipe, target: Target
) -> None:
    first, second, other = (begin(each, target).drafter for each in (recipe, recipe, replace(recipe, seed=1)))
    assert isinstance(first, DartDrafter)
    assert (first.config.draft_length, first.config.masks) == (8, 7)
    assert first.config.target_layer_ids == (1, 3, 4)  # 1, N / 2 - 1, N - 4
    for name, weight in trainable(first).items():
        assert weight.dtype == torch.float32
        assert weight.requires_grad
        assert torch.equal(weight, trainable(second)[name])
        drawn = "norm" not in name and name != "lm_head.weight"
        assert torch.equal(weight, trainable(other)[name]) != drawn, name
    head = target.model.get_output_embeddings().weight
    assert torch.equal(first.lm_head.weight, head)
    assert first.lm_head.weight.data_ptr() != head.data_ptr()
    assert first.midlayer.self_attn.o_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert first.midlayer.mask_rep.std().item() == pytest.approx(1, rel=0.3)


def test_a_published_checkpoint_is_continued(recipe: PublishedRecipe, target: Target, tmp_path: Path) -> None:
    chosen = started(recipe, tmp_path / "start", target.vocab_size, target_layer_ids=[0, 2, 4])
    begun = begin(chosen, target)
    assert begun.drafter.config.target_layer_ids == (0, 2, 4)
    assert begun.drafter.config.draft_length == 8
    assert begun.config["draft_length"] == 7
    stored, _ = load_tensors(tmp_path / "start" / "model.safetensors")
    for name, weight in trainable(begun.drafter).items():
        assert torch.equal(weight, stored[name]), name


def test_a_start_that_does_not_fit_is_refused(recipe: PublishedRecipe, target: Target, tmp_path: Path) -> None:
    vocab = target.vocab_size
    chosen = started(recipe, tmp_path / "whole", vocab)
    assert isinstance(chosen.model, DartModel)
    other = replace(chosen, model=replace(chosen.model, intermediate_size=41))
    with pytest.raises(UsageError, match="its intermediate_size is 40, and the recipe says 41"):
        begin(other, target)
    with pytest.raises(UsageError, match=f"its head has 90 tokens .* over the target's {vocab}"):
        begin(started(recipe, tmp_path / "part", vocab, draft_vocab_size=90), target)
    with pytest.raises(UsageError, match="max_length 513 is not allowed"):
        begin(replace(recipe, data=replace(recipe.data, max_length=513)), target)


def test_the_features_are_those_of_the_published_code(target: Target, sequence: CachedSequence) -> None:
    """The inputs of layers 2, N / 2 and N - 3, in this order."""
    with torch.no_grad():
        states = target.model(sequence.ids[None], use_cache=False, output_hidden_states=True).hidden_states
    wanted = torch.cat([states[2], states[LAYERS // 2], states[LAYERS - 3]], -1)[0]
    torch.testing.assert_close(sequence.features, wanted, rtol=1e-2, atol=1e-3)


# Gradients and acceptance -------------------------------------------------------------


@pytest.mark.parametrize("part", [1, 3, None])
def test_parts_give_the_gradient_of_the_whole(
    part: int | None, target: Target, recipe: PublishedRecipe, sequence: CachedSequence
) -> None:
    trained = begin(recipe, target).drafter
    anchors = draw_anchors(sequence.mask, 24, torch.Generator().manual_seed(3))
    by_slot = slot_weights(8, recipe.loss.decay)
    value = Anchored(trained, target, "float32", part).backward(sequence, anchors, by_slot, recipe.loss.weights, 0.5)
    parts = {name: weight.grad for name, weight in trainable(trained).items()}
    trained.zero_grad(set_to_none=True)

    blocks = Blocks.at(anchors, sequence, 8)
    assert not blocks.learnt.all()
    hidden = hidden_at(trained, target, sequence.features[None], sequence.ids[None], anchors[None])[0]
    q, p = trained.head(hidden, target).softmax(-1), target.head(sequence.final[blocks.places]).softmax(-1)
    weights = 0.6 ** torch.arange(8) * blocks.learnt
    loss = 2.458 * ((p * (p / q).log()).sum(-1) * weights).sum() / weights.sum()
    (loss * 0.5).backward()
    torch.testing.assert_close(value, loss.detach())
    for name, weight in trainable(trained).items():
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0, name
        torch.testing.assert_close(parts[name], weight.grad, rtol=1e-3, atol=1e-5)


def test_chances_are_overlaps_of_distributions(
    target: Target, recipe: PublishedRecipe, sequence: CachedSequence
) -> None:
    trained = begin(recipe, target).drafter
    anchors = draw_anchors(sequence.mask, 4, torch.Generator().manual_seed(3))
    chances, learnt = Anchored(trained, target, "float32", 3).chances(sequence, anchors)
    with torch.no_grad():
        hidden = hidden_at(trained, target, sequence.features[None], sequence.ids[None], anchors[None])[0]
        plain = target.model(sequence.ids[None], use_cache=False).logits[0]
    for row, slot in ((0, 0), (1, 2), (3, 5)):
        assert learnt[row, slot]
        drafted, wanted = hidden[row, slot] @ trained.lm_head.weight.T, plain[int(anchors[row]) + slot]
        overlap = torch.minimum(drafted.softmax(0), wanted.softmax(0)).sum().item()
        assert chances[row, slot] == pytest.approx(overlap, abs=0.02)  # the cache is rounded


# The whole ----------------------------------------------------------------------------


def test_twenty_steps_teach_the_drafter(whole: dict[str, Any], made: Path) -> None:
    losses = whole["fit"]["losses"]
    assert len(load_tensors(made / "work" / drafter.STATE)[1]["losses"]) == 20
    assert losses[-1] < 0.8 * losses[0]
    held_out = whole["held_out"]
    assert held_out["trained"]["tau"] > held_out["start"]["tau"] + 0.1
    assert len(held_out["trained"]["acceptance"]) == 8
    assert load_json(made / "out" / "train.json") == json.loads(json.dumps(whole))
    assert whole["start"] is None
    assert whole["recipe"]["model"]["kind"] == "dart"


def test_the_drafter_is_in_the_published_layout(whole: dict[str, Any], made: Path, target: Target) -> None:
    config = load_json(made / "out" / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMDart"]
    assert (config["draft_length"], config["draft_vocab_size"]) == (7, target.vocab_size)
    assert not {"target_layer_ids", "shifted"} & config.keys()
    tensors, _ = load_tensors(made / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    loaded = drafters.load("dart", str(made / "out"), target)
    trained, _ = load_tensors(made / "work" / drafter.STATE)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, trained[f"weight/{name}"].bfloat16().float()), name
    assert (loaded.config.draft_length, loaded.target_ids) == (8, None)


def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    whole: dict[str, Any], made: Path, recipe: PublishedRecipe, tmp_path: Path
) -> None:
    for stop in (7, None):
        drafter.train(recipe, tmp_path / "out", tmp_path, device="cpu", progress=silent, stop_after=stop)
    (mine, facts), (wanted, wanted_facts) = (
        load_tensors(folder / drafter.STATE) for folder in (tmp_path, made / "work")
    )
    assert facts["losses"] == wanted_facts["losses"]
    assert mine.keys() == wanted.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, wanted[name]), name


def test_the_command_continues_a_checkpoint_in_reduced_precision(
    made: Path, recipe: PublishedRecipe, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = started(recipe, tmp_path / "start", target.vocab_size, target_layer_ids=[0, 2, 4]).model.start
    out = str(tmp_path / "out")
    own = ["--start", start, "--out", out, "--steps", "2", "--dtype", "bfloat16", "--device", "cpu", "--json"]
    assert cli.main(["train", "drafter", str(made / "recipe.toml"), *own]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["start"] == {"name": start, "revision": None}
    loaded = drafters.load("dart", out, target)
    assert loaded.config.target_layer_ids == (0, 2, 4)
    weights, _ = load_tensors(Path(record["work"]) / drafter.STATE)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(0 < loss < 50 for loss in record["fit"]["losses"])
