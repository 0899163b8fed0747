"""Attention masks of a tree forward.

A node sees the committed entries of its own row, its ancestors and itself. Under a sliding window it sees of these
only what lies fewer than `window` positions back, where the position of a node is its depth below the row's length and
not its place in the flattened tree.

Masks are additive, in the model's dtype, so that they are converted once a forward and not once a layer. They are
written in place into a buffer of bucketed size. Slots beyond a row's length hold garbage and are never seen.
"""

import torch
from torch import Tensor

from sparkbench.decoding.cache import BUCKET, RowCache
from sparkbench.decoding.tree import DraftTree

FULL = "full_attention"
SLIDING = "sliding_attention"


class MaskWriter:
    """Writes the masks of one batch, a buffer for each of its layer types.

    windows:  sliding window of each layer type in use; None for full attention.
    implicit: the model takes None for a windowed layer, too, and does not make a mask of its own then.
    """

    def __init__(
        self, windows: dict[str, int | None], implicit: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.windows = windows
        self._implicit = implicit
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def masks(self, tree: DraftTree, cache: RowCache) -> dict[str, Tensor | None]:
        """Masks [B, 1, N, S] by layer type, None where every slot is visible to every node.

        S are the slots from the layer's horizon (RowCache.horizon) to the end of the cache's span.
        """
        return {kind: self._mask(kind, window, tree, cache) for kind, window in self.windows.items()}

    def _mask(self, kind: str, window: int | None, tree: DraftTree, cache: RowCache) -> Tensor | None:
        if window is not None and cache.max_length + tree.max_depth < window:
            window = None  # nothing lies outside it yet
        first = cache.horizon(window)
        if cache.uniform and tree.width == 1 and (first == 0 or self._implicit):
            return None
        mask = self._view(kind, tree.batch, tree.width, cache.span - first)
        if window is None and cache.uniform:
            start = cache.max_length
            mask[..., :start].zero_()
            mask[..., start:].fill_(float("-inf")).masked_fill_(tree.visibility[:, None], 0.0)
        else:
            mask.fill_(float("-inf")).masked_fill_(visible(tree, cache, window)[:, None, :, first:], 0.0)
        return mask

    def _view(self, kind: str, batch: int, width: int, span: int) -> Tensor:
        buffer = self._buffers.get(kind)
        if buffer is None or buffer.shape[0] < batch or buffer.shape[2] < width or buffer.shape[3] < span:
            size = (batch, 1, max(width, buffer.shape[2] if buffer is not None else 0), -(-span // BUCKET) * BUCKET)
            buffer = self._buffers[kind] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:batch, :, :width, :span]


def visible(tree: DraftTree, cache: RowCache, window: int | None) -> Tensor:
    """[B, N, cache.span] bool: which slots each node sees, for rows of any length, under an optional window."""
    slots = torch.arange(cache.span, device=tree.tokens.device)
    behind = slots - cache.lengths[:, None]  # [B, span]: index into the tree, negative for committed slots
    if tree.chain:  # a node sees all before it, and its slot is its position
        steps = torch.arange(tree.width, device=slots.device)[:, None]
        seen = behind[:, None] <= steps
        return seen if window is None else seen & (behind[:, None] > steps - window)
    node = behind.clamp(0, tree.width - 1)
    in_tree = (behind >= 0) & (behind < tree.width)
    tree_part = tree.visibility.gather(2, node[:, None].expand(-1, tree.width, -1)) & in_tree[:, None]
    seen = (behind < 0)[:, None] | tree_part
    if window is not None:
        position = torch.where(behind < 0, slots, cache.lengths[:, None] + tree.depths.gather(1, node))
        own = cache.lengths[:, None] + tree.depths
        seen = seen & (own[:, :, None] - position[:, None] < window)
    return seen
