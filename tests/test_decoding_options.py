"""Decoding options (top-k, top-p, min-p, repetition penalty) against transformers: its processors and its `generate`.

All methods must give the tokens of one reference, which decodes with whole forwards and transformers' own processors.
The noise itself and the filters' plain definitions are in `test_sampling.py`, distributions in other files.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import FAMILIES, Scripted, autoregressive, requests_of, run, tiny_target
from tiny_methods import MATCHING, PLAIN, REJECTING, VOCAB, Stage, random_requests
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Request, generate, serve
from sparkbench.decoding.sampling import Sampling, gumbel
from sparkbench.decoding.seen import Seen
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError

LIMIT = 12
STOPS = frozenset({4})
PENALTY = Sampling(repetition_penalty=1.3)
STRONG = Sampling(repetition_penalty=2.0)
ALL = Sampling(0.8, top_k=9, top_p=0.9, min_p=0.08, repetition_penalty=1.2)


def processors(sampling: Sampling) -> LogitsProcessorList:
    """transformers' own, in the order in which `generate` puts them (test_generate_gives_the_same_scores)."""
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.greedy:
        chosen.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chosen.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen


def seen_in(texts: Tensor, vocab: int) -> Tensor:
    """[B, V] bool for texts [B, n]."""
    return torch.zeros(len(texts), vocab, dtype=torch.bool).scatter_(1, texts, True)


@torch.inference_mode()
def reference(
    target: Target, request: Request, sampling: Sampling, limit: int = LIMIT, stops: frozenset[int] = STOPS
) -> tuple[int, ...]:
    """Decoded without cache, tree or loop, with transformers' processors and the positional noise."""
    text = list(request.prompt_ids)
    chain = processors(sampling)
    for _ in range(limit):
        ids = torch.tensor([text])
        scores = chain(ids, target.model(ids, use_cache=False).logits[:, -1].clone())[0]  # type: ignore[arg-type]
        if not sampling.greedy:
            scores = scores + gumbel(torch.tensor([request.noise_key]), torch.tensor([[len(text)]]), len(scores))[0, 0]
        text.append(int(scores.argmax()))
        if text[-1] in stops:
            break
    return tuple(text[len(request.prompt_ids) :])


# Scores


OPTIONS = [
    Sampling(1.0, repetition_penalty=1.7),
    Sampling(0.6, repetition_penalty=0.5),
    Sampling(0.5),
    Sampling(1.0, top_k=7),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=0.6),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.0, min_p=0.05),
    Sampling(2.0, min_p=0.3),
    Sampling(1.0, min_p=1.0),
    Sampling(0.7, top_k=20, top_p=0.8),
    Sampling(1.4, top_k=20, min_p=0.1),
    Sampling(1.4, top_p=0.9, min_p=0.02),
    Sampling(0.8, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
    Sampling(1.8, top_k=30, top_p=0.8, min_p=0.04, repetition_penalty=2.5),
    Sampling(0.0, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_scores_are_those_of_transformers(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(11)
    texts = torch.randint(50, (40, 15), generator=generator)
    for spread in (0.5, 3.0):
        logits = torch.randn(40, 50, generator=generator) * spread
        given = logits.clone()
        expected = processors(sampling)(texts, logits.clone())  # type: ignore[arg-type]
        found = sampling.scores(logits, seen_in(texts, 50))
        assert torch.equal(logits, given), "the logits are not the caller's any more"
        assert torch.equal(found.isfinite(), expected.isfinite())
        torch.testing.assert_close(found, expected)
        if not sampling.greedy:
            torch.testing.assert_close(sampling.probabilities(logits, seen_in(texts, 50)), expected.softmax(-1))
        # The same where logits come as nodes of trees.
        nodes = sampling.scores(logits.view(8, 5, 50), seen_in(texts, 50).view(8, 5, 50))
        assert torch.equal(nodes.view(40, 50), found)


def test_options_matter() -> None:
    """Each filter and the penalty changes something, and their order does."""
    generator = torch.Generator().manual_seed(1)
    logits, texts = torch.randn(40, 50, generator=generator) * 2, torch.randint(50, (40, 15), generator=generator)
    seen = seen_in(texts, 50)
    whole = Sampling(1.8, top_k=12, top_p=0.85, min_p=0.1, repetition_penalty=2.5)
    supports = [
        sampling.scores(logits, seen).isfinite()
        for sampling in (
            whole,
            replace(whole, repetition_penalty=1.0),
            replace(whole, min_p=0.0),
            replace(whole, top_p=1.0),
            replace(whole, top_k=0),
        )
    ]
    assert len({tuple(support.flatten().tolist()) for support in supports}) == 5
    backwards = LogitsProcessorList(list(processors(whole))[::-1])
    assert not torch.equal(backwards(texts, logits.clone()).isfinite(), supports[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", OPTIONS[:-1], ids=str)
def test_generate_gives_the_same_scores(sampling: Sampling) -> None:
    """What `generate` draws from, from the raw logits that it reports."""
    target = tiny_target(vocab=40)
    ids = torch.tensor([[1, 2, 3, 1, 7]])
    torch.manual_seed(3)
    result = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for step, (logits, scores) in enumerate(zip(result.logits, result.scores, strict=True)):
        found = sampling.scores(logits, seen_in(result.sequences[:, : ids.shape[1] + step], 40))
        assert torch.equal(found.isfinite(), scores.isfinite())
        torch.testing.assert_close(found, scores)


# What has been seen


def random_tree(draws: random.Random, rows: int, nodes: int) -> DraftTree:
    """Trees of different sizes and shapes, padded."""
    tokens, parents, depths, valid = [], [], [], []
    for _ in range(rows):
        own = [-1]
        for node in range(1, draws.randint(2, nodes)):
            own.append(draws.randrange(node))
        levels = [0]
        for parent in own[1:]:
            levels.append(levels[parent] + 1)
        padding = nodes - len(own)
        tokens.append([draws.randrange(VOCAB) for _ in range(nodes)])
        parents.append(own + [-1] * padding)
        depths.append(levels + [0] * padding)
        valid.append([True] * len(own) + [False] * padding)
    return DraftTree(
        torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), torch.tensor(valid), max(map(max, depths))
    )


def test_a_node_has_seen_prompt_and_path_alone() -> None:
    draws = random.Random(0)
    for rows in (1, 3):
        for _ in range(20):
            prompts = [[draws.randrange(VOCAB) for _ in range(draws.randint(1, 3))] for _ in range(rows)]
            tree = random_tree(draws, rows, 8)
            seen = Seen(prompts, VOCAB, torch.device("cpu"))
            found = seen.at_nodes(tree)
            assert found.shape == (rows, 8, VOCAB)
            for row, prompt in enumerate(prompts):
                for node in range(int(tree.valid[row].sum())):
                    path, place = set(prompt), node
                    while place >= 0:
                        path.add(int(tree.tokens[row, place]))
                        place = int(tree.parents[row, place])
                    assert set(found[row, node].nonzero()[:, 0].tolist()) == path
                assert set(seen.mask[row].nonzero()[:, 0].tolist()) == set(prompt)


def test_a_row_has_seen_what_it_committed() -> None:
    """Anchors, accepted drafts and bonus tokens, but no padding; rows join and leave."""
    seen = Seen([[0], [1, 2], [3]], VOCAB, torch.device("cpu"))
    tokens = torch.tensor([[5, 6, 7], [8, 9, 9], [10, 9, 9]])  # behind entry A there is padding
    accepted = torch.tensor([2, 0, 1])
    bonus = torch.tensor([7, 8, 9])
    path = torch.zeros(3, 3, dtype=torch.int64)
    seen.add(torch.tensor([4, 5, 6]), Acceptance(path, accepted, tokens, bonus))
    seen.join(Seen([[11, 0]], VOCAB, torch.device("cpu")))
    expected = [{0, 4, 5, 6, 7}, {1, 2, 5, 8}, {3, 6, 10, 9}, {11, 0}]
    assert [set(row.nonzero()[:, 0].tolist()) for row in seen.mask] == expected
    seen.keep(torch.tensor([3, 1]))
    assert [set(row.nonzero()[:, 0].tolist()) for row in seen.mask] == [expected[3], expected[1]]


# Decoding


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_penalty_is_that_of_generate(family: str, penalty: float) -> None:
    """Greedy decoding with a penalty, alone and in a batch, token for token."""
    target = tiny_target(family)
    prompts = [(1, 2, 3), (9,), (8, 7, 6, 5, 4, 3, 2, 1, 10, 11)]
    sampling = Sampling(repetition_penalty=penalty)
    together = run(target, autoregressive(), requests_of(prompts), 20, sampling=sampling)
    plain = run(target, autoregressive(), requests_of(prompts), 20)
    for prompt, generation in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        expected = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
        )
        assert list(generation.output_ids) == expected[0, len(prompt) :].tolist()
        (alone,) = run(target, autoregressive(), requests_of([prompt]), 20, sampling=sampling)
        assert alone.output_ids == generation.output_ids
    assert [g.output_ids for g in together] != [g.output_ids for g in plain]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage.build(tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return random_requests(7, (3, 1, 12, 5), seed=4)


Truth = Callable[[Sampling], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def truth(stage: Stage, requests: Sequence[Request]) -> Truth:
    known: dict[Sampling, list[tuple[int, ...]]] = {}

    def of(sampling: Sampling) -> list[tuple[int, ...]]:
        if sampling not in known:
            known[sampling] = [reference(stage.target, request, sampling) for request in requests]
        return known[sampling]

    return of


def decoded(
    stage: Stage, text: str, requests: Sequence[Request], sampling: Sampling, slots: int | None = None, **how: Any
) -> list[tuple[int, ...]]:
    config = DecodeConfig(LIMIT, sampling, STOPS)
    method = stage.method(text, **how)
    if slots is None:
        found = generate(stage.target, method, requests, config)
    else:
        found = serve(stage.target, method, requests, config, slots)
    return [generation.output_ids for generation in found]


@pytest.mark.parametrize("text", MATCHING)
def test_methods_give_what_the_reference_gives(stage: Stage, requests: list[Request], truth: Truth, text: str) -> None:
    """Not one token differs: alone, in a batch, and in a stream in which rows join while others run."""
    assert decoded(stage, text, requests, PENALTY) == truth(PENALTY)
    assert decoded(stage, text, requests[1:2], ALL) == truth(ALL)[1:2]
    assert decoded(stage, text, requests, ALL, slots=3) == truth(ALL)


def test_the_options_change_what_is_decoded(truth: Truth) -> None:
    """Else the test above would show nothing."""
    assert sum(one != other for one, other in zip(truth(PENALTY), truth(Sampling()), strict=True)) >= 4
    without = [Sampling(0.8, 9, 0.9, 0.08), Sampling(0.8, repetition_penalty=1.2), Sampling(0.8, 9, 0.9, 0, 1.2)]
    assert all(truth(sampling) != truth(ALL) for sampling in without)
    assert len({len(output) for output in truth(ALL)}) > 2


FAULTS: dict[str, Callable[[Seen, DraftTree], Tensor]] = {
    "no path": lambda seen, tree: seen.mask[:, None].expand(-1, tree.width, -1),
    "the node alone": lambda seen, tree: (
        seen.mask[:, None].repeat(1, tree.width, 1).scatter_(2, tree.tokens[:, :, None], True)
    ),
    "the path without the node": lambda seen, tree: (
        seen.mask[:, None]
        .repeat(1, tree.width, 1)
        .scatter_(2, tree.tokens.gather(1, tree.parents.clamp(min=0))[:, :, None], True)
    ),
    "the whole tree": lambda seen, tree: seen.mask.scatter(1, tree.tokens, True)[:, None].expand(-1, tree.width, -1),
    "siblings": lambda seen, tree: _with_siblings(seen, tree),
    "nothing": lambda seen, tree: torch.zeros_like(seen.mask)[:, None].expand(-1, tree.width, -1),
}


def _with_siblings(seen: Seen, tree: DraftTree) -> Tensor:
    """As it is right, with the tokens of each node's siblings."""
    found = right(seen, tree).clone()
    for row in range(tree.batch):
        for node in range(1, tree.width):
            siblings = (tree.parents[row] == tree.parents[row, node]) & tree.valid[row]
            found[row, node, tree.tokens[row, siblings]] = True
    return found


right = Seen.at_nodes


@pytest.fixture(scope="module")
def scripted() -> tuple[Target, list[Request], list[tuple[int, ...]]]:
    """Requests and their outputs under a strong penalty, with more tokens to choose from than an output holds."""
    target = tiny_target(vocab=31)
    draws = random.Random(3)
    requests = requests_of([[draws.randrange(31) for _ in range(length)] for length in (2, 6, 3)])
    return target, requests, [reference(target, each, STRONG, 40, frozenset()) for each in requests]


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("branch", [0, 5])
def test_a_wrong_path_shows(
    scripted: tuple[Target, list[Request], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: str | None,
    branch: int,
) -> None:
    """Along long accepted paths, with wrong siblings or without, a node must have seen its own path and nothing else:
    any other choice gives a token that plain decoding does not give."""
    target, requests, outputs = scripted
    method = Scripted([request.prompt_ids for request in requests], outputs, length=5, branch=branch)
    if fault is not None:
        monkeypatch.setattr(Seen, "at_nodes", FAULTS[fault])
    if fault is None or (fault == "siblings" and not branch):
        found = run(target, method, requests, 30, sampling=STRONG)
        assert [generation.output_ids for generation in found] == [output[:30] for output in outputs]
        assert all(record.accepted == 5 for generation in found for record in generation.rounds)
    else:
        with pytest.raises(AssertionError, match="the anchor is not the row's own token"):
            run(target, method, requests, 30, sampling=STRONG)


@pytest.mark.parametrize("text", [*REJECTING, *PLAIN])
def test_what_is_drawn_lies_in_the_support(stage: Stage, requests: list[Request], text: str) -> None:
    """Whatever the rule, a token is one that transformers' processors leave behind the text before it."""
    narrow = Sampling(1.3, top_k=6, top_p=0.8, min_p=0.1, repetition_penalty=1.5)
    chain, left = processors(narrow), 0
    for output, request in zip(decoded(stage, text, requests, narrow), requests, strict=True):
        text_ids = torch.tensor([[*request.prompt_ids, *output]])
        with torch.inference_mode():
            logits = stage.target.model(text_ids, use_cache=False).logits[0]
        for place in range(len(request.prompt_ids), text_ids.shape[1]):
            scores = chain(text_ids[:, :place], logits[None, place - 1].clone())  # type: ignore[arg-type]
            assert scores[0, text_ids[0, place]].isfinite()
            left += int(scores.isfinite().sum())
    assert left < 6 * sum(map(len, decoded(stage, text, requests, narrow))), "nothing is cut"


@pytest.mark.parametrize("text", REJECTING)
def test_rejection_at_temperature_zero_is_greedy(
    stage: Stage, requests: list[Request], truth: Truth, text: str
) -> None:
    """All of the target's distribution is on one token then, the penalty's included."""
    assert decoded(stage, text, requests, PENALTY) == truth(PENALTY)


# Refusals


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1e-9}, "temperature -1e-09"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top-k -1"),
        ({"top_p": 0.0}, "top-p 0.0"),
        ({"top_p": -0.1}, "top-p -0.1"),
        ({"top_p": 1.5}, "top-p 1.5"),
        ({"top_p": math.nan}, "top-p nan"),
        ({"min_p": -0.01}, "min-p -0.01"),
        ({"min_p": 1.01}, "min-p 1.01"),
        ({"min_p": math.nan}, "min-p nan"),
        ({"repetition_penalty": 0.0}, "repetition-penalty 0.0"),
        ({"repetition_penalty": -1.3}, "repetition-penalty -1.3"),
        ({"repetition_penalty": math.inf}, "repetition-penalty inf"),
        ({"repetition_penalty": math.nan}, "repetition-penalty nan"),
    ],
)
def test_bad_values(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**values)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_allowed_edges() -> None:
    """The ends of each range that are allowed, and which of them switch something off."""
    off = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert not off.filters
    assert not off.penalises
    assert Sampling(1.0, min_p=1.0).filters
    assert not Sampling(0.0, top_k=3, min_p=1.0).filters
    assert Sampling(0.0, repetition_penalty=0.5).penalises
    assert Sampling(0.7, 5, 0.9, 0.1, 1.3).for_drafts() == Sampling(0.7, 5, 0.9, 0.1)
    assert Sampling(0.7, 5, 0.9, 0.1, 1.3).for_drafts(1.0) == Sampling(1.0, 5, 0.9, 0.1)
