"""Helpers shared by the tests: golden folders, tiny models, and stub methods whose proposals a test decides."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.method import Context, Method, NoOptions
from sparkbench.decoding.sampling import Sampling, gumbel
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.methods.autoregressive import Autoregressive

torch.set_num_threads(1)


def golden_folder(name: str) -> Path:
    """The folder of golden values `name`; SPARKBENCH_GOLDEN says where the folders are."""
    return Path(os.environ.get("SPARKBENCH_GOLDEN", Path(__file__).parent / "golden")) / name


FAMILIES = ("qwen3", "qwen3-mixed", "llama", "mistral", "gemma3")
WINDOWED = ("qwen3-mixed", "mistral", "gemma3")


def tiny_model(
    family: str = "qwen3",
    seed: int = 0,
    *,
    vocab: int = 97,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    window: int = 6,
    context: int = 512,
) -> Any:
    """A random float32 model of a family; `window` counts for the families in WINDOWED."""
    from transformers import (
        AutoModelForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        MistralConfig,
        PretrainedConfig,
        Qwen3Config,
    )

    head_dim = 8
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    mixed = [("full_attention", "sliding_attention")[i % 2] for i in range(layers)]
    config: PretrainedConfig
    if family == "qwen3":
        config = Qwen3Config(**shape)
    elif family == "qwen3-mixed":
        config = Qwen3Config(**shape, use_sliding_window=True, sliding_window=window, layer_types=mixed)
    elif family == "llama":
        config = LlamaConfig(**shape)
    elif family == "mistral":
        config = MistralConfig(**shape, sliding_window=window)
    elif family == "gemma3":
        config = Gemma3TextConfig(**shape, sliding_window=window, layer_types=mixed, query_pre_attn_scalar=head_dim)
    else:
        raise ValueError(family)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.float()


def tiny_target(family: str = "qwen3", seed: int = 0, **shape: int) -> Target:
    return Target.wrap(tiny_model(family, seed, **shape), name=f"tiny {family}")


COUNT_PROMPT = (1, 2, 3)


def count_next(token: int) -> int:
    """The map that the COUNT target follows: 10 after 3, else one more."""
    return 10 if token == 3 else (token + 1) % 128


def count_model() -> Any:
    """A Qwen3 whose greedy continuation is `count_next`: its layers add nothing, its head is the map."""
    model = tiny_model(vocab=128, layers=2, heads=16, kv_heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(128))
        model.lm_head.weight.zero_()
        for token in range(128):
            model.lm_head.weight[count_next(token), token] = 1.0
    return model


@pytest.fixture(scope="session")
def count_target() -> Target:
    return Target.wrap(count_model(), name="count")


@pytest.fixture(scope="session")
def tiny() -> Target:
    """TINY: a random 3-layer Qwen3."""
    return tiny_target()


class Scripted(Method):
    """A method whose proposals follow known continuations.

    continuations: for each row of the batch, the output that decoding is known to give (long enough).
    wrong:         output indices at which the draft carries another token.
    branch:        how many wrong siblings each node gets: 0 proposes chains, more propose trees.
    """

    summary = "proposes what a test tells it to"
    name = "scripted"

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        *,
        length: int = 7,
        wrong: Callable[[int], bool] = lambda index: False,
        branch: int = 0,
    ) -> None:
        super().__init__(NoOptions(), None, None)
        self.prompts, self.continuations = prompts, continuations
        self.length, self.wrong, self.branch = length, wrong, branch

    @property
    def max_nodes(self) -> int:
        return self.length * (1 + self.branch)

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        assert batch == len(self.prompts)
        self.rows = list(range(batch))
        self.vocab = target.vocab_size

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def drafts(self, context: Context) -> Tensor:
        """[B, length]: the known continuation behind each anchor, spoilt where it is to be wrong."""
        found = []
        for place, length in enumerate(context.lengths.tolist()):
            row = self.rows[place]
            index = length - len(self.prompts[row])  # of the anchor in the output
            assert self.continuations[row][index] == context.anchors[place], "the anchor is not the row's own token"
            coming = [*self.continuations[row][index + 1 : index + 1 + self.length]]
            coming += [0] * (self.length - len(coming))
            found.append([(token + self.wrong(index + 1 + step)) % self.vocab for step, token in enumerate(coming)])
        return torch.tensor(found)

    def propose(self, context: Context) -> DraftTree:
        drafts = self.drafts(context)
        if not self.branch:
            return DraftTree.chain_of(context.anchors, drafts)
        # Each depth holds `branch` wrong siblings before the drafted token, all children of the last drafted one.
        tokens, parents, depths = [context.anchors], [-1], [0]
        parent = 0
        for depth in range(1, self.length + 1):
            drafted = drafts[:, depth - 1]
            for shift in range(self.branch, -1, -1):
                tokens.append((drafted + shift) % self.vocab)
                parents.append(parent)
                depths.append(depth)
            parent = len(parents) - 1
        shape = len(context.anchors), len(parents)
        return DraftTree(
            torch.stack(tokens, 1),
            torch.tensor(parents).expand(shape),
            torch.tensor(depths).expand(shape),
            torch.ones(shape, dtype=torch.bool),
            self.length,
        )


@torch.inference_mode()
def plain_continuation(
    target: Target, prompt: Sequence[int], count: int, key: int = 0, sampling: Sampling | None = None
) -> list[int]:
    """`count` tokens decoded without cache, tree or loop: a whole forward of the model for every token."""
    sampling = sampling or Sampling()
    ids = list(prompt)
    for _ in range(count):
        scores = sampling.scores(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        if not sampling.greedy:
            scores = scores + gumbel(torch.tensor([key]), torch.tensor([[len(ids)]]), len(scores))[0, 0]
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


def autoregressive() -> Method:
    return Autoregressive(NoOptions(), None, None)


def requests_of(prompts: Sequence[Sequence[int]], keys: Sequence[int] | None = None) -> list[Request]:
    """Requests with noise keys of their own."""
    return [Request(tuple(p), keys[i] if keys else 1000 + i) for i, p in enumerate(prompts)]


def run(
    target: Target,
    method: Method,
    requests: Sequence[Request],
    limit: int,
    *,
    stops: Sequence[int] = (),
    sampling: Sampling | None = None,
) -> list[Generation]:
    """Decode one batch and check what holds for every generation."""
    config = DecodeConfig(limit, sampling or Sampling(), frozenset(stops))
    generations = generate(target, method, requests, config)
    for generation in generations:
        check_records(generation, limit, frozenset(stops))
    return generations


def check_records(generation: Generation, limit: int, stops: frozenset[int]) -> None:
    """The invariants of a generation and its rounds."""
    output, rounds = generation.output_ids, generation.rounds
    assert sum(round_.committed for round_ in rounds) + 1 == len(output)
    assert 1 <= len(output) <= limit
    assert generation.forwards == len(rounds) + 1
    assert not stops & set(output[:-1])
    if generation.stop_reason == "stop":
        assert output[-1] in stops
    else:
        assert generation.stop_reason == "length"
        assert len(output) == limit
        assert output[-1] not in stops
    for index, round_ in enumerate(rounds):
        assert round_.cold == (index == 0)
        assert 0 <= round_.accepted <= round_.max_depth <= round_.nodes
        assert 0 <= round_.accepted_node <= round_.nodes
        assert (round_.accepted_node == 0) == (round_.accepted == 0)
        assert 1 <= round_.committed <= round_.accepted + 1
        if index + 1 < len(rounds):
            assert round_.committed == round_.accepted + 1
        if round_.accepted == round_.max_depth:
            assert not round_.offered_next
        assert round_.stages_ns.keys() >= {"pack", "verify", "accept", "commit"}
    assert generation.rounds_drafted == sum(round_.nodes > 0 for round_ in rounds)
