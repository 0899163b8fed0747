"""`sparkbench train drafter`: recipe, conversations, masks, feature cache, gradients, resumption, the whole command.

Everything runs on a random Qwen3 of three layers with a tokenizer learnt here, and on a random DSpark drafter for
blocks of 7 in the DeepSpec layout.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import save_recipe, save_target, silent, talk

from sparkbench import cli, drafters, hub
from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.errors import RunError, UsageError
from sparkbench.train import conversations, drafter, features, recipe_file, samples, storage, tokenizer
from sparkbench.train.anchored import Acceptance, Anchored, Blocks, draw_anchors
from sparkbench.train.block import export, trainable
from sparkbench.train.drafter_recipe import PublishedRecipe
from sparkbench.train.features import CachedSequence, FeatureCache
from sparkbench.train.loss import BlockTargets, block_loss, slot_weights
from sparkbench.train.samples import Sample, Samples
from sparkbench.train.slots import block_hidden
from sparkbench.train.start import begin
from sparkbench.train.storage import load_json, load_tensors

NAME = "qwen3-4b-dspark-b16"
THINKING = tokenizer.CHAT_TEMPLATE.replace(
    "message['content']",
    "('<think>\n\n</think>\n\n' if loop.last and message['role'] == 'assistant' else '') + message['content']",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, start (blocks of 7), talks.jsonl and recipe.toml: 20 steps on tiny shapes."""
    folder = tmp_path_factory.mktemp("drafter")
    model, words = save_target(folder, layers=3)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "num_anchors": 512,
        "num_target_layers": 3,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "vocab_size": len(words),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "mask_token_id": words.mask_token_id,
        "target_layer_ids": [0, 1],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    built = BlockDrafter(BlockConfig.read(Checkpoint("start", folder, None, config)))
    generator = torch.Generator().manual_seed(7)
    for weight in trainable(built).values():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.05, generator=generator)
    built.embed_tokens.weight = model.get_input_embeddings().weight
    built.lm_head.weight = model.get_output_embeddings().weight
    export(built, config, folder / "start")

    start = json.dumps(str(folder / "start"))
    save_recipe(folder, NAME, {"start": start, "num_anchors": 8, "markov_rank": 8})
    return folder


@pytest.fixture(scope="module")
def recipe(made: Path) -> PublishedRecipe:
    return recipe_file.read(made / "recipe.toml")


@pytest.fixture(scope="module")
def target(made: Path) -> Target:
    return Target.load(str(made / "target"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def found(target: Target, recipe: PublishedRecipe) -> Samples:
    rows, _ = conversations.read(recipe.data)
    return samples.make(target.tokenizer, rows, recipe)[0]


@pytest.fixture(scope="module")
def whole(made: Path, recipe: PublishedRecipe) -> dict[str, Any]:
    """The record of an uninterrupted run into made/out."""
    return drafter.train(recipe, made / "out", made / "work", device="cpu", progress=silent)


# The recipe ---------------------------------------------------------------------------


def test_the_bundled_recipe_is_the_published_one() -> None:
    recipe = recipe_file.read(recipe_file.find(NAME))
    model, data, training = recipe.model, recipe.data, recipe.training
    assert (model.target, model.start) == ("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7")
    assert (model.draft_length, model.num_anchors, data.max_length, recipe.seed) == (16, 32, 768, 42)
    assert (data.repo, data.rows, data.eval_share) == ("mlabonne/open-perfectblend", 2400, 0.05)
    assert (training.steps, training.global_batch, training.betas) == (600, 32, (0.9, 0.999))
    rates = [training.optimisation.lr_at(step) for step in range(600)]
    assert rates[0] == pytest.approx(1e-4 / 18)
    assert max(rates) == rates[17] == rates[18] == 1e-4
    assert rates[-1] < 1e-8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("clip = 1.0", "clip = 1.0\nspeed = 3", "unknown key training.speed; allowed here: steps, global_batch"),
        ("[loss]", "[losses]", "unknown key losses; allowed here: seed, model, data, loss, training"),
        ("rows = 2400", "", "the key data.rows is missing"),
        ("steps = 600", "steps = 0", "training.steps 0 is not allowed: 1 or above"),
        ("steps = 600", "steps = true", "training.steps True is not allowed: a whole number"),
        ("lr = 1e-4", 'lr = "high"', "training.lr 'high' is not allowed: a number"),
        ("eval_share = 0.05", "eval_share = 1", "data.eval_share 1.0 is not allowed: above 0 and below 1"),
        ("betas = [0.9, 0.999]", "betas = [0.9]", "training.betas [0.9] is not allowed: a list of two numbers"),
        ('kind = "dspark"', "", "the key model.kind is missing"),
        ('"dspark"', '"eagle"', "model.kind 'eagle' is not allowed: dspark, dart"),
        ('"dspark"', '"dart"', "unknown key model.block_size; allowed here: kind, target, start, num_anchors, draft_"),
        ("decay = 4.0", "gamma = 0.6", "unknown key loss.gamma; allowed here: ce_weight, l1_weight"),
        ('start = "deepseek-ai/dspark_qwen3_4b_block7"', 'start = ""', "model.start '' is not allowed: a known name"),
        ('"vanilla"', '"plain"', "model.markov_kind 'plain' is not allowed: vanilla, gated, rnn"),
        ("ce_weight = 0.1", "ce_weight = -1", "loss.ce_weight -1.0 is not allowed: 0 or above"),
        ("seed = 42", "seed = 42 43", "is no TOML file"),
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


# Conversations ------------------------------------------------------------------------


def test_bad_lines_are_named_and_keep_their_place(tmp_path: Path, recipe: PublishedRecipe) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    tools = {"conversations": [{"from": "tool", "value": "x"}, *talk(1), {"from": "human", "value": "unanswered"}]}
    twice = {"messages": [good["messages"][1], *good["messages"]]}
    half = {"messages": [{"role": "user", "content": "\ud800"}, good["messages"][1]]}
    lines = [
        "{",
        "[]",
        "{}",
        json.dumps(twice),
        json.dumps(half),
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([json.dumps(good), *lines, "", json.dumps(tools), json.dumps(good)]))
    data = replace(recipe.data, source=str(path), rows=9)
    rows, origin = conversations.read(data)
    assert origin == str(path)
    assert rows[0] == tuple(good["messages"])
    assert [turn["role"] for turn in rows[8]] == ["user", "assistant"] * 2  # type: ignore[index]
    reasons = [str(row).removeprefix(f"{path}:") for row in rows[1:8]]
    assert [reason.split(":")[0] for reason in reasons] == [str(number) for number in range(2, 9)]
    for reason, word in zip(
        reasons, ("JSON", "object", "no list", "take turns", "surrogate", "nothing", "lacks"), strict=True
    ):
        assert word in reason
    with pytest.raises(UsageError, match=r"cannot read .*none"):
        conversations.read(replace(data, source=str(tmp_path / "none.jsonl")))


def test_rows_of_the_hub_are_read_file_by_file(
    tmp_path: Path, recipe: PublishedRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "snapshots" / ("0" * 40) / "data"
    folder.mkdir(parents=True)
    for number in range(3):
        talks = [talk(10 * number + row) for row in range(4)]
        table = pa.table({"source": ["x"] * 4, "conversations": talks})
        pq.write_table(table, folder / f"train-0000{number}.parquet")
    fetched: list[str] = []

    def download(repo: str, file: str, revision: str) -> Path:
        fetched.append(file)
        return folder.parent / file

    monkeypatch.setattr(hub, "download", download)
    files = [f"data/train-0000{number}.parquet" for number in (2, 0, 1)]
    data = replace(recipe.data, source="hub", rows=6)
    rows, origin = conversations.read(data, lambda repo, revision: ["README.md", "data/test-0.parquet", *files])
    assert origin == f"{data.repo}@{'0' * 40}"
    answers = [row[1]["content"] for row in rows if not isinstance(row, str)]
    assert answers == [talk(number)[1]["value"] for number in (0, 1, 2, 3, 10, 11)]
    assert set(fetched) == {"data/train-00000.parquet", "data/train-00001.parquet"}
    with pytest.raises(RunError, match="no parquet file of the split train"):
        conversations.read(data, lambda repo, revision: ["README.md"])


def test_the_split_holds_out_what_the_published_one_does() -> None:
    train, held_out = conversations.split(2400, 0.05, 42)
    assert (len(train), len(held_out)) == (2280, 120)
    assert sorted(train + held_out) == list(range(2400))
    assert conversations.split(10, 0.25, 42) == ([7, 3, 2, 4, 9, 1, 8], [5, 6, 0])


# Samples ------------------------------------------------------------------------------


def masked(sample: Sample, words: Any) -> list[str]:
    """The texts of the runs of the mask."""
    runs: list[list[int]] = []
    for place, (token, inside) in enumerate(zip(sample.ids.tolist(), sample.mask.tolist(), strict=True)):
        if inside and place and sample.mask[place - 1]:
            runs[-1].append(token)
        elif inside:
            runs.append([token])
    return [words.decode(run) for run in runs]


@pytest.mark.parametrize("template", [tokenizer.CHAT_TEMPLATE, THINKING])
def test_the_mask_covers_answers_and_their_ends(
    template: str, target: Target, recipe: PublishedRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = target.tokenizer
    monkeypatch.setattr(words, "chat_template", template)
    rows, _ = conversations.read(recipe.data)
    recipe = replace(recipe, data=replace(recipe.data, max_length=400))
    first = samples.make(words, rows, recipe)[0].train[0]
    row = rows[conversations.split(len(rows), recipe.data.eval_share, recipe.seed)[0][0]]
    one, two = (turn["content"] for turn in row if turn["role"] == "assistant")  # type: ignore[index]
    thought = "<think>\n\n</think>\n\n" if template == THINKING else ""
    assert masked(first, words) == [f"{one}<|im_end|>\n", f"{thought}{two}<|im_end|>\n"]
    assert words.decode(first.ids.tolist()).startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")


def test_samples_are_cut_and_dropped_by_the_recipe(target: Target, recipe: PublishedRecipe) -> None:
    words = target.tokenizer
    ask = {"role": "user", "content": "Count."}

    def answered(text: str, *before: dict[str, str]) -> tuple[dict[str, str], ...]:
        return (*before, ask, {"role": "assistant", "content": text})

    system = {"role": "system", "content": "Be brief."}
    long = "one two three four five six seven " * 30
    rows: list[conversations.Conversation | str] = [answered(long)] * 40
    rows += (
        [answered(long, system)] * 8 + [answered("short")] * 9 + [answered(long + "<|im_end|>")] * 7 + ["2: bad"] * 6
    )
    found, remarks = samples.make(words, rows, recipe)
    assert remarks == ["2: bad"] * 6
    assert found.dropped == {
        "not a conversation": 6,
        "fewer than 32 tokens of answers": 9,
        "a message holds a control token": 7,
    }
    assert len(found.all) == 48
    assert {len(sample.ids) for sample in found.all} == {recipe.data.max_length}
    briefs = [words.decode(sample.ids.tolist()).startswith("<|im_start|>system\nBe brief.") for sample in found.all]
    assert sum(briefs) == 8
    with pytest.raises(UsageError, match=r"no conversation is left to train on .*30 rows: fewer than 32 tokens"):
        samples.make(words, [answered("short")] * 30, recipe)
    bare = SimpleNamespace(chat_template=None)
    with pytest.raises(UsageError, match="no chat template"):
        samples.make(bare, rows, recipe)


@settings(max_examples=60, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=3, max_size=30), length=st.integers(1, 9), count=st.integers(1, 6))
def test_anchors_and_slots_stay_inside_answers(mask: list[bool], length: int, count: int) -> None:
    flags = torch.tensor(mask)
    possible = [i for i in range(1, len(mask) - 1) if mask[i] and mask[i + 1]]
    anchors = draw_anchors(flags, count, torch.Generator().manual_seed(1))
    assert len(anchors) == min(count, len(possible))
    assert set(anchors.tolist()) <= set(possible)
    assert anchors.tolist() == sorted(set(anchors.tolist()))
    ids = torch.arange(100, 100 + len(mask))
    blocks = Blocks.at(anchors, CachedSequence(ids, flags, ids, ids), length)
    for row, anchor in enumerate(anchors.tolist()):
        for slot in range(length):
            reach = mask[anchor + 1 : anchor + slot + 2]
            learnt = len(reach) == slot + 1 and all(reach)
            assert blocks.learnt[row, slot] == learnt
            if learnt:
                assert blocks.previous[row, slot] == 100 + anchor + slot
                assert blocks.labels[row, slot] == 101 + anchor + slot


# The feature cache --------------------------------------------------------------------


def build(target: Target, found: Samples, folder: Path, lines: list[str] | None = None) -> FeatureCache:
    return features.build(target, (0, 1), found, folder, silent if lines is None else lines.append)


def test_the_cache_holds_what_the_target_says(
    target: Target, found: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_BYTES", 20_000)
    lines: list[str] = []
    cache = build(target, found, tmp_path, lines)
    per_token = features.bytes_per_token(32, 2)
    tokens = sum(len(sample.ids) for sample in found.all)
    assert per_token == 2 * 3 * 32 + 5
    assert f"{tokens:,} tokens of {per_token} bytes" in lines[0]
    assert load_json(tmp_path / "manifest.json")["bytes"] == tokens * per_token
    assert len(list(tmp_path.glob("*.safetensors"))) == len(cache.shards) > 3
    for index in (0, len(found.all) - 1):
        ids = found.all[index].ids.long()
        session = target.session(1, len(ids), (0, 1, 2))
        wanted = session.prefill([ids.tolist()]).features
        session.close()
        assert wanted is not None
        sequence = cache.read(index, target.device)
        assert torch.equal(sequence.ids, ids)
        assert torch.equal(sequence.mask, found.all[index].mask)
        got = torch.cat([sequence.features, sequence.final], 1)
        torch.testing.assert_close(got, wanted[0], rtol=1e-2, atol=1e-3)


def test_a_cache_is_continued_reused_and_refused(
    target: Target, found: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_BYTES", 20_000)
    saved = storage.save_tensors

    def cut(path: Path, *rest: Any) -> None:
        if path.name == features.shard_name(2):
            raise KeyboardInterrupt
        saved(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(features, "save_tensors", cut)
        with pytest.raises(KeyboardInterrupt):
            build(target, found, tmp_path)
    lines: list[str] = []
    cache = build(target, found, tmp_path, lines)
    assert f"; 2 of {len(cache.shards)} shards are there" in lines[0]

    files = sorted(tmp_path.glob("*.safetensors"))
    before = [file.stat().st_mtime_ns for file in files]
    lines.clear()
    assert build(target, found, tmp_path, lines).shards == cache.shards
    assert len(lines) == 1
    assert [file.stat().st_mtime_ns for file in files] == before

    whole, _ = load_tensors(files[1])
    files[1].rename(tmp_path / "whole")  # which the tensors still lie in
    files[1].write_bytes((tmp_path / "whole").read_bytes()[:-100])
    lines.clear()
    build(target, found, tmp_path, lines)
    assert "is damaged or foreign" in lines[0]
    again, _ = load_tensors(files[1])
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)

    fewer = Samples(found.train[1:], found.held_out, {})
    with pytest.raises(UsageError, match="another target or of other conversations"):
        build(target, fewer, tmp_path)
    other = Target.wrap(tiny_model(seed=1, vocab=target.vocab_size), target.tokenizer, target.name)
    with pytest.raises(UsageError, match="another target or of other conversations"):
        build(other, found, tmp_path)


def test_a_full_disk_is_told_before_work(
    target: Target, found: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(RunError, match=r"the features need 0\.00 GB and .* has 0\.00 GB free"):
        build(target, found, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


# Gradients and acceptance -------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(target: Target, found: Samples, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return build(target, found, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("part", [1, 3, None])
def test_parts_give_the_gradient_of_the_whole(
    part: int | None, target: Target, recipe: PublishedRecipe, cache: FeatureCache
) -> None:
    trained = begin(recipe, target).drafter
    assert isinstance(trained, BlockDrafter)
    sequence = cache.read(0, target.device)
    anchors = draw_anchors(sequence.mask, 8, torch.Generator().manual_seed(3))
    by_slot = slot_weights(16, recipe.loss.decay)
    value = Anchored(trained, target, "float32", part).backward(sequence, anchors, by_slot, recipe.loss.weights, 0.5)
    parts = {name: weight.grad for name, weight in trainable(trained).items()}
    trained.zero_grad(set_to_none=True)

    blocks = Blocks.at(anchors, sequence, 16)
    assert not blocks.learnt.all()
    hidden = block_hidden(trained, target, sequence.features[None], sequence.ids[None], anchors[None])[0]
    wanted = target.head(sequence.final[blocks.places])
    targets = BlockTargets(blocks.previous, blocks.labels, by_slot * blocks.learnt, wanted)
    loss = block_loss(trained, target, hidden, targets, recipe.loss.weights)
    (loss * 0.5).backward()
    torch.testing.assert_close(value, loss.detach())
    for name, weight in trainable(trained).items():
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0, name
        torch.testing.assert_close(parts[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_chances_are_overlaps_of_distributions(target: Target, recipe: PublishedRecipe, cache: FeatureCache) -> None:
    trained = begin(recipe, target).drafter
    assert isinstance(trained, BlockDrafter)
    sequence = cache.read(1, target.device)
    anchors = draw_anchors(sequence.mask, 4, torch.Generator().manual_seed(3))
    chances, learnt = Anchored(trained, target, "float32", 3).chances(sequence, anchors)
    with torch.no_grad():
        hidden = block_hidden(trained, target, sequence.features[None], sequence.ids[None], anchors[None])[0]
        plain = target.model(sequence.ids[None], use_cache=False).logits[0]
    assert trained.markov_head is not None
    w1, w2 = trained.markov_head.markov_w1.weight, trained.markov_head.markov_w2.weight
    for row, slot in ((0, 0), (1, 2), (3, 5)):
        assert learnt[row, slot]
        place = int(anchors[row]) + slot
        logits = hidden[row, slot] @ trained.lm_head.weight.T + w2 @ w1[sequence.ids[place]]
        overlap = torch.minimum(logits.softmax(0), plain[place].softmax(0)).sum().item()
        assert chances[row, slot] == pytest.approx(overlap, abs=0.02)  # the cache is rounded


def test_tau_is_one_plus_the_products() -> None:
    one = torch.tensor([[0.5, 0.5, 0.9], [1.0, 0.2, 0.9]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    two = torch.tensor([[0.6, 1.0, 0.9]]), torch.tensor([[1, 1, 0]]).bool()
    found = Acceptance.of([one, two])
    assert found.acceptance == pytest.approx((0.7, 0.75, 0.0))
    assert found.survival == pytest.approx((0.7, (0.25 + 0.6) / 2, 0.0))
    assert found.blocks == (3, 2, 0)
    assert found.tau == pytest.approx(1 + 0.7 + 0.425)


# The whole ----------------------------------------------------------------------------


def test_twenty_steps_teach_the_drafter(whole: dict[str, Any], made: Path, target: Target) -> None:
    losses = whole["fit"]["losses"]
    assert len(load_tensors(made / "work" / drafter.STATE)[1]["losses"]) == 20
    assert losses[-1] < losses[0] - 0.3
    held_out = whole["held_out"]
    assert held_out["trained"]["tau"] > held_out["start"]["tau"] + 0.3
    assert load_json(made / "out" / "train.json") == json.loads(json.dumps(whole))
    assert whole["data"]["trained"] + whole["data"]["held_out"] == 24
    assert whole["recipe"]["training"]["steps"] == 20


def test_the_drafter_is_in_the_published_layout(whole: dict[str, Any], made: Path, target: Target) -> None:
    loaded = drafters.load("dspark", str(made / "out"), target)
    assert loaded.config.block_size == loaded.config.draft_length == 16
    assert loaded.lm_head.weight is not None
    (new, _), (old, _) = (
        load_tensors(made / "out" / "model.safetensors"),
        load_tensors(made / "start" / "model.safetensors"),
    )
    assert new.keys() == old.keys()
    assert {tensor.dtype for tensor in new.values()} == {torch.bfloat16}
    still = {name for name in new if torch.equal(new[name], old[name])}
    assert still == {"embed_tokens.weight", "lm_head.weight"}
    config, before = load_json(made / "out" / "config.json"), load_json(made / "start" / "config.json")
    changed = {key for key in config if config[key] != before.get(key)}
    assert changed == {"block_size", "num_anchors", "dtype"}


def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    whole: dict[str, Any], made: Path, recipe: PublishedRecipe, tmp_path: Path
) -> None:
    for stop in (7, 12, None):
        drafter.train(recipe, tmp_path / "out", tmp_path, device="cpu", progress=silent, stop_after=stop)
    (mine, facts), (wanted, wanted_facts) = (
        load_tensors(tmp_path / drafter.STATE),
        load_tensors(made / "work" / drafter.STATE),
    )
    assert facts["losses"] == wanted_facts["losses"]
    assert mine.keys() == wanted.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, wanted[name]), name
    longer = recipe.override(steps=21)
    with pytest.raises(RunError, match="another recipe"):
        drafter.train(longer, tmp_path / "out", tmp_path, device="cpu", progress=silent)


def test_reduced_precision_trains_float32_weights(made: Path, recipe: PublishedRecipe, tmp_path: Path) -> None:
    rounded = recipe.override(steps=2, precision="bfloat16")
    drafter.train(rounded, tmp_path / "out", tmp_path, device="cpu", progress=silent)
    tensors, facts = load_tensors(tmp_path / drafter.STATE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    weights = [tensor for name, tensor in tensors.items() if name.startswith("weight/")]
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    assert all(0 < loss < 20 for loss in facts["losses"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_rank": 9}, "its markov_rank is 8, and the recipe says 9"),
        ({"markov_kind": "gated"}, "its markov_kind is vanilla, and the recipe says gated"),
        ({"confidence_with_markov": False}, "its confidence_with_markov is True"),
    ],
)
def test_a_start_with_other_heads_is_refused(
    change: dict[str, Any], message: str, target: Target, recipe: PublishedRecipe
) -> None:
    with pytest.raises(UsageError, match=message):
        begin(replace(recipe, model=replace(recipe.model, **change)), target)
    with pytest.raises(UsageError, match="max_length 513 is not allowed"):
        begin(replace(recipe, data=replace(recipe.data, max_length=513)), target)


# The command --------------------------------------------------------------------------


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_command_trains_and_continues(
    invoke: Callable[..., tuple[int, str, str]], made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "b16"
    arguments = ["train", "drafter", str(made / "recipe.toml"), "--out", str(out), "--steps", "2", "--device", "cpu"]
    code, shown, told = invoke(*arguments)
    assert code == 0
    assert "tau" in shown
    assert f"the drafter is in {out}" in shown
    assert "GB; 0 of 1 shards are there" in told
    first, _ = load_tensors(out / "model.safetensors")
    code, shown, told = invoke(*arguments, "--json")
    assert code == 0
    assert json.loads(shown)["work"] == str(tmp_path / "b16-work")
    assert "1 of 1 shards are there" in told
    assert "continues at step 2" in told
    second, _ = load_tensors(out / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen4"], f"unknown recipe 'qwen4'; allowed: a file FILE.toml, or one of qwen3-4b-dart, {NAME}"),
        (["none.toml"], "unknown recipe 'none.toml'"),
        ([NAME, "--steps", "0"], "training.steps 0 is not allowed"),
        ([NAME, "--data", "rows.csv"], "data.source 'rows.csv' is not allowed: hub or a file FILE.jsonl"),
        ([NAME, "--data", "none.jsonl"], "cannot read none.jsonl"),
        ([NAME, "--dtype", "int8"], "training.precision 'int8' is not allowed: bfloat16, float32"),
        ([NAME, "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_a_bad_command_is_one_line(
    invoke: Callable[..., tuple[int, str, str]], arguments: Sequence[str], message: str
) -> None:
    code, shown, told = invoke("train", "drafter", *arguments)
    assert (code, shown) == (2, "")
    assert message in told
    assert told.count("\n") == 1


def test_an_interruption_says_where_work_is_kept(
    invoke: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "train", interrupt)
    code, shown, told = invoke("train", "drafter", NAME, "--out", str(tmp_path / "b16"))
    assert (code, shown) == (130, "")
    assert f"what is done is kept in {tmp_path / 'b16-work'}" in told
    (tmp_path / "file").touch()
    code, shown, told = invoke("train", "drafter", NAME, "--out", str(tmp_path / "file"))
    assert (code, shown) == (2, "")
    assert "file is a file, and a folder is needed" in told
