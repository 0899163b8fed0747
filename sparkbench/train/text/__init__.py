"""Synthetic training text of the embedded default: short documents about code, math and everyday requests.

Why: a model of a few million parameters cannot learn real text, but it can learn a bounded world well.
Documents take the forms of the benchmark sets (HumanEval, MBPP, GSM8K, MATH, MT-Bench, Alpaca), and leave
the wording of the answers open at many points, so that drafting the next tokens is not a mere look-up.

A document depends only on (seed, index), so training runs are repeatable and any part can be made alone.
Not covered: tokenizing, chat templates, and the bundled prompts, whose wording this text never repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sparkbench.train.text import chat, code, math

__all__ = ["Document", "Message", "document", "documents"]

_DOMAINS = (("code", 35, code.BUILDERS), ("math", 35, math.BUILDERS), ("chat", 30, chat.BUILDERS))


@dataclass(frozen=True)
class Message:
    """One turn: `role` is `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """A chat of one or more exchanges; roles alternate, the user begins, the assistant ends."""

    domain: str
    template: str
    messages: tuple[Message, ...]


def document(seed: int, index: int) -> Document:
    """The document number `index` of the stream `seed`; whatever was made before it."""
    rng = random.Random(f"{seed}:{index}")
    domain, _, builders = rng.choices(_DOMAINS, weights=[weight for _, weight, _ in _DOMAINS])[0]
    template, build = rng.choice(builders)
    turns = build(rng)
    roles = ("user", "assistant")
    return Document(domain, template, tuple(Message(roles[i % 2], turn) for i, turn in enumerate(turns)))


def documents(seed: int, start: int, count: int) -> Iterator[Document]:
    """Documents `start` to `start + count - 1` of the stream `seed`."""
    return (document(seed, index) for index in range(start, start + count))
