"""A target and drafters over a vocabulary of a few tokens, and what is compared there with exact distributions.

`distribution` enumerates what the target says, `outputs_of` draws with the loop, `one_position` drafts and accepts at
one position without a model, and `chi_square_p` compares. Nothing here is a test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from conftest import tiny_target
from scipy import stats
from tiny_drafters import config_of, dspark_config, save_drafter
from torch import Tensor

from sparkbench import drafters, registry
from sparkbench.decoding.accept import Acceptance, accept
from sparkbench.decoding.batch import _DRAFTS
from sparkbench.decoding.drafting import DraftOptions, Drafts, TreeOptions
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.sampling import Sampling, noise_key, round_keys, stream_keys
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import StageTimer
from sparkbench.decoding.tree import DraftTree
from sparkbench.search import sampled_tree

VOCAB = 6
PROMPT = (1, 4, 2)
LENGTH = 3  # tokens of an output
SHAPE = {"vocab_size": VOCAB, "num_target_layers": 1, "block_size": 4, "target_layer_ids": [-1, 0], "mask_token_id": 5}
FLATNESS = 0.35  # of the head: nearly all outputs are expected 5 times in 4,000 at temperature 1, most in 50,000 at 0.5
LEAST = 5  # expected count of a cell of a chi-square test


def small_target() -> Target:
    """One layer; its drafters use its head, so they are as flat."""
    target = tiny_target(vocab=VOCAB, layers=1)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(FLATNESS)
    return target


def small_drafter(folder: Path, kind: str, target: Target) -> Any:
    """`dflash` or `dspark`, with random weights."""
    config = config_of("z-lab") if kind == "dflash" else dspark_config("vanilla")
    own = {name: SHAPE[name] for name in ("target_layer_ids", "mask_token_id")}
    config = config | SHAPE | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    if kind == "dflash":
        config["dflash_config"] = own
    return drafters.load(kind, str(save_drafter(folder, config)), target)


def method_of(text: str, found: Mapping[str, Any], budget: int = 6) -> Method:
    """A variant with the drafter of its kind. DART drafts with the DFlash drafter, without an index."""
    variant = registry.Variant.parse(text)
    kind = {None: None, "dspark": "dspark"}.get(registry.get(variant.method).drafter_kind, "dflash")
    return registry.build(variant, drafter=None if kind is None else found[kind], budget=budget)


@torch.inference_mode()
def distribution(target: Target, prompt: Sequence[int], sampling: Sampling, length: int = LENGTH) -> Tensor:
    """[V] * length float64: the probability of every continuation, by whole forwards without cache or loop."""
    texts, chances = torch.tensor([list(prompt)]), torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        logits = target.model(texts, use_cache=False).logits[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, texts, True)
        step = sampling.probabilities(logits, seen).double()
        vocab = step.shape[1]
        chances = (chances[:, None] * step).flatten()
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], 1)
    return chances.view(*[target.vocab_size] * length)


def request_of(seed: int) -> Request:
    return Request(PROMPT, noise_key(PROMPT, seed))


def outputs_of(target: Target, method: Method, sampling: Sampling, draws: int, batch: int) -> Tensor:
    """[draws, LENGTH] int64: outputs for the noise of seeds 0, 1, ..., decoded `batch` at a time, the last ones fewer.

    Rows of a batch need rounds of different numbers, so neighbours leave while others go on.
    """
    config = DecodeConfig(LENGTH, sampling, frozenset())
    found: list[tuple[int, ...]] = []
    for first in range(0, draws, batch):
        requests = [request_of(seed) for seed in range(first, min(first + batch, draws))]
        found += [generation.output_ids for generation in generate(target, method, requests, config)]
    return torch.tensor(found)


def counts_of(tokens: Tensor, vocab: int) -> Tensor:
    """[vocab ** n] int64: how often each sequence occurs among `tokens` [N, n], in the order of `distribution`."""
    places = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(1):
        places = places * vocab + column
    return torch.bincount(places, minlength=vocab ** tokens.shape[1])


def chi_square_p(counts: Tensor, chances: Tensor) -> float:
    """p-value of `counts` [C] against probabilities `chances` [C], 0 if something impossible was counted.

    Cells that are expected less than LEAST times are one cell, with the least of the others if they are still too few.
    """
    if (counts[chances == 0] > 0).any():
        return 0.0
    observed, expected = counts.double(), chances.double() * counts.sum()
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    few = int((expected < LEAST).sum())
    if few and expected[:few].sum() < LEAST:
        few += 1
    observed = torch.cat([observed[:few].sum(0, keepdim=True), observed[few:]])
    expected = torch.cat([expected[:few].sum(0, keepdim=True), expected[few:]])
    filled = expected > 0
    assert filled.sum() > 1, "there is but one cell to compare"
    statistic = ((observed - expected) ** 2 / expected)[filled].sum()
    return float(stats.chi2.sf(statistic.item(), int(filled.sum()) - 1))


def keys_of_rows(rows: int, seed: int = 0) -> Tensor:
    """[rows] int64 keys of the target's noise."""
    return torch.arange(seed * rows, (seed + 1) * rows)


@dataclass(frozen=True, eq=False)
class Position:
    """What was drafted and accepted behind one token by many rows of equal logits, each with noise of its own."""

    tree: DraftTree
    acceptance: Acceptance

    @property
    def tokens(self) -> Tensor:
        """[B, 1]: the token that follows, whether it was drafted or not."""
        return self.acceptance.tokens[:, :1]

    @property
    def rate(self) -> float:
        """How often a draft was accepted."""
        return float((self.acceptance.accepted > 0).double().mean())


def one_position(
    options: DraftOptions,
    target: Tensor,
    drafter: Tensor,
    sampling: Sampling,
    rows: int,
    *,
    budget: int = 1,
    length: int = 9,
    seed: int = 0,
) -> Position:
    """Draft and accept once behind `length` tokens, as a round of the loop does it.

    target, drafter: [V] logits.   options: of a chain, which drafts one token, or of a sampled tree of one depth.
    budget: children of a tree's root.   Keys of the noise as in the loop.
    """
    keys, lengths = keys_of_rows(rows, seed), torch.full((rows,), length)
    context = Context(
        target=cast(Target, None),
        anchors=torch.zeros(rows, dtype=torch.int64),
        lengths=lengths,
        features=None,
        tokens=torch.zeros(rows, 1, dtype=torch.int64),
        counts=[1] * rows,
        sampling=sampling,
        stop_ids=frozenset(),
        timer=StageTimer(torch.device("cpu"), recording=False),
        noise_keys=keys if options.noise == "shared" else round_keys(stream_keys(keys, _DRAFTS), lengths),
    )
    vocab = len(drafter)
    chosen = Drafts(options, context, 1, vocab)
    if isinstance(options, TreeOptions):
        assert chosen.noise is not None
        row = chosen.sampling.probabilities(drafter)
        tree = sampled_tree(
            lambda depth, parents: row.expand(rows, 1, -1), context.anchors, chosen.noise, budget, vocab
        )
    else:
        picked = chosen.pick(drafter.expand(rows, 1, -1))
        tree = DraftTree.chain_of(context.anchors, picked, draft_probs=chosen.draft_probs)
    logits = target.expand(rows, tree.width, -1)
    return Position(tree, accept(options.rule, tree, logits, lengths, keys, sampling))
