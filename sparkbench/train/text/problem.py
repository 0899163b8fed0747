"""What a math problem is: a question, worked steps, a check and the answer.

The texts are templates of `grammar.fill`. Word problems write plain equations, bare problems use LaTeX.
Not covered: the problems themselves (`worded`, `bare`), and how one is asked and answered in a chat
(`math`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A question with its worked steps (templates), a one-line check, the answer and its unit."""

    question: str
    steps: tuple[str, ...]
    check: str
    answer: int
    latex: bool = False
    who: str | None = None

    @property
    def separator(self) -> str:
        return "\n" if self.latex else " "

    def boxed(self) -> str:
        return f"$\\boxed{{{self.answer}}}$" if self.latex else f"\\boxed{{{self.answer}}}"


Maker = Callable[[random.Random, "str | None"], Problem]
