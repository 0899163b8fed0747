"""The target: trees against paths on every family, planted faults, loading and refusals."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAMILIES, WINDOWED, autoregressive, requests_of, run, tiny_model, tiny_target
from torch import Tensor

from sparkbench.decoding import masks, verifier
from sparkbench.decoding.attention import GROUPED_SDPA
from sparkbench.decoding.cache import RowCache
from sparkbench.decoding.layout import store_by_columns
from sparkbench.decoding.target import Target, resolve_device, resolve_dtype
from sparkbench.decoding.tree import DraftTree
from sparkbench.decoding.verifier import Packed, Verifier
from sparkbench.errors import SparkbenchError, UsageError

TREES = {
    "branches": [-1, 0, 1, 0, 3, 2, 3],
    "chain": [-1, 0, 1, 2],
    "root": [-1],
    "width 1": [-1, 0, 1, 2, 3, 4, 5, 6, 7],
    "depth 1": [-1, 0, 0, 0, 0, 0],
    "budget 64": [-1, *(max(0, node // 2 - node % 3) for node in range(1, 65))],
    "shuffled": [-1, 0, 0, 1, 2, 1, 3],
}


def tree_of(parents: list[int], batch: int = 1, vocab: int = 97) -> DraftTree:
    """Trees of one shape with random tokens; nodes 1 and 4 share one, as in a tree that repeats a token."""
    tokens = torch.randint(vocab, (batch, len(parents)), generator=torch.Generator().manual_seed(len(parents)))
    if len(parents) > 4:
        tokens[:, 4] = tokens[:, 1]
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    shape = batch, len(parents)
    return DraftTree(
        tokens,
        torch.tensor(parents).expand(shape),
        torch.tensor(depths).expand(shape),
        torch.ones(shape, dtype=torch.bool),
        max(depths),
    )


def prefix(length: int, vocab: int = 97) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.inference_mode()
def path_logits(target: Target, prompt: list[int], tree: DraftTree, row: int = 0) -> Tensor:
    """[N, V]: for each node, a plain forward over the prompt and its path."""
    rows = []
    for node in range(tree.width):
        path: list[int] = []
        above = node
        while above >= 0:
            path.insert(0, above)
            above = int(tree.parents[row, above])
        rows.append([*prompt, *tree.tokens[row, path].tolist()])
    longest = max(map(len, rows))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])  # a causal model never sees the padding
    logits = target.model(padded, use_cache=False).logits
    return logits[torch.arange(len(rows)), torch.tensor([len(ids) - 1 for ids in rows])]


@torch.inference_mode()
def tree_logits(target: Target, prompts: list[list[int]], tree: DraftTree) -> Tensor:
    session = target.session(len(prompts), 1)
    session.prefill(prompts)
    return session.verify(session.pack(tree)).logits


def agrees(target: Target, prompts: list[list[int]], tree: DraftTree) -> list[int]:
    """The nodes of row 0 whose logits are not those of their path."""
    found = tree_logits(target, prompts, tree)
    expected = path_logits(target, prompts[0], tree)
    differs = (found[0] - expected).abs().amax(1) > 1e-3
    differs |= found[0].argmax(1) != expected.argmax(1)
    return differs.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_equal_paths(family: str, shape: str) -> None:
    """With windows of 4 and 6 where there are any; alone, and in batches with prompts of other lengths."""
    for window in (4, 6) if family in WINDOWED else (6,):
        target = tiny_target(family, window=window)
        prompts = [prefix(10), prefix(3), prefix(17)]
        tree = tree_of(TREES[shape], batch=3)
        alone = tree_of(TREES[shape])
        assert agrees(target, [prefix(7)], alone) == []
        found = tree_logits(target, prompts, tree)
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(found[row], path_logits(target, prompt, tree, row), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_cuts_from_the_first_position_on(family: str) -> None:
    """Prefixes around the window's size, where the mask comes into use."""
    target = tiny_target(family, window=5)
    for length in range(1, 8):
        for shape in ("root", "chain", "branches"):
            assert agrees(target, [prefix(length)], tree_of(TREES[shape])) == [], (length, shape)


def plain_causal(self: DraftTree) -> Tensor:
    return torch.ones(self.width, self.width, dtype=torch.bool).tril().expand(self.batch, -1, -1)


def flattened_positions(self: Verifier, tree: DraftTree) -> Packed:
    self.cache.open(tree.width)
    positions = self.cache.lengths[:, None] + torch.arange(tree.width)
    return Packed(tree.tokens, positions, self._writer.masks(tree, self.cache))


VISIBLE = masks.visible


def no_window(tree: DraftTree, cache: RowCache, window: int | None) -> Tensor:
    return VISIBLE(tree, cache, None)


def flattened_window(tree: DraftTree, cache: RowCache, window: int | None) -> Tensor:
    places = cache.lengths[:, None] + torch.arange(tree.width)
    slots = torch.arange(cache.span)
    seen = VISIBLE(tree, cache, None)
    return seen if window is None else seen & (places[:, :, None] - slots < window)


FAULTS: dict[str, tuple[object, str, object, list[int] | None]] = {
    "flattened positions": (Verifier, "pack", flattened_positions, [4, 5, 6]),
    "plain causal mask": (DraftTree, "visibility", property(plain_causal), [3, 4, 6]),
    "no window": (masks, "visible", no_window, None),
    "flattened window": (masks, "visible", flattened_window, None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_are_seen(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load refuses a target that is computed wrongly, at the nodes where it must."""
    owner, name, wrong, nodes = FAULTS[fault]
    if "window" in fault and family not in WINDOWED:
        pytest.skip("the family has no window")
    target = tiny_target(family, window=4)
    target.check_trees()
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(UsageError, match=f"target tiny {family}.*draft tree differently"):
        target.check_trees()
    if family == "qwen3":
        differing = agrees(target, [prefix(7)], tree_of(TREES["branches"]))
        assert nodes is not None
        assert set(differing) >= set(nodes) - {3}
        assert set(differing) <= {3, 4, 5, 6}
        assert agrees(target, [prefix(7)], tree_of(TREES["chain"])) == [], "a chain cannot show this fault"


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_a_plain_forward(family: str) -> None:
    """Rows of different lengths, longer than the window."""
    target = tiny_target(family, window=4)
    prompts = [prefix(9), prefix(1), prefix(13)]
    layers = (-1, 0, 2)
    session = target.session(3, 1, layers)
    with torch.inference_mode():
        verified = session.prefill(prompts)
        assert verified.features is not None
        for row, prompt in enumerate(prompts):
            plain = target.model(torch.tensor([prompt]), output_hidden_states=True)
            torch.testing.assert_close(verified.logits[row, 0], plain.logits[0, -1], atol=1e-3, rtol=0)
            states = torch.cat([plain.hidden_states[layer + 1][0] for layer in layers], -1)
            torch.testing.assert_close(verified.features[row, : len(prompt)], states, atol=1e-3, rtol=1e-3)
    session.close()
    assert session.cache.host_lengths == [9, 1, 13]
    assert session.forwards == 1


# Loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refusal(folder: Path | str, **options: Any) -> str:
    with pytest.raises(SparkbenchError) as caught:
        Target.load(str(folder), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert isinstance(caught.value, UsageError), message
    return message


def test_loads(saved: Path) -> None:
    target = Target.load(str(saved), device="cpu")
    model = tiny_model()
    assert (target.vocab_size, target.num_layers, target.hidden_size, target.max_context) == (97, 3, 32, 512)
    assert (target.dtype, target.device, target.revision) == (torch.float32, torch.device("cpu"), None)
    assert (target.name, target.tokenizer, target.stop_ids) == (str(saved), None, frozenset())
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        hidden = target.decoder(ids).last_hidden_state
        torch.testing.assert_close(target.head(hidden), model(ids).logits, atol=1e-5, rtol=0)
        assert torch.equal(target.embed(ids), model.model.embed_tokens(ids))
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_bfloat16(saved: Path) -> None:
    target = Target.load(str(saved), dtype="bfloat16", device="cpu")
    assert target.dtype == torch.bfloat16
    (generation,) = run(target, autoregressive(), requests_of([(1, 2)]), 4)
    assert len(generation.output_ids) == 4


def test_gemma_embeds_as_its_first_layer_sees(tmp_path: Path) -> None:
    target = tiny_target("gemma3")
    ids = torch.tensor([[4, 5]])
    with torch.inference_mode():
        states = target.model(ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(target.embed(ids), states[0])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(copied: Path, name: str) -> None:
    (copied / name).unlink()
    message = refusal(copied)
    assert str(copied) in message


def test_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SparkbenchError, match="absent"):
        Target.load(str(tmp_path / "absent"))


@pytest.mark.parametrize("cut", [0, 5, 1000])
def test_broken_weights(copied: Path, cut: int) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    assert "weight" in refusal(copied)


def test_weights_of_another_shape(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert "mlp" in refusal(copied)


def test_lacking_weights(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    more = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (copied / "config.json").write_text(json.dumps(config | more))
    assert "layers.3" in refusal(copied)


def test_pickle_is_never_read(copied: Path) -> None:
    """A folder with weights as a pickle only; opening it would run code."""
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    refusal(copied)


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"model_type": "nonsense"}'])
def test_broken_config(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    refusal(copied)


def test_remote_code_is_not_run(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    mapped = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (copied / "evil.py").write_text("raise SystemExit('remote code ran')")
    (copied / "config.json").write_text(json.dumps(config | {"auto_map": mapped, "model_type": "evil"}))
    refusal(copied)


def test_unsupported_layers() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UsageError, match=r"linear_attention.*supported are full_attention"):
        Target.wrap(model)


def test_a_model_that_is_no_plain_decoder() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    with pytest.raises(UsageError, match="GPT2"):
        Target.wrap(model, name="old")


@pytest.mark.parametrize("dtype", ["float16", "int8", "", "Float32"])
def test_unknown_dtype(saved: Path, dtype: str) -> None:
    assert "allowed: auto, float32, bfloat16" in refusal(saved, dtype=dtype)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "cpu:", "cuda:", "cuda:99"])
def test_unknown_device(saved: Path, device: str) -> None:
    message = refusal(saved, device=device)
    assert "allowed: auto, cpu, cuda" in message or "does not exist" in message


def test_automatic_choices() -> None:
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


def test_stop_ids_are_of_all_three_owners() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [3, 4]
    model.config.eos_token_id = 5
    assert Target.wrap(model, SimpleNamespace(eos_token_id=6)).stop_ids == {3, 4, 5, 6}
    assert Target.wrap(tiny_model(), SimpleNamespace(eos_token_id=None)).stop_ids == frozenset()


def test_taps_take_the_last_layer_after_the_norm() -> None:
    target = tiny_target()
    taps = verifier.FeatureTaps(target, (2, 2, -1))
    with torch.inference_mode():
        states = target.model(torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states
        features = taps.take()
    taps.remove()
    assert features is not None
    assert torch.equal(features, torch.cat([states[3], states[3], states[0]], -1))


def test_linear_weights_lie_by_columns_on_a_cpu(tmp_path: Path) -> None:
    """Only strides change: the same values, and a head that shares its weight with the embedding is left alone."""
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    loaded = Target.load(str(tmp_path)).model
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert all(part.weight.t().is_contiguous() for part in loaded.modules() if isinstance(part, torch.nn.Linear))
    loaded.lm_head.weight = loaded.model.embed_tokens.weight
    store_by_columns(loaded)
    assert loaded.model.embed_tokens.weight.is_contiguous()


@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_attention_equals_the_stock_one(family: str, tmp_path: Path) -> None:
    """What a CPU target is loaded with gives the stock SDPA's logits, in `generate`'s masks and in a tree's."""
    tiny_model(family).save_pretrained(tmp_path)
    ours, stock = Target.load(str(tmp_path)), Target.wrap(tiny_model(family))
    assert ours.model.config._attn_implementation == GROUPED_SDPA
    ids = torch.arange(2, 32)[None].expand(2, -1)
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    with torch.inference_mode():
        for mask in (None, padding):
            found, wanted = (t.model(ids, attention_mask=mask).logits[:, 5:] for t in (ours, stock))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
