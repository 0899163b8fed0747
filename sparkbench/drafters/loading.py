"""From a checkpoint to a drafter that fits its target: the checks, and what of it the target has already."""

from typing import Any

import torch
from torch import Tensor

from sparkbench.decoding.layout import store_by_columns
from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.dart import DartDrafter
from sparkbench.drafters.dart_config import DartConfig, is_dart
from sparkbench.errors import UsageError
from sparkbench.scheduling import Calibration

CALIBRATION = "calibration.json"  # in a drafter's folder: temperatures for its confidences
_FROM_TARGET = "embed_tokens.weight"  # DART's embedding is the target's, whatever a file holds


def load(source: str, target: Target, revision: str | None = None) -> Any:
    """Load a drafter in any layout, for `target`. UsageError: broken, or made for another target."""
    checkpoint = Checkpoint.open(source, revision)
    drafter = _dart(checkpoint, target) if is_dart(checkpoint) else _block(checkpoint, target)
    drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    store_by_columns(drafter)
    if isinstance(drafter, BlockDrafter) and drafter.config.own_embedding:
        _share_equal(drafter, target)
    drafter.source, drafter.revision = source, checkpoint.revision
    return drafter


def _block(checkpoint: Checkpoint, target: Target) -> BlockDrafter:
    config = BlockConfig.read(checkpoint)
    _check_fit(config, checkpoint, target)
    if config.target_layers != target.num_layers:
        raise _misfit(checkpoint, target, "number of layers", config.target_layers, target.num_layers)
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise UsageError(f"drafter {checkpoint.source}: mask_token_id {config.mask_token_id} is outside the vocabulary")
    drafter = BlockDrafter(config)
    _fill(drafter, checkpoint, checkpoint.tensors())
    if (checkpoint.folder / CALIBRATION).is_file():
        drafter.calibration = Calibration.load(checkpoint.folder / CALIBRATION)
    return drafter


def _dart(checkpoint: Checkpoint, target: Target) -> DartDrafter:
    config = DartConfig.read(checkpoint, target.num_layers)
    _check_fit(config, checkpoint, target)
    drafter = DartDrafter(config)
    tensors = checkpoint.tensors()
    tensors.pop(_FROM_TARGET, None)
    ids = _target_ids(config, checkpoint, tensors)
    drafter.target_ids = None if ids is None else ids.to(target.device)
    _fill(drafter, checkpoint, tensors)
    return drafter


def _target_ids(config: DartConfig, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> Tensor | None:
    """The target's id of each row of a DART head, None for the identity; takes its two tensors out of `tensors`.

    UsageError: they are missing where the head covers a part of the vocabulary, or contradict each other.
    """
    offsets, covered = tensors.pop("d2t", None), tensors.pop("t2d", None)
    rows, vocab = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if rows < vocab:
            raise UsageError(f"drafter {checkpoint.source}: the checkpoint lacks d2t for a head of {rows} tokens")
        return None
    if offsets.shape != (rows,) or offsets.is_floating_point():
        raise UsageError(f"drafter {checkpoint.source}: d2t is not {rows} whole numbers")
    ids = torch.arange(rows) + offsets.long()
    distinct = len(ids.unique()) == rows and bool(((ids >= 0) & (ids < vocab)).all())
    if not distinct:
        raise UsageError(f"drafter {checkpoint.source}: d2t does not name {rows} different tokens of the vocabulary")
    if covered is not None and rows < vocab:
        named = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        if covered.shape != named.shape or not torch.equal(covered.bool(), named):
            raise UsageError(f"drafter {checkpoint.source}: d2t and t2d name different tokens")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _fill(drafter: Any, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Give a drafter its weights: exactly those it has, all of them finite."""
    checkpoint.check_names(drafter.state_dict(), tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise UsageError(f"drafter {checkpoint.source}: {name} holds no finite floating-point numbers")
    drafter.load_state_dict(tensors)


def _misfit(checkpoint: Checkpoint, target: Target, what: str, made_for: int, found: int) -> UsageError:
    return UsageError(
        f"drafter {checkpoint.source} does not fit target {target.name}: "
        f"it was made for a target whose {what} is {made_for}, not {found}"
    )


def _check_fit(config: BlockConfig | DartConfig, checkpoint: Checkpoint, target: Target) -> None:
    for what, made_for, found in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
    ):
        if made_for != found:
            raise _misfit(checkpoint, target, what, made_for, found)
    tokenizer_file = checkpoint.folder / "tokenizer.json"
    if target.tokenizer is not None and tokenizer_file.is_file():
        from tokenizers import Tokenizer

        try:
            vocabulary = Tokenizer.from_file(str(tokenizer_file)).get_vocab()
        except Exception as error:  # the library raises nothing more precise
            raise UsageError(f"drafter {checkpoint.source}: tokenizer.json cannot be read: {error}") from error
        if vocabulary != target.tokenizer.get_vocab():
            raise UsageError(f"drafter {checkpoint.source} does not fit target {target.name}: its tokenizer is another")


def _share_equal(drafter: Any, target: Target) -> None:
    """Use the target's embedding and head where the checkpoint's copies are equal, and save their memory."""
    for own, theirs in (
        (drafter.embed_tokens, target.model.get_input_embeddings()),
        (drafter.lm_head, target.model.get_output_embeddings()),
    ):
        if torch.equal(own.weight, theirs.weight):
            own.weight = theirs.weight
