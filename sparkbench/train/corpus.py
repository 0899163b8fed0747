"""From the generator of documents to training rows and prompts, in one stage, so all are of one text.

Made are: the tokenizer; packed rows for both trainings of the target; the prompts that the target later answers
for the drafters, which come from documents behind those it was trained on.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sparkbench.chat import encode_chat
from sparkbench.train import packing, tokenizer
from sparkbench.train.recipe import CorpusRecipe, Recipe
from sparkbench.train.storage import digest, save_json
from sparkbench.train.text import Document, documents
from sparkbench.train.vary import varied

_CHUNK = 10_000


def make(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write `tokenizer/`, `rows.safetensors`, `polish-rows.safetensors` and `prompts.json`; facts about them."""
    shape, seed = recipe.corpus, recipe.seed
    texts = (
        f"{message.role}\n{message.content}\n"
        for document in documents(seed, 0, shape.tokenizer_documents)
        for message in document.messages
    )
    words = tokenizer.learn(texts, shape.vocab_size, recipe.target.max_positions)
    words.save_pretrained(folder / "tokenizer")

    facts: dict[str, Any] = {"vocabulary": len(words)}
    for name, text in (
        ("rows", documents(seed, 0, shape.documents)),
        ("polish-rows", varied(seed, 0, shape.polish_documents, shape.varied)),
    ):
        rows, facts[name] = _packed(words, text, shape)
        rows.save(folder / f"{name}.safetensors")

    asked = varied(seed, shape.documents, shape.prompt_documents, shape.varied)
    prompts = [encode_chat(words, prompt) for document in asked for prompt in user_prompts(document)]
    save_json(folder / "prompts.json", prompts)
    return facts | {"prompts": len(prompts)}


def count(recipe: Recipe, words: Any, out: Path) -> dict[str, Any]:
    """Write the n-gram index of DART: of the target's second training text; facts about it."""
    from sparkbench.ngram.build import BuildSpec, Document, build
    from sparkbench.ngram.tokens import label

    shape = recipe.corpus
    text = varied(recipe.seed, 0, recipe.ngram.documents, shape.varied)
    spec = BuildSpec(
        vocab_size=len(words),
        order=recipe.ngram.order,
        end_token=words.convert_tokens_to_ids(tokenizer.END_OF_TEXT),
        corpus=f"sparkbench.train.text, seed {recipe.seed}, {recipe.ngram.documents:,} documents, "
        f"{shape.varied:.0%} of them varied",
        tokenizer=label("embedded", words),
    )

    def encoded() -> Iterator[Document]:
        while chunk := list(islice(text, _CHUNK)):
            for ids in packing.encode(words, chunk):
                yield Document(np.array(ids))

    out.parent.mkdir(exist_ok=True)
    index = build(encoded(), out, spec)
    return {
        "documents": recipe.ngram.documents,
        "tokens": index.total_tokens,
        "nodes": index.nodes,
        "bytes": index.bytes,
    }


def user_prompts(document: Document) -> list[list[dict[str, str]]]:
    """For each user turn, the messages up to it."""
    messages = [{"role": message.role, "content": message.content} for message in document.messages]
    return [messages[: turn + 1] for turn in range(0, len(messages), 2)]


def _packed(words: Any, text: Iterator[Document], shape: CorpusRecipe) -> tuple[packing.Rows, dict[str, Any]]:
    """Rows of all documents, and what is in them; encoded in chunks, since encoding runs on all cores."""
    sequences = []
    while chunk := list(islice(text, _CHUNK)):
        for ids in packing.encode(words, chunk):
            sequences.append((ids, packing.answer_weights(words, ids, shape.prompt_weight)))
    rows = packing.pack(sequences, shape.row_length, words.pad_token_id)
    return rows, {
        "documents": len(sequences),
        "tokens": sum(len(ids) for ids, _ in sequences),
        "answer_tokens": sum(sum(weight == 1.0 for weight in weights) for _, weights in sequences),
        "rows": len(rows.ids),
        "digest": digest(rows.ids),
    }
