"""A mixture-of-experts target: trees against paths, methods against AR, and how many experts a forward loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Scripted, autoregressive, plain_continuation, requests_of, run

from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.profiling.experts import expected_distinct, mixtures, watched
from sparkbench.profiling.measure import distinct_experts
from sparkbench.profiling.roofline import Work

EXPERTS, ACTIVE, LAYERS, LIMIT = 8, 2, 3, 14
PROMPTS = [(1, 2, 3), (9,), (8, 7, 6, 5, 4, 3, 2, 1, 10, 11), (30, 31, 32, 33, 34)]


def moe_model(seed: int = 0) -> Any:
    """A random float32 Qwen3 mixture of experts whose first layer is dense."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "num_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
    config = Qwen3MoeConfig(**shape)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Saved and loaded, so that it has the attention and the layout that a user's target has."""
    folder: Path = tmp_path_factory.mktemp("moe")
    moe_model().save_pretrained(folder)
    return Target.load(str(folder), name="moe", device="cpu")  # checks trees against their paths


def random_tree(width: int, vocab: int = 97) -> DraftTree:
    nodes = torch.arange(width)
    depths = torch.tensor([(node + 1).bit_length() - 1 for node in range(width)])[None]
    tokens = torch.randint(vocab, (1, width), generator=torch.Generator().manual_seed(width))
    valid = torch.ones(1, width, dtype=torch.bool)
    return DraftTree(tokens, ((nodes - 1) // 2)[None], depths, valid, int(depths.max()))


def test_a_router_that_sees_the_whole_tree_is_refused(moe: Target) -> None:
    """What makes a mixture unfit for trees: a choice that depends on the other nodes of the forward."""

    def shifted(module: Any, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        logits, scores, indices = output
        return logits, scores, (indices + len(indices)) % EXPERTS

    handles = [mixture.gate.register_forward_hook(shifted) for mixture in mixtures(moe)]
    try:
        with pytest.raises(UsageError, match=r"target moe.*draft tree differently"):
            moe.check_trees()
    finally:
        for handle in handles:
            handle.remove()
    moe.check_trees()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("branch", [0, 2])
def test_methods_equal_autoregressive_decoding(moe: Target, branch: int, temperature: float, batch: int) -> None:
    """Chains and trees, token by token, against AR and against forwards without a cache."""
    sampling = Sampling(temperature)
    requests = requests_of(PROMPTS[:batch])
    reference = [list(g.output_ids) for g in run(moe, autoregressive(), requests, LIMIT, sampling=sampling)]
    for request, output in zip(requests, reference, strict=True):
        assert output == plain_continuation(moe, request.prompt_ids, LIMIT, request.noise_key, sampling)
        assert len(set(output)) > 3, "the model says one thing only"
    method = Scripted(PROMPTS[:batch], reference, length=5, wrong=lambda index: index % 4 == 3, branch=branch)
    found = run(moe, method, requests, LIMIT, sampling=sampling)
    assert [list(generation.output_ids) for generation in found] == reference
    assert all(any(round_.accepted for round_ in generation.rounds) for generation in found)


def test_autoregressive_decoding_is_what_transformers_generates(moe: Target) -> None:
    for prompt, generation in zip(PROMPTS, run(moe, autoregressive(), requests_of(PROMPTS), LIMIT), strict=True):
        ids = torch.tensor([prompt])
        expected = moe.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False, pad_token_id=0
        )
        assert list(generation.output_ids) == expected[0, len(prompt) :].tolist()


# Experts


@torch.inference_mode()
def test_experts_are_counted_as_the_routers_choose(moe: Target) -> None:
    """Against the choice made again from what each router was given."""
    assert len(mixtures(moe)) == LAYERS - 1, "the first layer is dense"
    inputs: list[Any] = []
    handles = [m.gate.register_forward_pre_hook(lambda module, args: inputs.append(args[0])) for m in mixtures(moe)]
    session = moe.session(1, 64)
    session.prefill([PROMPTS[2]])
    inputs.clear()
    with watched(moe) as counts:
        session.verify(session.pack(random_tree(6)))
    for handle in handles:
        handle.remove()
    chosen = [
        set((given.view(-1, 32) @ mixture.gate.weight.T).topk(ACTIVE).indices.flatten().tolist())
        for given, mixture in zip(inputs, mixtures(moe), strict=True)
    ]
    assert counts == [len(each) for each in chosen]
    session.verify(session.pack(random_tree(6)))
    assert len(counts) == LAYERS - 1, "nothing is counted once it is closed"


def test_distinct_experts_of_widths(moe: Target) -> None:
    found = distinct_experts(moe, 2, 10, [1, 8, 64])
    assert list(found) == [2, 8, 64]
    assert distinct_experts(moe, 1, 10, [1]) == {1: ACTIVE}
    assert ACTIVE <= found[2] <= 2 * ACTIVE
    assert found[2] < found[64] <= EXPERTS


def test_experts_that_all_nodes_share_count_once() -> None:
    """Planted: routers whose choice no token changes."""
    target = Target.wrap(moe_model(), name="collapsed")
    for mixture in mixtures(target):
        mixture.gate.weight.zero_()
    assert distinct_experts(target, 1, 10, [1, 32]) == {1: ACTIVE, 32: ACTIVE}


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (128, 8)])
def test_the_uniform_expectation_is_that_of_uniform_draws(experts: int, active: int) -> None:
    draws = torch.Generator().manual_seed(0)
    for tokens in (1, 3, 17):
        chosen = torch.rand(2000, tokens, experts, generator=draws).topk(active).indices.flatten(1)
        hit = torch.zeros(2000, experts).scatter_(1, chosen, 1.0).sum(1)
        allowed = 4 * float(hit.std()) / 2000**0.5
        assert abs(expected_distinct(experts, active, tokens) - float(hit.mean())) <= allowed + 1e-4
    assert expected_distinct(experts, active, 1) == pytest.approx(active)


def test_only_the_experts_that_are_hit_are_read(moe: Target) -> None:
    work = Work.of(moe)
    routed = sum(weight.numel() for mixture in mixtures(moe) for weight in mixture.experts.parameters())
    assert work.expert_weights == 2 * 3 * 24 * 32  # two layers, three matrices
    assert work.expert_weights * EXPERTS == routed
    difference = work.read_bytes(1, 10, 4, distinct=5) - work.read_bytes(1, 10, 4, distinct=2)
    assert difference == 3 * work.expert_weights * 4
    total = sum(weight.numel() for weight in moe.model.parameters())
    everything = work.read_bytes(1, 10, 4, distinct=EXPERTS) - 4 * 32 * 4 - LAYERS * 2 * 2 * 8 * 4 * 10
    assert everything == 4 * (total - 97 * 32), "all but the embedding, whose rows are counted apart"
