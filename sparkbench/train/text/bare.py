"""Short problems of the math documents in LaTeX, in the form of MATH.

Every number in a step is computed here. Not covered: fractions, decimals and negative results.
"""

from __future__ import annotations

import random

from sparkbench.train.text.problem import Maker, Problem
from sparkbench.train.text.words import HELD_NUMBERS

# What is added in bare problems; the held numbers are left to the bundled prompts.
SUMMANDS = tuple(n for n in range(1, 41) if n not in HELD_NUMBERS)


def _side(rng: random.Random) -> tuple[int, int]:
    return rng.randint(3, 12), rng.randint(2, 11)


_DIVIDE = "<now we divide|we divide both sides|then divide both sides|dividing both sides> by"
_NEXT = "<this gives|this gives us|we get|so we get|that leaves us with>"


def linear(rng: random.Random, who: str | None) -> Problem:
    x, a, b, v = rng.randint(2, 12), rng.randint(2, 9), rng.choice(SUMMANDS), rng.choice("xyzn")
    c = a * x + b
    question = (
        f"<Solve|Solve the equation|Find ${v}$ if|What is ${v}$ if|Find the value of ${v}$ when> ${a}{v} + {b} = {c}$."
    )
    steps = (
        f"<we subtract {b} from both sides|we take {b} away on both sides|taking {b} away from both "
        f"sides|subtracting {b} on both sides>: "
        f"${a}{v} = {c} - {b} = {c - b}$.",
        f"{_DIVIDE} {a}: ${v} = {c - b} / {a} = {x}$.",
    )
    return Problem(question, steps, f"${a} \\cdot {x} + {b} = {c}$", x, True)


def linear_minus(rng: random.Random, who: str | None) -> Problem:
    x, a, v = rng.randint(3, 12), rng.randint(2, 9), rng.choice("xyzn")
    b = rng.choice([n for n in SUMMANDS if n < a * x])
    c = a * x - b
    question = (
        f"<Solve|Solve the equation|Find ${v}$ if|What is ${v}$ if|Find the value of ${v}$ when> ${a}{v} - {b} = {c}$."
    )
    steps = (
        f"<we add {b} to both sides|we add {b} on both sides|adding {b} to both sides|first we add "
        f"{b}>: "
        f"${a}{v} = {c} + {b} = {c + b}$.",
        f"{_DIVIDE} {a}: ${v} = {c + b} / {a} = {x}$.",
    )
    return Problem(question, steps, f"${a} \\cdot {x} - {b} = {c}$", x, True)


def rectangle(rng: random.Random, who: str | None) -> Problem:
    a, b = _side(rng)
    question = (
        f"A rectangle <has sides of length|has the sides|has side lengths> ${a}$ and ${b}$. "
        f"<What is its area?|Find its area.|How large is its area?>"
    )
    steps = (
        "<the area of a rectangle|the area|this area> <is the product of the sides|is length times "
        "width|is found from both sides>.",
        f"<we multiply the two sides|we multiply both|multiplying the sides|this gives us>: ${a} "
        f"\\cdot {b} = {a * b}$.",
    )
    return Problem(question, steps, f"${a} \\cdot {b} = {a * b}$", a * b, True)


def perimeter(rng: random.Random, who: str | None) -> Problem:
    a, b = _side(rng)
    question = (
        f"A rectangle <has sides of length|has the sides|has side lengths> ${a}$ and ${b}$. "
        f"<What is its perimeter?|Find its perimeter.|How long is its perimeter?>"
    )
    steps = (
        f"<two sides together|one long and one short side|two of the sides> <are|make|give>: ${a} + {b} = {a + b}$.",
        f"<we double this|we take it twice|there are two of each, so we double it|doubling it gives "
        f"us>: $2 \\cdot {a + b} = {2 * (a + b)}$.",
    )
    return Problem(question, steps, f"$2 \\cdot {a} + 2 \\cdot {b} = {2 * (a + b)}$", 2 * (a + b), True)


def power(rng: random.Random, who: str | None) -> Problem:
    a, b = rng.randint(2, 9), rng.choice(SUMMANDS)
    question = f"<What is|Compute|Find the value of|Calculate> ${a}^2 + {b}$."
    steps = (
        f"<we begin with the square|first we find the square|we start with the power|first comes "
        f"the square>: ${a}^2 = {a} \\cdot {a} = {a * a}$.",
        f"<then we add {b}|now we add {b}|adding {b} gives us|after that we add {b}>: ${a * a} + {b} = {a * a + b}$.",
    )
    return Problem(question, steps, f"${a * a} + {b} = {a * a + b}$", a * a + b, True)


def function_value(rng: random.Random, who: str | None) -> Problem:
    a, b, x, f = rng.randint(2, 9), rng.choice(SUMMANDS), rng.randint(2, 12), rng.choice("fgh")
    v = rng.choice("xnyz")
    question = (
        f"<Let|Suppose that|We know that|Say that> ${f}({v}) = {a}{v} + {b}$. <What is "
        f"${f}({x})$?|Find ${f}({x})$.|Compute ${f}({x})$.>"
    )
    steps = (
        f"<we put {x} in for ${v}$|we set ${v} = {x}$|we replace ${v}$ by {x}|putting {x} in for "
        f"${v}$ we get>: ${f}({x}) = {a} \\cdot {x} + {b}$.",
        f"<the product is|first the product|we multiply first>: ${a} \\cdot {x} = {a * x}$.",
        f"{_NEXT} ${a * x} + {b} = {a * x + b}$.",
    )
    return Problem(question, steps, f"${a} \\cdot {x} + {b} = {a * x + b}$", a * x + b, True)


def remainder(rng: random.Random, who: str | None) -> Problem:
    b = rng.randint(3, 9)
    q, r = rng.randint(2, 10), rng.randint(1, b - 1)
    a = b * q + r
    question = f"<What is the remainder|Which remainder is left|What remains> when ${a}$ is divided by ${b}$?"
    steps = (
        f"<the largest multiple of {b} below is|the next smaller multiple of {b} is|we look for a "
        f"multiple of {b}>: ${b} \\cdot {q} = {b * q}$.",
        f"<what is left is|we subtract it|the rest is then|subtracting it gives us>: ${a} - {b * q} = {r}$.",
    )
    return Problem(question, steps, f"${b} \\cdot {q} + {r} = {a}$", r, True)


def average(rng: random.Random, who: str | None) -> Problem:
    mean = rng.randint(5, 30)
    d, e = rng.randint(0, 4), rng.randint(0, 4)
    a, b, c = mean - d, mean + d + e, mean - e
    total = a + b + c
    question = f"<What is the average|What is the mean|What is the mean value> of ${a}$, ${b}$ and ${c}$?"
    steps = (
        f"<we add the three numbers|adding all three numbers|the sum of all is|first we add them>: "
        f"${a} + {b} + {c} = {total}$.",
        f"<we divide by three|there are three numbers, so we divide|dividing by their number|now we "
        f"divide>: ${total} / 3 = {mean}$.",
    )
    return Problem(question, steps, f"$3 \\cdot {mean} = {total}$", mean, True)


def triangle(rng: random.Random, who: str | None) -> Problem:
    a, b = rng.randint(20, 90), rng.randint(20, 80)
    question = (
        f"Two angles of a triangle <are|measure|have> ${a}$ and ${b}$ degrees. <How large is the "
        f"third angle?|What is the third angle?|Find the third angle.>"
    )
    steps = (
        "<the three angles together make|the angles of a triangle add up to|the sum of all angles is> $180$ degrees.",
        f"<we add the two angles|the two angles make|both angles together are>: ${a} + {b} = {a + b}$.",
        f"<what is left is|the third angle is|we subtract this>: $180 - {a + b} = {180 - a - b}$.",
    )
    return Problem(question, steps, f"${a} + {b} + {180 - a - b} = 180$", 180 - a - b, True)


def sequence(rng: random.Random, who: str | None) -> Problem:
    a, d, n = rng.randint(1, 15), rng.randint(2, 9), rng.randint(5, 12)
    question = (
        f"A sequence <starts with|begins with|has the first terms> ${a}$, ${a + d}$, "
        f"${a + 2 * d}$ and <goes on like this|grows by the same amount>. "
        f"What is the term number ${n}$?"
    )
    steps = (
        f"<the terms grow by|each step adds|the difference is>: ${a + d} - {a} = {d}$.",
        f"<there are {n - 1} steps|we need {n - 1} steps|we go {n - 1} steps>: ${n - 1} \\cdot {d} = {(n - 1) * d}$.",
        f"<we add the first term|adding the first term|with the first term>: ${a} + {(n - 1) * d} = "
        f"{a + (n - 1) * d}$.",
    )
    return Problem(question, steps, f"${a} + {n - 1} \\cdot {d} = {a + (n - 1) * d}$", a + (n - 1) * d, True)


_MAKERS: tuple[Maker, ...] = (
    linear,
    linear_minus,
    rectangle,
    perimeter,
    power,
    function_value,
    remainder,
    average,
    triangle,
    sequence,
)
BARE = tuple((make.__name__, make) for make in _MAKERS)
