"""How a report's tables look in a terminal: their frame, numbers, and names that come from files."""

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def framed(columns: Sequence[str], left: Iterable[str], rows: Iterable[Sequence[str]]) -> "RenderableType":
    """A table without rules. Columns in `left` hold texts and may fold, the others numbers; cells are literal."""
    from rich.table import Table
    from rich.text import Text

    texts = frozenset(left)
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name, justify="left" if name in texts else "right", overflow="fold", no_wrap=name not in texts)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def short(target: str) -> str:
    """A target's name for a title: of a long path, the last part."""
    return target if len(target) <= 24 else PurePath(target).name


def printable(text: str) -> str:
    """Control characters as visible escapes: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
