"""Batches: rows beside others, rows that join and leave, methods that rest; caches and what carries over.

All methods with real, tiny drafters in float32, where not one token may differ. What is drawn is `test_sampling.py`'s
and `test_decoding_options.py`'s business, the loop with random proposals `test_loop.py`'s.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import autoregressive, check_records, plain_continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import close, context_of, whole_forward
from test_cache import Model, new_cache
from tiny_methods import (
    FIXED,
    MATCHING,
    PLAIN,
    REJECTING,
    VOCAB,
    Stage,
    facts,
    live_rows,
    random_requests,
)
from torch import Tensor

from sparkbench.decoding import batch as batch_module
from sparkbench.decoding import cache as cache_module
from sparkbench.decoding.batch import Row
from sparkbench.decoding.committed import Committed
from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate, serve
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.tree import DraftTree
from sparkbench.drafters.block import BlockSession
from sparkbench.drafters.dart import DartSession
from sparkbench.drafters.parts import Block, RopeTable, rope
from sparkbench.errors import UsageError
from sparkbench.methods import dart as dart_module
from sparkbench.scheduling import DelayedCapacity, admit_capacity, capacity

LIMIT = 10
STOPS = frozenset({4, 9})
TEMPERATURES = (0.0, 0.7, 1.0)
LENGTHS = (1, 9, 3, 30, 5, 1, 12)  # of prompts


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage.build(tmp_path_factory.mktemp("stage"))


def config_at(temperature: float, limit: int = LIMIT, stops: frozenset[int] = STOPS) -> DecodeConfig:
    return DecodeConfig(limit, Sampling(temperature), stops)


def alone(stage: Stage, method: Method, requests: Sequence[Request], config: DecodeConfig) -> list[Generation]:
    return [generate(stage.target, method, [request], config)[0] for request in requests]


def outputs(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.output_ids for generation in generations]


class Pool:
    """Requests, and what plain decoding gives them, by temperature."""

    def __init__(self, stage: Stage) -> None:
        self.requests = random_requests(10, LENGTHS)
        self.stage = stage
        self.truths: dict[float, list[tuple[int, ...]]] = {}

    def truth(self, temperature: float) -> list[tuple[int, ...]]:
        if temperature not in self.truths:
            sampling = Sampling(temperature)
            self.truths[temperature] = []
            for request in self.requests:
                whole = plain_continuation(self.stage.target, request.prompt_ids, LIMIT, request.noise_key, sampling)
                end = next((place + 1 for place, token in enumerate(whole) if token in STOPS), LIMIT)
                self.truths[temperature].append(tuple(whole[:end]))
        return self.truths[temperature]


@pytest.fixture(scope="module")
def pool(stage: Stage) -> Pool:
    return Pool(stage)


# Rows beside others


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_pool_has_rows_of_all_kinds(pool: Pool, temperature: float) -> None:
    """Else the tests below would show little."""
    lengths = {len(output) for output in pool.truth(temperature)}
    assert {1, LIMIT} < lengths
    assert len(set(pool.truth(temperature))) > 6


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("text", MATCHING)
def test_tokens_are_those_of_plain_decoding_in_any_batch(
    stage: Stage, pool: Pool, text: str, temperature: float
) -> None:
    method, config = stage.method(text), config_at(temperature)
    truth = pool.truth(temperature)
    everyone = list(range(len(pool.requests)))
    shuffled = random.Random(1).sample(everyone, len(everyone))
    groups = {0.0: [everyone, [6, 5]], 0.7: [shuffled], 1.0: [shuffled[:5], [3]]}
    accepted = 0
    for group in groups[temperature]:
        found = generate(stage.target, method, [pool.requests[place] for place in group], config)
        assert outputs(found) == [truth[place] for place in group]
        for generation in found:
            check_records(generation, LIMIT, STOPS)
            accepted += sum(record.accepted for record in generation.rounds)
    if temperature != 0.7 and text in FIXED:
        assert (accepted > 0) == (text != "autoregressive")


@pytest.mark.parametrize("text", FIXED + REJECTING)
def test_a_row_does_not_feel_its_neighbours(stage: Stage, pool: Pool, text: str) -> None:
    """Output and rounds are those of the request alone, beside rows that stop at once, long ones, and short ones."""
    method, config, truth = stage.method(text), config_at(1.0), pool.truth(1.0)
    watched = [place for place, output in enumerate(truth) if len(output) > 5][:2]
    first, second = (pool.requests[place] for place in watched)
    early = [pool.requests[place] for place, output in enumerate(truth) if len(output) < 3][:3]
    draws = random.Random(2)
    wide = Request(tuple(draws.randrange(VOCAB) for _ in range(90)), 5)
    tiny = [Request((token,), token) for token in range(2)]
    expected = [(g.output_ids, facts(g)) for g in alone(stage, method, [first, second], config)]
    for group, own in (([early[0], second, wide, first, *early[1:]], (3, 1)), ([*tiny, first, second], (2, 3))):
        found = generate(stage.target, method, group, config)
        assert [(found[place].output_ids, facts(found[place])) for place in own] == expected


# Streams


class Clock:
    """Moves on by one second whenever it is read, so that streams run the same way every time."""

    def __init__(self) -> None:
        self.reads = 0

    def perf_counter(self) -> float:
        self.reads += 1
        return float(self.reads)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batch_module, "time", clock)
    return clock


PATTERNS: dict[str, Callable[[int], float]] = {
    "at once": lambda place: 0.0,
    "one by one": lambda place: 6.0 * place,
    "bursts": lambda place: 15.0 * (place // 3),
    "backwards": lambda place: 50.0 - 5 * place,
    "far apart": lambda place: 1000.0 * place,
}


def arriving(requests: Sequence[Request], pattern: str) -> list[Request]:
    return [replace(request, arrival_s=PATTERNS[pattern](place)) for place, request in enumerate(requests)]


def stream(
    stage: Stage, method: Method, requests: Sequence[Request], config: DecodeConfig, slots: int
) -> tuple[list[Generation], list[int]]:
    """The generations, and how many rows took part in each round."""
    rows: list[int] = []

    def watch(context: Context, tree: DraftTree, acceptance: Any) -> None:
        rows.append(len(acceptance.accepted))

    return serve(stage.target, method, requests, config, slots, watch), rows


@pytest.mark.parametrize("text", MATCHING + REJECTING)
def test_streams_give_what_batches_give(stage: Stage, pool: Pool, clock: Clock, text: str) -> None:
    method, config = stage.method(text), config_at(1.0)
    requests = pool.requests[:6]
    expected = alone(stage, method, requests, config)
    if text in MATCHING:
        assert outputs(expected) == pool.truth(1.0)[:6]
    for pattern, slots in streams_of(text):
        found, rows = stream(stage, method, arriving(requests, pattern), config, slots)
        assert outputs(found) == outputs(expected), (pattern, slots)
        if text in FIXED + REJECTING:
            assert [facts(g) for g in found] == [facts(g) for g in expected], (pattern, slots)
        assert max(rows) <= slots
        if pattern == "far apart":
            assert max(rows) == 1
        elif slots > 1:
            assert max(rows) > 1, "a row joins what runs"
        check_times(found, pattern, slots, len(rows))
        for generation in found:
            check_records(generation, LIMIT, STOPS)


def streams_of(text: str) -> list[tuple[str, int]]:
    """Patterns and slots that a method is tried with."""
    if text == "autoregressive":
        return [("at once", 2), ("one by one", 1), ("bursts", 8), ("backwards", 3), ("far apart", 2)]
    if text in PLAIN:
        return [("bursts", 2), ("one by one", 8), ("far apart", 3)]
    return [("bursts", 2)]


def check_times(found: Sequence[Generation], pattern: str, slots: int, rounds: int) -> None:
    arrivals = [PATTERNS[pattern](place) for place in range(len(found))]
    assert [generation.arrival_s for generation in found] == arrivals
    assert {generation.batch_rounds for generation in found} == {rounds}
    for generation in found:
        assert generation.ttft_s > 0
        assert generation.latency_s >= generation.ttft_s
        assert (generation.decode_s > 0) == (len(generation.output_ids) > 1)
    order = sorted(range(len(found)), key=lambda place: arrivals[place])
    started = [arrivals[place] + found[place].ttft_s for place in order]
    assert started == sorted(started), "first come, first served"
    if slots == 1:
        done = [arrivals[place] + found[place].latency_s for place in order]
        assert all(end < begin for end, begin in zip(done, started[1:], strict=False))
    # The clock is read a few times a round and a request; the 1000 s between arrivals are no part of it.
    (wall_s,) = {generation.batch_wall_s for generation in found}
    assert rounds < wall_s < 4 * rounds + 8 * len(found)


def test_nobody_waits_for_arrivals(stage: Stage, pool: Pool) -> None:
    """With the real clock: hours between arrivals, which neither pass nor are counted."""
    requests = [replace(request, arrival_s=3600.0 * place) for place, request in enumerate(pool.requests[:5])]
    found = serve(stage.target, autoregressive(), requests, config_at(1.0), 2)
    assert outputs(found) == pool.truth(1.0)[:5]
    for generation in found:
        assert 0 < generation.ttft_s <= generation.latency_s <= generation.batch_wall_s < 3600


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_a_free_slot_is_filled_before_the_next_round(stage: Stage, pool: Pool, slots: int) -> None:
    """Autoregressive rows take one round a token, so that a stream can be followed with a pencil."""
    left = [len(output) - 1 for output in pool.truth(1.0)]
    assert 0 in left
    live: list[int] = []
    expected = []
    while left or live:
        while left and len(live) < slots:
            live.append(left.pop(0))
            if len(live) == slots or not left:  # those that stopped at their first token leave, a round goes on
                break
        live = [count for count in live if count]
        if live:
            expected.append(len(live))
        live = [count - 1 for count in live if count > 1]
    found, rows = stream(stage, autoregressive(), pool.requests, config_at(1.0), slots)
    assert outputs(found) == pool.truth(1.0)
    assert rows == expected
    assert found[0].batch_rounds == len(expected)


@pytest.mark.parametrize("text", MATCHING + REJECTING)
def test_rows_of_one_token(stage: Stage, pool: Pool, text: str) -> None:
    """Rows that end at their first token, by the limit or by a stop, take part in no round."""
    method = stage.method(text)
    for config, reason in ((config_at(1.0, limit=1, stops=frozenset()), "length"), (all_stop(), "stop")):
        for found in (
            generate(stage.target, method, pool.requests[:3], config),
            serve(stage.target, method, arriving(pool.requests[:3], "far apart"), config, 2),
            serve(stage.target, method, arriving(pool.requests[:3], "at once"), config, 2),
        ):
            assert outputs(found) == [output[:1] for output in pool.truth(1.0)[:3]]
            assert {(g.stop_reason, g.rounds, g.forwards, g.batch_rounds) for g in found} == {(reason, (), 1, 0)}
            assert all(generation.decode_s == 0 for generation in found)


def all_stop() -> DecodeConfig:
    return config_at(1.0, stops=frozenset(range(VOCAB)))


def test_streams_of_nothing_and_without_slots(stage: Stage, pool: Pool) -> None:
    assert serve(stage.target, autoregressive(), [], config_at(1.0), 2) == []
    with pytest.raises(UsageError, match="slots 0"):
        serve(stage.target, autoregressive(), pool.requests[:1], config_at(1.0), 0)


def test_hooks_are_taken_off_after_a_stream(stage: Stage, pool: Pool, clock: Clock) -> None:
    modules = [*stage.target.decoder.layers, stage.target.decoder.norm]
    method: Any = stage.method("dflash")
    serve(stage.target, method, arriving(pool.requests, "bursts"), config_at(1.0), 3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)

    def failing(rows: int) -> None:
        raise RuntimeError("no room")

    method.admit = failing
    with pytest.raises(RuntimeError, match="no room"):
        serve(stage.target, method, arriving(pool.requests, "bursts"), config_at(1.0), 3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


# Methods that rest


class Drafted:
    """A row's draft: the text it follows, its anchor, and the drafter's logits [L, V]."""

    def __init__(self, row: Row, logits: Tensor) -> None:
        self.request = row.request
        self.text = [*row.request.prompt_ids, *row.output[:-1]]
        self.anchor = row.output[-1]
        self.logits = logits.clone()  # methods add to it in place

    def check(self, stage: Stage, drafter: Any) -> None:
        """The same as from a new session that is given the whole text at once."""
        ids = torch.tensor([self.text])
        with torch.inference_mode():
            _, features = whole_forward(stage.target, ids, drafter.config.target_layer_ids)
            session = drafter.begin(stage.target, 1, len(self.text), len(self.logits))
            fresh = session.draft(context_of(stage.target, features, [len(self.text)], [self.anchor], ids))
        close(self.logits, fresh.logits[0])


@contextmanager
def drafted_rows() -> Iterator[list[list[Drafted]]]:
    """What drafters make meanwhile, a list a round; checked that they are asked for the rows there are."""
    rounds: list[list[Drafted]] = []
    with live_rows() as live, pytest.MonkeyPatch.context() as patch:
        for session in (BlockSession, DartSession):

            def watched(self: Any, context: Context, draft: Any = session.draft) -> Block:
                block: Block = draft(self, context)
                rows = [Drafted(row, logits) for row, logits in zip(live[0], block.logits, strict=True)]
                assert context.anchors.tolist() == [row.anchor for row in rows]
                assert context.lengths.tolist() == self.cache.host_lengths == [len(row.text) for row in rows]
                rounds.append(rows)
                return block

            patch.setattr(session, "draft", watched)
        yield rounds


def of_lengths(pool: Pool, temperature: float, *wanted: Callable[[int], bool]) -> list[int]:
    """Places of different requests whose outputs have lengths as wanted."""
    chosen: list[int] = []
    for fits in wanted:
        lengths = {place: len(output) for place, output in enumerate(pool.truth(temperature))}
        chosen.append(next(place for place, length in lengths.items() if fits(length) and place not in chosen))
    return chosen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("text", PLAIN)
def test_a_method_rests_while_there_are_many_rows(stage: Stage, pool: Pool, text: str, temperature: float) -> None:
    method = stage.method(text)
    method.most_rows = 1
    places = of_lengths(pool, temperature, lambda n: n == LIMIT, lambda n: n < 4, lambda n: 4 < n < 9)
    with drafted_rows() as rounds:
        found = generate(stage.target, method, [pool.requests[place] for place in places], config_at(temperature))
    truth = [pool.truth(temperature)[place] for place in places]
    assert outputs(found) == truth
    last = len(truth[2]) - 1  # rounds until the second row has left, one token each
    for generation, output in zip(found[1:], truth[1:], strict=True):
        assert generation.rounds_drafted == 0
        assert [record.nodes for record in generation.rounds] == [0] * (len(output) - 1)
    nodes = [record.nodes for record in found[0].rounds]
    assert not any(nodes[:last])
    assert all(nodes[last:])
    assert found[0].rounds_drafted == len(nodes) - last == len(rounds) > 1
    for (row,) in rounds:
        row.check(stage, method.drafter)


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize(("most", "pattern"), [(None, "bursts"), (1, "one by one"), (2, "bursts"), (2, "at once")])
def test_a_drafter_sees_the_whole_text(
    stage: Stage, pool: Pool, clock: Clock, text: str, most: int | None, pattern: str
) -> None:
    """In streams, where it rests again and again while rows join and leave, each draft is that of a new session."""
    method = stage.method(text)
    method.most_rows = most
    requests = arriving(pool.requests[:8], pattern)
    with drafted_rows() as rounds:
        found, rows = stream(stage, method, requests, config_at(1.0), 3)
    assert outputs(found) == pool.truth(1.0)[:8]
    assert len(rounds) == sum(count <= (most or 3) for count in rows)
    assert max(map(len, rounds)) == (most or 3)
    shapes = {"".join("r-"[record.nodes > 0] for record in generation.rounds) for generation in found}
    assert any("r-" in shape for shape in shapes) == (most is not None), "it drafts again"
    if pattern == "bursts" and most is not None:
        assert any("-r" in shape for shape in shapes), "it begins to rest"
    for round_ in rounds:
        for row in round_:
            row.check(stage, method.drafter)


SHORT = 24  # longest text behind which the drafter `short` drafts


@pytest.fixture(scope="module")
def outgrowing(stage: Stage) -> tuple[list[Request], list[tuple[int, ...]], DecodeConfig]:
    """A row that grows beyond SHORT and stops between two that go on and stay below, what AR gives, and how."""
    config = config_at(1.0, limit=18, stops=frozenset({4}))
    long, other = random_requests(24, [20], seed=1), random_requests(24, [1, 5], seed=2)
    first = next(
        (request, generation.output_ids)
        for request, generation in zip(long, generate(stage.target, autoregressive(), long, config), strict=True)
        if 7 <= len(generation.output_ids) <= 10
    )
    others = [
        (request, generation.output_ids)
        for request, generation in zip(other, generate(stage.target, autoregressive(), other, config), strict=True)
        if len(generation.output_ids) == 18
    ]
    chosen = [others[0], first, others[1]]
    return [request for request, _ in chosen], [output for _, output in chosen], config


@pytest.mark.parametrize("text", ["dflash", "ddtree", "dart"])
def test_a_method_rests_while_a_row_is_too_long_for_its_drafter(
    stage: Stage, outgrowing: tuple[list[Request], list[tuple[int, ...]], DecodeConfig], text: str
) -> None:
    requests, truth, config = outgrowing
    method = stage.method(text, drafter="short", budget=3)
    assert method.max_length == SHORT
    drafts: list[tuple[bool, bool]] = []

    def watch(context: Context, tree: DraftTree, acceptance: Any) -> None:
        before = context.lengths - acceptance.accepted - 1
        drafts.append((tree.width > 1, int(before.max()) <= SHORT))

    with drafted_rows() as rounds:
        found = generate(stage.target, method, requests, config, watch)
    assert outputs(found) == truth
    assert all(drafted == short for drafted, short in drafts)
    assert [drafted for drafted, _ in itertools.groupby(drafted for drafted, _ in drafts)] == [True, False, True]
    resumed = next(number for number, round_ in enumerate(rounds) if len(round_) == 2)
    for round_ in rounds[: resumed + 3]:
        for row in round_:
            row.check(stage, method.drafter)


@pytest.mark.parametrize("text", ["dflash", "ddtree"])
def test_a_row_that_joins_a_too_long_one_is_drafted_for_later(
    stage: Stage, outgrowing: tuple[list[Request], list[tuple[int, ...]], DecodeConfig], clock: Clock, text: str
) -> None:
    """A batch of nothing but too long rows drafts again when one that is not joins and they have left."""
    requests, truth, config = outgrowing
    long = replace(requests[1], prompt_ids=requests[1].prompt_ids + tuple(truth[1][:5]))  # beyond SHORT at once
    arrivals = [replace(requests[0], arrival_s=5.0), long]
    method = stage.method(text, drafter="short")
    found, rows = stream(stage, method, arrivals, config, 2)
    assert outputs(found) == [truth[0], truth[1][5:]]
    assert 2 in rows
    assert [record.nodes for record in found[1].rounds] == [0] * len(found[1].rounds)
    assert found[0].rounds_drafted > 3


# Caches and what carries over


class Joining(Model):
    """Cache and twin that take rows in, too."""

    def admit(self, rows: int) -> None:
        self.cache.admit(rows)
        self.rows += [[] for _ in range(rows)]
        self.check()

    def join(self, other: Model) -> None:
        self.cache.join(other.cache)
        self.rows += other.rows
        self.check()

    def steps(self, data: st.DataObject, most: int) -> None:
        """One write, of which each row keeps a path of its own."""
        batch, width = len(self.rows), data.draw(st.integers(1, most))
        counts = data.draw(st.lists(st.integers(1, width), min_size=batch, max_size=batch))
        if data.draw(st.booleans()):
            counts = [counts[0]] * batch
        paths = None
        if data.draw(st.booleans()):
            nodes = st.lists(st.integers(0, width - 1), min_size=max(counts), max_size=max(counts), unique=True)
            paths = [sorted(data.draw(nodes)) for _ in range(batch)]
        self.step(width, paths, counts, at_once=data.draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_caches_take_rows_in(data: st.DataObject) -> None:
    """Any order of writes, rows that join empty or with entries, and rows that leave or change places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BUCKET", 8)  # so that they grow
        model = Joining(data.draw(st.integers(1, 3)), 1)
        for operation in data.draw(st.lists(st.sampled_from("wwwajk"), min_size=3, max_size=10)):
            if operation == "w":
                model.steps(data, 12)
            elif operation == "a":
                model.admit(data.draw(st.integers(1, 2)))
            elif operation == "j":
                other = Joining(data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 40])))
                other.generator.manual_seed(len(model.rows))
                for _ in range(data.draw(st.integers(0, 2))):
                    other.steps(data, 30)
                model.join(other)
            else:
                model.keep(data.draw(st.lists(st.sampled_from(range(len(model.rows))), min_size=1, unique=True)))


def test_rope_tables_grow() -> None:
    """Beyond the rows they were made for, behind rows of one length or several, from one before the end or more."""
    for lengths in ([5], [5, 5], [3, 9, 0]):
        for width, back in ((4, 0), (1, 1), (40, 1), (40, 0)):
            table = RopeTable(4, 8, 5000.0, torch.float32, torch.device("cpu"))
            cache = new_cache(len(lengths))
            cache.open(max(lengths))
            cache.commit([max(1, length) for length in lengths])
            starts = torch.tensor(cache.host_lengths)[:, None] - back
            expected = rope(starts + torch.arange(width), 8, 5000.0, torch.float32)
            for _ in range(2):
                for found, wanted in zip(table.behind(cache, width, back), expected, strict=True):
                    torch.testing.assert_close(found.expand_as(wanted), wanted)


Entries = list[list[int]]  # tokens of each row


def committed(rows: Entries, width: int, channels: int, numbers: Iterator[int]) -> Committed:
    """Rows padded to `width` with garbage; the feature of a token says which it is."""
    tokens = torch.tensor([row + [-next(numbers) for _ in range(width - len(row))] for row in rows])
    features = tokens[:, :, None] * torch.arange(1.0, channels + 1) if channels else None
    return Committed(tokens, features, list(map(len, rows)))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_committed_against_lists(data: st.DataObject) -> None:
    numbers = itertools.count(1)
    channels = data.draw(st.sampled_from([0, 3]))

    def some(batch: int, least: int) -> tuple[Committed, Entries]:
        counts = data.draw(st.lists(st.integers(least, 6), min_size=batch, max_size=batch))
        rows = [[next(numbers) for _ in range(count)] for count in counts]
        return committed(rows, max(counts) + data.draw(st.integers(0, 3)), channels, numbers), rows

    def check(found: Committed, rows: Entries) -> None:
        assert list(found.counts) == [len(row) for row in rows]
        assert (found.features is None) == (channels == 0)
        for place, row in enumerate(rows):
            assert found.tokens[place, : len(row)].tolist() == row
            if found.features is not None:
                expected = torch.tensor(row)[:, None] * torch.arange(1.0, channels + 1)
                assert torch.equal(found.features[place, : len(row)], expected)

    found, rows = some(data.draw(st.integers(1, 4)), 1)
    for operation in data.draw(st.lists(st.sampled_from("ffjk"), min_size=1, max_size=8)):
        if operation == "f":
            later, more = some(len(rows), 1)
            found, rows = found.followed_by(later), [row + new for row, new in zip(rows, more, strict=True)]
            assert found.tokens.shape[1] == max(map(len, rows))
        elif operation == "j":
            other, more = some(data.draw(st.integers(1, 3)), 1)
            found, rows = found.join(other), rows + more
        else:
            chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
            found, rows = found.keep(torch.tensor(chosen)), [rows[place] for place in chosen]
        check(found, rows)


@pytest.mark.parametrize("text", ["autoregressive", *PLAIN, "ddtree:draft-noise=shared", *REJECTING])
def test_caches_that_grow_while_decoding(
    stage: Stage, pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    method, config = stage.method(text, budget=2), config_at(1.0, limit=24, stops=frozenset())
    requests = pool.requests[:3]
    expected = outputs(alone(stage, method, requests, config))
    monkeypatch.setattr(batch_module, "RESERVE", 1)
    monkeypatch.setattr(cache_module, "BUCKET", 4)
    grown: dict[int, int] = defaultdict(int)
    grow = cache_module.RowCache._grow

    def watched(self: cache_module.RowCache, needed: int) -> None:
        before = self.store.shape[4]
        grow(self, needed)
        grown[len(self.store)] += self.store.shape[4] > before and self.max_length > 0

    monkeypatch.setattr(cache_module.RowCache, "_grow", watched)
    assert outputs(generate(stage.target, method, requests, config)) == expected
    found, _ = stream(stage, method, arriving(requests, "one by one"), config, 2)
    assert outputs(found) == expected
    assert all(grown.values())
    assert len(grown) == (1 if text == "autoregressive" else 2), "the target's and the drafter's"


# What methods remember


def test_rows_that_join_count_as_certain() -> None:
    """The capacity of a step is that of the rows present, of which new ones drafted nothing two steps earlier."""

    def seconds(tokens: int) -> float:
        return 1 + 0.1 * tokens

    scheduler = DelayedCapacity()
    past = [[[0.9, 0.5, 0.3], [0.8, 0.1, 0.05]], [[0.7, 0.6, 0.2], [0.9, 0.8, 0.7]]]
    for step in past:
        assert scheduler.admit(step, seconds) == [3, 3]
    scheduler.join(2, 3)
    present = [[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.95, 0.9, 0.85], [0.2, 0.1, 0.05]]
    for step in past:
        certain = [*step, [1.0] * 3, [1.0] * 3]
        assert capacity(certain, seconds) != capacity(step, seconds)
        assert scheduler.admit(present, seconds) == admit_capacity(present, capacity(certain, seconds))
    # Two steps on, what the new rows drafted is known.
    assert scheduler.admit(present, seconds) == admit_capacity(present, capacity(present, seconds))
    scheduler.keep([3])
    scheduler.join(1, 3)
    present = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]
    found = scheduler.admit(present, seconds)
    assert found == admit_capacity(present, capacity([[0.2, 0.1, 0.05], [1.0] * 3], seconds))


@pytest.mark.parametrize("most", [None, 2])
def test_delayed_lengths_when_rows_join(stage: Stage, pool: Pool, clock: Clock, most: int | None) -> None:
    """In a stream: the capacity of a proposal by the confidences of two before, as far as a row has been there."""
    method: Any = stage.method("dspark:verify-length=delayed")
    method.most_rows = most
    past: list[dict[int, list[float]]] = []
    joined = 0
    lengths, begin = method.lengths, method.begin

    def beginning(*arguments: Any) -> None:
        past.clear()
        begin(*arguments)

    def watched(logits: Tensor) -> list[int]:
        nonlocal joined
        chances = logits.sigmoid().double().cumprod(1).tolist()
        survival = {row.request.noise_key: chance for row, chance in zip(live[0], chances, strict=True)}
        found: list[int] = lengths(logits)
        if len(past) < 2:
            assert found == [method.depth] * len(survival)
        else:
            known = [past[-2].get(row, [1.0] * method.depth) for row in survival]
            curve = method.costs.at(len(survival), method.session.cache.max_length)[0]
            assert found == admit_capacity(list(survival.values()), capacity(known, curve.seconds))
            joined += any(row not in past[-2] for row in survival)
        past.append(survival)
        return found

    method.lengths, method.begin = watched, beginning
    with live_rows() as live:
        found, _ = stream(stage, method, arriving(pool.requests, "one by one"), config_at(1.0), 3)
    assert outputs(found) == pool.truth(1.0)
    assert joined > 2


@pytest.mark.parametrize("most", [None, 2])
def test_the_history_of_rows_that_join(
    stage: Stage, pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    """What a look-up of the n-gram index may read is the end of the row's text, however it came there."""
    method = stage.method("dart")
    method.most_rows = most
    real, looks = dart_module.continuity_tree, 0

    def watched(logits: Tensor, anchors: Tensor, history: Tensor, *rest: Any) -> DraftTree:
        nonlocal looks
        looks += 1
        for row, remembered in zip(live[0], history.tolist(), strict=True):
            text = [-1, -1, *row.request.prompt_ids, *row.output[:-1]]
            assert remembered == text[-2:]
        return real(logits, anchors, history, *rest)

    monkeypatch.setattr(dart_module, "continuity_tree", watched)
    with live_rows() as live:
        for pattern in ("bursts", "one by one"):
            found, _ = stream(stage, method, arriving(pool.requests, pattern), config_at(1.0), 3)
            assert outputs(found) == pool.truth(1.0)
    assert looks > 2
