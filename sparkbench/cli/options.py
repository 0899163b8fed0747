"""Options that several commands share, and the parsing of values whose form is the command line's own.

An option that is not given is None and left out of the sweep's settings, so that a default stands in one
place, in sweep.py, and a TOML file can set it. Lists and numbers, and what a value means (which methods,
data sets or devices exist), are checked there too; the errors here are one line and name the option.
"""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkbench.errors import UsageError

Target = Annotated[
    str | None,
    typer.Option("--target", metavar="ID", help="embedded, a folder or a hub id. Default: embedded."),
]
Revision = Annotated[str | None, typer.Option("--revision", metavar="REV", help="The target's revision on the hub.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="auto, float32 or bfloat16. Default: auto.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N. Default: auto.")
]
Thinking = Annotated[
    str | None, typer.Option("--thinking", metavar="on|off", help="For templates that know it. Default: off.")
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Above temperature 0; 0 is off. Default: 0.")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Above temperature 0; 1 is off. Default: 1.")]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="P", help="Above temperature 0; 0 is off. Default: 0.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="X", help="1 is off. Default: 1.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="CPU threads. Default: one for tiny models, else torch's choice."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def given(**values: Any) -> dict[str, Any]:
    """The values that were given."""
    return {name: value for name, value in values.items() if value is not None}


def pairs(option: str, values: Iterable[str]) -> dict[str, str]:
    """METHOD=ID entries as a mapping; the same name twice is refused."""
    found: dict[str, str] = {}
    for value in values:
        name, sign, source = value.partition("=")
        if not (name and sign and source):
            raise UsageError(f"{option} {value!r} is not allowed: METHOD=ID")
        if found.setdefault(name, source) != source:
            raise UsageError(f"{option} names {name} twice: {found[name]} and {source}")
    return found


def switch(option: str, value: str | None) -> bool | None:
    """on or off as a boolean; None where the option was not given."""
    return None if value is None else one_of(option, value, ("on", "off")) == "on"


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise UsageError(f"{option} {value!r} is not allowed: {', '.join(allowed)}")
    return value


def text(option: str, value: str) -> str:
    """`value`, refused where the shell passed bytes that are no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{option} is not valid UTF-8") from None
    return value


def check_file(option: str, path: Path) -> None:
    """Refuse a place where no file can be written, before the work whose outcome goes there."""
    if not path.name or path.is_dir():
        raise UsageError(f"{option} {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from None
