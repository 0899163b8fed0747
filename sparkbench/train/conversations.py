"""Conversations to train on: rows of a JSONL file or of a data set on the hub, in one form.

A row holds `conversations`, a list of {"from", "value"}, or `messages`, a list of {"role", "content"}. A row that
cannot be used keeps its place, as the reason why: which rows are held out depends on their number alone, so a bad line
moves no other row. Messages of unknown roles (tools) are left out, as in the published preparation.

Not covered: turning conversations into tokens (samples.py), and writing answers anew with the target.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sparkbench import hub
from sparkbench.errors import RunError, UsageError, first_line
from sparkbench.train.drafter_recipe import HUB, DataPart

Conversation = tuple[dict[str, str], ...]  # {"role", "content"}: a system message or none, then user, assistant, ...
ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
COLUMNS = ("conversations", "messages")
ListFiles = Callable[[str, str], Sequence[str]]  # (repository, revision) -> the paths in it


def read(data: DataPart, list_files: ListFiles | None = None) -> tuple[list[Conversation | str], str]:
    """The first `data.rows` rows, each a conversation or the reason why it is none; and where they come from.

    list_files: for tests and mirrors; the default asks the hub.
    UsageError: no such file, or not UTF-8.   RunError: the hub does not deliver.
    """
    if data.source == HUB:
        values, origin = _hub_rows(data, list_files or _files_on_hub)
    else:
        values, origin = _file_rows(Path(data.source)), data.source
    return [_conversation(*each, origin) for each in islice(values, data.rows or None)], origin


def split(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the rows to train on and of those held out, ceil(share * count) of them.

    The draw is that of `train_test_split` of the library `datasets`, so a published split is met exactly: a NumPy
    permutation of the rows, of which the first part is held out.
    """
    import numpy as np

    order = np.random.default_rng(seed).permutation(count).tolist()
    held_out = math.ceil(share * count)
    return order[held_out:], order[:held_out]


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and JSON value of each line that is not empty; instead of a value, a ValueError that says why."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from None
        if not text:
            continue
        try:
            yield number, json.loads(text)
        except (ValueError, RecursionError) as error:
            yield number, ValueError(f"broken JSON ({first_line(error)})")


def _hub_rows(data: DataPart, list_files: ListFiles) -> tuple[Iterator[tuple[int, Any]], str]:
    """Rows of the split's parquet files, in the order of their names; a file is fetched when its turn comes."""
    wanted = re.compile(rf"(?:.*/)?{re.escape(data.split)}[^/]*\.parquet")
    files = sorted(file for file in list_files(data.repo, data.revision) if wanted.fullmatch(file))
    if not files:
        raise RunError(f"{data.repo} has no parquet file of the split {data.split}")
    first = hub.download(data.repo, files[0], data.revision)
    commit = re.search(r"/snapshots/([0-9a-f]{40})/", first.as_posix())
    revision = commit[1] if commit else data.revision

    rows = (row for file in files for row in _parquet_rows(hub.download(data.repo, file, revision)))
    return enumerate(rows, start=1), f"{data.repo}@{revision}"


def _files_on_hub(repo: str, revision: str) -> Sequence[str]:
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repo, revision=revision, repo_type="dataset")
    except Exception as error:  # the client raises its own, the HTTP library's and OS errors, by version
        raise RunError(f"data set {repo}: its files cannot be listed: {first_line(error)}") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    """Rows with the one column that holds the conversation, read a few at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = [name for name in COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=256, columns=columns[:1]):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path}: cannot be read: {first_line(error)}") from error


def _conversation(number: int, row: Any, origin: str) -> Conversation | str:
    try:
        if isinstance(row, ValueError):
            raise row
        return _turns(row)
    except ValueError as error:
        return f"{origin}:{number}: {error}"


def _turns(row: Any) -> Conversation:
    """ValueError: the row holds no conversation of user and assistant in turn."""
    if not isinstance(row, dict):
        raise ValueError("an object is needed")
    column = next((name for name in COLUMNS if isinstance(row.get(name), list)), None)
    if column is None:
        raise ValueError(f"it has no list `{COLUMNS[0]}` or `{COLUMNS[1]}`")
    turns = []
    for message in row[column]:
        if not isinstance(message, dict):
            raise ValueError("a message is no object")
        speaker = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(speaker, str) or not isinstance(content, str):
            raise ValueError("a message lacks `from` and `value`, or `role` and `content`, as texts")
        _check_text(content)
        if speaker in ROLES:
            turns.append({"role": ROLES[speaker], "content": content})
    if turns and turns[-1]["role"] == "user":
        turns.pop()
    roles = [turn["role"] for turn in turns]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if not talk:
        raise ValueError("nothing is answered")
    if talk != ["user", "assistant"] * (len(talk) // 2):
        raise ValueError("user and assistant do not take turns")
    return tuple(turns)


def _check_text(content: str) -> None:
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no text") from None
