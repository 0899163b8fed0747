"""A batch on its way: rows that join, one round after the other, rows that leave.

    tree = method.propose(context)                   stages: draft, build
    out  = target.verify(tree)                       stages: pack, verify
    path = accept(tree, out)                         stage:  accept
    target.commit(path); method.observe(...)         stage:  commit

This is the inside of the loop (loop.py), which decides when rows join. The host learns one small array a round: what
each row accepted. A stop token or the length limit inside an accepted path truncates there: what lies beyond is neither
output nor counted as committed.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkbench.decoding.accept import Acceptance, accept
from sparkbench.decoding.committed import Committed
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.rounds import Fact, to_host
from sparkbench.decoding.sampling import draw, round_keys, stream_keys
from sparkbench.decoding.seen import Seen
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import StageTimer
from sparkbench.decoding.tree import DraftTree
from sparkbench.decoding.verifier import Verified, Verifier

if TYPE_CHECKING:
    from sparkbench.decoding.loop import DecodeConfig, Request

Observer = Callable[[Context, DraftTree, Acceptance], None]

RESERVE = 512  # new tokens that room is made for at first; caches grow when rows get longer
_DRAFTS = 2  # stream of the noise that drafts take


@dataclass
class Row:
    """A request on its way. Moments are seconds on the batch's clock; `began`: prefill, or arrival in a stream."""

    request: "Request"
    began: float
    output: list[int] = field(default_factory=list)
    rounds: list[tuple[Fact, dict[str, int]]] = field(default_factory=list)
    stop_reason: str | None = None
    first_at: float = 0.0
    finished_at: float = 0.0


class Batch:
    """Rows being decoded with one target and method. Close it at the end.

    live:    rows that have not stopped, in the order of the tensors.
    rounds:  rounds so far.
    skipped: seconds that the clock was moved on.
    closed:  no row joins while others run.
    """

    def __init__(
        self, target: Target, method: Method, config: "DecodeConfig", observer: Observer | None, closed: bool
    ) -> None:
        self.target, self.method, self.config, self.observer = target, method, config, observer
        self.closed = closed
        self.live: list[Row] = []
        self.rounds = 0
        self.skipped = 0.0
        self._stop_ids = target.stop_ids if config.stop_ids is None else config.stop_ids
        self._timer = StageTimer(target.device, recording=config.profile or target.device.type == "cpu")
        self._verifier: Verifier | None = None
        self._context: Context
        self._keys: Tensor  # [B], of the target's noise
        self._draft_keys: Tensor | None = None  # [B], of the noise that drafts take
        self._seen: Seen | None = None
        self._new: list[Committed] = []  # since the method last proposed, one a round
        self._rests_for_good = False
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started + self.skipped

    def skip_to(self, moment: float) -> None:
        """Move the clock on, if it is not as late already."""
        self.skipped += max(0.0, moment - self.now())

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None

    def admit(self, requests: Sequence["Request"], began: Sequence[float] | None = None) -> list[Row]:
        """Prefill requests as new rows and draw their first tokens. `began`: since when they wait; None is now."""
        now = self.now()
        rows = [Row(each, now if began is None else began[place]) for place, each in enumerate(requests)]
        prompts = [request.prompt_ids for request in requests]
        joins = bool(self.live)
        if joins:
            assert self._verifier is not None
            prefill = self._verifier.admit(prompts)
        else:
            self.close()
            longest = max(map(len, prompts))
            capacity = longest + min(self.config.max_new_tokens, RESERVE) + self.method.max_nodes + 1
            self._verifier = self.target.session(len(rows), capacity, self.method.feature_layers)
            prefill = self._verifier.prefill(prompts)
        anchors, keys, seen = self._first_tokens(requests, prefill)
        tokens = anchors.tolist()
        now = self.now()
        for row, token in zip(rows, tokens, strict=True):
            row.first_at = row.finished_at = now
            self._append(row, [token])
        new = Committed(prefill.ids, prefill.features, list(map(len, prompts)))
        if joins:
            self._join(anchors, keys, seen, new)
        else:
            self._begin(anchors, keys, seen, new, capacity)
        self.live += rows
        self._retire()
        return rows

    def round(self) -> None:
        """One round of all live rows; those that stop leave."""
        method, verifier, timer, context = self.method, self._verifier, self._timer, self._context
        assert verifier is not None
        cache, sampling = verifier.cache, self.config.sampling
        context.lengths = cache.lengths
        drafting = self._may_draft()
        if drafting:
            new = reduce(Committed.followed_by, self._new)
            context.tokens, context.features, context.counts = new.tokens, new.features, new.counts
            self._new = []
            if self._draft_keys is not None:
                own = method.noise == "own"
                context.noise_keys = round_keys(self._draft_keys, cache.lengths) if own else self._draft_keys
            tree = method.propose(context)
        else:
            tree = DraftTree.root(context.anchors)
        with timer.stage("pack"):
            packed = verifier.pack(tree)
        with timer.stage("verify"):
            verified = verifier.verify(packed)
        with timer.stage("accept"):
            past = None if self._seen is None else self._seen.at_nodes(tree)
            acceptance = accept(method.rule, tree, verified.logits, cache.lengths, self._keys, sampling, past)
            facts = to_host(tree, acceptance)
        with timer.stage("commit"):
            counts = [fact.accepted + 1 for fact in facts]
            widest = max(counts)
            with timer.stage("commit/compact"):
                in_place = all(fact.in_place for fact in facts)
                verifier.commit(None if in_place else acceptance.path[:, :widest], counts)
            with timer.stage("commit/carry"):
                method.observe(context, tree, acceptance)
                if self._seen is not None:
                    self._seen.add(context.anchors, acceptance)
                if not self._rests_for_good:
                    tokens = torch.cat([context.anchors[:, None], acceptance.tokens[:, : widest - 1]], 1)
                    features = _carry(verified.features, acceptance.path, widest, in_place)
                    self._new.append(Committed(tokens, features, counts))
                context.anchors = acceptance.bonus
            for row, fact in zip(self.live, facts, strict=True):
                fact.committed = self._append(row, fact.tokens)
        if self.observer is not None:
            self.observer(context, tree, acceptance)
        stages = timer.take()
        now = self.now()
        for row, fact in zip(self.live, facts, strict=True):
            row.rounds.append((fact, stages))
            row.finished_at = now
        self.rounds += 1
        context.round += 1
        self._retire()

    def _first_tokens(self, requests: Sequence["Request"], prefill: Verified) -> tuple[Tensor, Tensor, Seen | None]:
        """Of new rows: their first tokens [B], the keys of their noise [B], and what their texts hold."""
        sampling, device = self.config.sampling, self.target.device
        keys = torch.tensor([request.noise_key for request in requests], device=device)
        ends = torch.tensor([len(request.prompt_ids) - 1 for request in requests], device=device)
        seen, past = None, None
        if sampling.penalises:
            seen = Seen([request.prompt_ids for request in requests], prefill.logits.shape[2], device)
            past = seen.mask[:, None]
        at_root = torch.zeros(len(requests), 1, dtype=torch.int64, device=device)
        return draw(prefill.logits, at_root, ends, keys, 0, sampling, past)[:, 0], keys, seen

    def _begin(self, anchors: Tensor, keys: Tensor, seen: Seen | None, new: Committed, capacity: int) -> None:
        assert self._verifier is not None
        self._keys, self._seen, self._new = keys, seen, [new]
        self._draft_keys = self._keys_of_drafts(keys)
        self._rests_for_good = self.method.most_rows == 0
        with self._timer.stage("draft") if self.method.drafter_kind else nullcontext():  # counted in the first round
            self.method.begin(self.target, len(anchors), capacity)
        self._context = Context(
            target=self.target,
            anchors=anchors,
            lengths=self._verifier.cache.lengths,
            features=new.features,
            tokens=new.tokens,
            counts=new.counts,
            sampling=self.config.sampling,
            stop_ids=self._stop_ids,
            timer=self._timer,
        )

    def _join(self, anchors: Tensor, keys: Tensor, seen: Seen | None, new: Committed) -> None:
        """Put new rows behind those there are."""
        self._keys = torch.cat([self._keys, keys])
        self._draft_keys = self._keys_of_drafts(self._keys)
        if self._seen is not None and seen is not None:
            self._seen.join(seen)
        self._new = [reduce(Committed.followed_by, self._new).join(new)]
        self.method.admit(len(anchors))
        self._context.anchors = torch.cat([self._context.anchors, anchors])

    def _keys_of_drafts(self, keys: Tensor) -> Tensor | None:
        """Keys of the noise that drafts take: the target's own only where the method says that it shares it."""
        return {"none": None, "own": stream_keys(keys, _DRAFTS), "shared": keys}[self.method.noise]

    def _may_draft(self) -> bool:
        method, verifier = self.method, self._verifier
        assert verifier is not None
        if self._rests_for_good:
            return False
        longest = method.max_length
        if longest is not None and verifier.cache.max_length > longest:
            # Rows only grow, so a closed batch of nothing but such rows never drafts again.
            self._rests_for_good = self.closed and min(verifier.cache.host_lengths) > longest
            return False
        return method.most_rows is None or len(self.live) <= method.most_rows

    def _retire(self) -> None:
        """Take rows that have stopped out of the batch; the others close up."""
        going = [place for place, row in enumerate(self.live) if row.stop_reason is None]
        if len(going) == len(self.live):
            return
        if not going:
            self.live = []
            self.close()
            return
        self.live = [self.live[place] for place in going]
        assert self._verifier is not None
        with self._timer.stage("commit"), self._timer.stage("commit/compact"):  # of the next round
            self._verifier.keep(going)
            self.method.keep(going)
            index = torch.tensor(going, device=self.target.device)
            self._keys = self._keys[index]
            if self._draft_keys is not None:
                self._draft_keys = self._draft_keys[index]
            if self._seen is not None:
                self._seen.keep(index)
            self._new = [each.keep(index) for each in self._new]
            self._context.anchors = self._context.anchors[index]

    def _append(self, row: Row, tokens: Sequence[int]) -> int:
        """Add tokens to a row's output up to a stop token or the limit; return how many were added."""
        for added, token in enumerate(tokens, 1):
            row.output.append(token)
            if token in self._stop_ids:
                row.stop_reason = "stop"
                return added
            if len(row.output) == self.config.max_new_tokens:
                row.stop_reason = "length"
                return added
        return len(tokens)


def _carry(features: Tensor | None, path: Tensor, steps: int, in_place: bool) -> Tensor | None:
    """The features of the accepted path, [B, steps, F * H]."""
    if features is None:
        return None
    if in_place:
        return features[:, :steps]
    return features.gather(1, path[:, :steps, None].expand(-1, -1, features.shape[2]))
