"""Varied documents: made-up names and things and clumsy requests, so the target relies less on fixed wording.

The generator knows few names and few ways to ask. A target trained on it alone copies only names that it knows,
and answers another request when it is asked in other words. Varying a document teaches both. Names, some nouns
and the letters of formulas are replaced throughout by others, and words of the user's turns are doubled, swapped or
replaced, while the answer stays as it is. Numbers and code are never touched, so every answer stays
right.
"""

import random
import re
import string
from collections.abc import Iterator

from sparkbench.train.text import Document, Message, documents
from sparkbench.train.text.words import GOODS, PEOPLE, THINGS
from sparkbench.train.text.world import ANIMALS, FINDS, HEROES

NAMES = tuple(name for name, _, _ in PEOPLE)
NOUNS = tuple(sorted({*THINGS, *GOODS, *ANIMALS, *HEROES, *FINDS}))
_ONSETS = (
    "b",
    "br",
    "ch",
    "d",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo", "y")
_CODAS = ("", "", "", "l", "n", "r", "s", "t", "x", "m", "ck")
_WORD = re.compile(r"[A-Za-z]+")
_FORMULA = re.compile(r"\$[^$]*\$")
_LETTER = re.compile(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])")
_PROTECTED = re.compile(r"```.*?```|\$[^$]*\$|\\boxed\{\}|\S*\d\S*|\n+", re.DOTALL)


def varied(seed: int, start: int, count: int, share: float) -> Iterator[Document]:
    """Documents `start` to `start + count - 1` of stream `seed`; a share of them is varied."""
    for index, document in enumerate(documents(seed, start, count), start):
        rng = random.Random(f"vary:{seed}:{index}")
        yield vary(document, rng) if rng.random() < share else document


def vary(document: Document, rng: random.Random) -> Document:
    """The document with made-up names, some made-up things, other letters, and noise in the user's turns."""
    renamed = _relettered(_renamed(document, rng), rng)
    level = rng.choice((0.0, 0.05, 0.1, 0.15, 0.25))
    answers = " ".join(message.content for message in renamed if message.role == "assistant")
    kept = set(_WORD.findall(answers))  # what an answer uses again must stay, or it could not be given
    messages = (
        Message(message.role, _noisy(message.content, level, kept, rng)) if message.role == "user" else message
        for message in renamed
    )
    return Document(document.domain, document.template, tuple(messages))


def made_up(rng: random.Random, ending: str = "") -> str:
    """A pronounceable word of one to three syllables that mostly does not exist."""
    syllables = (rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2, 2, 3))))
    return "".join(syllables) + rng.choice(_CODAS) + ending


def _renamed(document: Document, rng: random.Random) -> list[Message]:
    """Replace names, and half of the nouns, by made-up words: the same word by the same one everywhere."""
    text = "\n".join(message.content for message in document.messages)
    words = dict.fromkeys(_WORD.findall(text))
    new = {}
    for word in words:
        if word in NAMES:
            new[word] = made_up(rng).capitalize()
        elif document.domain != "code" and word in NOUNS and rng.random() < 0.5:
            new[word] = made_up(rng, "s" if word.endswith("s") else "")
    if not new:
        return list(document.messages)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, new))})\b")
    return [
        Message(message.role, pattern.sub(lambda match: new[match[0]], message.content))
        for message in document.messages
    ]


def _relettered(messages: list[Message], rng: random.Random) -> list[Message]:
    """Exchange the letters of formulas, the same letter for the same one everywhere."""
    new = dict(zip(string.ascii_lowercase, rng.sample(string.ascii_lowercase, 26), strict=True))

    def formula(match: re.Match[str]) -> str:
        return _LETTER.sub(lambda letter: new[letter[0]], match[0])

    return [Message(message.role, _FORMULA.sub(formula, message.content)) for message in messages]


def _noisy(text: str, level: float, kept: set[str], rng: random.Random) -> str:
    """Replace, double and swap words, with a chance of `level` in all; protected parts stay as they are."""
    pieces, place = [], 0
    for match in _PROTECTED.finditer(text):
        pieces += [_noisy_words(text[place : match.start()], level, kept, rng), match[0]]
        place = match.end()
    return "".join([*pieces, _noisy_words(text[place:], level, kept, rng)])


def _noisy_words(text: str, level: float, kept: set[str], rng: random.Random) -> str:
    out: list[str] = []
    for word in text.split(" "):
        draw = rng.random()
        if not word or draw >= level:
            out.append(word)
        elif draw < 0.6 * level:
            out.append(word if kept.intersection(_WORD.findall(word)) else made_up(rng))
        elif draw < 0.8 * level:
            out += [word, word]
        else:
            out.insert(max(len(out) - 1, 0), word)
    return " ".join(out)
