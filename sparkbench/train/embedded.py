"""`sparkbench train embedded`: makes the embedded family from nothing, stage by stage, in one work folder.

    corpus     documents -> tokenizer, packed rows, prompts
    target     a Qwen3 model trained on plain text
    polish     its second training, on text that is partly varied; then rounded to bfloat16
    responses  the rounded target's own answers to the prompts
    dflash, dspark_b7, dspark_b16   drafters trained on the answers, rounded; the last begins with the one before it
    calibration   temperatures for the confidences of the DSpark drafters
    dart       a drafter trained on the same answers
    ngram      the n-gram index of DART, from the target's training text
    figures    what they are worth on held-out documents and on the bundled prompts
    export     everything into the package's layout, with a model card

A finished stage is not made again; an interrupted one continues from its last checkpoint, and ends as if it
had not been interrupted (on the same machine with the same number of threads). With fixed seeds the outcome
is that of the recipe.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sparkbench.errors import UsageError
from sparkbench.scheduling import Calibration
from sparkbench.train.family import DRAFTERS, INDEX, STAGES, VARIANTS, folder_name
from sparkbench.train.fit import Fit, Progress
from sparkbench.train.recipe import Optimisation, Recipe, fingerprint
from sparkbench.train.storage import load_json, save_json


def train(work: Path, out: Path, *, threads: int, recipe: Recipe | None = None, progress: Progress = print) -> None:
    """Make the family in `work`, and write target, drafters and the model card `README.md` into `out`.

    threads: CPU threads; two are about twice as fast as one.
    UsageError: `threads` below 1, or a stage in `work` belongs to another recipe.   RunError: a broken work
    file.
    """
    if threads < 1:
        raise UsageError(f"threads {threads} is not allowed: 1 or more")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from sparkbench.train.card import model_card

    torch.set_num_threads(threads)
    recipe = recipe or Recipe()
    facts = _Stages(work, recipe, threads, progress).run()
    for part in ("target", *map(folder_name, DRAFTERS), Path(INDEX).parent.name):
        _replace(work / part, out / part)
    (out / "README.md").write_text(model_card(recipe, facts, out, threads), encoding="utf-8")
    seconds = sum(stage["wall_s"] for stage in facts.values())
    progress(f"train embedded: done in {seconds / 60:.1f} minutes of all sittings; written to {out}")


class _Stages:
    """The stages of one work folder. Facts of a finished stage are stored as `<stage>.json`."""

    def __init__(self, work: Path, recipe: Recipe, threads: int, progress: Progress) -> None:
        self.work, self.recipe, self.threads, self.progress = work, recipe, threads, progress

    def run(self) -> dict[str, dict[str, Any]]:
        """Run what is not done yet, in order; facts by stage."""
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "corpus": self.corpus,
            "target": self.target,
            "polish": self.polish,
            "responses": self.responses,
            **{name: partial(self.drafter, name) for name in DRAFTERS},
            "calibration": self.calibration,
            "ngram": self.ngram,
            "figures": self.figures,
        }
        return {stage: self._once(stage, makers[stage]) for stage in STAGES}

    def corpus(self) -> dict[str, Any]:
        from sparkbench.train import corpus

        return corpus.make(self.recipe, self.work)

    def target(self) -> dict[str, Any]:
        model, result = self._trained("target", self.recipe.target.optimisation, "rows", None)
        return _fit_facts(result, model.parameters())

    def polish(self) -> dict[str, Any]:
        from sparkbench.train import target, tokenizer

        start = self.work / "target-state.safetensors"
        model, result = self._trained("polish", self.recipe.target.polish, "polish-rows", start)
        words = tokenizer.load(self.work / "tokenizer")
        target.export(model, words, self.recipe.corpus.row_length, self.work / "target")
        return _fit_facts(result, model.parameters())

    def responses(self) -> dict[str, Any]:
        from sparkbench.train import responses

        prompts = load_json(self.work / "prompts.json")
        path = self.work / "responses.safetensors"
        made = responses.answer(
            self._rounded_target(), prompts, self.recipe.responses, self.recipe.seed, path, self.progress
        )
        return {
            "responses": len(made.ids),
            "sampled": int(made.sampled.sum()),
            "answer_tokens": made.answer_tokens,
        }

    def drafter(self, name: str) -> dict[str, Any]:
        from sparkbench.train import block
        from sparkbench.train.responses import Responses

        target, recipe, before = self._rounded_target(), getattr(self.recipe, name), DRAFTERS[name]
        config = block.checkpoint_config(recipe, target, target.tokenizer.mask_token_id)
        answers = Responses.load(self.work / "responses.safetensors")
        start = None
        if before is not None:
            start = self.work / block.state_name(before, len(getattr(self.recipe, before).phases) - 1)
        drafter, result = block.train(
            recipe, config, target, answers, self.recipe.seed, self.work, name, self.progress, start=start
        )
        block.export(drafter, config, self.work / folder_name(name))
        return _fit_facts(result, block.trainable(drafter).values())

    def calibration(self) -> dict[str, Any]:
        from sparkbench.chat import encode_chat
        from sparkbench.drafters.loading import CALIBRATION
        from sparkbench.train.calibrate import calibrate
        from sparkbench.train.text import documents

        recipe, shape, target = self.recipe.calibration, self.recipe.corpus, self._rounded_target()
        first = shape.documents + shape.prompt_documents + self.recipe.figures.held_out
        prompts = [
            encode_chat(target.tokenizer, [{"role": "user", "content": document.messages[0].content}])
            for document in documents(self.recipe.seed, first, recipe.documents)
        ]
        facts = {}
        for name in DRAFTERS:
            if not getattr(self.recipe, name).markov_rank:
                continue
            found, facts[name] = calibrate(target, self._loaded(name, target), prompts, recipe, self.recipe.seed)
            named = {"target": "embedded", "drafter": folder_name(name)}
            Calibration(found.temperatures, dict(found.provenance) | named).save(
                self.work / folder_name(name) / CALIBRATION
            )
        return facts

    def ngram(self) -> dict[str, Any]:
        from sparkbench.train import corpus, tokenizer

        return corpus.count(self.recipe, tokenizer.load(self.work / "tokenizer"), self.work / INDEX)

    def figures(self) -> dict[str, Any]:
        import torch

        from sparkbench.ngram.index import NgramIndex
        from sparkbench.train import figures

        target = self._rounded_target()
        learnt = figures.target_figures(target, self.recipe)
        self.progress(f"figures: target {json.dumps(learnt)}")
        torch.set_num_threads(1)
        loaded = {name: self._loaded(name, target) for name in DRAFTERS}
        arms = [(text, budget, loaded[name]) for name, text, budget in VARIANTS]
        rows = figures.drafter_figures(target, arms, NgramIndex.open(self.work / INDEX), self.recipe.figures)
        torch.set_num_threads(self.threads)
        return {"target": learnt, "drafted": rows}

    def _trained(self, stage: str, optimisation: Optimisation, rows: str, start: Path | None) -> tuple[Any, Fit]:
        from sparkbench.train import target, tokenizer
        from sparkbench.train.packing import Rows

        words = tokenizer.load(self.work / "tokenizer")
        text = Rows.load(self.work / f"{rows}.safetensors")
        state = self.work / f"{stage}-state.safetensors"
        return target.train(self.recipe, optimisation, text, words, state, self.progress, start=start)

    def _loaded(self, name: str, target: Any) -> Any:
        from sparkbench import drafters

        kind = "dspark" if getattr(self.recipe, name).markov_rank else "dflash"
        return drafters.load(kind, str(self.work / folder_name(name)), target)

    def _rounded_target(self) -> Any:
        from sparkbench.decoding.target import Target

        return Target.load(str(self.work / "target"), dtype="float32", device="cpu")

    def _identity(self, stage: str) -> str:
        """Hash of the recipe's parts that the stage depends on: its own and those before it."""
        values = self.recipe.as_json()
        parts = [values.get(name) for name in STAGES[: STAGES.index(stage) + 1]]
        return fingerprint(values["seed"], parts)

    def _once(self, stage: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path, identity = self.work / f"{stage}.json", self._identity(stage)
        if path.exists():
            facts: dict[str, Any] = load_json(path)
            if facts["identity"] != identity:
                raise UsageError(
                    f"work folder {self.work}: stage {stage} belongs to another recipe; use another folder, "
                    f"or delete {path.name} and what the stage made"
                )
            self.progress(f"{stage}: done before")
            return facts
        wall, cpu = time.perf_counter(), time.process_time()
        made = make()
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        facts = {"identity": identity} | spent | made
        save_json(path, facts)
        self.progress(f"{stage}: {facts['wall_s']:.0f} s wall, {facts['cpu_s']:.0f} s CPU")
        return facts


def _fit_facts(result: Fit, weights: Iterable[Any]) -> dict[str, Any]:
    return {"parameters": sum(weight.numel() for weight in weights)} | asdict(result)


def _replace(source: Path, destination: Path) -> None:
    """Copy a folder to its destination, which is replaced as a whole; everybody may read the copies."""
    temporary = destination.with_name(f"{destination.name}.{os.getpid()}.tmp")
    shutil.copytree(source, temporary, copy_function=shutil.copyfile)
    shutil.rmtree(destination, ignore_errors=True)
    temporary.rename(destination)
