"""Targets of random weights in the shape of published models, made in memory without a download.

What a forward costs depends on the shape and not on the values, but for the routing of a mixture of experts. Here the
embeddings are wide, so that tokens stay distinct and random routers choose almost uniformly; trained ones do not. The
figures are those of the published `config.json` files. Needed memory is estimated first, so that a machine refuses a
shape instead of swapping.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparkbench import machine
from sparkbench.decoding import attention
from sparkbench.decoding.layout import store_by_columns
from sparkbench.decoding.target import Target
from sparkbench.errors import RunError, UsageError

VOCABULARY = 151_936
CONTEXT = 40_960
DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder. With `experts`, `mlp` is the width of each expert, and `active` of them serve a token."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    experts: int = 0
    active: int = 0
    vocabulary: int = VOCABULARY

    def config(self) -> Any:
        """The transformers config of this shape."""
        from transformers import Qwen3Config, Qwen3MoeConfig

        common: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if not self.experts:
            return Qwen3Config(intermediate_size=self.mlp, **common)
        return Qwen3MoeConfig(
            moe_intermediate_size=self.mlp,
            num_experts=self.experts,
            num_experts_per_tok=self.active,
            norm_topk_prob=True,
            **common,
        )

    @property
    def parameters(self) -> int:
        """Number of weights: embedding, head and last norm; of each layer projections, feed-forward part and norms."""
        attention_weights = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden * self.mlp * max(self.experts, 1) + self.hidden * self.experts
        norms = 2 * self.hidden + 2 * self.head_dim
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return tables + self.hidden + self.layers * (attention_weights + feed_forward + norms)


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288, tied=False),
    "qwen3-14b": Shape(5120, 40, 40, 8, 128, 17408, tied=False),
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 768, tied=False, experts=128, active=8),
}


def named(name: str, layers: int | None = None) -> tuple[Shape, str]:
    """A known shape, cut to `layers` layers, and what to call its target. UsageError: unknown, or not that deep."""
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if layers is None:
        return shape, f"{name} (random weights)"
    if not 1 <= layers <= shape.layers:
        raise UsageError(f"--layers {layers} is not allowed: {name} has 1 to {shape.layers}")
    return replace(shape, layers=layers), f"{name} (random weights, {layers} of {shape.layers} layers)"


def random_target(shape: Shape, name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Target:
    """A target of random weights, created on the device in its dtype. RunError: the memory is not enough."""
    from transformers import AutoModelForCausalLM

    require(f"target {name}", shape.parameters * dtype.itemsize, device)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, attn_implementation=attention.implementation(device)
        )
    model.to_empty(device=device)
    model.tie_weights()
    # The one module with values that are neither weights nor stored with them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    store_by_columns(model)
    draws = torch.Generator(device).manual_seed(seed)
    embeddings = model.get_input_embeddings().weight
    for weight in model.parameters():
        _fill(weight.data, 1.0 if weight is embeddings else DEVIATION, draws)
    return Target.wrap(model, name=name)


def require(what: str, needed: int, device: torch.device) -> None:
    """RunError where `needed` bytes exceed what is free on the device; where a system does not tell, nothing."""
    free = machine.free_bytes(device)
    if free is not None and needed > free:
        raise RunError(
            f"{what} needs {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free on {device}; "
            "take fewer layers, a smaller shape, context or batch size, or bfloat16"
        )


def _fill(weight: Tensor, deviation: float, draws: torch.Generator) -> None:
    """Ones for norms, else uniform numbers, which on a CPU are drawn faster than normal ones."""
    if weight.dim() == 1:
        weight.fill_(1.0)
    else:
        weight.uniform_(-deviation * 3**0.5, deviation * 3**0.5, generator=draws)
