"""Prompt files: JSON lines in UTF-8, one prompt a line, written by anyone.

A line is `{"turns": ["first message", ...]}` or `{"prompt": "message"}`, with an optional `"id"`. A line that
is not is named with file, number and reason, and the good ones are used: a benchmark must not lose a night to
line 4,012, nor drop it in silence. Lines end at LF alone, since U+0085 and U+2028 are legal inside JSON
strings. Not covered: original data set rows (`hub.py`).
"""

import json
from dataclasses import dataclass
from typing import Any

from sparkbench.errors import UsageError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """A good line: its prompt's id and turns."""

    prompt_id: str
    turns: tuple[str, ...]


def parse(content: bytes, label: str, name: str) -> tuple[list[Line], list[str]]:
    """Good lines of a prompt file and remarks on the others (`LABEL:LINE: reason`), both in file order.

    `label` is the file's name for messages, `name` the data set's, for ids: a line without one is `NAME-0001`
    by line number. A repeated id gets the suffix `#2` (`#3`, ...) and a remark. Bytes that are not UTF-8 are
    a UsageError.
    """
    lines: list[Line] = []
    remarks: list[str] = []
    used: set[str] = set()
    for number, raw in enumerate(content.removeprefix(_BOM).split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            raise UsageError(f"{label}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if not text:
            continue
        try:
            given, turns = _row(text)
        except ValueError as error:
            remarks.append(f"{label}:{number}: {error}")
            continue
        wanted = given or f"{name}-{number:04d}"
        prompt_id = _distinct(wanted, used)
        if prompt_id != wanted:
            remarks.append(f"{label}:{number}: duplicate id {wanted!r}, kept as {prompt_id!r}")
        used.add(prompt_id)
        lines.append(Line(prompt_id, turns))
    return lines, remarks


def _row(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Id (None if absent or empty) and turns of one line; ValueError with the reason otherwise."""
    try:
        row: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("broken JSON (nested too deeply)") from error
    if not isinstance(row, dict):
        raise ValueError(f"{_kind(row)} where an object with `turns` or `prompt` is needed")
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"`turns` is {'empty' if turns == [] else _kind(turns)}, a list of texts is needed")
    elif "prompt" in row:
        turns = [row["prompt"]]
    else:
        raise ValueError("neither `turns` nor `prompt`")
    for turn in turns:
        if not isinstance(turn, str):
            raise ValueError(f"{_kind(turn)} where a message's text is needed")
        _encodable(turn)
    given = row.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | str)):
        raise ValueError(f"`id` is {_kind(given)}, text or an integer is needed")
    if given is not None:
        _encodable(str(given))
    return None if given is None else str(given), tuple(turns)


def _encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair, which is no text") from error


def _kind(value: object) -> str:
    """A JSON value's type in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def _distinct(wanted: str, used: set[str]) -> str:
    prompt_id, copy = wanted, 1
    while prompt_id in used:
        copy += 1
        prompt_id = f"{wanted}#{copy}"
    return prompt_id
