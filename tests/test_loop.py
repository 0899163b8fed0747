"""The loop as a whole: any valid proposal, on any model, in any batch, gives what plain decoding gives.

A method that proposes random trees stands for every method. What it sees (features, anchors, lengths), what the loop
records, and what the cache holds are compared with plain forwards of the model.
"""

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from conftest import (
    FAMILIES,
    Scripted,
    autoregressive,
    check_records,
    plain_continuation,
    requests_of,
    run,
    tiny_target,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.rounds import Round
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.decoding.verifier import Verifier
from sparkbench.errors import UsageError

Proposal = tuple[list[int], list[int], list[float]]  # tokens, parents, log-probabilities of one row


class RandomTrees(Scripted):
    """Proposes random trees that sometimes hold the true continuation, a different shape every round.

    proposals, features, anchors: by request, what was proposed and seen in each round.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        layers: tuple[int, ...],
        seed: int,
    ) -> None:
        super().__init__(prompts, continuations, length=4)
        self.layers = layers
        self.random = random.Random(seed)
        self.proposals: list[list[Proposal]] = [[] for _ in prompts]
        self.features: list[list[torch.Tensor]] = [[] for _ in prompts]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.layers

    @property
    def max_nodes(self) -> int:
        return 12

    def propose(self, context: Context) -> DraftTree:
        truth = self.drafts(context).tolist()  # also checks the anchors
        for place, row in enumerate(self.rows):
            assert (context.features is None) == (not self.layers)
            if context.features is not None:
                self.features[row].append(context.features[place, : context.counts[place]].clone())
        kind = self.random.choice(["tree", "tree", "chain", "root"])
        rows = [self._row(kind, int(context.anchors[i]), path) for i, path in enumerate(truth)]
        for row, proposal in zip(self.rows, rows, strict=True):
            self.proposals[row].append(proposal)
        if kind == "root":
            return DraftTree.root(context.anchors)
        if kind == "chain":
            drafts = torch.tensor([tokens[1:] for tokens, _, _ in rows])
            return DraftTree.chain_of(context.anchors, drafts, torch.tensor([scores[1:] for _, _, scores in rows]))
        width = max(len(tokens) for tokens, _, _ in rows) + self.random.randint(0, 1)
        depths = [_depths(parents) for _, parents, _ in rows]

        def padded(lists: Sequence[Sequence[float]], fill: float) -> list[list[float]]:
            return [[*entries, *[fill] * (width - len(entries))] for entries in lists]

        return DraftTree(
            torch.tensor(padded([tokens for tokens, _, _ in rows], self.random.randrange(self.vocab))),
            torch.tensor(padded([parents for _, parents, _ in rows], -1)),
            torch.tensor(padded(depths, 0)),
            torch.tensor(padded([[True] * len(tokens) for tokens, _, _ in rows], False)),
            max(map(max, depths)) + self.random.randint(0, 1),
            torch.tensor(padded([scores for _, _, scores in rows], -math.inf)),
        )

    def _row(self, kind: str, anchor: int, truth: list[int]) -> Proposal:
        tokens, parents = [anchor], [-1]
        right = self.random.randint(0, self.length)
        if kind == "root":
            return tokens, parents, [0.0]
        if kind == "chain":
            wrong = [(token + 1) % self.vocab for token in truth[right:]]
            tokens, parents = [anchor, *truth[:right], *wrong], list(range(-1, self.length))
        else:
            for token in truth[:right]:
                parents.append(len(tokens) - 1)
                tokens.append(token)
            for _ in range(self.random.randint(0, self.max_nodes - right)):
                parent = self.random.randrange(len(tokens))
                taken = {tokens[i] for i, other in enumerate(parents) if other == parent}
                parents.append(parent)
                tokens.append(self.random.choice([t for t in range(self.vocab) if t not in taken]))
            tokens, parents = self._shuffled(tokens, parents)
        scores = [0.0]
        for parent in parents[1:]:
            scores.append(scores[parent] - self.random.random())
        return tokens, parents, scores

    def _shuffled(self, tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
        """The same tree in another order, parents still before children."""
        rank = [0.0] * len(tokens)
        for node in range(1, len(tokens)):
            rank[node] = rank[parents[node]] + self.random.random() + 1e-6
        order = sorted(range(len(tokens)), key=lambda node: rank[node])
        place = {node: index for index, node in enumerate(order)}
        return [tokens[node] for node in order], [place.get(parents[node], -1) for node in order]


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def check_round(record: Round, proposal: Proposal, coming: Sequence[int]) -> None:
    """The facts of a round, from the proposal and the true tokens behind its root."""
    tokens, parents, scores = proposal
    node, accepted = 0, 0
    while found := [i for i, p in enumerate(parents) if p == node and tokens[i] == coming[accepted]]:
        node, accepted = found[0], accepted + 1
    assert (record.accepted, record.accepted_node) == (accepted, node)
    assert record.nodes == len(tokens) - 1
    assert record.max_depth == max(_depths(parents))
    assert record.offered_next == (node in parents)
    if len(tokens) > 1:
        assert record.expected_accepted == pytest.approx(sum(math.exp(s) for s in scores[1:]), rel=1e-5)


@lru_cache(maxsize=64)
def cached_target(family: str, seed: int, layers: int, kv_heads: int, window: int) -> Target:
    return tiny_target(family, seed, vocab=31, layers=layers, kv_heads=kv_heads, window=window)


@lru_cache(maxsize=1024)
def cached_continuation(target: Target, prompt: tuple[int, ...], count: int, key: int, sampling: Sampling) -> list[int]:
    return plain_continuation(target, prompt, count, key, sampling)


def cut(output: Sequence[int], stops: Sequence[int], limit: int) -> tuple[int, ...]:
    end = next((i + 1 for i, token in enumerate(output) if token in stops), len(output))
    return tuple(output[: min(end, limit)])


@torch.inference_mode()
def plain_state(target: Target, ids: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Keys and values [layers, 2, heads, n, dim] and hidden states of one plain forward."""
    from transformers import DynamicCache

    cache = DynamicCache()
    output = target.model(torch.tensor([ids]), output_hidden_states=True, **{target.cache_argument: cache})
    layers: list[Any] = list(cache.layers)
    entries = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
    return entries, [states[0] for states in output.hidden_states]


# Shrinking a failure would take minutes, and the arguments tell enough.
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 3),
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 4]),
    window=st.sampled_from([3, 6]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    limit=st.integers(1, 14),
    stops=st.sets(st.integers(0, 30), max_size=4),
    sampling=st.sampled_from([Sampling(), Sampling(0.8), Sampling(1.0, top_k=5, top_p=0.9)]),
    tapped=st.booleans(),
    proposals=st.integers(0, 10**6),
)
def test_random_trees(
    family: str,
    seed: int,
    layers: int,
    kv_heads: int,
    window: int,
    lengths: list[int],
    limit: int,
    stops: set[int],
    sampling: Sampling,
    tapped: bool,
    proposals: int,
) -> None:
    target = cached_target(family, seed, layers, kv_heads, window)
    generator = random.Random(seed)
    prompts = [tuple(generator.randrange(31) for _ in range(length)) for length in lengths]
    requests = requests_of(prompts)
    truths = [cached_continuation(target, r.prompt_ids, 20, r.noise_key, sampling) for r in requests]
    taps = tuple(dict.fromkeys((layers - 1, -1, 0))) if tapped else ()
    method = RandomTrees(prompts, truths, taps, proposals)
    verifiers: list[Verifier] = []
    session = Target.session

    def spied(self: Target, batch: int, capacity: int, feature_layers: Sequence[int] = ()) -> Verifier:
        verifiers.append(session(self, batch, capacity, feature_layers))
        return verifiers[-1]

    def check_cache(context: Context, tree: DraftTree, acceptance: Acceptance) -> None:
        cache = verifiers[0].cache
        assert context.lengths.tolist() == cache.host_lengths
        for place, row in enumerate(method.rows):
            length = cache.host_lengths[place]
            ids = [*prompts[row], *truths[row]][:length]
            entries, _ = plain_state(target, ids)
            torch.testing.assert_close(cache.store[:, :, place, :, :length], entries, atol=1e-4, rtol=1e-4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "session", spied)
        config = DecodeConfig(limit, sampling, frozenset(stops))
        generations = generate(target, method, requests, config, observer=check_cache)

    for row, generation in enumerate(generations):
        check_records(generation, limit, frozenset(stops))
        assert generation.output_ids == cut(truths[row], sorted(stops), limit)
        done = 1
        for record, proposal in zip(generation.rounds, method.proposals[row], strict=True):
            check_round(record, proposal, truths[row][done:])
            done += record.committed
        if taps and generation.rounds:
            seen = torch.cat(method.features[row])
            ids = [*prompts[row], *generation.output_ids][: len(seen)]
            _, states = plain_state(target, ids)
            expected = torch.cat([states[layer + 1] for layer in taps], dim=-1)
            assert len(seen) == len(ids)
            torch.testing.assert_close(seen, expected, atol=1e-3, rtol=1e-3)


def test_rows_do_not_touch_each_other() -> None:
    """A request gets the same in any batch, at any place."""
    target = cached_target("qwen3-mixed", 1, 3, 4, 6)
    prompts = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (1, 2, 3)]
    requests = requests_of(prompts)
    sampling = Sampling(0.9)
    together = run(target, autoregressive(), requests, 9, stops=[3, 7], sampling=sampling)
    for order in ([0], [1, 0], [2, 3, 1], [3, 2, 1, 0]):
        some = run(target, autoregressive(), [requests[i] for i in order], 9, stops=[3, 7], sampling=sampling)
        assert [g.output_ids for g in some] == [together[i].output_ids for i in order]


def test_the_targets_own_stop_tokens_are_the_default() -> None:
    target = cached_target("qwen3", 0, 2, 4, 6)
    truth = plain_continuation(target, (1, 2), 8)
    model = target.model
    model.generation_config.eos_token_id = truth[3]
    try:
        stopping = Target.wrap(model)
        (generation,) = generate(stopping, autoregressive(), requests_of([(1, 2)]), DecodeConfig(8))
    finally:
        model.generation_config.eos_token_id = None
    assert generation.output_ids == cut(truth, [truth[3]], 8)
    assert generation.stop_reason == "stop"


def test_times_are_those_of_rows() -> None:
    target = cached_target("qwen3", 0, 2, 4, 6)
    prompts = [(1, 2), (9, 9, 9)]
    truths = [plain_continuation(target, prompt, 20) for prompt in prompts]
    method = Scripted(prompts, truths, length=3)
    stop = next(token for token in truths[0][1:] if token not in truths[1][:12])
    first, second = run(target, method, requests_of(prompts), 12, stops=[stop])
    assert len(first.rounds) < len(second.rounds)
    assert 0 < first.decode_s < second.decode_s == second.batch_wall_s == first.batch_wall_s
    assert first.ttft_s == second.ttft_s > 0
    covered = sum(record.stages_ns[s] for record in second.rounds for s in ("pack", "verify", "accept", "commit"))
    assert 0 < covered <= second.decode_s * 1e9


def test_hooks_are_taken_off() -> None:
    target = tiny_target(vocab=31)
    truth = plain_continuation(target, (1, 2), 12)
    run(target, RandomTrees([(1, 2)], [truth], (-1, 0, 2), 0), requests_of([(1, 2)]), 4)
    failing = RandomTrees([(1, 2)], [[truth[0] - 1] * 12], (-1, 0, 2), 0)
    with pytest.raises(AssertionError, match="anchor"):
        run(target, failing, requests_of([(1, 2)]), 4)
    modules = [*target.decoder.layers, target.decoder.norm]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(UsageError, match="max-new-tokens"):
        DecodeConfig(limit)
