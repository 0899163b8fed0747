"""The target's own answers, on which drafters are trained: what a drafter meets when it is used.

Prompts are the user turns of documents that the target was not trained on. Some are answered greedily, the
others at temperature 1, since a drafter trained on one kind alone is poor at the other. Answers come from the
one decode loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkbench.train.fit import Progress
from sparkbench.train.recipe import ResponseRecipe
from sparkbench.train.storage import load_tensors, save_tensors


@dataclass(frozen=True, eq=False)
class Responses:
    """Prompts with their answers.

    ids:     [R, S] int64, prompt and answer, padded with 0 on the right.
    starts:  [R] int64, where the answer begins.   ends: [R] int64, where it has ended.
    sampled: [R] bool, answered at temperature 1.
    """

    ids: Tensor
    starts: Tensor
    ends: Tensor
    sampled: Tensor

    @property
    def answer_tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], Sequence[int], bool]]) -> "Responses":
        """From (prompt ids, answer ids, sampled) rows."""
        longest = max(len(prompt) + len(answer) for prompt, answer, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        for index, (prompt, answer, _) in enumerate(rows):
            ids[index, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        starts = torch.tensor([len(prompt) for prompt, _, _ in rows])
        lengths = torch.tensor([len(answer) for _, answer, _ in rows])
        return cls(ids, starts, starts + lengths, torch.tensor([sampled for _, _, sampled in rows]))

    def save(self, path: Path, facts: Any = None) -> None:
        tensors = {"ids": self.ids.short(), "starts": self.starts, "ends": self.ends, "sampled": self.sampled}
        save_tensors(path, tensors, facts)

    @classmethod
    def load(cls, path: Path) -> "Responses":
        tensors, _ = load_tensors(path)
        return cls(tensors["ids"].long(), tensors["starts"], tensors["ends"], tensors["sampled"])

    def rows(self) -> list[tuple[list[int], list[int], bool]]:
        """The inverse of `of`."""
        facts = zip(self.ids.tolist(), self.starts.tolist(), self.ends.tolist(), self.sampled.tolist(), strict=True)
        return [(ids[:start], ids[start:end], sampled) for ids, start, end, sampled in facts]


def answer(
    target: Any,
    prompts: Sequence[Sequence[int]],
    recipe: ResponseRecipe,
    seed: int,
    path: Path,
    progress: Progress,
    save_every: int = 8,
) -> Responses:
    """Answer all prompts in batches of similar length; continues from what `path` holds, and saves to it.

    Every row's noise has a key of its own, so the answers do not depend on where the work was interrupted.
    """
    from sparkbench.decoding.loop import DecodeConfig, Request, generate
    from sparkbench.decoding.sampling import Sampling, noise_key
    from sparkbench.registry import Variant, build

    rows = Responses.load(path).rows() if path.exists() else []
    batches = _batches(prompts, recipe)
    done = 0
    for number, (sampled, batch) in enumerate(batches, 1):
        done += len(batch)
        if done <= len(rows):
            continue
        config = DecodeConfig(recipe.max_new_tokens, Sampling(temperature=1.0 if sampled else 0.0))
        requests = [Request(tuple(prompts[index]), noise_key(prompts[index], seed, index)) for index in batch]
        generations = generate(target, build(Variant.parse("autoregressive")), requests, config)
        for index, generation in zip(batch, generations, strict=True):
            rows.append((list(prompts[index]), list(generation.output_ids), sampled))
        if number % save_every == 0 or number == len(batches):
            Responses.of(rows).save(path)
            progress(f"responses: {done} of {len(prompts)} prompts answered")
    return Responses.of(rows)


def _batches(prompts: Sequence[Sequence[int]], recipe: ResponseRecipe) -> list[tuple[bool, list[int]]]:
    """(sampled, prompt indices): prompts are dealt out to the two kinds evenly, then batched by length."""
    batches = []
    for sampled in (False, True):
        kind = [i for i in range(len(prompts)) if _is_sampled(i, recipe.sampled) is sampled]
        kind.sort(key=lambda index: len(prompts[index]))
        batches += [(sampled, kind[i : i + recipe.batch]) for i in range(0, len(kind), recipe.batch)]
    return batches


def _is_sampled(index: int, share: float) -> bool:
    """A low-discrepancy assignment: of any run of prompts, about `share` are sampled."""
    return int((index + 1) * share) > int(index * share)
