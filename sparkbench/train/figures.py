"""Figures of the model card: how well the target learnt, and what the drafters save on the bundled prompts.

All are measured with the rounded weights, in float32, through the decode loop. Times are those of the machine
that trains; counts (tokens, rounds) are the same everywhere. Not covered: intervals and reports; those are
`sparkbench run`.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch

from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.target import Target
from sparkbench.ngram.index import NgramIndex
from sparkbench.prompts import dataset_names, encode_chat, load_prompts
from sparkbench.registry import Variant, build
from sparkbench.train import packing
from sparkbench.train.recipe import FigureRecipe, Recipe
from sparkbench.train.text import documents

_BOXED = re.compile(r"\\boxed\{([^}]*)\}")


def target_figures(target: Target, recipe: Recipe) -> dict[str, float]:
    """On documents that nothing was trained on.

    Returns the accuracy of the next answer token, and the share of first answers whose boxed result is right.
    """
    shape = recipe.corpus
    start = shape.documents + shape.prompt_documents
    held_out = list(documents(recipe.seed, start, recipe.figures.held_out))
    encoded = packing.encode(target.tokenizer, held_out)
    sequences = [(ids, packing.answer_weights(target.tokenizer, ids, 0.0)) for ids in encoded]
    rows = packing.pack(sequences, shape.row_length, target.tokenizer.pad_token_id)
    right = total = 0.0
    with torch.inference_mode():
        for ids, weights in zip(rows.ids.split(16), rows.weights.split(16), strict=True):
            best = target.model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
            right += ((best == ids[:, 1:]) * weights[:, 1:]).sum().item()
            total += weights[:, 1:].sum().item()

    sums = [document for document in held_out if _BOXED.search(document.messages[1].content)]
    prompts = [
        encode_chat(target.tokenizer, [{"role": "user", "content": document.messages[0].content}]) for document in sums
    ]
    answers = _decode(target, build(Variant.parse("autoregressive")), prompts, recipe.figures, batch=64)
    solved = [
        _BOXED.findall(target.tokenizer.decode(answer.output_ids))[-1:]
        == _BOXED.findall(document.messages[1].content)[-1:]
        for answer, document in zip(answers, sums, strict=True)
    ]
    return {
        "token_accuracy": right / total,
        "problems": len(sums),
        "problems_solved": sum(solved) / len(sums),
    }


def drafter_figures(
    target: Target, arms: Sequence[tuple[str, int | None, Any]], index: NgramIndex, recipe: FigureRecipe
) -> list[dict[str, Any]]:
    """Decode the bundled prompts at temperature 0 with AR and with each (variant, budget, drafter).

    Second turns continue AR's answer to the first. A row for each data set and variant:
    rounds, tokens committed a round (pooled), decode seconds, and how many outputs equal AR's.
    """
    rows = []
    for dataset in dataset_names():
        references: list[Generation] = []
        prompts: list[tuple[int, ...]] = []
        autoregressive = build(Variant.parse("autoregressive"))
        for prompt in load_prompts(dataset, limit=recipe.prompts).prompts:
            messages: list[dict[str, str]] = []
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                prompts.append(encode_chat(target.tokenizer, messages))
                references += _decode(target, autoregressive, prompts[-1:], recipe)
                answer = target.tokenizer.decode(references[-1].output_ids, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
        rows.append(_row(dataset, "autoregressive", None, references, references))
        for name, budget, drafter in arms:
            variant = Variant.parse(name)
            method = build(variant, drafter=drafter, budget=budget)
            method.index = index
            found = _decode(target, method, prompts, recipe)
            rows.append(_row(dataset, variant.canonical, budget, found, references))
    return rows


def _decode(
    target: Target, method: Any, prompts: Sequence[Sequence[int]], recipe: FigureRecipe, batch: int = 1
) -> list[Generation]:
    requests = [Request(tuple(prompt)) for prompt in prompts]
    config = DecodeConfig(recipe.max_new_tokens)
    return [
        generation
        for start in range(0, len(requests), batch)
        for generation in generate(target, method, requests[start : start + batch], config)
    ]


def _row(
    dataset: str,
    variant: str,
    budget: int | None,
    found: Sequence[Generation],
    references: Sequence[Generation],
) -> dict[str, Any]:
    rounds = [round_ for generation in found for round_ in generation.rounds]
    return {
        "dataset": dataset,
        "variant": variant,
        "budget": budget,
        "generations": len(found),
        "equal": sum(a.output_ids == b.output_ids for a, b in zip(found, references, strict=True)),
        "rounds": len(rounds),
        "committed": sum(round_.committed for round_ in rounds),
        "decoded": sum(len(generation.output_ids) - 1 for generation in found),
        "decode_s": sum(generation.decode_s for generation in found),
        "cpu_s": sum(generation.cpu_s for generation in found),
    }
