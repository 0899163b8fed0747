"""Reads the golden folder `dspark`, and states where its recording differs from this project's loop.

- In a round that an accepted stop token ends, the recorded `n_accepted`, `acceptance_length` and `proposal_length` stop
  at that token and there is no bonus; `draft` and its confidences are whole. Here `Round.accepted` and `Round.nodes`
  count what lies beyond, and `Round.committed` is what was recorded.
- The length limit does not shorten a recorded round. Here it cuts `Round.committed`.
- The reference looks at the limit before a round, by position, and so may run one more round when the output is
  complete. These `redundant_rounds` are not run here.
- A DFlash drafter of this folder is a DSpark drafter without heads; method and kind `dflash` run it. The ablation
  `markov: false` of a DSpark drafter is its source with `+none`.

Sizes, names, layers, thresholds and cases are all read from the folder. Its EAGLE-3 parts are not covered.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import golden_folder
from probes import close, drafted_blocks
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkbench import drafters, registry
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.method import Method
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.checkpoint import Checkpoint
from sparkbench.drafters.parts import Block

FOLDER = golden_folder("dspark")

Case = dict[str, Any]


def document(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


PROMPTS: dict[str, Case] = {prompt["id"]: prompt for prompt in document("cases/prompts")["prompts"]}


def prompt_ids(case: Case) -> list[int]:
    return list(PROMPTS[case["prompt_id"]]["token_ids"])


def prefix(case: Case) -> list[int]:
    """The committed tokens before the anchor: the prompt, and what the target says after it."""
    return [*prompt_ids(case), *PROMPTS[case["prompt_id"]]["greedy_continuation"]][: case["start"]]


def config_of(drafter: str) -> Case:
    return json.loads((FOLDER / "drafters" / drafter / "config.json").read_text())


@dataclass(eq=False)
class Models:
    """The target, and drafters by name as they are asked for."""

    target: Target
    _drafters: dict[tuple[str, str], BlockDrafter] = field(default_factory=dict)

    @classmethod
    def load(cls) -> "Models":
        return cls(Target.load(str(FOLDER / "target"), dtype="float32", device="cpu"))

    def drafter(self, name: str, head: str = "", kind: str = "") -> BlockDrafter:
        """A drafter of the folder. head: `none` takes its heads away.  kind: by its config, unless given."""
        kind = kind or ("dspark" if head or config_of(name)["markov_rank"] else "dflash")
        source = str(FOLDER / "drafters" / name) + (f"+{head}" if head else "")
        if (kind, source) not in self._drafters:
            self._drafters[kind, source] = drafters.load(kind, source, self.target)
        return self._drafters[kind, source]

    def method_of(self, case: Case) -> Method:
        """The method that a case of `generate_dspark` ran."""
        if not config_of(case["drafter"])["markov_rank"]:
            return registry.build(registry.Variant.parse("dflash"), drafter=self.drafter(case["drafter"]))
        drafter = self.drafter(case["drafter"], "" if case["markov"] else "none")
        variant = f"dspark:confidence-threshold={case['confidence_threshold']}"
        return registry.build(registry.Variant.parse(variant), drafter=drafter)


@dataclass(frozen=True, eq=False)
class Seen:
    """One row of one round.

    tokens: of the nodes, root first.      path: nodes of the accepted path, root first.
    confidence: logits of the proposed slots; None without any, or without a confidence head.
    """

    tokens: list[int]
    path: list[int]
    accepted: int
    bonus: int
    confidence: Tensor | None


def decode(models: Models, method: Method, cases: Sequence[Case]) -> list[tuple[Generation, list[Seen]]]:
    """Cases of one limit and one set of stop tokens as one batch: each generation, and what its rounds looked like."""
    trees: list[tuple[DraftTree, Acceptance]] = []
    limit, stops = cases[0]["max_new_tokens"], frozenset(cases[0].get("stop_token_ids") or ())
    with drafted_blocks() as blocks:
        generations = generate(
            models.target,
            method,
            [Request(tuple(prompt_ids(case))) for case in cases],
            DecodeConfig(limit, Sampling(), stops),
            observer=lambda context, tree, acceptance: trees.append((tree, acceptance)),
        )
    found: list[tuple[Generation, list[Seen]]] = [(generation, []) for generation in generations]
    for number, (block, (tree, acceptance)) in enumerate(zip(blocks, trees, strict=True)):
        live = [rounds for generation, rounds in found if len(generation.rounds) > number]
        assert len(live) == tree.batch
        for row, rounds in enumerate(live):
            rounds.append(_seen(method, block, tree, acceptance, row))
    return found


def _seen(method: Method, block: Block, tree: DraftTree, acceptance: Acceptance, row: int) -> Seen:
    tokens, accepted = tree.tokens[row][tree.valid[row]], int(acceptance.accepted[row])
    confidence, drafted = None, len(tokens) - 1
    if method.name == "dspark" and method.drafter.confidence_head is not None and drafted:
        part = Block(block.hidden[row, None, :drafted], block.logits[row, None, :drafted])
        confidence = method.confidence(part, tokens[None, 0], tokens[None, 1:])[0]  # type: ignore[attr-defined]
    path = acceptance.path[row, : accepted + 1].tolist()
    return Seen(tokens.tolist(), path, accepted, int(acceptance.bonus[row]), confidence)


def check_generation(case: Case, generation: Generation, rounds: Sequence[Seen]) -> None:
    """Output, stop reason, and every round that the output needs."""
    output, stops = case["output_ids"], case["stop_token_ids"] or ()
    assert list(generation.output_ids) == output
    assert generation.stop_reason == ("stop" if output[-1] in stops else "length")
    useful = case["rounds"][: case["num_rounds"] - case["redundant_rounds"]]
    assert len(rounds) == len(generation.rounds) == len(useful)
    start = len(prompt_ids(case))
    for seen, record, recorded in zip(rounds, generation.rounds, useful, strict=True):
        stopped = recorded.get("terminated_by_stop", False)
        left = case["max_new_tokens"] - (start - len(prompt_ids(case)) + 1)
        assert start == recorded["start"]
        assert seen.tokens == [recorded["anchor"], *recorded["draft"]]
        assert seen.accepted == record.accepted
        assert record.nodes == len(recorded["draft"])
        if stopped:
            assert recorded["draft"][recorded["n_accepted"] - 1] in stops
            assert record.accepted >= record.committed == recorded["acceptance_length"] == recorded["proposal_length"]
        else:
            assert (seen.accepted, seen.bonus) == (recorded["n_accepted"], recorded["bonus"])
            assert recorded["acceptance_length"] == recorded["n_accepted"] + 1
            assert record.nodes == recorded["proposal_length"]
            assert record.committed == min(recorded["acceptance_length"], left)
        if seen.confidence is not None:
            close(seen.confidence, torch.tensor(recorded["confidence_logits"]))
        else:
            assert "confidence_logits" not in recorded
        start += recorded["acceptance_length"]


# formula.json: weights, features and inputs of the loss are given as formulas, in words.


def formula_config(model: Case, case: str) -> Case:
    """The config of a drafter that formula.json calls `case`: `dflash` has no heads, `dspark_KIND` both."""
    markov = case != "dflash"
    return {
        "architectures": ["Qwen3DSparkModel"],
        "num_target_layers": model["num_hidden_layers"],
        "num_hidden_layers": model["num_draft_layers"],
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
        "markov_head_type": case.removeprefix("dspark_"),
        "enable_confidence_head": markov,
        **{
            key: model[key]
            for key in (
                "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "max_position_embeddings", "rms_norm_eps", "block_size", "mask_token_id",
                "target_layer_ids", "confidence_head_with_markov",
            )
        },
        "markov_rank": model["markov_rank"] if markov else 0,
    }  # fmt: skip


def formula_weight(name: str, shape: torch.Size) -> Tensor:
    """The weight `name`, as `weight_formula` says."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    h = 0.1 * (sum(name.encode()) % 97)
    if "norm" in name:
        values = 1 + 0.1 * torch.sin(0.37 * i + h)
    elif name.startswith("embed_tokens") or "markov_w1" in name:
        values = 0.8 * torch.sin(0.017 * i * i + h)
    else:
        values = 0.25 * torch.sin(0.61 * i + 0.013 * (i % 101) ** 2 + h)
    return values.float().view(shape)


def formula_features(positions: int, width: int) -> Tensor:
    """[1, positions, width], as `feature_formula` says."""
    t = torch.arange(positions, dtype=torch.float64)[:, None]
    c = torch.arange(width, dtype=torch.float64)
    return torch.sin(0.9 * t + 0.31 * c + 0.002 * t * c).float()[None]


_WAVE = (r"([\d.]+)\*sin", r"[\d.]+\*sin\(([\d.]+)\*g", r"[\d.]+\*sin\([\d.]+\*g\+([\d.]+)\)")  # a*sin(b*g+c)


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Inputs of the loss, read from their text in `loss_golden`."""

    drafted: Tensor
    target: Tensor
    labels: Tensor
    mask: Tensor
    believed: Tensor
    decay: float

    @classmethod
    def read(cls, text: str) -> "LossInputs":
        blocks, slots, vocab = (int(_after(text, rf"\[{what}=(\d+)\]")) for what in ("block", "pos", "V"))
        g = torch.arange(blocks * slots * vocab, dtype=torch.float64)

        def wave(name: str) -> Tensor:
            scale, slope, shift = (float(_after(text, f"{name}={pattern}")) for pattern in _WAVE)
            return (scale * torch.sin(slope * g + shift)).float().view(blocks, slots, vocab)

        mask = re.sub(
            r"(\[\d\])\*(\d+)",
            lambda found: json.dumps(json.loads(found[1]) * int(found[2])),
            _after(text, r"eval_mask=(\[.*?\]\])"),
        )
        first, last, count = json.loads(f"[{_after(text, r'confidence_logits=linspace[(](.*?)[)]')}]")
        return cls(
            wave("draft_logits"),
            wave("target_logits"),
            torch.tensor(json.loads(_after(text, r"target_ids=(\[\[.*?\]\])"))),
            torch.tensor(json.loads(mask)).float(),
            torch.linspace(first, last, count).view(blocks, slots),
            float(_after(text, r"gamma=([\d.]+)")),
        )


def _after(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return found[1]


def save_formula_drafter(folder: Path, config: Case) -> Path:
    """A checkpoint of `config` with the weights of the formula."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = BlockDrafter(BlockConfig.read(Checkpoint.open(str(folder)))).state_dict()
    weights = {name: formula_weight(name, weight.shape) for name, weight in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def formula_target(model: Case) -> Target:
    """A random target of the drafters' geometry; only its sizes matter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    config = Qwen3Config(**{key: model[key] for key in sizes}, eos_token_id=None)
    return Target.wrap(Qwen3ForCausalLM(config).float(), name="formula")


# trees.json and tree_generate.json


def tree_method(models: Models, case: Case, entry: Case, builder: str) -> Method:
    """The method that grows the tree of `entry`: a budget, candidates of each depth, a normaliser.

    case: names the drafter; one without a Markov head serves as DSpark drafter with `+none`.
    """
    head = "" if config_of(case["drafter"])["markov_rank"] else "none"
    variant = registry.Variant.parse(
        f"sparklingtree:shortlist=depth:candidates={entry['top_c'] or 0}"
        f":normalise={entry['normalisation']}:builder={builder}"
    )
    return registry.build(variant, drafter=models.drafter(case["drafter"], head), budget=entry["budget"])
