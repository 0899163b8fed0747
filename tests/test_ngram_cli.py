"""`sparkbench ngram`: what it builds from each kind of file, what it prints, and what it refuses in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_helpers import TOY, count, grams, trie_bytes

from sparkbench import cli
from sparkbench.ngram import documents
from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.tokens import Tokens

IDS = ("--vocab-size", "10", "--end-token", "0")
Ngram = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ngram(capsys: pytest.CaptureFixture[str]) -> Ngram:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["ngram", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_ids(path: Path, texts: Any) -> None:
    path.write_text("".join(json.dumps({"ids": list(text)}) + "\n" for text in texts))


def test_all_kinds_of_token_files_give_one_index(ngram: Ngram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SCAN", 3)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_ids(tmp_path / "in" / "a.jsonl", TOY[:2])
    np.save(tmp_path / "in" / "deep" / "b.npy", np.array([*TOY[2], 0, *TOY[3]], np.uint16))
    (tmp_path / "in" / "notes.md").write_text("not read")
    write_ids(tmp_path / "all.jsonl", TOY)
    code, out, err = ngram("build", tmp_path / "in", "--out", tmp_path / "1", *IDS, "--corpus", "a toy")
    assert code == 0
    assert "20 nodes: the root, and by depth 9, 7, 4" not in err
    assert "order 3, 10 tokens in the vocabulary" in out
    assert "bytes a node" in out
    assert "16 tokens of 4 documents" in out
    assert "peak memory" in out
    code, out, _ = ngram("build", tmp_path / "all.jsonl", "--out", tmp_path / "2", *IDS, "--corpus", "a toy", "--json")
    found = json.loads(out)
    assert (code, found["documents"], found["total_tokens"], found["corpus"]) == (0, 4, 16, "a toy")
    assert found["seconds"] > 0
    assert found["peak_bytes"] > 1 << 20
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert grams(NgramIndex.open(tmp_path / "1")) == count([[*text, 0] for text in TOY], 3)


def test_text_is_encoded_by_the_tokenizer(ngram: Ngram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 20)
    texts = ["def f(x):\n    return x", "one two three four", "", "h\u00e9llo"]
    tokens = Tokens.load("embedded")
    rows = [{"text": texts[0]}, {"text": texts[1]}, {"ids": [5, 6]}, {"text": texts[2]}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "b.txt").write_text(texts[3], encoding="utf-8")
    code, _, _ = ngram("build", tmp_path / "a.jsonl", tmp_path / "b.txt", "--order", 2, "--out", tmp_path / "index")
    assert code == 0
    index = NgramIndex.open(tmp_path / "index")
    ids = [[*each, tokens.end_token] for each in [*tokens.encode(texts), [5, 6]]]
    assert grams(index) == count(ids, 2)
    assert (index.order, index.facts["tokenizer"], index.facts["documents"]) == (2, tokens.label, "5")
    code, out, _ = ngram("info", tmp_path / "index", "--json", "--verify")
    found = json.loads(out)
    best = [token for token, _ in found["frequent"]]
    assert found["frequent_texts"] == [tokens.tokenizer.decode([token]) for token in best]
    assert found["frequent"][0] == [tokens.end_token, 5]
    code, out, _ = ngram("info", tmp_path / "index", "--verify")
    assert "verified" in out
    assert "tokenizer: embedded@" in out


def test_a_trie_is_converted(ngram: Ngram, tmp_path: Path) -> None:
    (tmp_path / "toy.trie").write_bytes(trie_bytes(count(TOY, 3), 3))
    code, out, _ = ngram("build", tmp_path / "toy.trie", "--out", tmp_path / "index")
    assert (code, "order 3, 10 tokens" in out) == (0, True)
    assert grams(NgramIndex.open(tmp_path / "index")) == count(TOY, 3)
    for options, match in (
        (("--order", 2), "--order 2 is not allowed"),
        (("--vocab-size", 5), "outside the vocabulary"),
        (("--end-token", 0), "--end-token"),
        ((tmp_path / "toy.trie", tmp_path), "is converted alone"),
    ):
        write_ids(tmp_path / "more.jsonl", TOY)
        code, out, err = ngram("build", tmp_path / "toy.trie", "--out", tmp_path / "other", *options)
        assert (code, out, match in err) == (2, "", True), err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", b'{"ids": [1]}\n{"ids": [1}\n', "a.jsonl line 2 is no JSON"),
        ("a.jsonl", b'{"ids": [1]}\n\n[1]\n', "a.jsonl line 3 is not allowed"),
        ("a.jsonl", b'{"ids": [1]}\n{"ids": [1.0]}\n', "a.jsonl line 2: ids are not all whole numbers"),
        ("a.jsonl", b'{"ids": [1]}\n{"ids": [true]}\n', "a.jsonl line 2: ids are not all whole numbers"),
        ("a.jsonl", b'{"ids": [1]}\n{"ids": [10]}\n', "a.jsonl line 2: token 10 is outside"),
        ("a.jsonl", b'{"ids": [1]}\n{"text": "x"}\n', "a.jsonl line 2: text needs --tokenizer"),
        ("a.jsonl", b'{"ids": [1], "text": "x"}\n', "a.jsonl line 1 is not allowed"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl line 1: the text holds half"),
        ("a.jsonl", b'{"ids": "\xff"}\n', "a.jsonl line 1 is no JSON"),
        ("a.jsonl", b"\n", "there is no document"),
        ("a.txt", b"\xff", "a.txt is not valid UTF-8"),
        ("a.npy", b"", "a.npy is no .npy file"),
        ("a.npy", b"\x80\x04]", "a.npy is no .npy file"),
        ("a.csv", b"1", "a.csv is not allowed"),
        ("a.trie", b"1", "a.trie: is no .trie file"),
    ],
)
def test_bad_files_are_named(name: str, content: bytes, match: str, ngram: Ngram, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    options = IDS[:2] if name.endswith(".trie") else IDS
    code, out, err = ngram("build", tmp_path / name, "--out", tmp_path / "index", *options)
    assert (code, out) == (2, "")
    assert match in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_arrays_and_options_are_refused(ngram: Ngram, tmp_path: Path) -> None:
    path, out = tmp_path / "a.npy", tmp_path / "index"
    for array in (np.zeros((2, 2), np.uint8), np.zeros(3, np.int64), np.zeros(3, np.float32), np.array([{}])):
        np.save(path, array, allow_pickle=True)
        code, _, err = ngram("build", path, "--out", out, *IDS)
        assert (code, "a.npy" in err) == (2, True)
    np.save(path, np.arange(5, dtype=np.uint8))
    for arguments, match in (
        ((path, "--out", out), "token ids need --tokenizer ID, or --vocab-size N and --end-token ID"),
        ((path, "--out", out, *IDS[:2]), "token ids need --end-token ID"),
        ((path, "--out", out, "--vocab-size", 10, "--end-token", 10), "0 to 9"),
        ((path, "--out", out, *IDS, "--memory", "1 pound"), "512MiB"),
        ((path, "--out", out, *IDS, "--memory", "1KiB"), "not allowed"),
        ((path, "--out", out, *IDS, "--order", 99), "order up to 15"),
        ((path, "--out", tmp_path, *IDS), "is a folder"),
        ((path, "--out", path, *IDS), "one of the inputs"),
        ((tmp_path / "none", "--out", out, *IDS), "no such file"),
        ((tmp_path / "empty", "--out", out, *IDS), "holds no .jsonl"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        code, shown, err = ngram("build", *arguments)
        assert (code, shown, match in err, err.count("\n")) == (2, "", True, 1), err
    code, _, err = ngram("info", path)
    assert (code, "a.npy is no n-gram index" in err) == (2, True)
    assert ngram("build", path, "--out", out, *IDS, "--memory", "0.5MiB")[0] == 0
