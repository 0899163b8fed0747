"""Conversations as token ids, with a mask of the tokens that the assistant wrote.

A conversation is rendered by the target's own chat template. An answer begins where the template, given the messages
before it, would have the model begin, and ends behind the template's own end of a turn. Both are places in the rendered
text; they become token indices by encoding the text up to them. With Qwen3's template the last answer begins with an
empty think block, which is therefore learnt, as in the published training.

A conversation is dropped, with the reason, where this is not exact: the template writes a turn differently once another
follows, a token lies across an edge, or a message holds a control token, which could end a turn by itself.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkbench.errors import RunError, UsageError
from sparkbench.train.conversations import Conversation, split
from sparkbench.train.drafter_recipe import PublishedRecipe
from sparkbench.train.storage import digest


@dataclass(frozen=True, eq=False)
class Sample:
    """A conversation. ids: [S] int32.   mask: [S] bool, True where the assistant wrote the token."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class Samples:
    """What is trained on, what is held out, and how many rows were dropped by reason."""

    train: list[Sample]
    held_out: list[Sample]
    dropped: dict[str, int]

    @property
    def all(self) -> list[Sample]:
        return self.train + self.held_out

    @property
    def hash(self) -> str:
        """A hash of all tokens and masks and of what is held out."""
        lengths = torch.tensor([len(self.train), *(len(sample.ids) for sample in self.all)])
        return digest(lengths, *(tensor for sample in self.all for tensor in (sample.ids, sample.mask)))


def candidates(mask: Tensor) -> Tensor:
    """Positions [n] that can be anchors: the token and its successor are the assistant's. mask: [S] bool.

    Position 0 is none: a drafter reads the features before its anchor, and none are there.
    """
    return (mask[1:-1] & mask[2:]).nonzero()[:, 0] + 1


def make(tokenizer: Any, rows: Sequence[Conversation | str], recipe: PublishedRecipe) -> tuple[Samples, list[str]]:
    """Samples of all rows that can be used, and a remark for each row that is none.

    UsageError: nothing is left to train on or to hold out.   RunError: the tokenizer's template cannot be used.
    """
    template = _Template(tokenizer, recipe.data.system_prompt)
    remarks = [row for row in rows if isinstance(row, str)]
    dropped: Counter[str] = Counter({"not a conversation": len(remarks)} if remarks else {})

    def part(indices: Sequence[int]) -> list[Sample]:
        samples = []
        for row in (rows[index] for index in indices):
            if isinstance(row, str):
                continue
            try:
                samples.append(template.sample(row, recipe.data.max_length, recipe.least_loss_tokens))
            except ValueError as error:
                dropped[str(error)] += 1
        return samples

    train, held_out = map(part, split(len(rows), recipe.data.eval_share, recipe.seed))
    for what, samples in (("to train on", train), ("to hold out", held_out)):
        if not samples:
            reasons = ", ".join(f"{count} rows: {reason}" for reason, count in dropped.items())
            raise UsageError(f"{recipe.data.source}: no conversation is left {what} ({reasons or f'{len(rows)} rows'})")
    return Samples(train, held_out, dict(dropped)), remarks


class _Template:
    """A tokenizer with its chat template, and how the template ends a turn."""

    def __init__(self, tokenizer: Any, system_prompt: str) -> None:
        if tokenizer is None or not tokenizer.chat_template:
            raise UsageError("the target's tokenizer has no chat template, so answers cannot be told from questions")
        self.tokenizer = tokenizer
        self.system = ({"role": "system", "content": system_prompt},) if system_prompt else ()
        added = tokenizer.added_tokens_decoder.values()
        self.controls = [token.content for token in added if token.special]
        probe = self.render(({"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}), False)
        self.turn_end = probe.rpartition("answer")[2]
        if not any(control in self.turn_end for control in self.controls):
            raise RunError("the target's chat template ends an answer with no special token, so answers have no end")

    def render(self, messages: Conversation, generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": generation}
            return str(self.tokenizer.apply_chat_template(list(messages), **options))
        except TemplateError as error:
            raise RunError(f"the chat template of the target refuses a conversation: {error}") from error

    def sample(self, conversation: Conversation, max_length: int, least: int) -> Sample:
        """ValueError, a reason without details: it cannot be used."""
        if any(control in message["content"] for message in conversation for control in self.controls):
            raise ValueError("a message holds a control token")
        if conversation[0]["role"] != "system":
            conversation = (*self.system, *conversation)
        text = self.render(conversation, False)
        ids = self._ids(text)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for index, message in enumerate(conversation):
            if message["role"] == "assistant":
                before = self.render(conversation[:index], True)
                end = text.find(self.turn_end, len(before))
                if not text.startswith(before) or end < 0:
                    raise ValueError("the template writes a turn differently once another follows")
                mask[self._place(before, ids) : self._place(text[: end + len(self.turn_end)], ids)] = True
        mask = mask[:max_length]
        if mask.sum() < least or not len(candidates(mask)):
            raise ValueError(f"fewer than {least} tokens of answers")
        return Sample(torch.tensor(ids[:max_length], dtype=torch.int32), mask)

    def _place(self, prefix: str, ids: list[int]) -> int:
        """How many of `ids` encode `prefix`, which the whole text begins with."""
        encoded = self._ids(prefix)
        if ids[: len(encoded)] != encoded:
            raise ValueError("a token lies across the edge of an answer")
        return len(encoded)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids
