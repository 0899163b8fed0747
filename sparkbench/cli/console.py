"""What the commands print, and the rules that make any text safe to print.

Prompts, tokens, file names and exception messages come from outside. They are shown literally: no markup is
read from them, and control characters (ESC, the other C0 and C1 codes, bidirectional overrides, lone
surrogates) appear as visible escapes, so that no text can move the cursor, recolour the terminal or reorder
a line. A character that the encoding of the stream lacks is written as an escape too, never as an error.

Colour is used on a terminal, or where FORCE_COLOR asks for it; NO_COLOR and TERM=dumb switch it off. Without
colour no escape byte is written at all, not even for bold. JSON is one line of ASCII, the same bytes under
all these settings.

Results go to `stdout`, everything else to `stderr`. Progress of long work lives in `progress.py`.
"""

import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

NAMED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}
JOINERS = {"\u200c", "\u200d"}  # zero-width, yet part of how emoji and several scripts are written
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
MIN_WIDTH = 80  # tables are made for this; a narrower terminal breaks lines, and loses nothing


def literal(text: str) -> str:
    """`text` on one line; a character that could act on a terminal becomes an escape (`\\n`, `\\x1b`)."""
    return "".join(character if _is_plain(character) else _escape(character) for character in text)


def _is_plain(character: str) -> bool:
    return character in JOINERS or unicodedata.category(character) not in UNSAFE


def _escape(character: str) -> str:
    if character in NAMED:
        return NAMED[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def prepare_streams() -> None:
    """Let stdout and stderr write an escape where their encoding lacks a character."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # absent where a caller replaced the stream
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches `stream` on a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def wants_colour(stream: TextIO) -> bool:
    """NO_COLOR decides, then FORCE_COLOR, then whether `stream` is a terminal; empty counts as unset."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "") not in ("", "0") or is_terminal(stream)


def console(stream: TextIO | None = None) -> "Console":
    """A rich console on `stream` (stdout by default) that reads no markup or emoji codes from text."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with 1, which is a verdict here

    stream = sys.stdout if stream is None else stream
    colour = wants_colour(stream)
    return Quiet(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        color_system="standard" if colour else None,
        force_terminal=colour,
        no_color=not colour,
        width=max(MIN_WIDTH, shutil.get_terminal_size().columns),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> "Table":
    """An aligned table without rules; cells are literal, long ones fold. `right`: numeric columns."""
    from rich.table import Table
    from rich.text import Text

    built = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        built.add_column(name.upper(), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        built.add_row(*(Text(literal(cell)) for cell in row))
    return built


def show(*renderables: "RenderableType", wrap: bool = True) -> None:
    """Print each on stdout, without trailing blanks; `wrap=False` leaves long lines to the terminal.

    Written here and not by rich, which ends the process with exit code 1 when the reader of a pipe goes away.
    """
    target = console()
    with target.capture() as captured:
        for renderable in renderables:
            target.print(renderable, soft_wrap=not wrap)
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


def print_json(document: object) -> None:
    """Write `document` to stdout as one line of strict JSON: ASCII only, and null for what is not finite."""
    sys.stdout.write(json.dumps(plain(document), ensure_ascii=True, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """`value` in JSON's types: dataclasses as objects, tuples as lists, paths as text, NaN as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def note(message: str) -> None:
    """One line on stderr, shown literally."""
    print(literal(message), file=sys.stderr, flush=True)
