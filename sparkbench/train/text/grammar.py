"""A small template language: `<this|that>` draws one of its alternatives, `@name` is replaced by a value.

Alternatives may be empty and may nest. Values are inserted last and taken as they are, so they may hold
any character. Not covered: escaping; a template's own text may hold a lone `<` or `>` (a comparison), but
not both around text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from sparkbench.train.text.words import SURE

Builder = Callable[[random.Random], list[str]]
T = TypeVar("T")

_INNERMOST = re.compile(r"<([^<>]*)>")
_SLOT = re.compile(r"@([a-z_]+)")


def fill(rng: random.Random, template: str, **values: object) -> str:
    """Draw every choice of `template`, innermost first, then insert `values`; KeyError if one is missing."""
    drawn = 1
    while drawn:
        template, drawn = _INNERMOST.subn(lambda match: rng.choice(match[1].split("|")), template)
    return _SLOT.sub(lambda match: str(values[match[1]]), template)


def capital(text: str) -> str:
    """`text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def some(rng: random.Random, items: Sequence[T], low: int, high: int) -> list[T]:
    """Between `low` and `high` different items in random order."""
    return rng.sample(items, rng.randint(low, min(high, len(items))))


def joined(items: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def lead(rng: random.Random, what: str) -> str:
    """The words that hand over `what` (a template), as `Sure, here is the list`."""
    return capital(fill(rng, f"<{SURE}, here <is|comes>|{SURE}, this is|here is|here you have|this is> {what}"))
