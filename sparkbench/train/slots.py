"""The forwards of training: final hidden states of all drafted slots, at many anchors of a sequence at once.

An anchor is a position whose token is known and roots a block; its slots predict the tokens behind it. All blocks of a
sequence run in one forward. A mask shows each block what a drafter sees in use: the features of the positions before
its anchor, and its own slots. It cannot see other blocks, nor the text it is to predict. The pieces are those of
inference; only the way context reaches them differs (all positions at once, masked, instead of a growing cache).

Not covered: sliding windows while training: a drafter's window is as long as the longest sequence it is trained on.
"""

import torch
from torch import Tensor

from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.dart import PUBLISHED_NORMS, DartDrafter


def hidden_at(
    drafter: BlockDrafter | DartDrafter, target: Target, features: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """Final hidden states [B, K, L, H] of the L drafted slots at K anchors a row; `drafter.head` makes logits of them.

    features: [B, S, F * H], the target's features of the rows' tokens.   ids: [B, S].
    anchors:  [B, K], positions; of DART at least 1, since its first row joins the features of the position before.
    """
    run = dart_hidden if isinstance(drafter, DartDrafter) else block_hidden
    return run(drafter, target, features, ids, anchors)  # type: ignore[arg-type]


def block_hidden(drafter: BlockDrafter, target: Target, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """`hidden_at` of DFlash and DSpark: every slot of a block sees the whole block."""
    config = drafter.config
    length, block = features.shape[1], config.block_size
    slots = torch.arange(length, device=features.device)
    context = drafter.context_kv(features, drafter.rope(slots, features.dtype))

    masks = torch.full((*anchors.shape, block - 1), config.mask_token_id, device=features.device)
    x = drafter.embed(torch.cat([ids.gather(1, anchors)[..., None], masks], 2).flatten(1), target)
    positions = (anchors[..., None] + torch.arange(block, device=features.device)).flatten(1)
    rope = drafter.rope(positions, x.dtype)
    owner = torch.arange(x.shape[1], device=features.device) // block  # the block of each slot
    own = (owner[:, None] == owner).expand(len(x), -1, -1)
    seen = torch.cat([slots < anchors[:, owner, None], own], 2)[:, None]
    for layer, (context_keys, context_values) in zip(drafter.blocks, map(torch.unbind, context), strict=True):
        queries, keys, values = layer.block_qkv(x, rope)
        keys, values = torch.cat([context_keys, keys], 2), torch.cat([context_values, values], 2)
        x = layer.attend(x, queries, keys, values, seen)
    return drafter.norm(x.unflatten(1, (-1, block))[:, :, config.first_slot :])


def dart_hidden(drafter: DartDrafter, target: Target, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """`hidden_at` of DART. The rows of the prefix are shared by all blocks; each has masks of its own, which see the
    prefix up to their anchor, themselves and the masks before them.

    Row j of the prefix joins the features at j with the token at j + 1, so a block anchored at a begins with row a - 1.
    """
    config, layer = drafter.config, drafter.midlayer
    count, masks, device = anchors.shape[1], config.masks, features.device
    projected = drafter.fc(features[:, :-1])
    inputs = layer.inputs(target.embed(ids[:, 1:]), projected)
    rows = torch.arange(inputs.shape[1], device=device)
    keys, values = layer.keys_values(inputs, drafter.rope(rows, inputs.dtype))

    steps = torch.arange(-1, masks, device=device)  # of a block's rows: the last of the prefix, and the masks
    positions = anchors[..., None] + steps
    mask_inputs = layer.mask_rep.to(inputs.dtype).expand(len(anchors), count * masks, -1)
    mask_rope = drafter.rope(positions[..., 1:].flatten(1), inputs.dtype)
    mask_keys, mask_values = layer.keys_values(mask_inputs, mask_rope)

    last = (anchors - 1)[..., None]
    own_masks = mask_inputs.unflatten(1, (count, masks))
    own_inputs = torch.cat([inputs.gather(1, last.expand(-1, -1, inputs.shape[2]))[:, :, None], own_masks], 2)
    residual = layer.mask_residual.to(projected.dtype).expand(len(anchors), count, masks, -1)
    residuals = torch.cat([projected.gather(1, last.expand(-1, -1, projected.shape[2]))[:, :, None], residual], 2)
    queries = layer.queries(own_inputs.flatten(1, 2), drafter.rope(positions.flatten(1), inputs.dtype))

    owner = torch.arange(count, device=device)
    own = (owner[:, None, None, None] == owner[:, None]) & (steps[:, None, None] >= steps[1:])  # [K, 1 + m, K, m]
    own = own.flatten(2).flatten(0, 1).expand(len(anchors), -1, -1)
    prefix = (rows < anchors[..., None]).repeat_interleave(len(steps), 1)
    seen = torch.cat([prefix, own], 2)[:, None]
    hidden = layer.attend(
        residuals.flatten(1, 2), queries, torch.cat([keys, mask_keys], 2), torch.cat([values, mask_values], 2), seen
    )
    hidden = hidden.unflatten(1, (count, len(steps)))[:, :, 0 if config.shifted else 1 :]
    return drafter.normed(hidden, PUBLISHED_NORMS)
