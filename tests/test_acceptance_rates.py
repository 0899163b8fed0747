"""How often drafts are accepted, against what the rules say: measured at one position over many rows.

Bounds are five standard deviations of a binomial share. Trees of siblings are also checked without draws: the chances
of everything that can happen are added up.
"""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from tiny_vocabulary import one_position
from torch import Tensor

from sparkbench.decoding.accept import rejection
from sparkbench.decoding.drafting import ChainOptions, DraftOptions, TreeOptions
from sparkbench.decoding.sampling import Sampling
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.registry import Variant

ROWS = 200_000
TEMPERATURES = (0.5, 1.0)
TARGET = torch.tensor([1.0, 0.2, -0.5, 0.9, -2.0, 0.0])
DRAFTER = torch.tensor([0.4, 1.1, -0.5, -0.3, 0.5, -1.0])


def pair(temperature: float, draft_temperature: float | None = None) -> tuple[Tensor, Tensor]:
    drafter = DRAFTER / (draft_temperature or temperature)
    return (TARGET / temperature).double().softmax(0), drafter.double().softmax(0)


def rate(options: DraftOptions, temperature: float, budget: int = 1) -> float:
    return one_position(options, TARGET, DRAFTER, Sampling(temperature), ROWS, budget=budget).rate


def near(measured: float, chance: float) -> None:
    assert abs(measured - chance) < 5 * math.sqrt(chance * (1 - chance) / ROWS)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_chains(temperature: float) -> None:
    p, q = pair(temperature)
    near(rate(ChainOptions(), temperature), float(p[DRAFTER.argmax()]))
    near(rate(ChainOptions(draft="sampled"), temperature), float((p * q).sum()))
    near(rate(ChainOptions(rule="rejection"), temperature), float(torch.minimum(p, q).sum()))
    p, hot = pair(temperature, 1.0)
    near(rate(ChainOptions(rule="rejection", draft_temperature="1"), temperature), float(torch.minimum(p, hot).sum()))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_shared_noise_is_a_gumbel_coupling(temperature: float) -> None:
    p, q = pair(temperature)
    chance = float(sum(1 / torch.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))
    distance = 1 - float(torch.minimum(p, q).sum())
    assert (1 - distance) / (1 + distance) <= chance <= 1 - distance
    near(rate(ChainOptions(draft_noise="shared"), temperature), chance)


def test_filters_cut_both_distributions() -> None:
    sampling = Sampling(1.0, top_k=3)
    p, q = sampling.probabilities(TARGET), sampling.probabilities(DRAFTER)
    assert (p > 0).sum() == (q > 0).sum() == 3
    found = one_position(ChainOptions(rule="rejection"), TARGET, DRAFTER, sampling, ROWS)
    near(found.rate, float(torch.minimum(p, q).sum()))
    assert set(found.tokens.flatten().tolist()) == set(p.nonzero()[:, 0].tolist())


def recursive(p: Tensor, q: Tensor, siblings: Sequence[int], renormalise: bool = True) -> tuple[list[float], Tensor]:
    """The chance that each of `siblings`, tried in order, is taken, and the chance [V] of each token as the bonus.

    Written from the definition, in float64. renormalise: whether q is after a sibling has been taken out.
    """
    chances, reached, q = [], 1.0, q.clone()
    for token in siblings:
        odds = min(1.0, float(p[token] / q[token]))
        chances.append(reached * odds)
        reached *= 1 - odds
        rest = (p - q).clamp(min=0)
        p = rest / rest.sum() if float(rest.sum()) > 0 else p
        q[token] = 0
        q = q / q.sum() if renormalise else q
    return chances, reached * p


def ordered(q: Tensor, siblings: Sequence[int]) -> float:
    """The chance to draw `siblings` in this order without replacement."""
    chance, left = 1.0, 1.0
    for token in siblings:
        chance *= float(q[token]) / left
        left -= float(q[token])
    return chance


@pytest.mark.parametrize("count", [1, 2, 3])
def test_siblings_added_up(count: int) -> None:
    """Over all ordered sets of siblings, the token that comes out has the target's distribution; not with a fault."""
    p, q = (logits[:4].double().softmax(0) for logits in (TARGET, DRAFTER))
    for renormalise in (True, False):
        outcome, accepted = torch.zeros(4, dtype=torch.float64), 0.0
        for siblings in itertools.permutations(range(4), count):
            weight = ordered(q, siblings)
            chances, bonus = recursive(p, q, siblings, renormalise)
            for token, chance in zip(siblings, chances, strict=True):
                outcome[token] += weight * chance
            outcome += weight * bonus
            accepted += weight * sum(chances)
        exact = float((outcome - p).abs().max()) < 1e-12
        assert exact == (renormalise or count == 1)
        if renormalise:
            options = TreeOptions(rule="rejection", tree_draft="sampled")
            found = one_position(options, TARGET[:4], DRAFTER[:4], Sampling(1.0), ROWS, budget=count)
            near(found.rate, accepted)


@pytest.mark.parametrize("siblings", list(itertools.permutations(range(4), 2)))
def test_siblings_are_tried_as_the_definition_says(siblings: tuple[int, int]) -> None:
    """Where `rejection` changes its mind as the uniform numbers grow, and what it leaves when it refuses both."""
    p, q = (logits[:4].double().softmax(0) for logits in (TARGET, DRAFTER))
    tree = DraftTree(
        tokens=torch.tensor([[0, *siblings]]),
        parents=torch.tensor([[-1, 0, 0]]),
        depths=torch.tensor([[0, 1, 1]]),
        valid=torch.ones(1, 3, dtype=torch.bool),
        max_depth=1,
        draft_probs=q.float()[None, None],
    )
    left: list[Tensor] = []

    def settle(accepted: Tensor, rest: Tensor) -> Tensor:
        left.append(rest[0].double() / rest[0].sum())
        return rest.argmax(1)

    def taken(first: float, second: float) -> int:
        """0 for neither."""
        tests = torch.tensor([[0.5, first, second]], dtype=torch.float64)
        return int(rejection(tree, p.float().expand(1, 3, -1), tests, settle).path[0, -1])

    chances, bonus = recursive(p, q, siblings)
    first = chances[0]
    assert taken(first * 0.999, 1.0) == 1
    if first == 1:
        assert taken(0.999999, 0.0) == 1
        return
    second = chances[1] / (1 - first)
    if second > 0:
        assert taken(first * 1.001, second * 0.999) == 2
    if second < 1:
        assert taken(first * 1.001, second + 0.001) == 0
        torch.testing.assert_close(left[-1], bonus / bonus.sum(), atol=1e-6, rtol=0)


REFUSED = (
    ("dflash:rule=rejection:draft=greedy", "draft=greedy has no distribution"),
    ("dspark:rule=rejection:draft-noise=shared", "know nothing of the target's noise"),
    ("dflash:draft=sampled:draft-noise=shared", "instead of sampled drafts"),
    ("ddtree:rule=rejection", "add tree-draft=sampled"),
    ("sparklingtree:rule=rejection", "add tree-draft=sampled"),
    ("ddtree:tree-draft=sampled:draft-noise=shared", "instead of sampled drafts"),
    ("ddtree:tree-draft=sampled:builder=heap", "builder is for ranked trees"),
    ("ddtree:budget=auto:tree-draft=sampled", "budget=auto is for ranked trees"),
    ("ddtree:budget=auto:draft-noise=shared", "budget=auto is for ranked trees"),
    ("sparklingtree:tree-draft=sampled:candidates=8", "candidates is for ranked trees"),
    ("dart:rule=rejection", "these are searched for"),
    ("dflash:draft-temperature=2", "auto, 1, target"),
)


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_what_does_not_fit_together_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        Variant.parse(text)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
