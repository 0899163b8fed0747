"""Is a method's output what autoregressive decoding returns?

Forwards of different widths round differently, so two tokens whose scores are almost equal may change places without
anything being wrong. Each generation is classed against AR's with the same noise:

- identical: the same token ids.
- tie_flip:  at the first divergence both forwards are run again on the shared prefix, one token wide as AR's and as
  wide as the method's round. With e the largest difference of their logits over the two tokens, the gap between the
  two scores is at most 2 e / T (or a filter's cut-off lies within that error), and e is no larger than the noise that
  this width shows on AR's own text.
- violation: anything else. It is confirmed by a float32 replay of the prefix, and fails the run.

Generation stops at the first token that differs, so nothing beyond it is compared.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparkbench.decoding.loop import Generation, Request
from sparkbench.decoding.sampling import Sampling, gumbel
from sparkbench.decoding.seen import Seen
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree

NOISE_TOKENS = 64
STEP = 4  # tokens a wide forward keeps while the width noise is measured, as many as a typical round

IDENTICAL, TIE_FLIP, VIOLATION = "identical", "tie_flip", "violation"


@dataclass(frozen=True)
class Verdict:
    """How a generation compares with AR's.

    first_divergence: index of the first differing output token.
    score_gap:   difference of the two tokens' scores (logits / T + noise) in AR's forward at that place; None where a
                 filter cuts one of them.
    width_noise: e, the largest difference of the two forwards' logits over the two tokens.
    All are None for identical outputs.
    """

    exactness: str
    first_divergence: int | None = None
    score_gap: float | None = None
    width_noise: float | None = None


@torch.inference_mode()
def width_noise(
    target: Target, request: Request, reference_ids: Sequence[int], widths: Sequence[int], batch: int = 1
) -> dict[int, float]:
    """By width N: how far logits move on AR's own text when its forwards are N tokens wide instead of one.

    reference_ids: AR's output for `request`, of which the first 64 tokens are decoded again at each width; what was
    cached at that width is part of the difference. `batch`: rows of the forwards, all alike. Differences are taken
    over all tokens of the vocabulary.
    """
    text = list(reference_ids[:NOISE_TOKENS])
    narrow = _logits_along(target, request.prompt_ids, text, 1, batch)
    return {
        width: (_logits_along(target, request.prompt_ids, text, width, batch) - narrow).abs().max().item()
        for width in dict.fromkeys(widths)
    }


@torch.inference_mode()
def classify(
    target: Target,
    request: Request,
    reference: Generation,
    other: Generation,
    sampling: Sampling,
    noise: Mapping[int, float],
    batch: int = 1,
) -> Verdict:
    """Class `other` against AR's `reference`, both decoded in a batch of `batch` rows.

    noise: what `width_noise` measured; widths it lacks take the largest.
    """
    ours, theirs = other.output_ids, reference.output_ids
    if ours == theirs:
        return Verdict(IDENTICAL)
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:  # one is a prefix of the other: it stopped elsewhere, which no rounding explains
        return Verdict(VIOLATION, min(len(ours), len(theirs)))
    tokens = [theirs[place], ours[place]]
    width, behind = _round_of(other, place)
    prefix = [*request.prompt_ids, *theirs[:place]]
    narrow = _wide_logits(target, prefix, 1, 0, batch)
    wide = _wide_logits(target, prefix, width, behind, batch)
    error = (narrow - wide)[tokens].abs().max().item()
    gap = _gap(narrow, tokens, request, prefix, sampling)
    allowed_noise = noise.get(width, max(noise.values(), default=0.0))
    stored = gap if math.isfinite(gap) else None
    close = gap <= _reach(error, sampling) or _cut_off_within(narrow, tokens, error, prefix, sampling)
    if close and error <= allowed_noise:
        return Verdict(TIE_FLIP, place, stored, error)
    if _replay_agrees(target, prefix, tokens, request, sampling, allowed_noise):
        return Verdict(TIE_FLIP, place, stored, error)
    return Verdict(VIOLATION, place, stored, error)


def _round_of(generation: Generation, place: int) -> tuple[int, int]:
    """Width of the round that committed output token `place`, and how far below its root the token was drawn."""
    start = 1  # the first token comes from the prefill
    if place == 0:
        return 1, 0
    for round_ in generation.rounds:
        if place < start + round_.committed:
            return round_.nodes + 1, place - start
        start += round_.committed
    return 1, 0


def _wide_logits(target: Target, prefix: Sequence[int], width: int, behind: int, batch: int) -> Tensor:
    """float32 logits [V] after `prefix`, its last `behind + 1` tokens run as a chain in a forward of `width` nodes."""
    behind = min(behind, width - 1, len(prefix) - 2)
    if behind < 0:  # a prefix of one token: there is nothing to prefill
        return target.model(torch.tensor([prefix], device=target.device)).logits[0, -1].float()
    cut = len(prefix) - behind - 1
    verifier = target.session(batch, len(prefix) + width)
    verifier.prefill([prefix[:cut]] * batch)
    tree = _padded_chain(prefix[cut:], width, batch, target.device)
    return verifier.verify(verifier.pack(tree)).logits[0, behind].float()


def _logits_along(target: Target, prompt: Sequence[int], text: Sequence[int], width: int, batch: int) -> Tensor:
    """float32 logits [len(text), V] after each token of `text`, decoded behind `prompt` with forwards of `width`."""
    verifier = target.session(batch, len(prompt) + len(text) + width)
    verifier.prefill([prompt] * batch)
    found = []
    step = min(width, STEP)
    for start in range(0, len(text), step):
        chain = text[start : start + step]
        verified = verifier.verify(verifier.pack(_padded_chain(chain, width, batch, target.device)))
        verifier.commit(None, [len(chain)] * batch)
        found.append(verified.logits[0, : len(chain)].float())
    return torch.cat(found)


def _padded_chain(chain: Sequence[int], width: int, batch: int, device: torch.device) -> DraftTree:
    """A chain in a tree of `width` nodes, the same in `batch` rows.

    The nodes left over hang below the root and repeat its token: they fill the width, and nothing sees them.
    """
    fill = width - len(chain)
    depths = [*range(len(chain)), *[1] * fill]
    parents = [*range(-1, len(chain) - 1), *[0] * fill]
    tokens = [*chain, *list(chain[:1]) * fill]
    table = torch.tensor([tokens, parents, depths], device=device)[:, None].expand(-1, batch, -1)
    return DraftTree(table[0], table[1], table[2], torch.ones_like(table[0], dtype=torch.bool), max(depths))


def _reach(error: float, sampling: Sampling) -> float:
    """How far the scores of two tokens can move apart when each logit is off by `error`."""
    penalty = sampling.repetition_penalty
    return 2 * error * max(penalty, 1 / penalty) / (sampling.temperature or 1.0)


def _scores(logits: Tensor, prefix: Sequence[int], sampling: Sampling) -> Tensor:
    """Scores [V] of the token behind `prefix`."""
    seen = Seen([prefix], len(logits), logits.device).mask[0] if sampling.penalises else None
    return sampling.scores(logits, seen)


def _gap(logits: Tensor, tokens: Sequence[int], request: Request, prefix: Sequence[int], sampling: Sampling) -> float:
    """Difference of the scores of two tokens behind `prefix`; infinite if a filter cuts one of them."""
    scores = _scores(logits, prefix, sampling)[list(tokens)]
    if not sampling.greedy:
        key = torch.tensor([request.noise_key], device=logits.device)
        place = torch.tensor([[len(prefix)]], device=logits.device)
        scores = scores + gumbel(key, place, len(logits))[0, 0, list(tokens)]
    return (scores[0] - scores[1]).abs().item()


def _cut_off_within(
    logits: Tensor, tokens: Sequence[int], error: float, prefix: Sequence[int], sampling: Sampling
) -> bool:
    """Whether moving the two logits by `error` can carry one of them over a filter's cut-off."""
    if not sampling.filters:
        return False
    moved = [_moved(logits, tokens, shift) for shift in (-error, 0.0, error)]
    inside = [_scores(each, prefix, sampling)[list(tokens)].isfinite() for each in moved]
    return any(not torch.equal(inside[0], other) for other in inside[1:])


def _moved(logits: Tensor, tokens: Sequence[int], shift: float) -> Tensor:
    moved = logits.clone()
    moved[list(tokens)] += shift
    return moved


def _replay_agrees(
    target: Target, prefix: Sequence[int], tokens: Sequence[int], request: Request, sampling: Sampling, noise: float
) -> bool:
    """Whether a float32 replay of the prefix leaves the two tokens closer than the width noise explains.

    In float32 there is nothing to replay: the first comparison stands.
    """
    if target.dtype == torch.float32:
        return False
    gap = _gap(_wide_logits(_in_float32(target), prefix, 1, 0, 1), tokens, request, prefix, sampling)
    return gap <= _reach(noise, sampling)


@lru_cache(maxsize=1)
def _in_float32(target: Target) -> Target:
    """A float32 copy of the target; kept, since a run that needs one replay needs many."""
    return Target.wrap(copy.deepcopy(target.model).float(), None, target.name)
