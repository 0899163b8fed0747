"""The n-gram index: look-ups against their definition, what `open` refuses, and what damage can do."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_helpers import TOY, count, documents, expected, trie_bytes

from sparkbench.errors import UsageError
from sparkbench.ngram import index as index_module
from sparkbench.ngram import lookup
from sparkbench.ngram.build import BuildSpec, build
from sparkbench.ngram.index import NgramIndex, digest_of
from sparkbench.ngram.jit import compiled
from sparkbench.ngram.lookup import look_up, warm_up
from sparkbench.ngram.trie import convert


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "toy.index"
    build(documents(TOY), path, BuildSpec(10, corpus="a toy"))
    return path


def test_the_toy_of_the_specification(toy: Path) -> None:
    index = NgramIndex.open(toy)
    assert (index.total_tokens, index.facts["documents"], index.facts["corpus"]) == (12, "4", "a toy")
    assert index.counts[0] == 12
    contexts = np.array([[1, 2], [9, 2], [2, 3], [-1, 1], [1, -1], [-1, -1], [7, 10]])
    candidates = np.array([[3, 6, 1, 2, -1, 10]])
    found, lengths = look_up(index, contexts, candidates, np.zeros(7, np.int64))
    third = np.float32(1 / 3)
    assert found.tolist() == [
        [third, 0, 0, 0, 0, 0],
        [third, 0, 0, 0, 0, 0],
        [0] * 6,
        [0, 0, 0, 1, 0, 0],
        *[[0] * 6] * 3,
    ]
    assert lengths.tolist() == [[2, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 0, 1, 0, 0], *[[0] * 6] * 3]
    assert look_up(index, contexts[:, -1:], candidates, np.zeros(7, np.int64))[1].max() == 1


@pytest.mark.parametrize(("order", "vocab"), [(2, 3), (3, 5), (4, 4)])
def test_look_ups_follow_their_definition(order: int, vocab: int, tmp_path: Path) -> None:
    draws = np.random.default_rng(order)
    texts = [draws.integers(0, vocab, size).tolist() for size in draws.integers(0, 30, 12)]
    counts = count(texts, order)
    index = build(documents(texts), tmp_path / "index", BuildSpec(vocab, order))
    for width in range(order + 2):
        contexts = draws.integers(-1, vocab + 1, (120, width))
        candidates = draws.integers(-1, vocab + 1, (7, 9))
        rows = draws.integers(0, 7, 120)
        found, lengths = look_up(index, contexts, candidates, rows)
        for context, row, *result in zip(contexts.tolist(), rows, found, lengths, strict=True):
            right = [expected(counts, context, token, order) for token in candidates[row].tolist()]
            np.testing.assert_allclose(result[0], [value for value, _ in right], rtol=1e-6)
            assert result[1].tolist() == [length for _, length in right]


def test_counts_of_zero_are_matches_and_no_nan(tmp_path: Path) -> None:
    counts = {(1,): 3, (2,): 0, (1, 2): 0, (2, 1): 0, (1, 1): 2, (1, 2, 3): 0, (2, 3): 0, (3,): 1}
    (tmp_path / "pruned.trie").write_bytes(trie_bytes(counts, 3, root=-7))
    index = convert(tmp_path / "pruned.trie", tmp_path / "index")
    found, lengths = look_up(index, np.array([[1, 2], [3, 2], [3, 1]]), np.array([[3, 2, 1]]), np.zeros(3, np.int64))
    assert found[:2].tolist() == [[0, 0, 0]] * 2
    assert found[2, 2] == np.float32(2 / 3)
    assert lengths.tolist() == [[2, 0, 1], [1, 0, 1], [0, 1, 1]]


def test_impossible_shapes_are_refused(toy: Path) -> None:
    index, one = NgramIndex.open(toy), np.zeros((2, 2), np.int64)
    for rows in (one[0, :1], one[0] + 2, one[0] - 1):
        with pytest.raises(ValueError, match=r"fit together|rows"):
            look_up(index, one, one, rows)


def test_nothing_compiles_after_the_warm_up(toy: Path) -> None:
    index = NgramIndex.open(toy)
    warm_up(index)
    before = len(lookup.fill.signatures)  # type: ignore[attr-defined]
    frozen = np.zeros((4, 6), np.int64)
    frozen.flags.writeable = False
    for array in (frozen, frozen[::2, ::3], np.zeros((2, 2), np.int32), np.asfortranarray(np.ones((3, 3), np.int64))):
        look_up(index, array, array, array[:, 0])
    assert len(lookup.fill.signatures) == before  # type: ignore[attr-defined]


def test_code_compiles_where_no_folder_can_keep_it() -> None:
    """Code that lies in no file has no such folder, as code in a folder that nobody may write to."""
    names: dict[str, Any] = {}
    exec("def double(number):\n    return 2 * number", names)
    assert compiled(names["double"])(4) == 8


def test_two_processes_read_the_same(toy: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from sparkbench.ngram.index import NgramIndex\n"
        "from sparkbench.ngram.lookup import look_up\n"
        "index = NgramIndex.open(sys.argv[1])\n"
        "assert isinstance(index.tokens.base, np.memmap) and not index.tokens.flags.writeable\n"
        "every = np.arange(100).reshape(10, 10) % 10\n"
        "print(look_up(index, every, every, every[0])[0].tobytes().hex())\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(toy)], stdout=subprocess.PIPE) for _ in range(2)]
    found = {process.communicate(timeout=120)[0] for process in started}
    every = np.arange(100).reshape(10, 10) % 10
    assert found == {look_up(NgramIndex.open(toy), every, every, every[0])[0].tobytes().hex().encode() + b"\n"}


def refuse(path: Path, match: str | None = None) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        NgramIndex.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_foreign_files_are_refused(tmp_path: Path, toy: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "file"
    refuse(path, "no such file")
    refuse(tmp_path, "folder")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "pipe")
    for content in (b"", b"{", b"text\n" * 9, b"\x80\x04\x95" + bytes(60), b"PK\x03\x04" + bytes(60), bytes(64)):
        path.write_bytes(content)
        refuse(path, "no n-gram index")
    path.write_bytes(trie_bytes(count(TOY, 3), 3))
    refuse(path, r"\.trie format; convert it: sparkbench ngram build ")
    save_file({"tokens": np.zeros(3, np.uint32)}, path, {"format": "np"})
    refuse(path, "safetensors file, but no n-gram index")
    content = toy.read_bytes()
    path.write_bytes(content.replace(b'"version":"1"', b'"version":"2"'))
    refuse(path, "version '2'")


def test_damage_is_refused(tmp_path: Path, toy: Path) -> None:
    content = toy.read_bytes()
    path = tmp_path / "damaged"
    for size in {len(content) * part // 37 for part in range(37)} | {len(content) - 1, 7, 8, 15, 16}:
        path.write_bytes(content[:size])
        refuse(path)
    path.write_bytes(content + b"\0")
    refuse(path)
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x11]) + content[place + 1 :])
        refuse(path)


def test_above_the_limit_only_verify_reads_everything(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(toy.read_bytes())
    content[-1] ^= 1
    path = tmp_path / "damaged"
    path.write_bytes(content)
    monkeypatch.setattr(index_module, "DIGEST_AT_OPEN", 0)
    with pytest.raises(UsageError, match="damaged: its digest") as caught:
        NgramIndex.open(path).verify()
    assert str(path) in str(caught.value)
    NgramIndex.open(toy).verify()


def test_verify_finds_what_was_written_wrong(tmp_path: Path, toy: Path) -> None:
    """A digest that fits says only that the file is as it was written."""
    index = NgramIndex.open(toy)
    content = bytearray(toy.read_bytes())
    begin = len(content) - 4 * 2 * index.nodes  # of the tokens
    place = begin + 4 * int(index.first_child[1 + 2])  # the first of the three children of token 2
    path = tmp_path / "wrong"
    for token, fault in ((5, "do not rise"), (10, "no token")):
        content[place : place + 4] = token.to_bytes(4, "little")
        path.write_bytes(content)
        written = index.facts["digest"]
        with open(path, "rb") as file:
            right = digest_of(file, written)
        path.write_bytes(bytes(content).replace(written.encode(), right.encode()))
        with pytest.raises(UsageError, match=f"node 3: .*{fault}"):
            NgramIndex.open(path).verify()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_damaged_arrays_never_crash_a_look_up(dtype: type[np.unsignedinteger[Any]], toy: Path) -> None:
    index = NgramIndex.open(toy)
    draws = np.random.default_rng(0)
    contexts, candidates = draws.integers(-1, 12, (200, 4)), draws.integers(-1, 12, (1, 25))
    for high in (index.nodes + 3, np.iinfo(dtype).max):
        for _ in range(10):
            first = draws.integers(0, high, index.inner + 1, dtype=dtype, endpoint=True)
            tokens = draws.integers(0, 12, index.nodes, dtype=np.uint32)
            broken = NgramIndex("broken", 5, 10, tokens, index.counts, first, {})
            found, lengths = look_up(broken, contexts, candidates, np.zeros(200, np.int64))
            assert np.isfinite(found).all()
            assert set(Counter(lengths.ravel().tolist())) <= set(range(5))
    for nodes, inner in ((2, 3), (2, index.inner), (index.nodes, 2)):
        short = NgramIndex("short", 5, 10, index.tokens[:nodes], index.counts[:nodes], index.first_child[:inner], {})
        assert not look_up(short, contexts, candidates, np.zeros(200, np.int64))[1].any()
