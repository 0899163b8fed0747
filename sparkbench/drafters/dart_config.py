"""The shape of a DART drafter, read from the published layout (`fvliang/qwen4b-dart`).

`draft_length` of the file counts masks: with the last prefix row, which predicts too, m masks draft m + 1 tokens. The
file says nothing of the target's layers: which of them are read follows from their number.

Two keys are this project's own, for drafters that it trains: `target_layer_ids` names other layers, and
`shifted: false` reads the masks alone (m masks draft m tokens), which is an ablation of the paper.
"""

from dataclasses import dataclass

from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.errors import UsageError

DEFAULT_THETA = 10_000.0  # of the published code, where the file has none
LEAST_LAYERS = 4


@dataclass(frozen=True)
class DartConfig:
    """Shape of a drafter.

    masks:            mask rows behind the prefix.
    draft_vocab_size: rows of the drafter's head; at most vocab_size.
    target_layer_ids: target layers whose outputs are read: low, middle, high.
    shifted:          the last prefix row predicts the first token.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    masks: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    shifted: bool = True

    @property
    def draft_length(self) -> int:
        return self.masks + self.shifted

    @classmethod
    def read(cls, checkpoint: Checkpoint, target_layers: int) -> "DartConfig":
        """UsageError: a key is missing or impossible, or the checkpoint is no DART drafter."""
        config, whole = checkpoint.config, checkpoint.whole
        if not is_dart(checkpoint):
            raise UsageError(f"drafter {checkpoint.source}: no DART drafter: config.json lacks draft_length")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UsageError(
                f"drafter {checkpoint.source}: hidden_act {activation!r} is not supported; supported: silu"
            )
        heads, hidden = whole("num_attention_heads"), whole("hidden_size")
        kv_heads = heads if config.get("num_key_value_heads") is None else whole("num_key_value_heads")
        head_dim = hidden // heads if config.get("head_dim") is None else whole("head_dim")
        if heads % kv_heads or head_dim % 2:
            raise checkpoint.broken(f"has {heads} heads, {kv_heads} key-value heads and head_dim {head_dim}")
        if config.get("target_hidden_size") not in (None, hidden):
            raise checkpoint.broken(f"has target_hidden_size {config['target_hidden_size']!r} beside {hidden}")
        shifted = config.get("shifted", True)
        if type(shifted) is not bool:
            raise checkpoint.broken(f"has shifted {shifted!r}, and bool is needed")
        vocab = whole("vocab_size")
        named_theta = any(config.get(key) is not None for key in ("rope_theta", "rope_parameters", "rope_scaling"))
        return cls(
            hidden_size=hidden,
            intermediate_size=whole("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=checkpoint.positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=checkpoint.rope_theta() if named_theta else DEFAULT_THETA,
            masks=whole("draft_length", 0 if shifted else 1, 256),
            vocab_size=vocab,
            draft_vocab_size=whole("draft_vocab_size", 1, vocab),
            target_layer_ids=_layers(checkpoint, target_layers),
            shifted=shifted,
        )


def is_dart(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says it is a DART drafter, by a key that no other kind has."""
    return "draft_length" in checkpoint.config


def _layers(checkpoint: Checkpoint, target_layers: int) -> tuple[int, ...]:
    """The inputs of layers 2, N // 2 and N - 3, which are the outputs of those before; or what the file names."""
    named = checkpoint.config.get("target_layer_ids")
    if named is None:
        if target_layers < LEAST_LAYERS:
            raise UsageError(
                f"drafter {checkpoint.source} reads the output of layer 1 and of three layers before the last: "
                f"a target of {target_layers} layers is too small"
            )
        return 1, target_layers // 2 - 1, target_layers - 4
    if not isinstance(named, list) or len(named) != 3 or any(type(k) is not int for k in named):
        raise checkpoint.broken(f"has target_layer_ids {named!r}, and three numbers are needed")
    if not all(-1 <= k < target_layers for k in named):
        raise checkpoint.broken(f"has target_layer_ids {named!r} for a target of {target_layers} layers")
    return tuple(named)
