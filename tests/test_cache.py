"""RowCache against a plain list of lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkbench.decoding.cache import BUCKET, RowCache

LAYERS, HEADS, DIM = 2, 3, 4
CPU = torch.device("cpu")


def new_cache(batch: int, capacity: int = 8) -> RowCache:
    return RowCache(LAYERS, HEADS, DIM, batch, capacity, torch.float32, CPU)


class Model:
    """Cache and naive twin: a list of entries [layers, 2, heads, dim] a row."""

    def __init__(self, batch: int, capacity: int = 8) -> None:
        self.cache = new_cache(batch, capacity)
        self.rows: list[list[Tensor]] = [[] for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(0)

    def step(self, width: int, paths: list[list[int]] | None, counts: list[int], at_once: bool = False) -> None:
        """Write `width` entries a row; keep `paths` (or the first `counts`)."""
        batch = len(self.rows)
        new = torch.randn(LAYERS, 2, batch, HEADS, width, DIM, generator=self.generator)
        cache = self.cache
        cache.open(width)
        assert cache.span == max(map(len, self.rows)) + width
        if at_once:
            cache.write_layers(new)
        for layer in range(0 if at_once else LAYERS):
            views = cache.write(layer, new[layer, 0], new[layer, 1])
            for which, view in enumerate(views):
                assert view.shape == (batch, HEADS, cache.span, DIM)
                for row, entries in enumerate(self.rows):
                    expected = [entry[layer, which] for entry in entries]
                    expected += list(new[layer, which, row].unbind(1))
                    assert torch.equal(view[row, :, : len(expected)], torch.stack(expected, 1))
        if paths is not None:
            longest = max(counts)
            cache.compact(torch.tensor([(path + path[-1:] * longest)[:longest] for path in paths]))
        cache.commit(counts)
        for row, entries in enumerate(self.rows):
            for node in (paths[row] if paths is not None else range(width))[: counts[row]]:
                entries.append(new[:, :, row, :, node])
        self.check()

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)
        self.rows = [self.rows[row] for row in rows]
        self.check()

    def check(self) -> None:
        lengths = [len(entries) for entries in self.rows]
        assert self.cache.host_lengths == lengths
        assert self.cache.lengths.tolist() == lengths
        assert self.cache.batch == len(lengths)
        assert self.cache.max_length == max(lengths)
        assert self.cache.uniform == (len(set(lengths)) == 1)
        for row, entries in enumerate(self.rows):
            if entries:
                stored = self.cache.store[:, :, row, :, : len(entries)]
                assert torch.equal(stored, torch.stack(entries, 3))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_lists(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 4))
    model = Model(batch)
    for _ in range(data.draw(st.integers(1, 6))):
        batch = len(model.rows)
        width = data.draw(st.integers(1, 90))
        permuted = data.draw(st.booleans())
        same = data.draw(st.booleans())
        counts = [data.draw(st.integers(1, min(width, 9)))] * batch
        if not same:
            counts = [data.draw(st.integers(1, min(width, 9))) for _ in range(batch)]
        paths = None
        if permuted:
            nodes = st.lists(st.integers(0, width - 1), min_size=max(counts), max_size=max(counts), unique=True)
            paths = [sorted(data.draw(nodes)) for _ in range(batch)]
        model.step(width, paths, counts, at_once=data.draw(st.booleans()))
        if len(model.rows) > 1 and data.draw(st.booleans()):
            rows = data.draw(st.lists(st.sampled_from(range(len(model.rows))), min_size=1, unique=True))
            model.keep(sorted(rows))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("at_once", [False, True])
def test_growth_keeps_what_is_stored(batch: int, at_once: bool) -> None:
    model = Model(batch, capacity=1)
    before = model.cache.store.shape[4]
    for count in (BUCKET - 3, 9, 2 * BUCKET, 1):
        model.step(count, None, [count - row for row in range(batch)] if count > batch else [count] * batch, at_once)
    assert model.cache.store.shape[4] > before
    assert model.cache.store.shape[4] % BUCKET == 0


def test_slices_and_scatter_write_the_same() -> None:
    """A row beside one of another length holds what it holds alone."""
    alone, pair = new_cache(1), new_cache(2)
    generator = torch.Generator().manual_seed(3)
    for width, other in ((4, 2), (3, 3), (5, 1)):
        entries = torch.randn(LAYERS, 2, 2, HEADS, width, DIM, generator=generator)
        path = torch.arange(width)[None]
        alone.open(width)
        alone.write_layers(entries[:, :, :1])
        alone.compact(path)
        alone.commit([width])
        pair.open(width)
        pair.write_layers(entries)
        pair.compact(path.expand(2, -1))
        pair.commit([width, other])
    assert not pair.uniform
    assert torch.equal(alone.store[:, :, 0, :, :12], pair.store[:, :, 0, :, :12])


def test_what_is_not_committed_is_overwritten() -> None:
    model = Model(2)
    model.step(6, None, [1, 6])
    model.step(6, None, [6, 1])


def test_lengths_are_one_tensor_between_drops() -> None:
    """Who holds `lengths` sees every commit, whether the rows agree or not."""
    cache = new_cache(2)
    held = cache.lengths
    for counts in ([2, 2], [1, 3], [3, 1]):
        cache.open(4)
        cache.commit(counts)
        assert held.tolist() == cache.host_lengths
