"""From the name of an index to the index: files, the hub, conversion, and indices of other targets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden_dart as golden
import pytest
from golden_dart import FOLDER

from sparkbench.catalog import resolve_index
from sparkbench.errors import RunError, SparkbenchError, UsageError
from sparkbench.ngram import sources
from sparkbench.ngram.build import BuildSpec, Document, build
from sparkbench.ngram.tokens import label, same_vocabulary

WORDS = {"a": 0, "b": 1, "c": 2}


def target_of(vocab: dict[str, int] | None = None, size: int = 3) -> Any:
    tokenizer = None if vocab is None else SimpleNamespace(get_vocab=lambda: vocab)
    return SimpleNamespace(name="some target", vocab_size=size, tokenizer=tokenizer)


def index_in(folder: Path, tokenizer: str = "") -> Path:
    import numpy as np

    out = folder / "index.safetensors"
    build([Document(np.array([0, 1, 2, 0]))], out, BuildSpec(3, tokenizer=tokenizer))
    return out


def refusal(source: str, target: Any) -> str:
    with pytest.raises(SparkbenchError) as caught:
        sources.load(source, target)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_and_what_does_not_fit(tmp_path: Path) -> None:
    labelled = label("words", target_of(WORDS).tokenizer)
    file = str(index_in(tmp_path, labelled))
    for target in (target_of(WORDS), target_of(None), target_of(WORDS, 5)):
        assert sources.load(file, target).nodes == 9
    assert "another tokenizer, words@" in refusal(file, target_of({"a": 0, "b": 2, "c": 1}))
    assert "it counts 3 different tokens, and the target has 2" in refusal(file, target_of(WORDS, 2))
    assert same_vocabulary("", target_of(WORDS).tokenizer)
    assert same_vocabulary("words", target_of(WORDS).tokenizer)


def test_what_can_only_be_a_file_must_be_one(tmp_path: Path) -> None:
    file = index_in(tmp_path)
    for source in (str(file), "org/name", "org/name/small.trie"):
        assert resolve_index("embedded", source) == source
    assert resolve_index("embedded", "none") is None
    for source in ("name", str(tmp_path / "none"), "./org/name", "~/name", "org\\name"):
        with pytest.raises(UsageError, match="no such file"):
            resolve_index("embedded", source)
    with pytest.raises(UsageError, match="is a folder"):
        resolve_index("embedded", str(tmp_path))


def test_a_trie_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SPARKBENCH_CACHE", str(tmp_path / "cache"))
    vocab = golden.document("manifest")["vocab_size"]
    file = str(FOLDER / "ngram" / "full.trie")
    for said in ("converting", ""):
        index = sources.load(file, target_of(size=vocab))
        assert index.vocab_size == vocab
        assert (said in capsys.readouterr().err) if said else not capsys.readouterr().err
    assert index.total_tokens == golden.document("ngram/counts_full")["total_tokens"]
    assert len(list((tmp_path / "cache" / "ngram").iterdir())) == 1


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    file, names = str(index_in(tmp_path)), ["README.md", "one.safetensors"]
    asked = []

    def download(repo: str, name: str) -> str:
        asked.append((repo, name))
        if name == "none.trie":
            raise EntryNotFoundError("404")
        if name == "away.trie":
            raise OSError("no network")
        return file

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo: names)
    assert sources.load("org/name", target_of()).nodes == 9
    assert sources.load("org/name/sub/two.safetensors", target_of()).nodes == 9
    assert asked == [("org/name", "one.safetensors"), ("org/name", "sub/two.safetensors")]
    assert "neither a file nor one of the hub" in refusal("org/name/none.trie", target_of())
    with pytest.raises(RunError, match="no network"):
        sources.load("org/name/away.trie", target_of())
    names.append("small.trie")
    assert "name one of org/name/one.safetensors, org/name/small.trie" in refusal("org/name", target_of())
    names[:] = ["README.md"]
    assert "it holds none" in refusal("org/name", target_of())
