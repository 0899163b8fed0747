"""Single requests of the chat documents: rewriting, sorting, facts, advice; several with a blank line and
`Input:`.
"""

from __future__ import annotations

import random

from sparkbench.train.text.grammar import Builder, capital, fill, joined, lead, some
from sparkbench.train.text.words import CLOSING, PEOPLE
from sparkbench.train.text.world import ACTIONS, ANIMALS, KINDS, OPPOSITES, TIMES


def tense(rng: random.Random) -> list[str]:
    (name, _, _), action, time = rng.choice(PEOPLE), rng.choice(list(ACTIONS)), rng.choice(TIMES)
    which = rng.randrange(2)
    word = ("past", "future")[which]
    ask = (
        f"<Rewrite|Put|Change|Write> <the sentence|this sentence> <in|into> the {word} "
        f"tense.\n\nInput:\n{name} {action} {time}."
    )
    new = f"{name} {ACTIONS[action][which]} {time}"
    reply = (
        f"<In the {word} tense,|Written in the {word},|Now> <it reads|the sentence is|we say|the "
        f"sentence becomes>: {new}. "
    )
    reply += (
        "<Only the verb|Just the verb|Here the verb> <has changed|is different|takes a new form>, "
        "<and the rest stays the same|while all other words stay|so the rest is as before>."
    )
    return [fill(rng, ask), fill(rng, reply)]


def odd_one(rng: random.Random) -> list[str]:
    kind, other = rng.sample(list(KINDS), 2)
    alien = rng.choice(KINDS[other])
    items = [*rng.sample(KINDS[kind], 3), alien]
    rng.shuffle(items)
    ask = (
        f"<Find|Pick out|Name> the word that <does not fit|does not belong|is different>.\n\nInput:\n{', '.join(items)}"
    )
    rest = joined([i for i in items if i != alien])
    reply = (
        f"<The word that does not fit is|The odd one out is|It is|The answer is> {alien}. <It "
        f"is|This is|That is> one of the {other}, "
        f"<while|but> {rest} are <all|> {kind}."
    )
    return [fill(rng, ask), fill(rng, reply).replace("  ", " ")]


def classify(rng: random.Random) -> list[str]:
    kinds = rng.sample(list(KINDS), 2)
    items = [(w, k) for k in kinds for w in rng.sample(KINDS[k], rng.randint(2, 3))]
    rng.shuffle(items)
    ask = (
        f"<Sort|Group|Divide> <the words|these words> into {kinds[0]} and "
        f"{kinds[1]}.\n\nInput:\n{', '.join(w for w, _ in items)}"
    )
    order = rng.sample(kinds, 2)
    lines = "\n".join(
        f"{capital(k)}: {', '.join(rng.sample(part, len(part)))}"
        for k in order
        for part in [[w for w, x in items if x == k]]
    )
    return [fill(rng, ask), f"{lead(rng, '<the list|a table|the result>')}:\n{lines}"]


def animal(rng: random.Random) -> list[str]:
    which = rng.choice(list(ANIMALS))
    food, home, legs = ANIMALS[which]
    the = rng.choice(("a", "the")) if which != "owl" else "the"
    ask = (
        f"<What do you know about|Tell me something about|Give me some facts about|Describe> {the} "
        f"{which}<| in a few words>."
    )
    facts = [
        f"<it likes to eat|it eats|its food is mostly> {food}",
        f"<it has|it walks on|it stands on> {legs} legs",
        f"<it lives in or near|its home is|you often find it near> a {home}",
    ]
    rng.shuffle(facts)
    extra = "<|It is a fine animal.|Many people like it.|Children often draw it.|You can see it in many books.>"
    reply = f"<The {which} is an animal|The {which} is well known|Here are some facts>. {'. '.join(facts)}. {extra}"
    text = fill(rng, reply).strip()
    drawn = fill(rng, ask)
    return [
        drawn[:-1] + "?" if drawn.startswith("What") else drawn,
        ". ".join(capital(part) for part in text.split(". ")),
    ]


def opposite(rng: random.Random) -> list[str]:
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in some(rng, list(OPPOSITES.items()), 1, 3)]
    words = [a for a, _ in pairs]
    ask = (
        f"<What is the opposite of {words[0]}?|Name the opposite of {words[0]}.>"
        if len(words) == 1
        else f"<Give|Write|Find> the <opposite of each word|opposites of these words>.\n\nInput:\n{', '.join(words)}"
    )
    parts = [f"the opposite of {a} is {b}" for a, b in pairs]
    a, b = pairs[0]
    use = f"<For example, |You can say: |>a <day|house|story> is not {a} but {b}<, for instance|>."
    return [
        fill(rng, ask),
        capital(fill(rng, f"{joined(parts)}. <|{use}>".strip())).replace(". a ", ". A ").strip(),
    ]


def advice(rng: random.Random) -> list[str]:
    (name, he, _), problem = (
        rng.choice(PEOPLE),
        rng.choice(("is tired", "feels alone", "is nervous", "has too much work", "is bored", "lost a game")),
    )
    ask = (
        f"<My friend {name} {problem}. What can I do?|{name} {problem}. What should I say?|What would "
        f"you tell {name}, who {problem}?|Give some advice to {name}, who {problem}.>"
    )
    reply = (
        f"<It is good|It is kind|I am glad> that you <ask|care|want to help>. <First,|To begin "
        f"with,|At first,> <listen to {name}|talk with {name}|ask {name} how it feels>. "
        f"<Then|After that|Next>, you <could|can|may> <drink some tea|take a walk|play a game|cook "
        f"something> together. "
        f"<In the end|With some time|Step by step>, {he} will <feel better|be fine again|smile again>."
    )
    return [fill(rng, ask), fill(rng, reply)]


def shop(rng: random.Random) -> list[str]:
    kind = rng.choice(("fruits", "vegetables", "drinks"))
    items = rng.sample(KINDS[kind], 3)
    meal = rng.choice(("breakfast", "a picnic", "a party", "dinner"))
    ask = f"<Write|Make|Give me> a <shopping list|list of things to buy> for {meal} with three {kind}."
    lines = "\n".join(
        f"- {item}, {fill(rng, '<a small bag|a big box|enough for all|as much as you like>')}" for item in items
    )
    return [
        fill(rng, ask),
        f"{lead(rng, '<the list|a shopping list|your list>')} for {meal}:\n{lines}\n{fill(rng, CLOSING)}".strip(),
    ]


_BUILDERS = (tense, odd_one, classify, animal, opposite, advice, shop)
REQUESTS: tuple[tuple[str, Builder], ...] = tuple((make.__name__, make) for make in _BUILDERS)
