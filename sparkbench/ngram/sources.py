"""From the name of an n-gram index to the index: a file, or a file of a hub repository.

An index in the published `.trie` format is converted once and kept in the cache folder: SPARKBENCH_CACHE, or
`sparkbench` in the user's cache folder. A repository may hold several; which one is meant is then part of the name.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkbench.errors import RunError, UsageError, first_line
from sparkbench.ngram.documents import TRIE
from sparkbench.ngram.index import NgramIndex
from sparkbench.ngram.tokens import same_vocabulary

if TYPE_CHECKING:
    from sparkbench.decoding.target import Target

SUFFIXES = (".safetensors", TRIE)


def load(source: str, target: "Target") -> NgramIndex:
    """The index `source` for a target's tokens.

    source: a file, ORG/NAME/FILE on the hub, or ORG/NAME where that holds one index alone.
    UsageError: there is none, it is broken, or it was made for another vocabulary.   RunError: the hub or the disk.
    """
    path = find(source)
    if path.suffix == TRIE:
        path = _converted(path, target.vocab_size)
    index = NgramIndex.open(path)
    if index.vocab_size > target.vocab_size:
        raise UsageError(
            f"n-gram index {source} does not fit target {target.name}: "
            f"it counts {index.vocab_size:,} different tokens, and the target has {target.vocab_size:,}"
        )
    if target.tokenizer is not None and not same_vocabulary(index.facts["tokenizer"], target.tokenizer):
        raise UsageError(
            f"n-gram index {source} does not fit target {target.name}: "
            f"it counts tokens of another tokenizer, {index.facts['tokenizer']}"
        )
    return index


def find(source: str) -> Path:
    """The local file of an index; one on the hub is downloaded. UsageError, RunError as in `load`."""
    if Path(source).is_file():
        return Path(source)
    parts = source.split("/")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    return Path(_hub("hf_hub_download", source, repo, file or _only(source, repo)))


def _only(source: str, repo: str) -> str:
    """The one index of a repository. UsageError: it holds none, or several, which are named."""
    names = sorted(name for name in _hub("list_repo_files", source, repo) if name.endswith(SUFFIXES))
    if len(names) != 1:
        found = f"name one of {', '.join(f'{repo}/{name}' for name in names)}" if names else "it holds none"
        raise UsageError(f"n-gram index {source}: {found}")
    return str(names[0])


def _hub(function: str, source: str, *arguments: str) -> Any:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    try:
        return getattr(huggingface_hub, function)(*arguments)
    except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UsageError(f"n-gram index {source}: neither a file nor one of the hub") from error
    except Exception as error:  # the hub client raises errors of several libraries
        raise RunError(f"n-gram index {source}: cannot be downloaded: {first_line(error)}") from error


def cache_folder() -> Path:
    """Where converted indices are kept."""
    chosen = os.environ.get("SPARKBENCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkbench"


def _converted(path: Path, vocab_size: int) -> Path:
    """The index made of a `.trie`, from the cache folder or made now. The file's place, size and time name it."""
    found = path.resolve()
    state = found.stat()
    identity = hashlib.sha256(f"{found}:{state.st_size}:{state.st_mtime_ns}:{vocab_size}".encode()).hexdigest()
    out = cache_folder() / "ngram" / f"{path.stem}-{identity[:16]}.safetensors"
    if not out.is_file():
        from sparkbench.ngram.trie import convert

        print(f"sparkbench: converting {path} once; the index is kept in {out.parent}", file=sys.stderr)
        convert(path, out, vocab_size=vocab_size, corpus=f"converted from {path.name}")
    return out
