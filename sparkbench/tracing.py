"""What happened while one prompt was decoded: the rounds, what each committed, and their draft trees.

One prompt, one method, recorded by the observer of the loop. It is for looking at how a method works: nothing
here is timed for comparison, checked against autoregressive decoding or written to disk.
"""

import math
from dataclasses import dataclass

from sparkbench import models
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import noise_key
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.prompts import encode_chat
from sparkbench.settings import SweepConfig
from sparkbench.sweep import plan


@dataclass(frozen=True)
class Token:
    id: int
    text: str


@dataclass(frozen=True)
class Node:
    """A node of a draft tree, node 0 the root.

    probability: the drafter's, given the parent.  path_probability: from the root. None where it has none.
    """

    token: Token
    parent: int
    depth: int
    accepted: bool
    probability: float | None
    path_probability: float | None


@dataclass(frozen=True)
class TracedRound:
    """`draft`: committed draft tokens; `bonus`: the target's own, None where the output ended before it."""

    index: int
    cold: bool
    drafted: int
    accepted: int
    draft: tuple[Token, ...]
    bonus: Token | None
    nodes: tuple[Node, ...]

    @property
    def branches(self) -> bool:
        parents = [node.parent for node in self.nodes]
        return len(set(parents)) < len(parents)


@dataclass(frozen=True)
class Trace:
    """One decoded prompt. `tau` is the mean of committed tokens over rounds, None without a round."""

    prompt: str
    target: str
    drafter: str | None
    variant: str
    budget: int | None
    temperature: float
    prompt_tokens: int
    first: Token
    rounds: tuple[TracedRound, ...]
    shown: int | None
    text: str
    stop_reason: str
    tokens_out: int
    forwards: int
    tau: float | None
    decode_s: float


def trace_prompt(config: SweepConfig, round_: int | None = None) -> Trace:
    """Decode the first prompt of `config` with its last method, at its first budget and temperature.

    round_: the round whose tree is to be shown, None to choose one (`choose`).
    UsageError: a prompt without tokens or too long for the target, or a round that does not exist.
    """
    planned = plan(config)
    arm = planned.arms[-1]
    if round_ is not None and arm.drafter is None:
        raise UsageError(f"--round has no meaning for {arm.variant}: it drafts nothing")
    loaded = models.load(planned, run="trace")
    target = loaded.target
    prompt = config.prompts[0]
    ids = encode_chat(target.tokenizer, [{"role": "user", "content": prompt}], config.thinking)
    if not ids:
        raise UsageError("the prompt has no tokens")
    if len(ids) + config.max_new_tokens > target.max_context:
        raise UsageError(
            f"the prompt's {len(ids)} tokens and {config.max_new_tokens} new ones exceed the context of "
            f"{target.max_context}"
        )
    recorder = Recorder(target)
    sampling = config.sampling(config.temperatures[0])
    request = Request(ids, noise_key(ids, config.seed))
    decode = DecodeConfig(config.max_new_tokens, sampling)
    generated = generate(target, loaded.methods[-1], [request], decode, observer=recorder)[0]
    rounds = tuple(recorder.finish(index, done.cold, done.committed) for index, done in enumerate(generated.rounds))
    committed = sum(done.committed for done in generated.rounds)
    return Trace(
        prompt=prompt,
        target=config.target,
        drafter=arm.drafter,
        variant=arm.variant,
        budget=arm.budget,
        temperature=sampling.temperature,
        prompt_tokens=len(ids),
        first=recorder.token(generated.output_ids[0]),
        rounds=rounds,
        shown=choose(rounds, round_),
        text=target.tokenizer.decode(list(generated.output_ids), skip_special_tokens=True),
        stop_reason=generated.stop_reason,
        tokens_out=len(generated.output_ids),
        forwards=generated.forwards,
        tau=committed / len(rounds) if rounds else None,
        decode_s=generated.decode_s,
    )


def choose(rounds: tuple[TracedRound, ...], wanted: int | None) -> int | None:
    """The round to show: `wanted`, else the first warm one with a branch, else the first that drafted."""
    if wanted is not None:
        if not 0 <= wanted < len(rounds):
            allowed = f"0 to {len(rounds) - 1}" if rounds else "no round was needed"
            raise UsageError(f"--round {wanted} does not exist: {allowed}")
        return wanted
    drafted = [done for done in rounds if done.drafted]
    preferred = [done for done in drafted if done.branches and not done.cold]
    preferred += [done for done in drafted if done.branches] + drafted
    return preferred[0].index if preferred else None


class Recorder:
    """The loop's observer: copies each round's tree and outcome of the only row to the host."""

    def __init__(self, target: Target) -> None:
        self._tokenizer = target.tokenizer
        self._seen: list[tuple[tuple[Node, ...], list[int]]] = []

    def __call__(self, context: Context, tree: DraftTree, outcome: Acceptance) -> None:
        accepted = int(outcome.accepted[0])
        path = set(outcome.path[0, 1 : accepted + 1].tolist())
        parents = tree.parents[0].tolist()
        logs = None if tree.log_probs is None else tree.log_probs[0].tolist()
        rows = zip(tree.tokens[0].tolist(), parents, tree.depths[0].tolist(), tree.valid[0].tolist(), strict=True)
        nodes = tuple(
            Node(
                token=self.token(token),
                parent=parent,
                depth=depth,
                accepted=node in path,
                probability=math.exp(logs[node] - logs[parent]) if logs and node else None,
                path_probability=math.exp(logs[node]) if logs and node else None,
            )
            for node, (token, parent, depth, valid) in enumerate(rows)
            if valid
        )
        self._seen.append((nodes, outcome.tokens[0, : accepted + 1].tolist()))

    def token(self, token: int) -> Token:
        return Token(token, self._tokenizer.decode([token]))

    def finish(self, index: int, cold: bool, committed: int) -> TracedRound:
        """Round `index`, of which the loop kept `committed` tokens: accepted + 1, or fewer at the end."""
        nodes, tokens = self._seen[index]
        kept = [self.token(token) for token in tokens[:committed]]
        accepted = len(tokens) - 1
        return TracedRound(
            index=index,
            cold=cold,
            drafted=len(nodes) - 1,
            accepted=accepted,
            draft=tuple(kept[:accepted]),
            bonus=kept[accepted] if committed > accepted else None,
            nodes=nodes,
        )
