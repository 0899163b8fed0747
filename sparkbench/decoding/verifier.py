"""The verifier: one batch on the target, behind prefill, verify and commit.

It owns the batch's key-value cache and hands the stock transformers model what it needs: token ids, positions (row
length + depth) and 4D masks. The model's own code runs unchanged; only its cache is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from sparkbench.decoding.cache import RowCache
from sparkbench.decoding.masks import MaskWriter
from sparkbench.decoding.tree import DraftTree

if TYPE_CHECKING:
    from sparkbench.decoding.target import Target


@dataclass(frozen=True, eq=False)
class Verified:
    """What the target says of a tree.

    logits:   [B, N, V] in the model's dtype: the next token after each node.
    ids:      [B, N] int64: the tokens of the nodes.
    features: [B, N, F * H]: residual streams after the feature layers, joined along channels; None if no layer is
              asked for.
    """

    logits: Tensor
    ids: Tensor
    features: Tensor | None


@dataclass(frozen=True, eq=False)
class Packed:
    """A tree made ready for the target: ids and positions [B, N], masks by layer type."""

    ids: Tensor
    positions: Tensor
    masks: dict[str, Tensor | None]


class Verifier:
    """Prefill, verify and commit for one batch; close it to take the feature hooks off the model.

    capacity: cache entries a row is expected to need; more is allocated when it is not enough.
    """

    def __init__(self, target: "Target", batch: int, capacity: int, feature_layers: Sequence[int] = ()) -> None:
        self.target = target
        self.cache = self._new_cache(batch, capacity)
        self.forwards = 0
        self._stock_cache = _StockCache(self.cache, target.layer_windows)
        self._writer = MaskWriter(target.windows, target.by_type, target.dtype, target.device)
        self._taps = FeatureTaps(target, feature_layers)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Verified:
        """Run the prompts, right-padded to the longest; logits [B, 1, V] are those after each last token.

        The features [B, S, F * H] of padding are garbage. The prompts are committed.
        """
        longest = max(map(len, prompts))
        padded = [list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        ids = torch.tensor(padded, device=self.target.device)
        tree = DraftTree.chain_of(ids[:, 0], ids[:, 1:])
        self.cache.open(longest)
        causal = None if self._causal_alone(longest) else self._writer.masks(tree, self.cache)
        masks = causal or dict.fromkeys(self.target.windows)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.target.device)
        verified = self._forward(Packed(ids, tree.depths, masks), last)
        self.cache.commit([len(prompt) for prompt in prompts])
        return verified

    def admit(self, prompts: Sequence[Sequence[int]]) -> Verified:
        """Prefill further prompts as new rows behind those there are; the result is that of `prefill`."""
        running = self.cache
        self.cache = self._stock_cache.rows = self._new_cache(len(prompts), max(map(len, prompts)))
        try:
            verified = self.prefill(prompts)
            running.join(self.cache)
        finally:
            self.cache = self._stock_cache.rows = running
        return verified

    def pack(self, tree: DraftTree) -> Packed:
        """Positions and masks of `tree`, behind what is committed."""
        self.cache.open(tree.width)
        return Packed(tree.tokens, self.cache.lengths[:, None] + tree.depths, self._writer.masks(tree, self.cache))

    def verify(self, packed: Packed) -> Verified:
        """One forward of the target over a packed tree; its entries stay uncommitted."""
        return self._forward(packed, None)

    def commit(self, path: Tensor | None, counts: Sequence[int]) -> None:
        """Keep the first `counts` nodes of `path` [B, P] of each row; None when they lie in place already."""
        if path is not None:
            self.cache.compact(path)
        self.cache.commit(counts)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows` from the batch."""
        self.cache.keep(rows)

    def close(self) -> None:
        self._taps.remove()

    def _new_cache(self, batch: int, capacity: int) -> RowCache:
        target = self.target
        return RowCache(
            target.num_layers, target.kv_heads, target.head_dim, batch, capacity, target.dtype, target.device
        )

    def _causal_alone(self, longest: int) -> bool:
        """Padding lies to the right, so a causal forward needs no mask unless a window cuts it."""
        return all(window is None or longest <= window for window in self.target.windows.values())

    def _forward(self, packed: Packed, last: Tensor | None) -> Verified:
        self.forwards += 1
        hidden = self.target.run(packed.ids, packed.positions, packed.masks, self._stock_cache)
        if last is not None:
            hidden = hidden[torch.arange(len(last), device=hidden.device), last][:, None]
        return Verified(self.target.head(hidden), packed.ids, self._taps.take())


class FeatureTaps:
    """Hooks that keep the residual stream after the asked-for decoder layers, and nothing else.

    Layer k means `hidden_states[k + 1]` of transformers: -1 is the embedding output, and the last layer's entry is
    taken after the final norm.
    """

    def __init__(self, target: "Target", layers: Sequence[int]) -> None:
        self._kept: dict[int, Tensor] = {}
        self._layers = tuple(layers)
        self._handles = [self._attach(target, layer) for layer in dict.fromkeys(layers)]

    def take(self) -> Tensor | None:
        """The features of the last forward [B, N, F * H], or None without layers."""
        if not self._layers:
            return None
        joined = torch.cat([self._kept[layer] for layer in self._layers], dim=-1)
        self._kept.clear()
        return joined

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _attach(self, target: "Target", layer: int) -> Any:
        decoder = target.decoder

        def before(module: Any, inputs: tuple[Tensor, ...]) -> None:
            self._kept[layer] = inputs[0]

        def after(module: Any, inputs: Any, output: Any) -> None:
            self._kept[layer] = output if isinstance(output, Tensor) else output[0]

        if layer == -1:
            return decoder.layers[0].register_forward_pre_hook(before)
        if layer == target.num_layers - 1:
            return decoder.norm.register_forward_hook(after)
        return decoder.layers[layer].register_forward_hook(after)


class _StockCache(Cache):
    """A RowCache behind the interface that transformers models write through; `windows`: sliding window by layer."""

    def __init__(self, rows: RowCache, windows: Sequence[int | None]) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self._windows = windows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.rows.write(layer_idx, key_states, value_states)
        first = self.rows.horizon(self._windows[layer_idx])
        return (keys[:, :, first:], values[:, :, first:]) if first else (keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.rows.max_length

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        return self.rows.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int | None = 0) -> tuple[int, int]:
        return self.rows.span, 0
