"""The tokenizer of an n-gram index: that of a target, without the target's weights.

An index names its tokenizer as NAME@DIGEST, the digest being that of the vocabulary: counts of other tokens look
plausible, too, and are worth nothing.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkbench.catalog import resolve_target
from sparkbench.errors import RunError, UsageError, first_line


@dataclass(frozen=True)
class Tokens:
    """vocab_size: one more than the largest token.   end_token: ends a text; None where the tokenizer has none."""

    name: str
    vocab_size: int
    end_token: int | None
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> "Tokens":
        """The tokenizer of a target: `embedded`, a folder or a hub id. UsageError, RunError: it cannot be loaded."""
        from transformers import AutoTokenizer

        source = resolve_target(name)
        try:
            loaded: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # the hub's client raises its own, by version
            kind = UsageError if Path(source).is_dir() else RunError
            raise kind(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error
        return cls(name, len(loaded), loaded.eos_token_id, loaded)

    @property
    def label(self) -> str:
        return label(self.name, self.tokenizer)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with what the tokenizer puts before a text."""
        return self.tokenizer(texts, add_special_tokens=True, verbose=False)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token by itself; outside the vocabulary: a question mark in brackets."""
        return [self.tokenizer.decode([token]) if token < self.vocab_size else "[?]" for token in tokens]


def label(name: str, tokenizer: Any) -> str:
    """NAME@DIGEST of a tokenizer."""
    entries = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return f"{name}@{hashlib.blake2b(entries, digest_size=8).hexdigest()}"


def same_vocabulary(labelled: str, tokenizer: Any) -> bool:
    """Whether a label, if it has a digest, is that of `tokenizer`."""
    _, _, digest = labelled.partition("@")
    return not digest or label("", tokenizer) == f"@{digest}"
