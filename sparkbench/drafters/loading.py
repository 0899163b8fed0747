"""From a checkpoint to a block drafter that fits its target: the checks, and what of it the target has already."""

from typing import Any

import torch

from sparkbench.decoding.layout import store_by_columns
from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.errors import UsageError
from sparkbench.scheduling import Calibration

CALIBRATION = "calibration.json"  # in a drafter's folder: temperatures for its confidences


def load(source: str, target: Target, revision: str | None = None, *, markov: bool | None = None) -> BlockDrafter:
    """Load a block drafter in any layout, for `target`. UsageError: broken, or made for another target.

    markov: whether it must have a Markov head (True), must not (False), or either (None).
    """
    checkpoint = Checkpoint.open(source, revision)
    config = BlockConfig.read(checkpoint)
    if markov is False and config.markov_rank:
        raise UsageError(f"drafter {source}: it has a Markov head, so it is a DSpark drafter")
    if markov and not config.markov_rank:
        raise UsageError(f"drafter {source}: it has no Markov head, so it is no DSpark drafter")
    _check_fit(config, checkpoint, target)
    drafter = BlockDrafter(config)
    tensors = checkpoint.tensors()
    checkpoint.check_names(drafter.state_dict(), tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise UsageError(f"drafter {source}: {name} holds no finite floating-point numbers")
    drafter.load_state_dict(tensors)
    drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    store_by_columns(drafter)
    if config.own_embedding:
        _share_equal(drafter, target)
    drafter.source, drafter.revision = source, checkpoint.revision
    if (checkpoint.folder / CALIBRATION).is_file():
        drafter.calibration = Calibration.load(checkpoint.folder / CALIBRATION)
    return drafter


def _check_fit(config: BlockConfig, checkpoint: Checkpoint, target: Target) -> None:
    pairs = {
        "number of layers": (config.target_layers, target.num_layers),
        "hidden size": (config.hidden_size, target.hidden_size),
        "vocabulary size": (config.vocab_size, target.vocab_size),
    }
    for what, (made_for, found) in pairs.items():
        if made_for != found:
            raise UsageError(
                f"drafter {checkpoint.source} does not fit target {target.name}: "
                f"it was made for a target whose {what} is {made_for}, not {found}"
            )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise UsageError(f"drafter {checkpoint.source}: mask_token_id {config.mask_token_id} is outside the vocabulary")
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
