"""A target and drafters over a vocabulary of a few tokens, so that distributions of outputs can be enumerated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conftest import tiny_target
from tiny_drafters import config_of, dspark_config, save_drafter

from sparkbench import drafters, registry
from sparkbench.decoding.method import Method
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target

VOCAB = 6
PROMPT = (1, 4, 2)
LENGTH = 3  # tokens of an output
SHAPE = {"vocab_size": VOCAB, "num_target_layers": 2, "block_size": 4, "target_layer_ids": [-1, 0], "mask_token_id": 5}


def small_target() -> Target:
    return tiny_target(vocab=VOCAB, layers=2)


def small_drafter(folder: Path, kind: str, target: Target) -> Any:
    """`dflash` or `dspark`, with random weights."""
    config = config_of("z-lab") if kind == "dflash" else dspark_config("vanilla")
    own = {name: SHAPE[name] for name in ("target_layer_ids", "mask_token_id")}
    config = config | SHAPE | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    if kind == "dflash":
        config["dflash_config"] = own
    return drafters.load(kind, str(save_drafter(folder, config)), target)


def method_of(text: str, found: dict[str, Any], budget: int = 6) -> Method:
    """A variant with the drafter of its kind. DART drafts with the DFlash drafter, without an index."""
    variant = registry.Variant.parse(text)
    kind = {None: None, "dspark": "dspark"}.get(registry.get(variant.method).drafter_kind, "dflash")
    return registry.build(variant, drafter=None if kind is None else found[kind], budget=budget)


@torch.inference_mode()
def distribution(target: Target, prompt: Sequence[int], sampling: Sampling, length: int = LENGTH) -> torch.Tensor:
    """[V] * length float64: the probability of every continuation, by whole forwards without cache or loop."""
    texts, chances = torch.tensor([list(prompt)]), torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        logits = target.model(texts, use_cache=False).logits[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, texts, True)
        step = sampling.probabilities(logits.double().float(), seen).double()
        vocab = step.shape[1]
        chances = (chances[:, None] * step).flatten()
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], 1)
    return chances.view(*[target.vocab_size] * length)
