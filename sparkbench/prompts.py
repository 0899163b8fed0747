"""Prompts: where they come from, and which are drawn.

`load_prompts` gives the prompts of one data set from one source:

- `bundled`: the small sets in the package, in the form of each data set, made for the embedded models;
- `hub`: the original rows, one file from the hub, formatted as `datasets/NAME.toml` declares;
- `package`: the same from an installed package, for the data sets that have one;
- a folder with `NAME.jsonl`, or one file, whose stem names the data set.

Without a limit all prompts are given in file order. With a limit they are drawn: ordered by a hash of (seed,
data set, index), the same on every machine, and cut, so that a smaller limit is a prefix of a larger one.

Turning a prompt into token ids is `chat.py`, re-exported here. Not covered: what fits a model's context; the
caller decides that for all methods at once.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkbench import hub, promptfile
from sparkbench.chat import encode_chat, prompt_hash
from sparkbench.errors import UsageError
from sparkbench.hub import DatasetSpec, dataset_names, spec
from sparkbench.paths import datasets_folder

__all__ = [
    "DatasetSpec",
    "Prompt",
    "PromptSet",
    "available",
    "dataset_names",
    "encode_chat",
    "load_prompts",
    "prompt_hash",
    "spec",
]

SOURCES = "bundled, hub, package, a folder with NAME.jsonl, or a FILE.jsonl"
OTHER_DOMAIN = "other"


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user messages of a conversation, in order.

    `domain` is code, math, chat, or `other` for a data set that is not declared; `source` says where the text
    is from: `bundled`, `hub:REPOSITORY`, `package:NAME`, or the path of a folder or file.
    """

    dataset: str
    domain: str
    source: str
    prompt_id: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one data set; remarks on its lines (`FILE:LINE: reason`); the hub's commit, if any."""

    prompts: tuple[Prompt, ...]
    bad_lines: tuple[str, ...] = ()
    revision: str | None = None


def available(data: str = "bundled") -> list[str]:
    """Names of the data sets a source has, sorted; a source that does not exist is a UsageError."""
    if data == "hub":
        return dataset_names()
    if data == "package":
        return hub.packaged()
    return sorted(_files(data))


def load_prompts(
    dataset: str,
    data: str = "bundled",
    *,
    limit: int | None = None,
    seed: int = 0,
    strict: bool = False,
    download: hub.Downloader = hub.download,
) -> PromptSet:
    """Load the prompts of one data set; see the module's description for `data`, `limit` and `seed`.

    `strict` makes any remark on a line an error; `download` replaces the hub client. UsageError: unknown data
    set (lists what exists), missing source or file, no usable line, a limit below 1. RunError: a failed
    download, or a downloaded file that is not the declared one.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}, must be at least 1")
    if data in ("hub", "package"):
        loaded = _original(dataset, data, download)
    else:
        loaded = _finished(dataset, data, strict)
    if limit is None:
        return loaded
    order = sorted(range(len(loaded.prompts)), key=_draw_key(dataset, seed))
    return PromptSet(tuple(loaded.prompts[i] for i in order[:limit]), loaded.bad_lines, loaded.revision)


def _draw_key(dataset: str, seed: int) -> Callable[[int], bytes]:
    return lambda index: hashlib.sha256(f"{seed}\0{dataset}\0{index}".encode()).digest()


def _original(dataset: str, data: str, download: hub.Downloader) -> PromptSet:
    """Prompts formatted from original rows; ids count the rows, as they do in a plain file."""
    declared = spec(dataset)
    revision = None
    if data == "hub":
        rows, revision = hub.from_hub(declared, download)
        source = f"hub:{declared.hub.repo}"
    else:
        rows = hub.from_package(declared)
        source = f"package:{declared.package.name if declared.package else ''}"
    prompts = tuple(
        Prompt(dataset, declared.domain, source, f"{dataset}-{number:04d}", turns)
        for number, turns in enumerate(rows, start=1)
    )
    return PromptSet(prompts, revision=revision)


def _finished(dataset: str, data: str, strict: bool) -> PromptSet:
    """Prompts from a JSON lines file: a bundled one or the user's."""
    found = _files(data)
    if dataset not in found:
        what = "unknown data set" if data == "bundled" else f"{data} has no data set"
        raise UsageError(f"{what} {dataset!r}; it has: {', '.join(sorted(found)) or 'no .jsonl file'}")
    file = found[dataset]
    label = file.name if data == "bundled" else str(file)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{label}: cannot be read: {error.strerror or error}") from error
    lines, remarks = promptfile.parse(content, label, dataset)
    if strict and remarks:
        more = f" (and {len(remarks) - 1} more)" if len(remarks) > 1 else ""
        raise UsageError(f"{remarks[0]}{more}")
    if not lines:
        raise UsageError(f"{label}: no prompt in it: {remarks[0] if remarks else 'the file is empty'}")
    domain = spec(dataset).domain if dataset in dataset_names() else OTHER_DOMAIN
    prompts = tuple(Prompt(dataset, domain, data, line.prompt_id, line.turns) for line in lines)
    return PromptSet(prompts, tuple(remarks))


def _files(data: str) -> dict[str, Path]:
    """Prompt files of a source by data set name."""
    if data == "bundled":
        return _jsonl_in(datasets_folder())
    path = Path(data).expanduser()
    if path.is_dir():
        return _jsonl_in(path)
    if path.is_file():
        return {path.stem: path}
    raise UsageError(f"no such data: {data!r}; allowed: {SOURCES}")


def _jsonl_in(folder: Path) -> dict[str, Path]:
    try:
        found = [entry for entry in folder.iterdir() if entry.name.endswith(".jsonl") and entry.is_file()]
    except OSError as error:
        raise UsageError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    return {entry.name.removesuffix(".jsonl"): entry for entry in found}
