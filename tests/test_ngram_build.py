"""Building an n-gram index and converting a `.trie`: golden counts, brute force, bounds, and what is refused."""

import json
import resource
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import golden_folder
from ngram_helpers import TOY, Gram, count, documents, grams, trie_bytes

from sparkbench.errors import RunError, UsageError
from sparkbench.ngram.build import LEAST_MEMORY, BuildSpec, Document, build
from sparkbench.ngram.describe import describe
from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.lookup import look_up
from sparkbench.ngram.nodes import make_levels
from sparkbench.ngram.runs import Packing, Sorter
from sparkbench.ngram.trie import convert
from sparkbench.ngram.write import write_index

GOLDEN = golden_folder("dart")
TRIES = sorted(path.stem for path in (GOLDEN / "ngram").glob("*.trie"))
TEXTS = {"documents": "0", "corpus": "", "tokenizer": ""}


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def counts_of(name: str) -> dict[Gram, int]:
    """The golden counts, without tokens that neither occur nor go on; those of an index with no counts file: none."""
    if not (GOLDEN / "ngram" / f"counts_{name}.json").exists():
        return {}
    rows = golden(f"ngram/counts_{name}.json")
    counts = {tuple(gram): number for part in ("unigrams", "bigrams", "trigrams") for *gram, number in rows[part]}
    inner = {gram[:-1] for gram in counts}
    return {gram: number for gram, number in counts.items() if number or len(gram) > 1 or gram in inner}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("converted")
    vocab = golden("manifest.json")["vocab_size"]
    return cache(lambda name: convert(GOLDEN / "ngram" / f"{name}.trie", folder / name, vocab))


def test_the_golden_corpus_gives_the_golden_counts(tmp_path: Path, converted: Any) -> None:
    manifest = golden("manifest.json")
    order, vocab = manifest["ngram"]["order"], manifest["vocab_size"]
    lines = (GOLDEN / "ngram" / "corpus.jsonl").read_text().splitlines()
    texts = [np.frombuffer(json.loads(line)["text"].encode(), np.uint8) for line in lines]
    index = build(map(Document, texts), tmp_path / "index", BuildSpec(vocab, order, end_token=0))
    index.verify()
    assert grams(index) == counts_of("full")
    assert index.total_tokens == index.counts[0] == golden("ngram/counts_full.json")["total_tokens"]
    for name in ("tokens", "counts", "first_child"):
        assert (getattr(index, name) == getattr(converted("full"), name)).all()


@pytest.mark.parametrize("name", TRIES)
def test_golden_tries_give_the_golden_counts(name: str, converted: Any) -> None:
    index = converted(name)
    index.verify()
    found = grams(index)
    assert found == counts_of(name)
    arrays = GOLDEN / "ngram" / f"counts_{name}.npz"
    if not arrays.exists():
        assert describe(index).nodes == (0,) * index.order
        return
    with np.load(arrays) as rows:
        for kind, order in (("bigram", 2), ("trigram", 3)):
            tokens, counts, chances = (rows[f"{kind}_{part}"] for part in ("tokens", "counts", "prob"))
            assert [found[tuple(gram)] for gram in tokens.tolist()] == counts.tolist()
            result, lengths = look_up(index, tokens[:, :-1], tokens[:, -1:], np.arange(len(tokens)))
            np.testing.assert_allclose(result[:, 0], np.nan_to_num(chances), rtol=1e-6)
            assert (lengths == order - 1).all()


@pytest.mark.parametrize("name", TRIES)
def test_golden_look_ups(name: str, converted: Any) -> None:
    index = converted(name)
    found = grams(index)
    cases = [case for case in golden("cases/ngram_lookups.json") if case["index"] == name]
    assert cases
    for case in cases:
        result, lengths = look_up(
            index, np.array([case["context"]]), np.array([case["query_tokens"]]), np.zeros(1, int)
        )
        np.testing.assert_allclose(result[0], case["probability"], rtol=1e-6)
        assert lengths[0].tolist() == case["matched_context_length"]
        for right in case["children"].values():
            context = tuple(right["context"])
            assert found.get(context) == right["context_count"] or (len(context) == 1 and not found.get(context))
            children = [[gram[-1], number] for gram, number in found.items() if gram[:-1] == context]
            assert children == right["children"]


@pytest.mark.parametrize(("order", "vocab"), [(2, 60_000), (3, 900), (4, 30)])
def test_little_memory_gives_the_same_file_and_the_right_counts(order: int, vocab: int, tmp_path: Path) -> None:
    draws = np.random.default_rng(order)
    # Documents of every size, one longer than a run, and in all enough for several passes of merging.
    sizes = [*draws.integers(0, 50, 200).tolist(), 30_000, 1, 0]
    texts = [(vocab * draws.random(size) ** 3).astype(int).tolist() for size in sizes]
    least = LEAST_MEMORY + 64 * vocab
    lines: list[str] = []
    small = BuildSpec(vocab, order, 0, memory_bytes=least, temp=tmp_path / "temp")
    if vocab < 1000:
        index = build(documents(texts), tmp_path / "small", small, lines.append)
        assert int(lines[-2].rsplit(" ", 1)[1].replace(",", "")) > 2, lines
    else:
        index = build(documents(texts), tmp_path / "small", small)
    build(documents(texts), tmp_path / "large", BuildSpec(vocab, order, 0))
    assert (tmp_path / "small").read_bytes() == (tmp_path / "large").read_bytes()
    index.verify()
    assert grams(index) == count([[*text, 0] for text in texts], order)
    assert index.total_tokens == sum(sizes) + len(sizes)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["large", "small", "temp"]


def test_runs_are_merged_in_several_passes(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    keys = draws.integers(0, 3000, 20_000)
    sorter = Sorter(tmp_path, Packing(2, 20), 12 * 100, distinct=False)
    sorter.add(keys)
    assert len(sorter.runs) > 100
    blocks = [(some.copy(), counts.copy()) for some, counts in sorter.merged(12 * 30)]
    right = np.unique(keys, return_counts=True)
    assert [np.concatenate(part).tolist() for part in zip(*blocks, strict=True)] == [part.tolist() for part in right]
    assert list(tmp_path.iterdir()) == []


def test_nothing_and_empty_documents(tmp_path: Path) -> None:
    index = build([], tmp_path / "a", BuildSpec(5))
    assert (index.nodes, index.total_tokens, grams(index)) == (6, 0, {})
    index = build(documents([[], [4], []]), tmp_path / "b", BuildSpec(5, end_token=2))
    assert grams(index) == {(4,): 1, (2,): 3, (4, 2): 1}
    index = build(documents([[], [4], []]), tmp_path / "c", BuildSpec(5))
    assert grams(index) == {(4,): 1}


@pytest.mark.parametrize("vocab", [(1 << 18) - 2, (1 << 21) - 2])
def test_the_largest_tokens(vocab: int, tmp_path: Path) -> None:
    last = vocab - 1
    index = build(documents([[last, last, last, 0, last]]), tmp_path / "index", BuildSpec(vocab))
    assert grams(index) == count([[last, last, last, 0, last]], 3)
    contexts = np.array([[last, last], [0, last]])
    found, lengths = look_up(index, contexts, np.array([[last, vocab]]), np.zeros(2, int))
    assert (found[:, 0] > 0).all()
    assert lengths.tolist() == [[2, 0], [1, 0]]


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    for values, match in (
        ({"vocab_size": (1 << 21) - 1}, "order up to 2"),
        ({"vocab_size": 0}, "1 or more"),
        ({"vocab_size": 9, "order": 1}, "2 or more"),
        ({"vocab_size": 9, "end_token": 9}, "0 to 8"),
        ({"vocab_size": 9, "memory_bytes": 1000}, "66,112 to 1,099,511,627,776"),
        ({"vocab_size": 9, "memory_bytes": 1 << 41}, "not allowed"),
    ):
        with pytest.raises(UsageError, match=match):
            BuildSpec(**values)  # type: ignore[arg-type]
    for token in (9, -1):
        with pytest.raises(UsageError, match=f"a.txt: token {token} is outside"):
            build([Document(np.array([1, token]), "a.txt")], tmp_path / "index", BuildSpec(9))
    assert list(tmp_path.iterdir()) == []


def test_counts_beyond_32_bits(tmp_path: Path) -> None:
    """They are refused with the n-gram's name, but for the root's, which is capped."""
    half, packing = 3 << 30, Packing(2, 8)
    keys, counts = np.array([2 << 8, 3 << 8]), np.array([half, half], np.uint32)
    levels = make_levels([(keys, counts)], packing, 9, tmp_path, 1 << 16, given=False)
    write_index(tmp_path / "index", levels, TEXTS)
    index = NgramIndex.open(tmp_path / "index")
    assert (index.counts[:4].tolist(), index.total_tokens) == ([(1 << 32) - 1, 0, half, half], 2 * half)
    with pytest.raises(UsageError, match=r"tokens \(1,\) occurs more than 4,294,967,295 times"):
        make_levels([(np.array([(2 << 8) + 1, (2 << 8) + 2]), counts)], packing, 9, tmp_path, 1 << 16, given=False)
    sorter = Sorter(tmp_path, packing, 1 << 16, distinct=False)
    for number in range(2):
        sorter._keys[:1], sorter._counts[:1] = 2 << 8, half
        sorter._save([(sorter._keys[:1].copy(), sorter._counts[:1].copy())])
        assert len(sorter.runs) == number + 1
    with pytest.raises(UsageError, match=r"tokens \(1,\) occurs more than"):
        list(sorter.merged(1 << 16))


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def texts() -> Iterator[Document]:
        yield Document(np.arange(20_000) % 900)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(texts(), tmp_path / "index", BuildSpec(900, memory_bytes=LEAST_MEMORY + 64 * 900))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; it strikes in the runs, and then in the index."""
    texts = documents([np.random.default_rng(0).integers(0, 900, 20_000).tolist()])
    memory = LEAST_MEMORY + 64 * 900
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (5_000, 150_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        try:
            with pytest.raises(RunError, match=r"cannot write .*index, with temporary files in .*: File too large"):
                build(texts, tmp_path / "index", BuildSpec(900, memory_bytes=memory))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert list(tmp_path.iterdir()) == []


def test_a_realistic_index_takes_less_than_ten_bytes_a_node(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    states = (2000 * draws.random((4, 100_000)) ** 4).astype(np.int64)
    tokens = (states[0] + 7 * np.roll(states[1], 1) + 31 * (states[2] % 5)) % 2000
    index = build([Document(tokens)], tmp_path / "index", BuildSpec(2000))
    found = describe(index)
    assert found.nodes[2] > found.nodes[1] > found.nodes[0]
    assert found.bytes_per_node < 10
    assert (tmp_path / "index").stat().st_size < found.bytes + 1000


def test_a_trie_made_by_hand(tmp_path: Path) -> None:
    """In any order of nodes and children, whatever the root's count, in little memory."""
    path = tmp_path / "toy.trie"
    counts = count(TOY, 3)
    path.write_bytes(trie_bytes(counts, 3, root=12))
    assert path.stat().st_size == 688
    right = build(documents(TOY), tmp_path / "right", BuildSpec(10))
    draws = np.random.default_rng(0)
    for root in (12, 0, -5):
        order = draws.permutation(len(counts))
        mixed = sorted((list(counts)[place] for place in order), key=len)
        path.write_bytes(trie_bytes({gram: counts[gram] for gram in mixed}, 3, root))
        index = convert(path, tmp_path / "index", memory_bytes=LEAST_MEMORY + 640)
        assert index.vocab_size == right.vocab_size == 10
        for name in ("tokens", "counts", "first_child"):
            assert (getattr(index, name) == getattr(right, name)).all()


def test_a_large_trie_in_little_memory(tmp_path: Path) -> None:
    """Many blocks, runs and passes; the root's list of children is longer than what is read at once."""
    from sparkbench.ngram import trie

    draws = np.random.default_rng(0)
    texts = [draws.integers(0, 700, 6_000).tolist()]
    counts = count(texts, 3)
    (tmp_path / "large.trie").write_bytes(trie_bytes(counts, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie, "BLOCK_BYTES", 1000)
        index = convert(tmp_path / "large.trie", tmp_path / "index", memory_bytes=LEAST_MEMORY + 64 * 700)
    assert grams(index) == counts


# The second node of the toy file is (1,), the third (1, 2); before them stands the root with a child for each token.
FIRST = 16 + 24 + 12 * len({token for text in TOY for token in text})
FAULTS = {
    "short": (lambda data: data[:-1], "36 N"),
    "trailing bytes": (lambda data: data + b"\0" * 36, "36 N"),
    "node count": (lambda data: data[:8] + b"\x01" + data[9:], "36 N"),
    "order 1": (lambda data: b"\x01" + data[1:], "2 or more"),
    "order 40": (lambda data: b"\x28" + data[1:], "does not fit"),
    "order 2": (lambda data: b"\x02" + data[1:], "deeper than the order"),
    "parent": (lambda data: put(data, FIRST + 4, "<Q", 1), "node 1: its parent does not come before it"),
    "negative parent": (lambda data: put(data, FIRST + 4, "<q", -1), "node 1: its parent does not come before it"),
    "another parent": (lambda data: put(data, FIRST + 24 + 12 + 4, "<Q", 0), "lists of children"),
    "token": (lambda data: put(data, FIRST, "<i", 10), "node 1: its token is outside"),
    "negative token": (lambda data: put(data, FIRST, "<i", -1), "node 1: its token is outside"),
    "another token": (lambda data: put(data, FIRST, "<i", 6), "lists of children"),
    "negative count": (lambda data: put(data, FIRST + 12, "<i", -3), "node 1: its count is negative"),
    "small count": (lambda data: put(data, FIRST + 12, "<i", 2), r"\(1,\) occurs less often than its children"),
    "children": (lambda data: put(data, FIRST + 16, "<Q", 1 << 40), "numbers of children do not add up"),
    "more children": (lambda data: put(data, FIRST + 16, "<Q", 2), "do not add up|does not come before"),
    "child": (lambda data: put(data, FIRST + 24 + 4, "<Q", 5), "lists of children"),
}


def put(data: bytes, place: int, kind: str, value: int) -> bytes:
    packed = struct.pack(kind, value)
    return data[:place] + packed + data[place + len(packed) :]


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_tries_are_refused(fault: str, tmp_path: Path) -> None:
    change, match = FAULTS[fault]
    path = tmp_path / "toy.trie"
    toy = sorted(count(TOY, 3).items())  # (1,) first, then (1, 2)
    path.write_bytes(change(trie_bytes(dict(toy), 3, 12)))
    with pytest.raises(UsageError, match=match) as caught:
        convert(path, tmp_path / "index", 10)
    assert str(caught.value).startswith(f"{path}: ")
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.trie"
    records = [(0, 0, 0, [(1, 1), (1, 2)]), (1, 0, 1, []), (1, 0, 1, [])]
    data = struct.pack("<QQ", 3, 3)
    for token, parent, number, children in records:
        data += struct.pack("<iQiQ", token, parent, number, len(children))
        data += b"".join(struct.pack("<iQ", *child) for child in children)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"tokens \(1,\) occurs twice"):
        convert(path, tmp_path / "index")


def test_flipped_bytes_of_a_trie_change_a_count_or_are_refused(tmp_path: Path) -> None:
    data = trie_bytes(count(TOY, 3), 3, 12)
    path = tmp_path / "flipped.trie"
    right = set(count(TOY, 3))
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            index = convert(path, tmp_path / "index", 10)
        except UsageError as error:
            assert str(path) in str(error)  # noqa: PT017 (either outcome is right)
        else:
            assert set(grams(index)) <= right
