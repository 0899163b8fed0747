"""Chat documents: tips, explanations, plans and the like, with follow-ups that change the answer.

Single exchanges take the form of Alpaca, those of two turns the form of MT-Bench. Not covered: requests
that never get a second turn (`requests`), and anything outside the small world of `world`.
"""

from __future__ import annotations

import random
from functools import partial

from sparkbench.train.text.compose import letter, poem, story
from sparkbench.train.text.grammar import Builder, capital, fill, joined, lead
from sparkbench.train.text.requests import REQUESTS
from sparkbench.train.text.words import CLOSING, NUMBER, PEOPLE, PLACES, SURE
from sparkbench.train.text.world import ACTIONS, EXPLAINED, KINDS, TIMES, TOPICS

_REASON = (
    "<|, because it helps a lot|, since it is easy to do|, which is good for you|, so that you "
    "feel good|, and you will like it>"
)


def _lines(rng: random.Random, items: list[str], numbered: bool) -> str:
    return "\n".join(f"{f'{i}.' if numbered else '-'} {capital(fill(rng, item))}." for i, item in enumerate(items, 1))


def tips(rng: random.Random, *, follow: bool) -> list[str]:
    topic = rng.choice(list(TOPICS))
    count = rng.randint(2, 4)
    ask = (
        f"<Give me|List|Write|Name|Tell me> {NUMBER[count]} <tips|ideas|ways|good tips|simple tips> "
        f"<to|that help to|for people who want to> {topic}."
    )
    chosen = rng.sample(TOPICS[topic], count)
    reasoned = [tip + (_REASON if rng.random() < 0.6 else "") for tip in chosen]
    numbered = rng.random() < 0.6
    opening = fill(
        rng,
        f"<{SURE}, here are|here are|these are|you can try> {NUMBER[count]} <ways to|ideas "
        f"to|tips to|simple ways to> {topic}:",
    )
    turns = [
        fill(rng, ask),
        f"{capital(opening)}\n{_lines(rng, reasoned, numbered)}\n{fill(rng, CLOSING)}".strip(),
    ]
    if not follow:
        return turns
    kind = rng.choice(("more", "short", "why", "shape"))
    if kind == "more":
        spare = [tip for tip in TOPICS[topic] if tip not in chosen]
        ask = "<Add another one|Give me one more|Can you add one more|One more, please><.|!>"
        reply = f"<{SURE}, |Yes, |>you <can|could|may> also <try this|do this|think of this>: {rng.choice(spare)}."
    elif kind == "short":
        ask = "<Make it shorter.|Say it in one sentence.|Put it into a single sentence.|Can you shorten your answer?>"
        reply = f"<In short,|To put it simply,|In other words,|In one sentence:> {joined(chosen[:2])}."
    elif kind == "why":
        ask = (
            "<Which one is the most important?|Which of them is best?|Which tip should I try "
            "first?|Where should I start?>"
        )
        reply = (
            f"<I think|In my view,|For most people,|I would say> the <first one|first step|very "
            f"first one> <is the best|matters most|is a good start>: "
            f"{chosen[0]}. <It is easy to do|It does not cost much|You will feel it soon> <and it "
            f"helps a lot|and helps right away|and works for most people>."
        )
    else:
        ask = "<Write it as a list with|Use a list with|Show it as a list with|Please rewrite it with> " + (
            "dashes." if numbered else "numbers."
        )
        return [
            *turns,
            fill(rng, ask),
            f"{lead(rng, '<the list|your list|the new list>')}:\n{_lines(rng, chosen, not numbered)}",
        ]
    return [*turns, fill(rng, ask), capital(fill(rng, reply))]


def explain(rng: random.Random, *, follow: bool) -> list[str]:
    thing = rng.choice(list(EXPLAINED))
    ask = (
        f"<Explain {thing}|Tell me about {thing}|What can you tell me about {thing}|Describe "
        f"{thing}|Write a short text about {thing}>< in simple words| for a child|>"
    )
    drawn = fill(rng, ask)
    parts = [capital(fill(rng, part)) + "." for part in EXPLAINED[thing]]
    last = (
        "<|In short,|To put it simply,|In other words,> <it is something|this is a thing|we speak of "
        "something> "
        "<that we meet every day|everyone should know|that is part of our life|that helps us a lot>."
    )
    turns = [
        drawn + ("?" if drawn.startswith("What") else "."),
        f"{' '.join(parts)} {capital(fill(rng, last).strip())}",
    ]
    if not follow:
        return turns
    if rng.random() < 0.5:
        ask = (
            "<Make it shorter.|Can you shorten your answer?|Say it in one sentence.|Now in a single sentence, please.>"
        )
        reply = f"<In short,|To put it simply,|In other words,|In one sentence:> {rng.choice(EXPLAINED[thing])}."
    else:
        ask = "<Rewrite it as a list.|Turn this into a list.|Please make a list of it.|Show the main points.>"
        return [
            *turns,
            fill(rng, ask),
            f"{lead(rng, '<the list|a short list|the same as a list>')}:\n{_lines(rng, list(EXPLAINED[thing]), False)}",
        ]
    return [*turns, fill(rng, ask), capital(fill(rng, reply))]


def name_some(rng: random.Random, *, follow: bool) -> list[str]:
    kind, count = rng.choice(list(KINDS)), rng.randint(3, 5)
    words = rng.sample(KINDS[kind], count)
    ask = f"<Name|List|Give me|Tell me|Write down> {NUMBER[count]} {kind}<| that you know| for a game>."
    reply = (
        f"<Some|Well known|{NUMBER[count].capitalize()}> {kind} are {joined(words)}. <I like "
        f"{words[0]} best|My favorite is {words[-1]}|Most people know {words[1]}>, "
        f"<but there are many more|and there are many others|but you may like another one>."
    )
    turns = [fill(rng, ask), fill(rng, reply)]
    if follow:
        order = sorted(words)
        ask = (
            "<Sort them by the alphabet.|Put them in the order of the alphabet.|Now sort them from a "
            "to z.|Write them from a to z.>"
        )
        turns += [
            fill(rng, ask),
            capital(
                fill(
                    rng,
                    f"<{SURE}, in order they are|from a to z we have|in "
                    f"this order|sorted they are>: {', '.join(order)}.",
                )
            ),
        ]
    return turns


def sentence(rng: random.Random, *, follow: bool) -> list[str]:
    (name, he, _), action, time = rng.choice(PEOPLE), rng.choice(list(ACTIONS)), rng.choice(TIMES)
    ask = (
        f"<Make this sentence longer|Add some details to this sentence|Make this sentence more "
        f"lively|Describe it with more words>.\n\nInput:\n{name} {action}."
    )
    long = (
        f"<On a sunny day|On a cold day|Today|As always>, {name} <happily|slowly|quietly|proudly> "
        f"{action} {time}, "
        f"<because|since> {he} <loves it|has some time|feels so good|wants to relax>."
    )
    turns = [fill(rng, ask), fill(rng, long)]
    if follow:
        ask = (
            "<Now add a second sentence.|Write one more sentence.|Continue with one more "
            "sentence.|Add what happens after that.>"
        )
        reply = (
            f"<After that|Later|Then|In the end>, {he} <goes|walks|runs> to the "
            f"{rng.choice(PLACES)} and <meets|looks for|talks to> "
            f"<an old friend|a neighbor|the teacher|some children>."
        )
        turns += [fill(rng, ask), fill(rng, reply)]
    return turns


def plan(rng: random.Random, *, follow: bool) -> list[str]:
    day = rng.choice(("Monday", "Friday", "Saturday", "Sunday"))
    where = rng.choice(PLACES)
    ask = (
        f"<Plan|Write a plan for|Suggest a plan for|Help me plan> a <nice|quiet|busy|free> {day} "
        f"<with a visit to the|at the|near the> {where}."
    )
    parts = [
        "<In the morning,|After breakfast,|At nine,> <you can|you could|it is nice to> <take a "
        "walk|drink some tea|ride a bike> <in the park|with a friend|near the river>.",
        f"<At noon,|Around noon,|Later,> <go to|visit|have a look at> the {where} and <have lunch "
        f"there|take your time|meet some friends>.",
        "<In the evening,|After dinner,|At night,> <read a book|cook a good meal|listen to "
        "music|play a game> <at home|with your family|until you are tired>.",
    ]
    turns = [
        fill(rng, ask),
        f"{lead(rng, '<a plan|a simple plan|an idea>')} for {day}:\n" + "\n".join(f"- {fill(rng, p)}" for p in parts),
    ]
    if follow:
        ask = "<What if it rains?|And if it rains?|What can I do if it rains?|It may rain that day.>"
        reply = (
            "<In that case|If it rains|Then>, <stay at home|take an umbrella|go to the museum> and "
            "<bake a cake|play cards|read a good book|watch a film> "
            "<with your family|until the sun is back|and enjoy the rain>."
        )
        turns += [fill(rng, ask), fill(rng, reply)]
    return turns


_TWO = (tips, explain, story, letter, name_some, sentence, plan, poem)
BUILDERS: tuple[tuple[str, Builder], ...] = (
    *((make.__name__, partial(make, follow=False)) for make in _TWO),
    *((f"{make.__name__}-chat", partial(make, follow=True)) for make in _TWO),
    *REQUESTS,
)
