"""The block drafter: its cache against recomputation, both layouts, sliding layers, and refusals by name.

The heads of a DSpark drafter are tested in test_dspark.py.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import plain_continuation, requests_of, run, tiny_model
from probes import context_of
from safetensors.torch import load_file, save_file
from tiny_drafters import LAYOUTS, config_of, features_of, save_drafter
from torch import Tensor

from sparkbench import drafters, registry
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter, BlockSession
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.parts import rotate
from sparkbench.errors import SparkbenchError, UsageError

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.wrap(tiny_model(), name="tiny")


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter"), config_of(request.param))


@pytest.fixture
def z_lab(tmp_path: Path) -> Path:
    return save_drafter(tmp_path / "drafter", config_of("z-lab"))


def plainly(drafter: BlockDrafter, target: Target, anchor: int, features: Tensor) -> Tensor:
    """Draft logits [draft_length, V] by the formulas of the paper: no cache, one key at a time where it is clearer."""
    config = drafter.config
    start, size = features.shape[1], config.block_size
    block = torch.tensor([[anchor, *[config.mask_token_id] * (size - 1)]])
    x = drafter.embed_tokens(block) if config.own_embedding else target.model.model.embed_tokens(block)
    context = drafter.hidden_norm(drafter.fc(features))
    rope = drafter.rope(torch.arange(start + size), torch.float32)
    after = rope[0][start:], rope[1][start:]
    position = torch.arange(start + size)
    layers: list[Any] = list(drafter.layers)
    for layer, window in zip(layers, config.windows, strict=True):
        attention, h = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([context, h], 1)
        shape = (1, -1, config.heads, config.head_dim)
        queries = rotate(attention.q_norm(attention.q_proj(h).view(shape)), after)
        narrow = (1, -1, config.kv_heads, config.head_dim)
        keys = rotate(attention.k_norm(attention.k_proj(both).view(narrow)), rope)
        values = attention.v_proj(both).view(narrow)
        group = config.heads // config.kv_heads
        keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / config.head_dim**0.5
        if window is not None:
            scores = scores.masked_fill(position[start:, None] - position >= window, -torch.inf)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values).flatten(2)
        x = x + attention.o_proj(mixed)
        mlp, n = layer.mlp, layer.post_attention_layernorm(x)
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(n)) * mlp.up_proj(n))
    hidden = drafter.norm(x)[0, config.first_slot :]
    return drafter.lm_head(hidden) if config.own_embedding else target.model.lm_head(hidden)


@pytest.mark.parametrize("window", [None, 4, 9, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_equals_recomputation(target: Target, tmp_path: Path, layout: str, window: int | None) -> None:
    """Round by round on one cache, rows of different lengths: every row as if alone and from scratch."""
    drafter = drafters.load("dflash", str(save_drafter(tmp_path, config_of(layout, window))), target)
    whole = [features_of(40, seed) for seed in range(3)]
    done = [0, 0, 0]
    with torch.inference_mode():
        session = BlockSession(drafter, target, 3, 40)
        for number, counts in enumerate(([7, 7, 7], [7, 1, 12], [1, 1, 1], [6, 2, 3])):
            width = max(counts)
            rows = [whole[b][:, done[b] : done[b] + width] for b in range(3)]
            features = torch.cat([F.pad(row, (0, 0, 0, width - row.shape[1]), value=9.0) for row in rows])
            for b, count in enumerate(counts):
                features[b, count:] = 9.0  # garbage that must not matter
            anchors = [5 + number, 6, 7]
            logits = session.draft(context_of(target, features, counts, anchors)).logits
            done = [d + c for d, c in zip(done, counts, strict=True)]
            assert session.cache.host_lengths == done
            for b in range(3):
                expected = plainly(drafter, target, anchors[b], whole[b][:, : done[b]])
                torch.testing.assert_close(logits[b], expected, atol=1e-4, rtol=1e-4)
        session.keep([0, 2])
        features = torch.cat([whole[b][:, done[b] : done[b] + 2] for b in (0, 2)])
        logits = session.draft(context_of(target, features, [2, 1], [1, 2])).logits
        for place, (b, count, anchor) in enumerate(((0, 2, 1), (2, 1, 2))):
            expected = plainly(drafter, target, anchor, whole[b][:, : done[b] + count])
            torch.testing.assert_close(logits[place], expected, atol=1e-4, rtol=1e-4)


def test_layouts(target: Target, folder: Path) -> None:
    """Which slots predict, whose embedding and head are used, and what is drafted."""
    drafter = drafters.load("dflash", str(folder), target)
    z_lab = "dflash_config" in json.loads((folder / "config.json").read_text())
    assert drafter.config.draft_length == (5 if z_lab else 6)
    assert hasattr(drafter, "lm_head") == (not z_lab)
    assert (drafter.source, drafter.revision) == (str(folder), None)
    assert (drafter.config.rope_theta, drafter.config.target_layer_ids) == (5000.0, (-1, 0, 2))
    ids = torch.tensor([[3, 4]])
    same = torch.equal(drafter.embed(ids, target), target.embed(ids))
    assert same == z_lab


def test_chain_log_probs(target: Target, folder: Path) -> None:
    """The chain is greedy, and a node's score is the sum of the log-probabilities down to it."""
    drafter = drafters.load("dflash", str(folder), target)
    method = registry.build(registry.Variant.parse("dflash"), drafter=drafter)
    features = features_of(5)
    with torch.inference_mode():
        method.begin(target, 1, 20)
        tree = method.propose(context_of(target, features, [5], [7]))
        best = plainly(drafter, target, 7, features).log_softmax(-1).max(-1)
    assert tree.tokens.tolist() == [[7, *best.indices.tolist()]]
    assert tree.log_probs is not None
    torch.testing.assert_close(tree.log_probs[0, 1:], best.values.cumsum(0), atol=1e-4, rtol=0)


def test_equal_copies_are_shared(target: Target, tmp_path: Path) -> None:
    """A DeepSpec checkpoint that carries the target's own embedding and head costs no memory for them."""
    folder = save_drafter(tmp_path, config_of("deepspec"))
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = target.model.model.embed_tokens.weight.detach().clone()
    save_file(weights, folder / "model.safetensors")
    drafter = drafters.load("dflash", str(folder), target)
    assert drafter.embed_tokens.weight is target.model.model.embed_tokens.weight
    assert drafter.lm_head.weight is not target.model.lm_head.weight


@pytest.mark.parametrize("variant", ["dflash", "ddtree", "ddtree:builder=heap"])
@pytest.mark.parametrize("batch", [1, 3])
def test_random_drafters_change_no_output(target: Target, folder: Path, variant: str, batch: int) -> None:
    drafter = drafters.load("dflash", str(folder), target)
    method = registry.build(registry.Variant.parse(variant), drafter=drafter, budget=20)
    prompts = [(1, 2, 3, 4), (5,), (6, 7, 8, 9, 10, 11, 12)][:batch]
    for sampling in (Sampling(), Sampling(0.9)):
        requests = requests_of(prompts)
        generations = run(target, method, requests, 12, sampling=sampling)
        for request, generation in zip(requests, generations, strict=True):
            truth = plain_continuation(target, request.prompt_ids, 12, request.noise_key, sampling)
            assert list(generation.output_ids) == truth
            assert generation.rounds_drafted == len(generation.rounds)
            assert all(record.expected_accepted is not None for record in generation.rounds)


@pytest.mark.parametrize("variant", ["dflash", "ddtree"])
def test_drafting_stops_at_the_drafters_context(target: Target, z_lab: Path, variant: str) -> None:
    """A drafter for 48 positions with blocks of 6 drafts behind at most 42; decoding goes on without it."""
    (z_lab / "config.json").write_text(json.dumps(config_of("z-lab") | {"max_position_embeddings": 48}))
    drafter = drafters.load("dflash", str(z_lab), target)
    method = registry.build(registry.Variant.parse(variant), drafter=drafter, budget=12)
    prompts = [tuple(range(1, 57)), tuple(range(1, 39)), (5, 6)]
    truths = [plain_continuation(target, prompt, 14) for prompt in prompts]
    for rows in ([0], [1], [2], [1, 2], [0, 1, 2]):
        some = [prompts[row] for row in rows]
        for row, generation in zip(rows, run(target, method, requests_of(some), 14), strict=True):
            assert list(generation.output_ids) == truths[row]
            length, drafted = max(map(len, some)), 0
            for record in generation.rounds:
                if len(rows) == 1:
                    assert (record.nodes > 0) == (length <= 42)
                    length += record.accepted + 1
                drafted += record.nodes > 0
            assert generation.rounds_drafted == drafted
            assert (drafted == 0) == (0 in rows)


@pytest.mark.parametrize(
    ("layers", "target_layers", "ids"),
    [(5, 36, (1, 9, 17, 25, 33)), (1, 36, (18,)), (1, 7, (3,)), (2, 6, (1, 3)), (3, 12, (1, 5, 9))],
)
def test_default_feature_layers(z_lab: Path, layers: int, target_layers: int, ids: tuple[int, ...]) -> None:
    config = config_of("z-lab")
    del config["dflash_config"]["target_layer_ids"], config["layer_types"]
    config |= {"num_hidden_layers": layers, "num_target_layers": target_layers}
    (z_lab / "config.json").write_text(json.dumps(config))
    read = BlockConfig.read(Checkpoint.open(str(z_lab)))
    assert (read.target_layer_ids, read.windows) == (ids, (None,) * layers)


# Refusals


def refusal(folder: Path | str, target: Target, kind: str = "dflash") -> str:
    with pytest.raises(SparkbenchError) as caught:
        drafters.load(kind, str(folder), target)
    assert isinstance(caught.value, UsageError), str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(key: str, value: Any) -> Change:
    return lambda config: config.__setitem__(key, value)


def drop(key: str) -> Change:
    return lambda config: config.pop(key)


def inner(key: str, value: Any) -> Change:
    return lambda config: config["dflash_config"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("num_target_layers", 4), "whose number of layers is 4, not 3"),
        (put("hidden_size", 64), "whose hidden size is 64, not 32"),
        (put("vocab_size", 98), "whose vocabulary size is 98, not 97"),
        (put("rope_parameters", {"rope_type": "default"}), "lacks rope_theta"),
        (drop("rope_parameters"), "lacks rope_theta"),
        (put("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "'yarn' is not supported"),
        (put("rope_scaling", {"type": "linear", "factor": 2.0}), "'linear' is not supported"),
        (put("block_size", None), "lacks block_size"),
        (put("block_size", "16"), "has block_size '16'"),
        (put("block_size", True), "has block_size True"),
        (drop("num_hidden_layers"), "lacks num_hidden_layers"),
        (drop("max_position_embeddings"), "lacks max_position_embeddings"),
        (inner("mask_token_id", 97), "mask_token_id 97 is outside"),
        (inner("mask_token_id", -1), "mask_token_id -1 is outside"),
        (inner("mask_token_id", None), "mask_token_id or target_layer_ids"),
        (inner("target_layer_ids", [0, 3]), "target_layer_ids"),
        (inner("target_layer_ids", [-2]), "target_layer_ids"),
        (inner("target_layer_ids", "012"), "target_layer_ids"),
        (inner("target_layer_ids", 2), "target_layer_ids"),
        (put("layer_types", ["full_attention", "linear_attention"]), "linear_attention"),
        (put("layer_types", ["full_attention", "sliding_attention"]), "sliding_window"),
        (put("layer_types", ["full_attention"]), "layer_types"),
        (put("num_attention_heads", 8), "wrong shape"),
        (put("num_hidden_layers", 3), "layer_types"),
        (drop("dflash_config"), "no DFlash, DSpark or DART drafter"),
    ],
)  # fmt: skip
def test_config_refusals(target: Target, z_lab: Path, change: Change, said: str) -> None:
    config = config_of("z-lab")
    if said == "'linear' is not supported":
        del config["rope_parameters"]
    change(config)
    (z_lab / "config.json").write_text(json.dumps(config))
    message = refusal(z_lab, target)
    assert said in message
    assert str(z_lab) in message


def test_older_rope_key(target: Target, z_lab: Path) -> None:
    config = config_of("z-lab")
    del config["rope_parameters"]
    (z_lab / "config.json").write_text(json.dumps(config | {"rope_theta": 5000, "rope_scaling": None}))
    assert drafters.load("dflash", str(z_lab), target).config.rope_theta == 5000.0


@pytest.mark.parametrize("text", ["no json", "[]", "", '{"a": '])
def test_unreadable_config(target: Target, z_lab: Path, text: str) -> None:
    (z_lab / "config.json").write_text(text)
    assert "config.json" in refusal(z_lab, target)


def test_missing_files(target: Target, z_lab: Path, tmp_path: Path) -> None:
    (z_lab / "model.safetensors").rename(z_lab / "pytorch_model.bin")
    assert "no safetensors file" in refusal(z_lab, target)
    (z_lab / "config.json").unlink()
    assert "no config.json" in refusal(z_lab, target)


@pytest.mark.parametrize("size", [0, 7, 500])
def test_broken_weights(target: Target, z_lab: Path, size: int) -> None:
    weights = z_lab / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert "broken weight file model.safetensors" in refusal(z_lab, target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("fc.weight"), "lacks fc.weight"),
        (put("lm_head.weight", torch.zeros(97, 32)), "unknown lm_head.weight"),
        (put("norm.weight", torch.zeros(31)), "wrong shape for norm.weight (31,) instead of (32,)"),
        (put("markov_head.markov_w1.weight", torch.zeros(97, 4)), "unknown markov_head"),
    ],
)
def test_weight_names(target: Target, z_lab: Path, change: Change, said: str) -> None:
    weights: dict[str, Any] = dict(load_file(z_lab / "model.safetensors"))
    change(weights)
    save_file(weights, z_lab / "model.safetensors")
    assert said in refusal(z_lab, target)


def test_weights_in_several_files(target: Target, z_lab: Path) -> None:
    weights = load_file(z_lab / "model.safetensors")
    whole = drafters.load("dflash", str(z_lab), target).state_dict()
    (z_lab / "model.safetensors").unlink()
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, z_lab / f"model-{number}.safetensors")
    split = drafters.load("dflash", str(z_lab), target).state_dict()
    assert all(torch.equal(split[name], whole[name]) for name in whole)


def tokenizer_file(path: Path, words: Sequence[str]) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(str(path))


def test_tokenizer(z_lab: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(97)]
    tokenizer_file(tmp_path / "tokenizer.json", words)
    target = Target.wrap(tiny_model(), PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")), "tiny")
    shutil.copy(tmp_path / "tokenizer.json", z_lab / "tokenizer.json")
    drafters.load("dflash", str(z_lab), target)
    tokenizer_file(z_lab / "tokenizer.json", [*words[1:], words[0]])
    assert "its tokenizer is another" in refusal(z_lab, target)
    (z_lab / "tokenizer.json").write_text("no tokenizer")
    assert "tokenizer.json" in refusal(z_lab, target)


def test_unknown_kind(target: Target, z_lab: Path) -> None:
    assert "known: dflash" in refusal(z_lab, target, "medusa")
