"""Look-ups of the profile: contexts that the index holds, and times by a clock of the test's own."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from sparkbench.errors import UsageError
from sparkbench.ngram.build import BuildSpec, Document, build
from sparkbench.ngram.lookup import look_up
from sparkbench.profiling.lookups import CALLS, CANDIDATES, CONTEXTS, known_contexts, lookup_time


@pytest.mark.parametrize("order", [2, 3, 4])
def test_contexts_are_held(tmp_path: Path, order: int) -> None:
    draws = np.random.default_rng(3)
    text = draws.integers(0, 20, 3000)
    index = build([Document(text)], tmp_path / "index", BuildSpec(30, order=order))
    contexts, candidates = known_contexts(index, 200)
    assert contexts.shape == (200, order - 1)
    assert candidates.shape == (200, CANDIDATES)
    held = {tuple(text[start : start + order - 1]) for start in range(len(text))}
    assert {tuple(context) for context in contexts.tolist()} <= held
    assert len({tuple(context) for context in contexts.tolist()}) > (15 if order == 2 else 100)
    _, matched = look_up(index, contexts, candidates, np.arange(200))
    assert (matched == order - 1).any(1).mean() > 0.9


def test_cold_is_the_first_pass_and_warm_the_median(tmp_path: Path) -> None:
    text = np.random.default_rng(3).integers(0, 20, 3000)
    path = tmp_path / "index"
    index = build([Document(text)], path, BuildSpec(30))
    ticks = iter([0.0, 8.0, 10.0, 11.0, 20.0, 23.0, 30.0, 32.0])
    found = lookup_time(str(path), 3, clock=lambda: next(ticks))
    contexts = CALLS * CONTEXTS
    assert (found.cold_s, found.warm_s) == (8.0 / contexts, 2.0 / contexts)
    assert (found.index, found.nodes, found.file_bytes) == (str(path), index.nodes, path.stat().st_size)
    assert found.bytes_per_node == index.bytes_per_node
    (tmp_path / "other").write_text("nothing")
    with pytest.raises(UsageError, match="other"):
        lookup_time(str(tmp_path / "other"), 3, clock=map(float, count()).__next__)
    build([], tmp_path / "empty", BuildSpec(30))
    with pytest.raises(UsageError, match="no text of 2 tokens"):
        lookup_time(str(tmp_path / "empty"), 3)
