"""The DART drafter and its method: the forward by its formulas, checkpoints, history, composites, and exact outputs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import autoregressive, requests_of, tiny_model
from golden_dart import index_of
from ngram_helpers import count
from probes import context_of
from safetensors.torch import load_file, save_file
from tiny_drafters import DART_LAYERS, config_of, dart_config, dspark_config, save_dart, save_drafter
from torch import Tensor

from sparkbench import drafters, models, registry
from sparkbench.decoding.loop import DecodeConfig, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.dart import DartDrafter
from sparkbench.errors import UsageError
from sparkbench.ngram.index import NgramIndex
from sparkbench.sweep import Arm

VOCAB, HIDDEN, HEADS, KV, DIM = 97, 32, 4, 2, 8


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.wrap(tiny_model(layers=DART_LAYERS), name="tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_dart(tmp_path / "dart", dart_config())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of x [..., D] at a position, pair by pair."""
    out = x.clone()
    for j in range(DIM // 2):
        angle = torch.tensor(position * 5000.0 ** (-2 * j / DIM))
        first, second = x[..., j], x[..., j + DIM // 2]
        out[..., j] = first * angle.cos() - second * angle.sin()
        out[..., j + DIM // 2] = second * angle.cos() + first * angle.sin()
    return out


def plainly(folder: Path, target: Target, features: Tensor, following: Sequence[int], masks: int, norms: int) -> Tensor:
    """Draft logits [1 + masks, V'] by the formulas: features [n, 3H], and the tokens one after each of them."""
    w = load_file(folder / "model.safetensors")
    layer = {name.removeprefix("midlayer."): weight for name, weight in w.items()}
    embedded = target.embed(torch.tensor(following))
    g = features @ w["fc.weight"].T
    u = torch.cat([norm(embedded, layer["input_layernorm.weight"]), norm(g, layer["hidden_norm.weight"])], -1)
    u = torch.cat([u, layer["mask_rep"].expand(masks, -1)])
    r = torch.cat([g, layer["mask_rep"][:HIDDEN].expand(masks, -1)])
    out = []
    queries, keys, values = (layer[f"self_attn.{name}_proj.weight"].view(-1, DIM, 2 * HIDDEN) for name in "qkv")
    k = [torch.stack([turned(key @ u[j], j) for j in range(len(u))]) for key in keys]
    v = [u @ value.T for value in values]
    for i in range(len(features) - 1, len(u)):
        mixed = []
        for head in range(HEADS):
            group, seen = head // (HEADS // KV), slice(i + 1)
            q = turned(queries[head] @ u[i], i)
            mixed.append((k[group][seen] @ q / DIM**0.5).softmax(0) @ v[group][seen])
        h = r[i] + layer["self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = norm(h, layer["post_attention_layernorm.weight"])
        gate, up = layer["mlp.gate_proj.weight"] @ y, layer["mlp.up_proj.weight"] @ y
        h = h + layer["mlp.down_proj.weight"] @ (F.silu(gate) * up)
        for _ in range(norms):
            h = norm(h, w["norm.weight"])
        out.append(w["lm_head.weight"] @ h)
    return torch.stack(out)


def features_of(positions: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features [positions, 3H] and the tokens of these positions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(positions, 3 * HIDDEN, generator=generator), torch.randint(
        VOCAB, (positions,), generator=generator
    )


@pytest.mark.parametrize("norms", [2, 1])
@pytest.mark.parametrize("shifted", [True, False])
def test_cache_equals_recomputation(target: Target, tmp_path: Path, shifted: bool, norms: int) -> None:
    """Round by round on one cache, rows of different lengths and garbage behind them, past max_position_embeddings."""
    folder = save_dart(tmp_path, dart_config() | {"shifted": shifted})
    drafter = drafters.load("dart", str(folder), target)
    whole = [features_of(90, seed) for seed in range(3)]
    done = [0, 0, 0]
    with torch.inference_mode():
        session = drafter.begin(target, 3, 90, drafter.config.draft_length, norms)
        for counts in ([70, 70, 70], [7, 1, 12], [1, 1, 1], [2, 3, 1]):
            width = max(counts)
            features, tokens = torch.full((3, width, 3 * HIDDEN), 9.0), torch.full((3, width), 5)
            for b, count in enumerate(counts):
                part = slice(done[b], done[b] + count)
                features[b, :count], tokens[b, :count] = whole[b][0][part], whole[b][1][part]
            done = [d + c for d, c in zip(done, counts, strict=True)]
            anchors = [int(whole[b][1][done[b]]) for b in range(3)]  # what the target commits next
            logits = session.draft(context_of(target, features, counts, anchors, tokens)).logits
            assert session.cache.host_lengths == done
            for b in range(3):
                following = whole[b][1][1 : done[b] + 1].tolist()
                expected = plainly(folder, target, whole[b][0][: done[b]], following, 4, norms)
                torch.testing.assert_close(logits[b], expected[0 if shifted else 1 :], atol=2e-4, rtol=1e-4)
        session.keep([0, 2])
        features, tokens = (torch.stack([whole[b][part][done[b] : done[b] + 1] for b in (0, 2)]) for part in (0, 1))
        anchors = [int(whole[b][1][done[b] + 1]) for b in (0, 2)]
        logits = session.draft(context_of(target, features, [1, 1], anchors, tokens)).logits
        for place, b in enumerate((0, 2)):
            following = whole[b][1][1 : done[b] + 2].tolist()
            expected = plainly(folder, target, whole[b][0][: done[b] + 1], following, 4, norms)
            torch.testing.assert_close(logits[place], expected[0 if shifted else 1 :], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_depth_cuts_masks(target: Target, folder: Path, depth: int) -> None:
    """Fewer drafted tokens are the first of more: masks do not see later ones."""
    drafter = drafters.load("dart", str(folder), target)
    features, tokens = features_of(9, 0)
    context = context_of(target, features[None], [9], [3], tokens[None])
    with torch.inference_mode():
        whole = drafter.begin(target, 1, 20, 5).draft(context).logits
        part = drafter.begin(target, 1, 20, depth).draft(context).logits
    torch.testing.assert_close(part, whole[:, :depth])


def test_reduced_vocabulary(target: Target, tmp_path: Path) -> None:
    """A head over some tokens gives their logits at the target's ids, and -inf to all others."""
    folder = save_dart(tmp_path, dart_config(rows=40))
    drafter = drafters.load("dart", str(folder), target)
    features, tokens = features_of(6, 0)
    with torch.inference_mode():
        logits = (
            drafter.begin(target, 1, 20, 5).draft(context_of(target, features[None], [6], [3], tokens[None])).logits
        )
    expected = plainly(folder, target, features, [*tokens[1:].tolist(), 3], 4, 2)
    ids = torch.arange(40) + load_file(folder / "model.safetensors")["d2t"]
    torch.testing.assert_close(logits[0][:, ids], expected, atol=2e-4, rtol=1e-4)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, ids, False)
    assert (logits[0][:, others] == -torch.inf).all()


def test_features_of_the_published_rule(tmp_path: Path) -> None:
    """The inputs of layers 2, N // 2 and N - 3, or the layers that the file names."""
    config = dart_config()
    for layers, expected in ((5, (1, 1, 1)), (8, (1, 3, 4)), (36, (1, 17, 32))):
        from sparkbench.drafters.checkpoint import Checkpoint
        from sparkbench.drafters.dart_config import DartConfig

        assert DartConfig.read(Checkpoint("x", tmp_path, None, config), layers).target_layer_ids == expected
    named = Checkpoint("x", tmp_path, None, config | {"target_layer_ids": [-1, 0, 4]})
    assert DartConfig.read(named, 5).target_layer_ids == (-1, 0, 4)


Change = Callable[[dict[str, Any]], Any]


def refusal(folder: Path, target: Target, kind: str = "dart") -> str:
    with pytest.raises(UsageError) as caught:
        drafters.load(kind, str(folder), target)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"draft_length": None}, "lacks draft_length"),
        ({"draft_length": -1}, "has draft_length -1"),
        ({"draft_length": "7"}, "has draft_length '7'"),
        ({"draft_vocab_size": None}, "lacks draft_vocab_size"),
        ({"draft_vocab_size": 98}, "has draft_vocab_size 98"),
        ({"draft_vocab_size": 96}, "d2t is not 96 whole numbers"),
        ({"vocab_size": 98}, "whose vocabulary size is 98, not 97"),
        ({"hidden_size": 64}, "whose hidden size is 64, not 32"),
        ({"target_hidden_size": 64}, "target_hidden_size 64"),
        ({"num_key_value_heads": 3}, "4 heads, 3 key-value heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"shifted": 1}, "shifted 1"),
        ({"target_layer_ids": [1, 2]}, "three numbers"),
        ({"target_layer_ids": [1, 2, 5]}, "a target of 5 layers"),
    ],
)
def test_config_refusals(target: Target, folder: Path, change: dict[str, Any], said: str) -> None:
    (folder / "config.json").write_text(json.dumps(dart_config() | change))
    assert said in refusal(folder, target)


def test_defaults_of_the_layout(target: Target, folder: Path) -> None:
    """What the published loader does without: heads, head size and RoPE base."""
    config = dart_config()
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    read = drafters.load("dart", str(folder), target).config
    assert (read.head_dim, read.rope_theta, read.eps) == (8, 10_000.0, 1e-6)


def rewritten(folder: Path, change: Change) -> None:
    weights: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("rows", "change", "said"),
    [
        (97, lambda w: w.pop("midlayer.mask_rep"), "lacks midlayer.mask_rep"),
        (97, lambda w: w.update(extra=torch.zeros(1)), "unknown extra"),
        (97, lambda w: w.update({"norm.weight": torch.full((HIDDEN,), torch.nan)}), "norm.weight holds no finite"),
        (97, lambda w: w.update({"lm_head.weight": torch.zeros(96, HIDDEN)}), "wrong shape for lm_head.weight"),
        (97, lambda w: w.update(d2t=torch.zeros(3, dtype=torch.int64)), "d2t is not 97 whole numbers"),
        (40, lambda w: w.pop("d2t"), "lacks d2t"),
        (40, lambda w: w.update(d2t=w["d2t"] + 90), "40 different tokens"),
        (40, lambda w: w.update(d2t=-torch.arange(40)), "40 different tokens"),
        (40, lambda w: w.update(d2t=w["d2t"].float()), "d2t is not 40 whole numbers"),
        (40, lambda w: w.update(t2d=~w["t2d"]), "d2t and t2d name different tokens"),
    ],
)
def test_weight_refusals(target: Target, tmp_path: Path, rows: int, change: Change, said: str) -> None:
    folder = save_dart(tmp_path, dart_config(rows=rows))
    rewritten(folder, change)
    assert said in refusal(folder, target)


def test_tensors_that_may_be_absent_or_extra(target: Target, folder: Path) -> None:
    """Over the whole vocabulary the maps may lack; an embedding in the file is not used, as in the published code."""
    rewritten(folder, lambda w: (w.pop("d2t"), w.pop("t2d"), w.update({"embed_tokens.weight": torch.ones(97, 32)})))
    drafter = drafters.load("dart", str(folder), target)
    assert drafter.target_ids is None
    assert not hasattr(drafter, "embed_tokens")


def test_small_target(folder: Path) -> None:
    assert "3 layers is too small" in refusal(folder, Target.wrap(tiny_model(), name="tiny"))


# Which drafters which methods take


def test_kinds(target: Target, folder: Path, tmp_path: Path) -> None:
    """Methods of independent rows take each other's drafters; a Markov head has to be left out by name."""
    layers = {"num_target_layers": DART_LAYERS}
    dspark = save_drafter(tmp_path / "dspark", dspark_config("vanilla") | layers)
    dflash = save_drafter(tmp_path / "dflash", config_of("z-lab") | layers)
    for kind in ("dflash", "dart"):
        assert isinstance(drafters.load(kind, str(folder), target), DartDrafter)
        assert drafters.load(kind, str(dflash), target).config.draft_length == 5
        assert drafters.load(kind, f"{dspark}+none", target).markov_head is None
        assert "it has a Markov head" in refusal(dspark, target, kind)
        with pytest.raises(UsageError, match="takes no Markov head"):
            drafters.load(kind, f"{folder}+{dspark}", target)
    assert "no Markov head" in refusal(folder, target, "dspark")
    assert drafters.load("dspark", f"{folder}+{dspark}", target).markov_head is not None


def test_a_shared_drafter_must_be_of_each_kind(target: Target, folder: Path, tmp_path: Path) -> None:
    """Methods that name the same drafter share it, whichever asks first; none may use one that is not of its kind."""
    dspark = save_drafter(tmp_path / "dspark", dspark_config("vanilla") | {"num_target_layers": DART_LAYERS})
    tools = models.Tools(load_target=lambda config: target, equip=lambda methods, target, batch_sizes: None)
    config = SimpleNamespace(threads=torch.get_num_threads(), batch_sizes=(1,))

    def load(source: str, kinds: Sequence[str]) -> models.Loaded:
        arms = [Arm(kind, kind, 4, kind, source) for kind in kinds]
        return models.load(SimpleNamespace(config=config, arms=arms), "run", tools)  # type: ignore[arg-type]

    for kinds in (("dart", "dspark"), ("dspark", "dart")):
        with pytest.raises(UsageError, match="has no Markov head"):
            load(str(folder), kinds)
        with pytest.raises(UsageError, match="has a Markov head"):
            load(str(dspark), kinds)
        first, second = load(f"{dspark}+none", kinds).methods
        assert first.drafter is second.drafter


INDEX_TEXT = [[int(x) for x in torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(9)) % 20]]


def counted(documents: Sequence[Sequence[int]], order: int = 3) -> NgramIndex:
    """The index of some documents, made by counting."""
    return index_of(count(documents, order), VOCAB, order)


def method_of(text: str, drafter: Any, budget: int | None = None, index: NgramIndex | None = None) -> Any:
    method: Any = registry.build(registry.Variant.parse(text), drafter=drafter, budget=budget)
    method.index = index
    return method


PROMPTS = [[1, 2, 3], [5] * 9, list(range(20, 37)), [7, 8]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("text", "budget", "source"),
    [
        ("dart", 16, "dart"),
        ("dart", 1, "dart"),
        ("dart:score=paper:order=2:ngram-weight=2", 30, "dart"),
        ("dart:candidates=3:beam=2:final-norms=1:depth=4", 12, "dart"),
        ("dart", 20, "reduced"),
        ("dart", 16, "dflash"),
        ("dart", 16, "dspark+none"),
        ("dflash", None, "dart"),
        ("ddtree", 16, "dart"),
        ("ddtree", 16, "dspark+none"),
        ("dspark", None, "dart+dspark"),
        ("sparklingtree", 16, "dart+dspark"),
    ],
)
def test_outputs_are_those_of_ar(
    target: Target, tmp_path: Path, text: str, budget: int | None, source: str, temperature: float
) -> None:
    layers = {"num_target_layers": DART_LAYERS}
    places = {
        "dart": save_dart(tmp_path / "dart", dart_config()),
        "reduced": save_dart(tmp_path / "reduced", dart_config(rows=40)),
        "dflash": save_drafter(tmp_path / "dflash", config_of("z-lab") | layers),
        "dspark": save_drafter(tmp_path / "dspark", dspark_config("vanilla") | layers),
    }
    name = registry.get(registry.Variant.parse(text).method).drafter_kind
    whole = "+".join(str(places.get(part, part)) for part in source.split("+"))
    drafter = drafters.load(str(name), whole, target)
    sampling = Sampling(temperature)
    config = DecodeConfig(24, sampling, frozenset({11, 50}))
    wanted = [generate(target, autoregressive(), [request], config)[0] for request in requests_of(PROMPTS)]
    method = method_of(text, drafter, budget, counted(INDEX_TEXT))
    for size in (1, 4):
        for start in range(0, 4, size):
            found = generate(target, method, requests_of(PROMPTS)[start : start + size], config)
            expected = wanted[start : start + size]
            assert [g.output_ids for g in found] == [g.output_ids for g in expected]
            assert [g.stop_reason for g in found] == [g.stop_reason for g in expected]
            assert any(g.rounds_drafted for g in found)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_history(target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    """What a look-up may read before the anchor is what was committed, in every row of a batch and after rows leave."""
    drafter = drafters.load("dart", str(folder), target)
    seen: list[tuple[list[list[int]], list[int], list[int]]] = []
    from sparkbench.methods import dart

    real = dart.continuity_tree

    def watched(logits: Tensor, anchors: Tensor, history: Tensor, *rest: Any) -> DraftTree:
        seen.append((torch.as_tensor(history).tolist(), anchors.tolist(), lengths[-1]))
        return real(logits, anchors, history, *rest)

    monkeypatch.setattr(dart, "continuity_tree", watched)
    method = method_of("dart", drafter, 20, counted(INDEX_TEXT, order))
    lengths: list[list[int]] = []
    propose = method.propose

    def proposing(context: Context) -> DraftTree:
        lengths.append(context.lengths.tolist())
        tree: DraftTree = propose(context)
        return tree

    method.propose = proposing
    requests = requests_of([[4], *PROMPTS])
    found = generate(target, method, requests, DecodeConfig(20, Sampling(1.0), frozenset({3, 60, 61})))
    texts = [[*request.prompt_ids, *g.output_ids] for request, g in zip(requests, found, strict=True)]
    assert len({g.stop_reason for g in found}) == 2  # some rows left early
    for histories, anchors, places in seen:
        assert len(histories) == len(anchors)
        for history, anchor, place in zip(histories, anchors, places, strict=True):
            fitting = [text for text in texts if len(text) > place and text[place] == anchor]
            expected = [[-1] * (order - 2 - place) + text[max(0, place - order + 2) : place] for text in fitting]
            assert len(history) == order - 2
            assert history in expected


def test_an_order_above_the_index_is_its_own(target: Target, folder: Path) -> None:
    drafter = drafters.load("dart", str(folder), target)
    outputs = []
    for order in (0, 3, 10**20):
        method = method_of(f"dart:order={order}", drafter, 8, counted(INDEX_TEXT))
        outputs.append(
            [
                (g.output_ids, g.rounds_drafted)
                for g in generate(target, method, requests_of(PROMPTS[:1]), DecodeConfig(9))
            ]
        )
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_tree_that_contains_the_chain_commits_no_less(target: Target, folder: Path) -> None:
    drafter = drafters.load("dart", str(folder), target)
    tree_method = method_of("dart:ngram-weight=0", drafter, 60)
    contained = further = 0
    for seed in range(40):
        features, tokens = features_of(12, seed)
        context = context_of(target, features[None], [12], [int(tokens[0])], tokens[None])
        with torch.inference_mode():
            proposals = []
            for method in (method_of("dflash", drafter), tree_method):
                method.begin(target, 1, 40)
                proposals.append(method.propose(context))
            chain, tree = proposals
            paths = [tree.tokens[0][tree.visibility[0, node]].tolist() for node in range(tree.width)]
            if chain.tokens[0].tolist() not in paths:
                continue
            contained += 1
            draws = torch.Generator().manual_seed(seed)
            # A target that agrees with the chain for a while, and elsewhere says what the tree's nodes may hold.
            agreed = int(torch.randint(0, 6, (1,), generator=draws))
            by_prefix: dict[tuple[int, ...], int] = {
                tuple(chain.tokens[0, : d + 1].tolist()): int(chain.tokens[0, d + 1]) for d in range(agreed)
            }
            accepted = []
            for proposal in proposals:
                drawn = []
                for node in range(proposal.width):
                    path = tuple(proposal.tokens[0][proposal.visibility[0, node]].tolist())
                    drawn.append(by_prefix.setdefault(path, int(torch.randint(VOCAB, (1,), generator=draws))))
                from sparkbench.decoding.accept import match

                accepted.append(int(match(proposal, torch.tensor([drawn])).accepted))
            assert accepted[1] >= accepted[0] >= agreed
            further += accepted[1] > 0
    assert contained >= 10
    assert further >= 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dart:depth=-1", "depth -1"),
        ("dart:candidates=0", "candidates 0"),
        ("dart:beam=0", "beam 0"),
        ("dart:ngram-weight=-0.5", "-0.5"),
        ("dart:ngram-weight=nan", "nan"),
        ("dart:ngram-weight=inf", "inf"),
        ("dart:order=1", "order 1"),
        ("dart:score=best", "code, paper"),
        ("dart:final-norms=3", "2, 1"),
    ],
)
def test_option_refusals(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        registry.Variant.parse(text)
    assert said in str(caught.value)


def test_final_norms_are_for_dart_drafters(target: Target, tmp_path: Path) -> None:
    layers = {"num_target_layers": DART_LAYERS}
    dflash = drafters.load("dflash", str(save_drafter(tmp_path, config_of("z-lab") | layers)), target)
    with pytest.raises(UsageError, match="no DART drafter"):
        method_of("dart:final-norms=1", dflash, 8)
