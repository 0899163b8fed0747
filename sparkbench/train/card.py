"""The model card of the embedded family, written from the recipe and from what its stages found."""

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparkbench.train.family import DRAFTERS, folder_name
from sparkbench.train.recipe import DartRecipe, Optimisation, Recipe

WARNING = "A ranking of methods on these embedded models is no evidence for real ones."
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def model_card(recipe: Recipe, facts: dict[str, dict[str, Any]], folder: Path, threads: int) -> str:
    """Markdown. facts: by stage (embedded.STAGES); folder: where the models lie."""
    learnt = facts["figures"]["target"]
    megabytes = sum(file.stat().st_size for file in folder.glob("*/*.safetensors")) / 1e6
    wall, cpu = (sum(stage[key] for stage in facts.values()) / 60 for key in ("wall_s", "cpu_s"))
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"""# The embedded models

A tiny target and its drafters, made by `sparkbench train embedded` from synthetic text, so that everything
can be tried without a GPU and without downloads. **{WARNING}**
The target knows a bounded world of short programs, worked arithmetic and simple requests, and nothing else.

Weights (bfloat16) and n-gram index: safetensors, {megabytes:.1f} MB in all, licence MIT. All figures below
are measured with these rounded weights, loaded as float32 on a CPU.

## Data

{_data(recipe, facts)}

## Models

{_models(recipe, facts)}

All stages together took {wall:.0f} minutes of wall time and {cpu:.0f} minutes of CPU time on {threads}
threads, so {cpu / threads:.0f} minutes a thread; the rest is waiting and other work of the machine. Versions:
Python {platform.python_version()}, {versions}.

## Figures

Held-out documents: {learnt["token_accuracy"]:.1%} of the assistant's tokens are predicted, and
{learnt["problems_solved"]:.1%} of {learnt["problems"]} worked problems end in the right result.

Bundled prompts, temperature 0, {recipe.figures.max_new_tokens} new tokens, batch size 1, one thread. `tau` is
the mean number of tokens committed a round, pooled, bonus token included. `speedup` is the pooled decode
throughput over that of autoregressive decoding, in wall time of one sitting, without intervals. `equal`
counts outputs that are token by token those of autoregressive decoding.

{_drafted(facts["figures"]["drafted"])}

Confidences of the DSpark drafters: expected calibration error of "the first k drafts are accepted", before and
after sequential temperature scaling, on rounds that the fit has not seen, temperature
{recipe.calibration.temperature:g}.

{_calibrated(facts["calibration"])}

## The recipe

Seed {recipe.seed} for everything; all constants are in `sparkbench/train/recipe.py`. To make the family
again: `sparkbench train embedded --work WORK --out OUT`.
"""


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums of the counts and seconds of several rows of figures."""
    keys = ("committed", "rounds", "decoded", "decode_s", "cpu_s", "equal", "generations")
    return {key: sum(row[key] for row in rows) for key in keys}


def _data(recipe: Recipe, facts: dict[str, dict[str, Any]]) -> str:
    corpus, answers, shape = facts["corpus"], facts["responses"], recipe.corpus

    def text(name: str) -> str:
        part = corpus[name]
        size = f"documents 0 to {part['documents'] - 1:,}, {part['tokens']:,} tokens"
        return f"{size}, {part['answer_tokens']:,} of them the assistant's (digest `{part['digest']}`)"

    return _table(
        ("", ""),
        [
            ("source", f"`sparkbench.train.text`, seed {recipe.seed}"),
            ("tokenizer", f"byte-level BPE, {corpus['vocabulary']:,} entries, one token a digit, ChatML"),
            ("first training", text("rows")),
            ("second training", f"{text('polish-rows')}, {shape.varied:.0%} of them varied"),
            (
                "drafters' prompts",
                f"{corpus['prompts']:,} user turns of the next {shape.prompt_documents:,} documents, "
                f"{shape.varied:.0%} of them varied",
            ),
            (
                "drafters' text",
                f"the target's answers to these, {answers['answer_tokens']:,} tokens; "
                f"{answers['sampled']:,} of {answers['responses']:,} at temperature 1, the others greedy",
            ),
            (
                "n-gram index",
                f"of the second training's first {facts['ngram']['documents']:,} documents, "
                f"{facts['ngram']['tokens']:,} tokens: {facts['ngram']['nodes']:,} nodes, "
                f"{facts['ngram']['bytes'] / 1e6:.1f} MB",
            ),
            ("held out", "the documents after those, and the bundled prompts"),
        ],
    )


def _models(recipe: Recipe, facts: dict[str, dict[str, Any]]) -> str:
    shape = recipe.target
    rows = f"{shape.rows_per_step} rows of {recipe.corpus.row_length} tokens"

    def size(part: Any) -> str:
        heads = f"{part.heads}/{part.kv_heads} heads of {part.head_dim}"
        return f"{part.layers} layers, hidden {part.hidden_size}, {heads}, MLP {part.intermediate_size}"

    def schedule(part: Optimisation) -> str:
        return f"{part.steps:,} steps, AdamW, peak rate {part.lr:g}, warm-up {part.warmup:.0%}, cosine"

    columns: list[tuple[str, ...]] = [
        (
            *("", "layout", "size", "sliding window", "parameters", "training", "a step"),
            *("loss by tenths of each training", "wall", "CPU"),
        )
    ]
    for name, stage, part in (
        ("target", facts["target"], shape.optimisation),
        ("target, second training", facts["polish"], shape.polish),
    ):
        columns.append(
            (
                name,
                "Qwen3, tied embeddings",
                size(shape),
                str(recipe.corpus.row_length),
                f"{stage['parameters']:,}",
                schedule(part),
                rows,
                *_spent(stage),
            )
        )
    for name in DRAFTERS:
        draft, stage, before = getattr(recipe, name), facts[name], DRAFTERS[name]
        layers = ", ".join(map(str, draft.target_layer_ids))
        heads = f", {draft.markov_kind} Markov head of rank {draft.markov_rank}" if draft.markov_rank else ""
        dart = isinstance(draft, DartRecipe)
        kind = "DART, head of its own" if dart else "DeepSpec" if draft.markov_rank else "z-lab"
        layout = f"{kind}, block {draft.block_size}, features of {layers}{heads}"
        start = f"begins with {folder_name(before)}; " if before else ""
        columns.append(
            (
                folder_name(name),
                layout,
                size(draft),
                "none" if dart else str(draft.max_length),
                f"{stage['parameters']:,}",
                start + "; then ".join(schedule(phase.optimisation) for phase in draft.phases),
                f"{draft.sequences_per_step} answers, {draft.anchors} blocks of each",
                *_spent(stage),
            )
        )
    return _table(columns[0], columns[1:])


def _spent(stage: dict[str, Any]) -> tuple[str, str, str]:
    return _curve(stage["losses"]), f"{stage['wall_s']:.0f} s", f"{stage['cpu_s']:.0f} s"


def _calibrated(facts: dict[str, Any]) -> str:
    """Expected calibration error of the confidences by position, before and after, on rounds the fit has not seen."""
    lines = []
    for name, found in facts.items():
        if isinstance(found, dict):
            for when in ("ece_before", "ece_after"):
                errors = [row[when] for row in found["judged"]]
                mean = sum(errors) / len(errors)
                shown = ", ".join(f"{error:.1%}" for error in errors)
                lines.append((folder_name(name), when.removeprefix("ece_"), f"{mean:.1%}", shown))
    return _table(("drafter", "", "mean", "by position"), lines)


def _curve(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.3f}" for loss in losses)


def _drafted(rows: Sequence[dict[str, Any]]) -> str:
    datasets = dict.fromkeys(row["dataset"] for row in rows)
    groups = {name: [row for row in rows if row["dataset"] == name] for name in datasets}
    lines = []
    for dataset, group in (groups | {"pooled": list(rows)}).items():
        baseline = pooled([row for row in group if row["variant"] == "autoregressive"])
        for variant, budget in dict.fromkeys((row["variant"], row["budget"]) for row in group):
            total = pooled([row for row in group if (row["variant"], row["budget"]) == (variant, budget)])
            tau = total["committed"] / total["rounds"]
            speedup = (total["decoded"] / total["decode_s"]) / (baseline["decoded"] / baseline["decode_s"])
            equal = f"{total['equal']:.0f} of {total['generations']:.0f}"
            lines.append((dataset, variant, str(budget or ""), f"{tau:.2f}", f"{speedup:.2f}", equal))
    return _table(("data set", "variant", "budget", "tau", "speedup", "equal"), lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
