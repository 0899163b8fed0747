"""Random drafters for the tiny Qwen3 of conftest, in all published layouts. DART's wants one of five layers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.dart import DartDrafter
from sparkbench.drafters.dart_config import DartConfig

LAYOUTS = ("z-lab", "deepspec")
FEATURES = 96  # width of the context features


def config_of(layout: str, window: int | None = None) -> dict[str, Any]:
    """A drafter's config, as published."""
    own: dict[str, Any] = {"mask_token_id": 96, "target_layer_ids": [-1, 0, 2]}
    config: dict[str, Any] = {
        "block_size": 6,
        "num_target_layers": 3,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention" if window else "full_attention"],
        "sliding_window": window,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 200,
        "vocab_size": 97,
        "attention_bias": layout == "z-lab",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    if layout == "z-lab":
        return config | {"dflash_config": own}
    return config | own | {"markov_rank": 0}


def dspark_config(kind: str, *, confidence: str = "markov", rank: int = 4) -> dict[str, Any]:
    """A DSpark drafter's config. confidence: what its head reads, `markov`, `hidden` or, without a head, `none`."""
    return config_of("deepspec") | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence != "none",
        "confidence_head_with_markov": confidence == "markov",
    }


DART_LAYERS = 5


def dart_config(rows: int = 97, masks: int = 4) -> dict[str, Any]:
    """A DART drafter's config, as published, with a head over `rows` tokens."""
    return {
        "architectures": ["LlamaForCausalLMDart"],
        "model_type": "llama",
        "draft_length": masks,
        "draft_vocab_size": rows,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 64,
    }


def save_dart(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """A DART checkpoint with random weights, whose head covers every third token and then others, where not all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    drafter = DartDrafter(DartConfig.read(Checkpoint.open(str(folder)), DART_LAYERS))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name)
        for name, weight in drafter.state_dict().items()
    }
    rows, vocab = config["draft_vocab_size"], config["vocab_size"]
    ids = torch.arange(vocab)
    if rows < vocab:
        ids = torch.cat([ids[::3], ids[1::3]])[:rows].sort().values
    weights["d2t"] = ids - torch.arange(rows)
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    save_file(weights, folder / "model.safetensors")
    return folder


def save_drafter(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """A checkpoint with random weights, large enough that every part matters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    drafter = BlockDrafter(BlockConfig.read(Checkpoint.open(str(folder))))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name)
        for name, weight in drafter.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def features_of(positions: int, seed: int = 0) -> Tensor:
    """[1, positions, F * H]"""
    return torch.randn(1, positions, FEATURES, generator=torch.Generator().manual_seed(seed))
