"""Code documents: requests for small Python functions in several forms, with answers and follow-up turns.

Forms: a signature with docstring and examples to complete, and one-line requests. The way to write a
function, the names in it and every sentence around it are drawn in the answer, so that they stay open to
whoever predicts it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkbench.train.text.grammar import Builder, capital, fill
from sparkbench.train.text.plain import PLAIN
from sparkbench.train.text.tasks import AGGREGATES, LIMITS, Task, list_task, listing
from sparkbench.train.text.words import HELD_NUMBERS, HERE, LIST_NUMBERS, SURE, WORDS

_PARAMETERS = {
    "numbers": ("numbers", "values", "items", "nums"),
    "words": ("words", "names", "items", "terms"),
    "text": ("text", "word", "line", "s"),
    "n": ("n", "number", "a", "k"),
    "m": ("m", "b", "other"),
}
_ELEMENTS = {
    "numbers": ("x", "number", "value", "num"),
    "words": ("w", "word", "name", "x"),
    "text": ("c", "letter", "ch", "char"),
    "n": ("i", "d", "x", "j"),
}
_TYPES = {"numbers": "list[int]", "words": "list[str]", "text": "str", "n": "int", "m": "int"}
_RESULTS = ("result", "total", "answer", "output", "found")


@dataclass(frozen=True)
class _Function:
    """The parts of a function that follow-up turns keep or change one by one."""

    task: Task
    name: str
    parameters: tuple[str, ...]
    typed: bool
    body: int


def _signature(function: _Function) -> str:
    kinds = function.task.kinds
    typed = [
        f"{p}: {_TYPES[kind]}" if function.typed else p for p, kind in zip(function.parameters, kinds, strict=True)
    ]
    arrow = f" -> {function.task.returns}" if function.typed else ""
    return f"def {function.name}({', '.join(typed)}){arrow}:"


def _arguments(rng: random.Random, task: Task) -> list[Any]:
    """Arguments for a call: numbers near the task's limit, so that conditions hold for some of them."""
    made: list[Any] = []
    for kind in task.kinds:
        if kind == "numbers":
            near = [n for n in LIST_NUMBERS if n < 2 * (task.limit or 25) + 8]
            made.append([rng.choice(near) for _ in range(rng.randint(3, 4))])
        elif kind == "words":
            made.append(rng.sample(WORDS, rng.randint(2, 3)))
        elif kind == "text":
            made.append(rng.choice(WORDS))
        else:
            high = {"digits": 99, "factorial": 6, "sum_to": 12, "prime": 40, "divisors": 20}.get(task.template, 12)
            made.append(rng.choice([n for n in range(2, high + 1) if n not in HELD_NUMBERS]))
    return made


def _call(function: _Function, arguments: list[Any]) -> tuple[str, str]:
    shown = ", ".join(repr(argument) for argument in arguments)
    return f"{function.name}({shown})", repr(function.task.reference(*arguments))


def _draw(rng: random.Random, task: Task) -> _Function:
    parameters = tuple(rng.choice(_PARAMETERS[kind]) for kind in task.kinds)
    return _Function(task, fill(rng, task.names), parameters, rng.random() < 0.5, rng.randrange(len(task.bodies)))


def _source(rng: random.Random, function: _Function) -> str:
    """The function as Python text, with a fresh docstring and fresh inner names."""
    task, p = function.task, function.parameters
    free = [name for name in _ELEMENTS[task.kinds[0]] if name not in p]
    body = fill(
        rng,
        task.bodies[function.body],
        p=p[0],
        q=p[-1],
        x=rng.choice(free),
        r=rng.choice(_RESULTS),
        f=function.name,
    )
    lines = [
        _signature(function),
        f'    """{capital(fill(rng, task.purpose))}."""',
        *("    " + line for line in body.split("\n")),
    ]
    return "\n".join(lines)


def _fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def _how(rng: random.Random, function: _Function) -> str:
    opening = "<The function|The code|It|In short, it|To put it simply, it|In other words, the function>"
    return fill(rng, f"{opening} {function.task.how}.")


def _example(rng: random.Random, function: _Function) -> str:
    call, value = _call(function, _arguments(rng, function.task))
    text = (
        "<For example|For instance|As an example|To give an example>, `@call` <returns|gives|gives back|is> `@value`."
    )
    return fill(rng, text, call=call, value=value)


def _answer(rng: random.Random, function: _Function) -> str:
    start = f"<{SURE}, {HERE}|{SURE}, {HERE}|{HERE}>"
    opening = fill(rng, f"{start} <a function that does it|the function|a solution|the code|one way to do it>:")
    parts = [capital(opening), _fenced(_source(rng, function))]
    if rng.random() < 0.6:
        parts.append(_how(rng, function))
    if rng.random() < 0.35:
        parts.append(_example(rng, function))
    return "\n\n".join(parts[:2]) + ("\n\n" + " ".join(parts[2:]) if parts[2:] else "")


def _complete(rng: random.Random, task: Task) -> list[str]:
    """A function to complete, in the form of HumanEval."""
    function = _draw(rng, task)
    examples = "\n".join(
        f"    >>> {call}\n    {value}"
        for call, value in (_call(function, _arguments(rng, task)) for _ in range(rng.randint(1, 2)))
    )
    docstring = f'    """{capital(fill(rng, task.purpose))}.\n{examples}\n    """'
    request = fill(
        rng,
        "<Complete this function|Finish the function below|Please fill in this "
        "function|Implement the function below|"
        "Write the body of this function|Solve this programming task>"
        "<.|:| in Python.| so that the examples work:| and check it against the examples:>",
    )
    return [f"{request}\n{_fenced(_signature(function) + chr(10) + docstring)}", _answer(rng, function)]


def _request(rng: random.Random, task: Task) -> tuple[list[str], _Function]:
    """A one-line request, in the form of MBPP; the answer picks the names."""
    function = _draw(rng, task)
    prompt = fill(
        rng,
        f"<Write a function to|Write a python function to|Can you write a Python function "
        f"to|I need a function to|"
        f"Please write code to|Give me a python function to> {task.purpose}",
    )
    end = "?" if prompt.startswith("Can") else "."
    return [prompt + end, _answer(rng, function)], function


def _follow_up(rng: random.Random, function: _Function) -> list[str]:
    kinds = ["rename", "rewrite", "explain", "example"] + ["limit"] * 2 * (function.task.limit is not None)
    kind = rng.choice(kinds)
    if kind == "explain":
        ask = (
            "<How does it work?|Can you explain it?|What does the code do?|"
            "Please explain how it works.|Explain the code, please.>"
        )
        end = (
            "<At the end|Finally|In the end|After that>, "
            "<the result is returned|it gives back the result|it returns the result>."
        )
        return [fill(rng, ask), f"{_how(rng, function)} {fill(rng, end)}"]
    if kind == "example":
        ask = "<Show me an example|Give me an example|Add an example call|Now call it once><.|, please.>"
        return [fill(rng, ask), _example(rng, function)]
    if kind == "rename":
        spare = [
            n
            for n in ("solve", "helper", "compute", "my_function", "run_it", "work", "task", "get_result")
            if n != function.name
        ]
        changed = replace(function, name=rng.choice(spare))
        ask = f"<Rename the function to|Call the function|Please change its name to|Use another name:> {changed.name}."
    elif kind == "rewrite":
        changed = replace(function, body=(function.body + 1) % len(function.task.bodies))
        ask = (
            "<Write it in another way|Show me a different solution|Do it differently|Now solve it in "
            "another way><.|, please.>"
        )
    else:
        changed_task = listing(
            rng,
            AGGREGATES.index(function.task.template),
            function.task.condition,
            rng.choice([n for n in LIMITS[:10] if n != function.task.limit]),
        )
        changed = replace(function, task=changed_task, name=fill(rng, changed_task.names))
        ask = (
            f"<Now do it for @k instead|Use @k instead of {function.task.limit}|Please change the "
            f"number to @k|And now with @k>."
        )
        ask = ask.replace("@k", str(changed_task.limit))
    reply = (
        f"<{SURE}, {HERE} <the new version|the changed code|the function again>:|{SURE}, <now it "
        f"looks like this|that would be>:>"
    )
    return [fill(rng, ask), f"{fill(rng, reply)}\n\n{_fenced(_source(rng, changed))}"]


def _document(rng: random.Random, make: Callable[[random.Random], Task]) -> list[str]:
    task = make(rng)
    if rng.random() < 0.45:
        return _complete(rng, task)
    turns, function = _request(rng, task)
    return turns + (_follow_up(rng, function) if rng.random() < 0.45 else [])


def _plain(task: Task) -> Callable[[random.Random], Task]:
    return lambda rng: task


BUILDERS: tuple[tuple[str, Builder], ...] = (
    *((f"list-{name}", partial(_document, make=partial(list_task, aggregate=i))) for i, name in enumerate(AGGREGATES)),
    *((task.template, partial(_document, make=_plain(task))) for task in PLAIN),
)
