"""A key-value cache with a length per row.

Rows of a batch accept different numbers of tokens, so every row has its own length: new entries of row b are written
at `length[b]`, and become part of the cache only when they are committed. What lies beyond a row's length is garbage
that masks hide and later writes replace, so dropping a rejected draft costs nothing.

One buffer holds all layers, [layers, 2, B, heads, capacity, head_dim], so that compacting an accepted path is one
gather and one copy for the whole model. The buffer is allocated once for the expected length, in steps of `BUCKET`
entries, and grows by copying when that was too small.

Used by the target and by drafters. Masks are the caller's business.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET = 128


class RowCache:
    """Keys and values of `layers` layers for `batch` rows.

    lengths:      [B] int64 on the device: committed entries of each row.
    host_lengths: the same numbers on the host, where the loop learns them anyway.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, 2, batch, heads, _bucketed(capacity), head_dim)
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = [0] * batch
        self.width = 0
        self._slots: Tensor | None = None
        self._rows = torch.arange(batch, device=device)[:, None]

    @property
    def batch(self) -> int:
        return len(self.host_lengths)

    @property
    def max_length(self) -> int:
        return max(self.host_lengths)

    @property
    def uniform(self) -> bool:
        """All rows have the same length, so slices do where rows would need a scatter."""
        return min(self.host_lengths) == max(self.host_lengths)

    @property
    def span(self) -> int:
        """Slots that attention reads: the longest row and the entries being written."""
        return self.max_length + self.width

    def horizon(self, window: int | None) -> int:
        """The first slot that an entry being written can see under a sliding window; attention reads from there."""
        return 0 if window is None else max(0, min(self.host_lengths) - window + 1)

    def open(self, width: int) -> None:
        """Prepare for one forward that writes `width` entries a row, in each layer."""
        self.width = width
        self._grow(self.span)
        self._slots = None if self.uniform else self.lengths[:, None] + _range(width, self.lengths)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, width, head_dim] behind each row; views [B, heads, span, head_dim]."""
        own_keys, own_values = self.store[layer, 0], self.store[layer, 1]
        if self._slots is None:
            start = self.host_lengths[0]
            own_keys[:, :, start : start + self.width] = keys
            own_values[:, :, start : start + self.width] = values
        else:
            own_keys[self._rows, :, self._slots] = keys.transpose(1, 2)
            own_values[self._rows, :, self._slots] = values.transpose(1, 2)
        span = self.span
        return own_keys[:, :, :span], own_values[:, :, :span]

    def write_layers(self, entries: Tensor) -> None:
        """Write keys and values of all layers at once: [layers, 2, B, heads, width, head_dim]."""
        if self._slots is None:
            start = self.host_lengths[0]
            self.store[:, :, :, :, start : start + self.width] = entries
        else:
            self.store[:, :, self._rows, :, self._slots] = entries.permute(2, 4, 0, 1, 3, 5)

    def compact(self, path: Tensor) -> None:
        """Move the entries `path` [B, P] (indices into the last write, increasing) to the first P written slots."""
        steps = path.shape[1]
        if self._slots is None and self.batch == 1:
            start = self.host_lengths[0]
            row = self.store[:, :, 0]
            row[:, :, :, start : start + steps] = row.index_select(3, start + path[0])
            return
        source = self.lengths[:, None] + path
        slots = self.lengths[:, None] + _range(steps, self.lengths)
        self.store[:, :, self._rows, :, slots] = self.store[:, :, self._rows, :, source]

    def commit(self, counts: Sequence[int]) -> None:
        """Add `counts` entries, the first written ones, to each row's length."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]
        if self.uniform:
            self.lengths.fill_(self.host_lengths[0])
        else:
            self.lengths.copy_(torch.tensor(self.host_lengths), non_blocking=True)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows`.

        In their old order they close up in place: nothing is allocated, and only what a row holds is copied.
        """
        if list(rows) == sorted(set(rows)):
            for place, row in enumerate(rows):
                if row != place:
                    used = self.host_lengths[row]
                    self.store[:, :, place, :, :used] = self.store[:, :, row, :, :used]
            self.store = self.store[:, :, : len(rows)]
        else:
            self.store = self.store[:, :, rows]
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths.index_select(0, index)
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self._rows = self._rows[: len(rows)]

    def admit(self, rows: int) -> None:
        """Add `rows` empty rows behind those there are."""
        layers, two, _, *shape = self.store.shape
        self._append(self.store.new_zeros(layers, two, rows, *shape), self.lengths.new_zeros(rows), [0] * rows)

    def join(self, other: "RowCache") -> None:
        """Add the rows of another cache of the same shape behind those there are."""
        capacity = max(self.store.shape[4], other.store.shape[4])
        self.store = _extended(self.store, capacity)
        self._append(_extended(other.store, capacity), other.lengths, other.host_lengths)

    def _append(self, store: Tensor, lengths: Tensor, host_lengths: Sequence[int]) -> None:
        self.store = torch.cat([self.store, store], 2)
        self.lengths = torch.cat([self.lengths, lengths])
        self.host_lengths = [*self.host_lengths, *host_lengths]
        self._rows = torch.arange(self.batch, device=self.lengths.device)[:, None]

    def _grow(self, needed: int) -> None:
        capacity = self.store.shape[4]
        if needed > capacity:
            self.store = _extended(self.store, _bucketed(max(needed, capacity * 3 // 2)))


def _extended(store: Tensor, capacity: int) -> Tensor:
    """`store` with room for `capacity` entries a row."""
    *leading, entries, head_dim = store.shape
    if entries == capacity:
        return store
    larger = store.new_zeros(*leading, capacity, head_dim)
    larger[:, :, :, :, :entries] = store
    return larger


def _bucketed(entries: int) -> int:
    return -(-max(entries, 1) // BUCKET) * BUCKET


def _range(steps: int, like: Tensor) -> Tensor:
    return torch.arange(steps, device=like.device)
