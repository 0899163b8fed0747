"""Documents to rows of token ids: chats are encoded, weighted and packed without being cut.

A row holds whole documents one after the other and is filled up with padding. Documents of a row can see
those before them, which costs nothing, and teaches the target to work behind a long context. Each document
begins with the same special token, so it can also tell where it begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkbench.train.storage import load_tensors, save_tensors
from sparkbench.train.text import Document


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed documents.

    ids:     [R, T] int64.
    weights: [R, T] float32, the weight of predicting each id; 0 in padding and at a row's start.
    """

    ids: Tensor
    weights: Tensor

    def save(self, path: Path) -> None:
        save_tensors(path, {"ids": self.ids.short(), "weights": self.weights})

    @classmethod
    def load(cls, path: Path) -> "Rows":
        tensors, _ = load_tensors(path)
        return cls(tensors["ids"].long(), tensors["weights"])


def chat_text(document: Document) -> str:
    """The document as the chat template writes it."""
    return "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in document.messages)


def encode(tokenizer: Any, documents: Sequence[Document]) -> list[list[int]]:
    """Token ids of each document's chat."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast([chat_text(document) for document in documents])
    return [encoding.ids for encoding in encodings]


def answer_weights(tokenizer: Any, ids: Sequence[int], prompt_weight: float) -> list[float]:
    """1 for what the assistant writes, its end-of-turn token included; `prompt_weight` for the rest."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = [start, *tokenizer.encode("assistant\n", add_special_tokens=False)]
    weights = [prompt_weight] * len(ids)
    place = 0
    while place < len(ids):
        if list(ids[place : place + len(header)]) == header:
            place += len(header)
            while place < len(ids):
                weights[place] = 1.0
                place += 1
                if ids[place - 1] == end:
                    break
        else:
            place += 1
    return weights


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[float]]],
    row_length: int,
    padding: int,
    window: int = 64,
) -> Rows:
    """Pack (ids, weights) sequences into rows.

    Each goes into the fullest of `window` open rows in which it fits. Sequences longer than a row are cut.
    """
    done: list[tuple[list[int], list[float]]] = []
    open_rows: list[tuple[list[int], list[float]]] = []
    for ids, weights in sequences:
        ids, weights = ids[:row_length], weights[:row_length]
        fitting = [row for row in open_rows if len(row[0]) + len(ids) <= row_length]
        if not fitting:
            if len(open_rows) == window:
                fullest = max(range(window), key=lambda index: len(open_rows[index][0]))
                done.append(open_rows.pop(fullest))
            open_rows.append(([], []))
            fitting = open_rows[-1:]
        row = max(fitting, key=lambda candidate: len(candidate[0]))
        row[0].extend(ids)
        row[1].extend(weights)
    done.extend(open_rows)
    all_ids = torch.full((len(done), row_length), padding, dtype=torch.int64)
    all_weights = torch.zeros(len(done), row_length)
    for index, (ids, weights) in enumerate(done):
        all_ids[index, : len(ids)] = torch.tensor(ids)
        all_weights[index, : len(ids)] = torch.tensor(weights)
    all_weights[:, 0] = 0.0
    return Rows(all_ids, all_weights)
