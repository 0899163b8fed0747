"""The shape of a block drafter (DFlash, DSpark), read from either published layout.

- z-lab (`z-lab/Qwen3-4B-DFlash-b16`): `dflash_config` holds the mask id and the feature layers. The mask slots predict
  their own positions, so a block of 16 drafts 15 tokens. Embedding and head are the target's.
- DeepSpec (`deepseek-ai/dspark_qwen3_4b_block7`): the same keys at the top of the config. Every slot predicts the next
  position, so a block of 7 drafts 7 tokens. The checkpoint carries an embedding and a head. With `markov_rank` above 0
  it is a DSpark drafter, with 0 (`deepseek-ai/dflash_qwen3_4b_block7`) a DFlash drafter: the same class without heads.

Which one it is follows from the checkpoint: the wrong convention runs without an error, shifted by one token.
"""

from dataclasses import dataclass

from sparkbench.decoding.masks import FULL, SLIDING
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.heads import MARKOV_KINDS
from sparkbench.errors import UsageError


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a drafter.

    block_size:    slots of a block, the anchor's included.
    first_slot:    first slot that predicts: 1 (z-lab, in place) or 0 (DeepSpec, the next position).
    target_layer_ids: target layers whose outputs are the context features; -1 means the embeddings.
    windows:       sliding window of each draft layer, None for full attention.
    own_embedding: the checkpoint carries an embedding and a head.
    markov_rank:   0 without a Markov head; markov_kind is one of heads.MARKOV_KINDS.
    confidence_rank: width of the Markov embedding that the confidence head reads, None without a confidence head.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    block_size: int
    first_slot: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_context: int
    attention_bias: bool
    own_embedding: bool
    vocab_size: int
    target_layers: int
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    confidence_rank: int | None = None

    @property
    def draft_length(self) -> int:
        return self.block_size - self.first_slot

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "BlockConfig":
        """UsageError: a key is missing, or the checkpoint is no block drafter."""
        config, whole = checkpoint.config, checkpoint.whole
        z_lab = isinstance(config.get("dflash_config"), dict)
        if not z_lab and "mask_token_id" not in config:
            known = "dflash_config (z-lab), mask_token_id and target_layer_ids (DeepSpec), or draft_length (DART)"
            raise UsageError(
                f"drafter {checkpoint.source}: no DFlash, DSpark or DART drafter: config.json lacks {known}"
            )
        _check_architecture(checkpoint)
        rank, kind, confidence_rank = (0, "vanilla", None) if z_lab else _heads(checkpoint)
        inner = config["dflash_config"] if z_lab else config
        layers, target_layers = whole("num_hidden_layers", 1, 1024), whole("num_target_layers")
        ids = inner.get("target_layer_ids") or (_default_layer_ids(layers, target_layers) if z_lab else None)
        mask_id = inner.get("mask_token_id")
        possible = isinstance(ids, list) and all(type(k) is int and -1 <= k < target_layers for k in ids)
        if type(mask_id) is not int or not ids or not possible:
            raise UsageError(f"drafter {checkpoint.source}: mask_token_id or target_layer_ids is missing or impossible")
        heads, hidden = whole("num_attention_heads"), whole("hidden_size")
        block_size = whole("block_size", 1 + z_lab, 256)
        return cls(
            hidden_size=hidden,
            intermediate_size=whole("intermediate_size"),
            heads=heads,
            kv_heads=whole("num_key_value_heads"),
            head_dim=hidden // heads if config.get("head_dim") is None else whole("head_dim"),
            eps=checkpoint.positive("rms_norm_eps", config.get("rms_norm_eps")),
            rope_theta=checkpoint.rope_theta(),
            block_size=block_size,
            first_slot=1 if z_lab else 0,
            mask_token_id=mask_id,
            target_layer_ids=tuple(ids),
            windows=_windows(checkpoint, layers),
            max_context=whole("max_position_embeddings", block_size + 1),
            attention_bias=bool(config.get("attention_bias", False)),
            own_embedding=not z_lab,
            vocab_size=whole("vocab_size"),
            target_layers=target_layers,
            markov_rank=rank,
            markov_kind=kind,
            confidence_rank=confidence_rank,
        )


def _check_architecture(checkpoint: Checkpoint) -> None:
    """UsageError: another family's drafter, whose keys look alike but whose forward differs."""
    named = checkpoint.config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    foreign = [name for name in named if "Gemma" in str(name) or "Eagle" in str(name)]
    if foreign:
        raise UsageError(f"drafter {checkpoint.source}: architecture {foreign[0]} is not supported as a block drafter")
    activation = checkpoint.config.get("hidden_act", "silu")
    if activation != "silu":
        raise UsageError(f"drafter {checkpoint.source}: hidden_act {activation!r} is not supported; supported: silu")


def _heads(checkpoint: Checkpoint) -> tuple[int, str, int | None]:
    """Markov rank and kind, and the width that the confidence head reads of the Markov embedding (None: no head)."""
    rank = checkpoint.whole("markov_rank", 0, 65536) if "markov_rank" in checkpoint.config else 0
    kind = checkpoint.require("markov_head_type", str) if rank else "vanilla"
    if kind not in MARKOV_KINDS:
        known = ", ".join(MARKOV_KINDS)
        raise UsageError(f"drafter {checkpoint.source}: Markov head {kind!r} of rank {rank}; known kinds: {known}")
    if "enable_confidence_head" not in checkpoint.config or not checkpoint.require("enable_confidence_head", bool):
        return rank, kind, None
    with_markov = checkpoint.require("confidence_head_with_markov", bool)
    if with_markov and not rank:
        raise UsageError(f"drafter {checkpoint.source}: its confidence head reads a Markov head that it lacks")
    return rank, kind, rank if with_markov else 0


def _windows(checkpoint: Checkpoint, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each draft layer. UsageError: layer types that do not fit the layers, or no window."""
    kinds = checkpoint.config.get("layer_types") or [FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise UsageError(
            f"drafter {checkpoint.source}: layer_types {kinds} is not {FULL} or {SLIDING} for each of {layers} layers"
        )
    window = checkpoint.whole("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _default_layer_ids(draft_layers: int, target_layers: int) -> list[int]:
    """Feature layers of a z-lab checkpoint that names none: evenly spread, from 1 to three before the end."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
