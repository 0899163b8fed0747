"""Math documents: word problems with worked steps, and short problems in LaTeX, all ending in a boxed
number.

The numbers are small and every equation in an answer is computed, never written by hand. How a step is
told is drawn afresh each time. Not covered: fractions, decimals and negative results.
"""

from __future__ import annotations

import random
from functools import partial

from sparkbench.train.text.bare import BARE
from sparkbench.train.text.grammar import Builder, capital, fill
from sparkbench.train.text.problem import Maker, Problem
from sparkbench.train.text.worded import WORDED

_SUFFIXES = (
    "Explain your steps and write the result in \\boxed{}.",
    "Think about it step by step. The final answer goes into \\boxed{}.",
    "Show each step, then give your answer as \\boxed{}.",
    "Work it out step by step and end with \\boxed{}.",
    "Please think step by step, and box the final answer with \\boxed{}.",
    "Write down how you get there and put the result inside \\boxed{}.",
    "Please solve it with reasons, and put your answer in \\boxed{}.",
    "Reason carefully, and end with the final answer within \\boxed{}.",
)


def _ending(rng: random.Random, problem: Problem) -> str:
    text = (
        "<So the|Therefore the|Hence the|This means that the|Thus the> <final answer|answer|final "
        "result|result> "
        "<is|must be|equals|comes out as> "
    )
    return f"{fill(rng, text)}{problem.boxed()}."


def _solution(rng: random.Random, problem: Problem) -> str:
    opening = fill(
        rng,
        "<|||Let us go step by step. |Let us think step by step. |We go through it in "
        "steps. |"
        "To solve this, we take it step by step. |Let us work it out. >",
    )
    steps = [capital(fill(rng, step)) for step in problem.steps]
    return opening + problem.separator.join([*steps, _ending(rng, problem)])


def _ask(rng: random.Random, problem: Problem) -> str:
    suffix = rng.choice(("", "\n", "\n", " ", "\n"))
    question = capital(fill(rng, problem.question))
    return f"{question}{suffix}{rng.choice(_SUFFIXES)}" if suffix else question


def _document(rng: random.Random, make: Maker) -> list[str]:
    """One problem, sometimes followed by another of its kind or a request to check the answer."""
    problem = make(rng, None)
    turns = [_ask(rng, problem), _solution(rng, problem)]
    kind = rng.random()
    if kind < 0.18:
        other = make(rng, problem.who)
        ask = "<Now solve this one:|Here is another one:|And what about this:|Now a new one:|Try this one too:> "
        turns += [fill(rng, ask) + capital(fill(rng, other.question)), _solution(rng, other)]
    elif kind < 0.3:
        ask = "<Are you sure?|Can you check this?|Is that right?|Please check your answer.|Can you say it in short?>"
        reply = (
            "<Yes|Sure|Of course|Yes, of course>, <in short|to put it simply|in other words|let us "
            "check>: "
            f"{problem.check}. <So it is|The answer is|So the result is|That gives us> "
        )
        turns += [fill(rng, ask), f"{fill(rng, reply)}{problem.boxed()}."]
    return turns


BUILDERS: tuple[tuple[str, Builder], ...] = tuple(
    (name, partial(_document, make=make)) for name, make in (*WORDED, *BARE)
)
