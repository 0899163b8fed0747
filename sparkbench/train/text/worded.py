"""Word problems of the math documents, in the form of GSM8K, with small whole numbers.

Every number in a step is computed here. Who a problem is about can be fixed, so that a second turn keeps
the person.
"""

from __future__ import annotations

import random

from sparkbench.train.text.problem import Maker, Problem
from sparkbench.train.text.words import GOODS, PEOPLE, PLACES, THINGS


def _person(rng: random.Random, who: str | None) -> tuple[str, str, str]:
    return rng.choice([p for p in PEOPLE if who is None or p[0] == who])


def _add(a: int, b: int, unit: str) -> str:
    eq = f"{a} + {b} = {a + b}"
    return (
        f"<we add the two amounts|we add both numbers|adding the two numbers|the sum of both is|both "
        f"together give us|"
        f"together that makes|in total there are>: {eq} {unit}."
    )


def _take(a: int, b: int, unit: str) -> str:
    eq = f"{a} - {b} = {a - b}"
    return (
        f"<we take {b} away from {a}|we subtract {b} from {a}|taking {b} away from {a}|what is left "
        f"is|there remain|"
        f"this leaves us with>: {eq} {unit}."
    )


def _times(a: int, b: int, unit: str) -> str:
    eq = f"{a} * {b} = {a * b}"
    return (
        f"<we multiply {a} by {b}|we multiply the two numbers|multiplying both numbers|the product "
        f"of both is|"
        f"{a} times {b} gives us|in total that makes>: {eq} {unit}."
    )


def _share(a: int, b: int, unit: str) -> str:
    eq = f"{a} / {b} = {a // b}"
    return (
        f"<we divide {a} by {b}|we split {a} into {b} equal parts|dividing {a} by {b}|each part is then|"
        f"{a} divided by {b} gives us|sharing it evenly makes>: {eq} {unit}."
    )


_FIRST = "<first,|to begin with,|at the start,|as a first step,> "
_THEN = "<then|next,|after that,|now|in the next step,> "


def gain(rng: random.Random, who: str | None) -> Problem:
    (name, he, _), thing, a, b = (
        _person(rng, who),
        rng.choice(THINGS),
        rng.randint(5, 60),
        rng.randint(3, 40),
    )
    question = (
        f"{name} has {a} {thing}<.| at home.| in a box.> <A friend gives {name} {b} more.|Then "
        f"{he} <finds|gets|buys> {b} more.> "
        f"How many {thing} does {name} have <now|in the end|in total|altogether>?"
    )
    steps = (
        f"<{name} has|at first, {name} has|{name} starts with|in the beginning there are> {a} "
        f"{thing}<, and {b} more are added|"
        f" and gets {b} more|, then {b} more come in|>.",
        _add(a, b, thing),
    )
    return Problem(question, steps, f"{a} + {b} = {a + b}", a + b, who=name)


def loss(rng: random.Random, who: str | None) -> Problem:
    (name, he, _), thing, a = _person(rng, who), rng.choice(THINGS), rng.randint(12, 90)
    b = rng.randint(2, a - 4)
    question = (
        f"{name} has {a} {thing}. {he.capitalize()} <gives {b} of them to a friend|loses {b} of "
        f"them|sells {b} of them|"
        f"gives away {b}>. How many {thing} <are left|does {name} still have|does {he} have now>?"
    )
    steps = (
        f"<{name} has|at first, {name} has|{name} starts with|in the beginning there are> {a} "
        f"{thing}<, and {b} of them go away|"
        f" and loses {b} of them|, but {b} are gone|>.",
        _take(a, b, thing),
    )
    return Problem(question, steps, f"{a} - {b} = {a - b}", a - b, who=name)


def boxes(rng: random.Random, who: str | None) -> Problem:
    (name, _, _), thing, a, b = (
        _person(rng, who),
        rng.choice(THINGS),
        rng.randint(2, 12),
        rng.randint(2, 12),
    )
    box = rng.choice(("boxes", "bags", "baskets", "jars"))
    question = (
        f"{name} <fills|packs|has> {a} {box}<.| for the market.> <Each of them holds|There "
        f"are|In each there are> {b} {thing}"
        f"< inside|>. How many {thing} are there <in total|altogether|in all>?"
    )
    steps = (
        f"<there are {a} {box} with {b} {thing} each|each of the {a} {box} holds {b} {thing}|we "
        f"have {a} groups of {b} {thing}>.",
        _times(a, b, thing),
    )
    return Problem(question, steps, f"{a} * {b} = {a * b}", a * b, who=name)


def sharing(rng: random.Random, who: str | None) -> Problem:
    (name, _, _), thing, a, b = (
        _person(rng, who),
        rng.choice(THINGS),
        rng.randint(2, 12),
        rng.randint(2, 10),
    )
    group = rng.choice(("friends", "children", "neighbors", "students"))
    question = (
        f"{name} <shares|splits|divides> {a * b} {thing} <equally|evenly|fairly> among {b} {group}. "
        f"How many {thing} does each of them get?"
    )
    steps = (
        f"<there are {a * b} {thing} for {b} {group}|{b} {group} get the same number|all {b} "
        f"{group} get equal shares>.",
        _share(a * b, b, thing),
    )
    return Problem(question, steps, f"{a * b} / {b} = {a}", a, who=name)


def shopping(rng: random.Random, who: str | None) -> Problem:
    (name, he, _), item, a, price, extra = (
        _person(rng, who),
        rng.choice(GOODS),
        rng.randint(2, 9),
        rng.randint(2, 9),
        rng.randint(2, 30),
    )
    other = rng.choice([g for g in GOODS if g != item])
    question = (
        f"{name} <buys|gets|takes> {a} {item}s <for|at> {price} dollars each and a {other} for "
        f"{extra} dollars"
        f"< at the {rng.choice(PLACES)}|>. How much <does {name} pay|does {he} spend|money is "
        f"that> <in total|altogether|in all>?"
    )
    cost = a * price
    steps = (
        f"{_FIRST}<we look at the {item}s|we find the cost of the {item}s|the {item}s cost {price} dollars each>.",
        _times(a, price, "dollars"),
        f"{_THEN}<we add the price of the {other}|the {other} comes on top|we take the {other} into "
        f"account>: {cost} + {extra} = {cost + extra} dollars.",
    )
    return Problem(question, steps, f"{a} * {price} + {extra} = {cost + extra}", cost + extra, who=name)


def change(rng: random.Random, who: str | None) -> Problem:
    (name, he, _), item, a, price = (
        _person(rng, who),
        rng.choice(GOODS),
        rng.randint(2, 8),
        rng.randint(2, 6),
    )
    paid = rng.choice([n for n in (20, 30, 40, 50, 60) if n > a * price])
    question = (
        f"A {item} costs {price} dollars. {name} <buys|wants|takes> {a} of them and pays with "
        f"{paid} dollars. "
        f"How much <change|money> does {he} get back?"
    )
    steps = (
        f"{_FIRST}<we find the cost of all|we find out the price of all|we look at the cost> {item}s.",
        _times(a, price, "dollars"),
        f"{_THEN}<we take this from the money|we subtract the cost from the money|the change is "
        f"what is left>: {paid} - {a * price} = {paid - a * price} dollars.",
    )
    return Problem(question, steps, f"{paid} - {a} * {price} = {paid - a * price}", paid - a * price, who=name)


def compare(rng: random.Random, who: str | None) -> Problem:
    (name, _, _), thing, a, b = (
        _person(rng, who),
        rng.choice(THINGS),
        rng.randint(6, 40),
        rng.randint(2, 30),
    )
    other = rng.choice([p[0] for p in PEOPLE if p[0] != name])
    question = (
        f"{name} has {a} {thing}. {other} has {b} more than {name}. How many {thing} do "
        f"<they|both of them|the two> have "
        f"<together|in total|altogether>?"
    )
    steps = (
        f"{_FIRST}<we find the number for {other}|we find out how many {other} has|we look at "
        f"{other}>: {a} + {b} = {a + b} {thing}.",
        _THEN + _add(a, a + b, thing),
    )
    return Problem(question, steps, f"{a} + {a + b} = {2 * a + b}", 2 * a + b, who=name)


def twice(rng: random.Random, who: str | None) -> Problem:
    (name, _, _), thing, a = _person(rng, who), rng.choice(THINGS), rng.randint(3, 30)
    factor, word = rng.choice(((2, "twice"), (3, "three times"), (4, "four times")))
    other = rng.choice([p[0] for p in PEOPLE if p[0] != name])
    question = (
        f"{name} has {a} {thing}, and {other} has {word} as many. How many {thing} do <they|both "
        f"of them|the two> have "
        f"<together|in total|altogether>?"
    )
    steps = (
        f"{_FIRST}<we find the number for {other}|we find out how many {other} has|we look at "
        f"{other}>: {factor} * {a} = {factor * a} {thing}.",
        _THEN + _add(a, factor * a, thing),
    )
    return Problem(question, steps, f"{a} + {factor * a} = {a + factor * a}", a + factor * a, who=name)


def days(rng: random.Random, who: str | None) -> Problem:
    (name, he, _), a, n = _person(rng, who), rng.randint(3, 20), rng.randint(3, 9)
    verb, unit = rng.choice(
        (("reads", "pages"), ("runs", "miles"), ("learns", "words"), ("bakes", "cakes"), ("writes", "lines"))
    )
    extra = rng.randint(2, 15)
    question = (
        f"{name} {verb} {a} {unit} <a day|every day|each day> for {n} days. <On the last day|At "
        f"the end> {he} {verb} {extra} {unit} more. "
        f"How many {unit} is that <in total|altogether|in all>?"
    )
    steps = (
        f"{_FIRST}<we look at the {n} days|we count the {n} days|we take the {n} days together>.",
        _times(a, n, unit),
        f"{_THEN}<we add the last part|we add what came last|the rest comes on top>: {a * n} + "
        f"{extra} = {a * n + extra} {unit}.",
    )
    return Problem(question, steps, f"{a} * {n} + {extra} = {a * n + extra}", a * n + extra, who=name)


def bus(rng: random.Random, who: str | None) -> Problem:
    a, c = rng.randint(10, 50), rng.randint(2, 20)
    b = rng.randint(2, a - 2)
    ride = rng.choice(("bus", "train", "boat", "tram"))
    question = (
        f"There are {a} people on a {ride}. At the <next stop|first stop> {b} people <get "
        f"off|leave> and {c} people "
        f"<get on|come in>. How many people are <on the {ride} now|there now>?"
    )
    steps = (
        f"{_FIRST}<the people who leave|we look at those who leave|some people get off>: {a} - {b} = {a - b} people.",
        f"{_THEN}<the new people come in|we add the new people|some people get on>: {a - b} + {c} = "
        f"{a - b + c} people.",
    )
    return Problem(question, steps, f"{a} - {b} + {c} = {a - b + c}", a - b + c)


def age(rng: random.Random, who: str | None) -> Problem:
    (name, _, his), a, b, years = (
        _person(rng, who),
        rng.randint(5, 30),
        rng.randint(2, 20),
        rng.randint(2, 15),
    )
    kin = rng.choice(("sister", "brother", "cousin", "teacher", "uncle"))
    question = (
        f"{name} is {a} years old. {his.capitalize()} {kin} is {b} years older. How old will "
        f"{his} {kin} be <in {years} years|{years} years from now>?"
    )
    steps = (
        f"{_FIRST}<we find the age today|we look at the age now|the {kin} is now>: {a} + {b} = {a + b} years.",
        f"{_THEN}<we add the {years} years|{years} years go by|we look {years} years ahead>: "
        f"{a + b} + {years} = {a + b + years} years.",
    )
    return Problem(question, steps, f"{a} + {b} + {years} = {a + b + years}", a + b + years, who=name)


def rows(rng: random.Random, who: str | None) -> Problem:
    a, b = rng.randint(3, 12), rng.randint(3, 12)
    c = rng.randint(2, a * b - 2)
    place, seat = rng.choice((("hall", "chairs"), ("garden", "trees"), ("theater", "seats"), ("field", "plants")))
    bad = {"chairs": "broken", "trees": "dry", "seats": "taken", "plants": "dry"}[seat]
    question = (
        f"A {place} has {a} rows <of|with> {b} {seat}<| each>. {c} of the {seat} are {bad}. How "
        f"many {seat} are not {bad}?"
    )
    steps = (
        f"{_FIRST}<we count all the {seat}|we find the number of {seat}|we look at all rows>.",
        _times(a, b, seat),
        _THEN + _take(a * b, c, seat),
    )
    return Problem(question, steps, f"{a} * {b} - {c} = {a * b - c}", a * b - c)


_MAKERS: tuple[Maker, ...] = (
    gain,
    loss,
    boxes,
    sharing,
    shopping,
    change,
    compare,
    twice,
    days,
    bus,
    age,
    rows,
)
WORDED = tuple((make.__name__, make) for make in _MAKERS)
