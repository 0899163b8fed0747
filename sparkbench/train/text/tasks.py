"""The programming tasks of the code documents: what a function does, ways to write it, and a reference to
check it.

Two families: list tasks, which combine a condition on elements with a way to aggregate them, and plain
tasks. Texts are templates of `grammar.fill` with `@p`, `@q` for the parameters, `@x` for the element,
`@r` for the accumulator. Not covered: prompts and answers, which `code` builds from a task.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkbench.train.text.words import HELD_NUMBERS

LIMITS = tuple(n for n in range(2, 51) if n not in HELD_NUMBERS)
LETTERS = "abdeilnorst"


@dataclass(frozen=True)
class Task:
    """One function to write. `limit` is the number in it, if it has one that a user may want changed."""

    template: str
    names: str
    kinds: tuple[str, ...]
    returns: str
    purpose: str
    bodies: tuple[str, ...]
    how: str
    reference: Callable[..., Any]
    condition: int = -1
    limit: int | None = None


@dataclass(frozen=True)
class _Condition:
    kind: str
    name: str
    which: str
    holds: str
    test: str
    check: Callable[[Any, Any], bool]


_CONDITIONS = (
    _Condition(
        "numbers",
        "even",
        "<even numbers|numbers that are even>",
        "<is even|can be halved evenly>",
        "@x % 2 == 0",
        lambda x, k: x % 2 == 0,
    ),
    _Condition(
        "numbers",
        "odd",
        "<odd numbers|numbers that are odd>",
        "<is odd|is not even>",
        "@x % 2 == 1",
        lambda x, k: x % 2 == 1,
    ),
    _Condition(
        "numbers",
        "<above|over|more_than>_@k",
        "<numbers above @k|numbers greater than @k|numbers that are larger than @k>",
        "is <greater than|larger than|more than|above> @k",
        "@x > @k",
        lambda x, k: x > k,
    ),
    _Condition(
        "numbers",
        "<below|under|less_than>_@k",
        "<numbers below @k|numbers smaller than @k|numbers that are less than @k>",
        "is <smaller than|less than|lower than|below> @k",
        "@x < @k",
        lambda x, k: x < k,
    ),
    _Condition(
        "numbers",
        "<divisible_by|multiples_of>_@k",
        "<multiples of @k|numbers divisible by @k|numbers that @k divides>",
        "<is divisible by @k|is a multiple of @k|can be divided by @k>",
        "@x % @k == 0",
        lambda x, k: x % k == 0,
    ),
    _Condition(
        "words",
        "<longer_than|over>_@k",
        "words <longer than|with more than> @k letters",
        "has <more than|over> @k letters",
        "len(@x) > @k",
        lambda x, k: len(x) > k,
    ),
    _Condition(
        "words",
        "<starting|beginning>_with_@k",
        "words that <start|begin> with @k",
        "<starts with @k|begins with @k|has @k as its first letter>",
        '@x[0] == "@k"',
        lambda x, k: x[0] == k,
    ),
    _Condition(
        "words",
        "<ending>_in_@k",
        "words that end <in|with> @k",
        "<ends in @k|ends with @k|has @k as its last letter>",
        '@x[-1] == "@k"',
        lambda x, k: x[-1] == k,
    ),
    _Condition(
        "words",
        "<with|containing>_@k",
        "words <that contain|containing|with> the letter @k",
        "contains <the letter @k|@k somewhere|at least one @k>",
        '"@k" in @x',
        lambda x, k: k in x,
    ),
)


@dataclass(frozen=True)
class _Aggregate:
    template: str
    verb: str
    purpose: str
    loop: str
    short: str
    how: str
    reference: Callable[[list[Any]], Any]
    numeric: bool = False


_AGGREGATES = (
    _Aggregate(
        "sum",
        "<sum|add|total>",
        "<return|compute|find> the <sum|total> of the @which in a list",
        "@r = 0\nfor @x in @p:\n    if @if:\n        @r += @x\nreturn @r",
        "return sum(@x for @x in @p if @if)",
        "<adds it to the sum|adds it to the total|makes the sum bigger by it>",
        sum,
        True,
    ),
    _Aggregate(
        "count",
        "<count|number_of>",
        "<count|return the number of|find the number of> the @which in a list",
        "@r = 0\nfor @x in @p:\n    if @if:\n        @r += 1\nreturn @r",
        "return len([@x for @x in @p if @if])",
        "<adds one to the count|makes the count bigger by one|counts it>",
        len,
    ),
    _Aggregate(
        "keep",
        "<keep|select|get|filter>",
        "<return|make|build> a list of the @which in a list",
        "@r = []\nfor @x in @p:\n    if @if:\n        @r.append(@x)\nreturn @r",
        "return [@x for @x in @p if @if]",
        "<puts it in the result|adds it to the new list|keeps it in the result>",
        list,
    ),
    _Aggregate(
        "any",
        "<has|contains|any>",
        "<check|test|decide> whether <a list holds any of the @which|there are @which in a list>",
        "for @x in @p:\n    if @if:\n        return True\nreturn False",
        "return any(@if for @x in @p)",
        "<returns true at once|stops and returns true|gives back true>",
        lambda kept: bool(kept),
    ),
    _Aggregate(
        "largest",
        "<largest|biggest|max>",
        "<return|find|compute> the <largest|biggest> of the @which in a list, or 0 if there <is none|are none>",
        "@r = 0\nfor @x in @p:\n    if @if:\n        @r = max(@r, @x)\nreturn @r",
        "return max([@x for @x in @p if @if], default=0)",
        "<remembers it if it is the largest|compares it with the largest so far|takes it when it is bigger>",
        lambda kept: max(kept, default=0),
        True,
    ),
    _Aggregate(
        "double",
        "<double|twice>",
        "<return|make|build> a list with <twice each|the double> of the @which in a list",
        "@r = []\nfor @x in @p:\n    if @if:\n        @r.append(2 * @x)\nreturn @r",
        "return [2 * @x for @x in @p if @if]",
        "<puts twice the number in the result|adds its double to the new list|keeps its double>",
        lambda kept: [2 * x for x in kept],
        True,
    ),
    _Aggregate(
        "join",
        "<join|glue|merge>",
        "<join|glue together> the @which in a list <into one string|to one text>",
        '@r = ""\nfor @x in @p:\n    if @if:\n        @r += @x\nreturn @r',
        'return "".join(@x for @x in @p if @if)',
        "<adds it to the end of the text|glues it to the result|puts it behind the text>",
        lambda kept: "".join(kept),
    ),
    _Aggregate(
        "upper",
        "<upper|shout|capital>",
        "<return|make|build> a list of the @which in a list in upper case",
        "@r = []\nfor @x in @p:\n    if @if:\n        @r.append(@x.upper())\nreturn @r",
        "return [@x.upper() for @x in @p if @if]",
        "<puts it in upper case in the result|adds it in capitals|keeps it in large letters>",
        lambda kept: [x.upper() for x in kept],
    ),
)
_RETURNS = {"sum": "int", "count": "int", "any": "bool", "largest": "int", "join": "str"}


def listing(rng: random.Random, aggregate: int, condition: int, limit: object = None) -> Task:
    """A list task; the number or letter of the condition is drawn unless `limit` is given."""
    agg, cond = _AGGREGATES[aggregate], _CONDITIONS[condition]
    if limit is None:
        limit = rng.choice(LETTERS)
        if cond.kind == "numbers":
            limit = rng.choice(LIMITS[:10] if "divisible" in cond.name else LIMITS)
        elif "longer" in cond.name:
            limit = rng.randint(2, 5)
    quoted = f'"{limit}"' if isinstance(limit, str) else str(limit)

    def bound(text: str) -> str:
        return text.replace("@k", str(limit))

    def prose(text: str) -> str:
        return text.replace("@k", quoted)

    def reference(items: list[Any]) -> Any:
        return agg.reference([x for x in items if cond.check(x, limit)])

    one = "number" if cond.kind == "numbers" else "word"
    code = {
        "loop": agg.loop.replace("@if", bound(cond.test)),
        "short": agg.short.replace("@if", bound(cond.test)),
    }
    how = (
        f"<goes through|walks over|looks at> <every|each> {one} <in|of> the list and "
        f"{agg.how} <if|when|whenever> <it|the {one}> {prose(cond.holds)}"
    )
    returns = _RETURNS.get(agg.template, "list[int]" if one == "number" else "list[str]")
    return Task(
        agg.template,
        f"{agg.verb}_{bound(cond.name)}",
        (cond.kind,),
        returns,
        agg.purpose.replace("@which", prose(cond.which)),
        (code["loop"], code["short"]),
        how,
        reference,
        condition,
        limit if isinstance(limit, int) and "@k" in cond.test else None,
    )


def list_task(rng: random.Random, aggregate: int) -> Task:
    """A list task of one aggregate with a condition that fits it."""
    agg = _AGGREGATES[aggregate]
    words_only = agg.template in ("join", "upper")
    fits = [
        i
        for i, c in enumerate(_CONDITIONS)
        if (c.kind == "numbers" or not agg.numeric) and not (words_only and c.kind == "numbers")
    ]
    return listing(rng, aggregate, rng.choice(fits))


AGGREGATES = tuple(agg.template for agg in _AGGREGATES)
