"""Outputs above temperature 0 have the target's distribution, whatever method drafts and whichever rule accepts.

Over a vocabulary of 6 tokens the distribution of the first three is enumerated from the target, and compared by
chi-square with what the loop puts out. Each draw differs from the next by the seed of its noise alone, so that the
same draws are made every time. A p-value below 1e-4 fails, divided by the number of cells (variant, sampling, batch
size) that the long suite tests (Bonferroni): a sound program fails the whole of it with a probability below 1e-4.

Under `match`, outputs are besides those of autoregressive decoding with the same noise, token by token. Errors are
planted, and the same check has to find them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tiny_vocabulary import (
    LENGTH,
    PROMPT,
    VOCAB,
    chi_square_p,
    counts_of,
    distribution,
    method_of,
    one_position,
    outputs_of,
    request_of,
    small_drafter,
    small_target,
)
from torch import Tensor

from sparkbench.decoding import accept as rules
from sparkbench.decoding import batch as batches
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.drafting import ChainOptions, Drafts
from sparkbench.decoding.loop import DecodeConfig, generate
from sparkbench.decoding.sampling import Sampling, argmax, draw, stream_keys
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.exactness import TIE_FLIP, classify, width_noise

Plant = Callable[[pytest.MonkeyPatch], None]

TEMPERATURES = (0.5, 1.0)
MATCHED = ("ar", "dflash", "dspark", "ddtree", "sparklingtree", "dart")
REJECTED = (
    "dflash:rule=rejection",
    "dspark:rule=rejection",
    "ddtree:tree-draft=sampled:rule=rejection",
    "sparklingtree:tree-draft=sampled:rule=rejection",
)
SAMPLED_BUT_MATCHED = (
    "dflash:draft=sampled",
    "dspark:draft=sampled",
    "ddtree:tree-draft=sampled",
    "sparklingtree:tree-draft=sampled",
)
SHARED = tuple(f"{name}:draft-noise=shared" for name in MATCHED[1:])
SHORTENED = "dspark:rule=rejection:confidence-threshold=0.5"
FILTERS = (
    Sampling(1.0, top_k=3),
    Sampling(1.0, top_p=0.8),
    Sampling(0.5, min_p=0.3),
    Sampling(1.0, repetition_penalty=1.5),
)
LARGE = 256


@dataclass(frozen=True)
class Cell:
    """What is tested at once: `draws` outputs of a variant."""

    text: str
    sampling: Sampling
    batch: int
    draws: int

    def __str__(self) -> str:
        return f"{self.text}-{shown(self.sampling)}-batch{self.batch}"


def shown(sampling: Sampling) -> str:
    changed = ("top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(sampling, name) for name in changed if getattr(sampling, name) != getattr(Sampling, name)}
    return "-".join([f"T{sampling.temperature}", *(f"{name}{value}" for name, value in values.items())])


MANY, SOME = 50_000, 12_800  # draws in large batches: of every method under every rule, of other ways to draft


def row_by_row(text: str) -> bool:
    """SparklingTree's ranked search takes the rows one by one on a CPU."""
    return text.startswith("sparklingtree") and "sampled" not in text


def all_cells() -> list[Cell]:
    cells = []
    for sampling in map(Sampling, TEMPERATURES):
        for text in (*MATCHED, *REJECTED):
            cells += [Cell(text, sampling, LARGE, MANY), *(Cell(text, sampling, size, 4000) for size in (1, 4))]
        cells += [Cell(text, sampling, LARGE, SOME) for text in (*SAMPLED_BUT_MATCHED, *SHARED, SHORTENED)]
    hot = Sampling(0.5)  # where drafts may have another temperature than the target
    cells += [Cell(f"{text}:draft-temperature=1", hot, LARGE, SOME) for text in REJECTED]
    cells += [Cell(text, sampling, LARGE, SOME) for sampling in FILTERS for text in REJECTED]
    return cells


CELLS = all_cells()
THRESHOLD = 1e-4 / len(CELLS)


@dataclass(frozen=True, eq=False)
class Models:
    target: Target
    drafters: dict[str, Any]
    _exact: dict[Sampling, Tensor] = field(default_factory=dict)
    _reference: dict[Sampling, Tensor] = field(default_factory=dict)

    def outputs(self, cell: Cell) -> Tensor:
        """[draws, LENGTH]"""
        return outputs_of(self.target, method_of(cell.text, self.drafters), cell.sampling, cell.draws, cell.batch)

    def exact(self, sampling: Sampling) -> Tensor:
        """[VOCAB ** LENGTH] float64"""
        if sampling not in self._exact:
            self._exact[sampling] = distribution(self.target, PROMPT, sampling).flatten()
        return self._exact[sampling]

    def reference(self, sampling: Sampling, draws: int) -> Tensor:
        """[draws, LENGTH]: autoregressive decoding's outputs."""
        if len(self._reference.get(sampling, ())) < draws:
            self._reference[sampling] = self.outputs(Cell("ar", sampling, LARGE, draws))
        return self._reference[sampling][:draws]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    target, folder = small_target(), tmp_path_factory.mktemp("drafters")
    return Models(target, {kind: small_drafter(folder / kind, kind, target) for kind in ("dflash", "dspark")})


def compare(tokens: Tensor, chances: Tensor, vocab: int) -> None:
    """The check of this file: `tokens` [N, n] against the probabilities `chances` [vocab ** n] of all sequences."""
    p = chi_square_p(counts_of(tokens, vocab), chances)
    assert p >= THRESHOLD, f"chi-square: p = {p:.1e}"


def check(models: Models, cell: Cell) -> None:
    outputs = models.outputs(cell)
    compare(outputs, models.exact(cell.sampling), VOCAB)
    if "rejection" not in cell.text:
        check_tokens(models, cell, outputs)


def check_tokens(models: Models, cell: Cell, outputs: Tensor) -> None:
    """Under `match`: what differs from autoregressive decoding may only be a tie that rounding decides, if that."""
    different = (outputs != models.reference(cell.sampling, cell.draws)).any(1).nonzero()[:, 0].tolist()
    assert len(different) <= 3, f"{len(different)} outputs differ from autoregressive decoding's"
    method = method_of(cell.text, models.drafters)
    config = DecodeConfig(LENGTH, cell.sampling, frozenset())
    for seed in different:
        request = request_of(seed)
        (reference,) = generate(models.target, method_of("ar", {}), [request], config)
        (found,) = generate(models.target, method, [request], config)
        other = replace(found, output_ids=tuple(outputs[seed].tolist()))
        noise = width_noise(models.target, request, reference.output_ids, [1, method.max_nodes + 1])
        verdict = classify(models.target, request, reference, other, cell.sampling, noise)
        assert verdict.exactness == TIE_FLIP, f"seed {seed} differs from autoregressive decoding"


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_outputs_have_the_targets_distribution(models: Models, cell: Cell) -> None:
    check(models, cell)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("text", [*MATCHED, *REJECTED, *SAMPLED_BUT_MATCHED, *SHARED, SHORTENED])
def test_few_outputs_have_the_targets_distribution(models: Models, text: str, temperature: float) -> None:
    """The same with few draws."""
    check(models, Cell(text, Sampling(temperature), LARGE, 256 if row_by_row(text) else 512))


@pytest.mark.parametrize("sampling", FILTERS, ids=shown)
def test_few_outputs_with_filters(models: Models, sampling: Sampling) -> None:
    for text in (REJECTED[1], REJECTED[2]):
        check(models, Cell(text, sampling, LARGE, 512))


@pytest.mark.parametrize("text", [*MATCHED[1:], *REJECTED])
def test_few_outputs_at_a_small_batch_size(models: Models, text: str) -> None:
    check(models, Cell(text, Sampling(0.5), 4, 160))


@pytest.mark.parametrize("text", REJECTED)
def test_rejection_at_temperature_0_is_greedy(models: Models, text: str) -> None:
    """All of both distributions is on one token then, so that outputs are autoregressive decoding's."""
    greedy = Sampling()
    assert models.outputs(Cell(text, greedy, 3, 3)).tolist() == models.outputs(Cell("ar", greedy, 3, 3)).tolist()


def test_the_target_has_cells_and_structure(models: Models) -> None:
    """What the long suite rests on: most cells are expected often enough, and outputs differ in how likely they are."""
    for temperature, draws, share in ((1.0, 4000, 0.75), (1.0, 50_000, 0.95), (0.5, 50_000, 0.75)):
        exact = models.exact(Sampling(temperature))
        assert exact.sum() == pytest.approx(1, abs=1e-5)
        assert (exact * draws >= 5).double().mean() > share
        assert exact.max() / exact.median() > 3


# Planted errors


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """The draft that was refused is kept, and what would follow it comes next. For chains."""
    follow = rules._follow

    def planted(tree: DraftTree, agrees: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, accepted, _ = follow(tree, agrees)
        accepted = (accepted + 1).clamp(max=tree.max_depth)
        return tree.depths.clamp(max=accepted[:, None]), accepted, accepted[:, None]

    patch.setattr(rules, "_follow", planted)


def with_bonus(found: Acceptance, bonus: Tensor) -> Acceptance:
    return replace(found, tokens=found.tokens.scatter(1, found.accepted[:, None], bonus[:, None]), bonus=bonus)


def at_the_end(found: Acceptance, values: Tensor) -> Tensor:
    """What `values` [B, N, ...] hold at the last node of each accepted path."""
    return values[torch.arange(len(values)), found.path[:, -1]]


def a_fresh_draw_after_a_rejection(patch: pytest.MonkeyPatch) -> None:
    """The bonus token comes from the target's whole distribution, not from what the refused drafts left of it."""
    rejection = rules.rejection

    def planted(tree: DraftTree, target: Tensor, tests: Tensor, settle: Any) -> Acceptance:
        found = rejection(tree, target, tests, settle)
        return with_bonus(found, settle(found.accepted, at_the_end(found, target)))

    patch.setattr(rules, "rejection", planted)


def a_fresh_draw_after_a_mismatch(patch: pytest.MonkeyPatch) -> None:
    """Where the target's draw is not among the drafts, it is thrown away and drawn again."""
    accept = rules.accept

    def planted(rule: str, tree: DraftTree, logits: Tensor, lengths: Tensor, keys: Tensor, *rest: Any) -> Acceptance:
        found = accept(rule, tree, logits, lengths, keys, *rest)
        again = draw(logits, tree.depths, lengths, stream_keys(keys, 99), tree.max_depth, *rest)
        return with_bonus(found, at_the_end(found, again))

    patch.setattr(batches, "accept", planted)


PLANTED = [
    (one_token_too_many, "dflash"),
    (one_token_too_many, "dspark:draft=sampled"),
    (one_token_too_many, "dflash:rule=rejection"),
    (one_token_too_many, "dspark:rule=rejection"),
    (a_fresh_draw_after_a_rejection, "dflash:rule=rejection"),
    (a_fresh_draw_after_a_rejection, "dspark:rule=rejection"),
    (a_fresh_draw_after_a_rejection, "ddtree:tree-draft=sampled:rule=rejection"),
    (a_fresh_draw_after_a_mismatch, "dflash"),
    (a_fresh_draw_after_a_mismatch, "ddtree"),
]


@pytest.mark.parametrize(("plant", "text"), PLANTED)
def test_planted_errors_are_found(models: Models, monkeypatch: pytest.MonkeyPatch, plant: Plant, text: str) -> None:
    """They are large: 5,120 draws do, even where a tree holds most tokens, so that few draws of the target miss it."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        check(models, Cell(text, Sampling(1.0), LARGE, 5120))


def test_other_tokens_of_the_right_distribution_are_found_under_match(models: Models) -> None:
    cell = Cell("ar", Sampling(1.0), LARGE, 1024)
    outputs = models.outputs(cell).roll(1, 0)
    compare(outputs, models.exact(cell.sampling), VOCAB)
    with pytest.raises(AssertionError, match="differ from autoregressive"):
        check_tokens(models, cell, outputs)


# Draft distributions in bfloat16
#
# Rounding to bfloat16 moves a probability by at most 2^-8 of itself, so that N draws add about N / 2^16 to a chi-square
# statistic at most, whatever the distribution: no outputs of three tokens in tens of thousands can show it. What can
# are millions of draws at one position, where the drafter says what the target says, so that every draft counts, and
# the probabilities lie next to the middle between two bfloat16 numbers.

_DOWN, _UP, _STEP = 0.5 + 2.0**-9, 0.125 + 2.0**-11, 2.0**-19
ROUNDED = torch.tensor([_DOWN - _STEP, *[_UP + _STEP] * 3, 1 - _DOWN - 3 * _UP - 2 * _STEP])
DRAWS = 8_000_000
AT_ONCE = 1_000_000


def sampled_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Drafts are sampled from rounded probabilities, and tested as if they were from exact ones."""

    def planted(drafts: Drafts, logits: Tensor, slot: int = 0) -> Tensor:
        assert drafts.noise is not None
        exact = drafts.sampling.probabilities(logits)
        drafts.probabilities.append(exact)
        return argmax(exact.bfloat16().float().log() + drafts.noise[:, slot : slot + 1])

    patch.setattr(Drafts, "pick", planted)


def remembered_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Drafts are sampled from exact probabilities, and tested as if they were from rounded ones."""
    exact: Any = Drafts.draft_probs
    patch.setattr(Drafts, "draft_probs", property(lambda drafts: exact.fget(drafts).bfloat16().float()))


def check_one_position(draws: int) -> None:
    """`draws` tokens behind a drafter that is the target, under rejection."""
    options, logits = ChainOptions(rule="rejection"), ROUNDED.log()
    rows = min(draws, AT_ONCE)
    parts = [
        one_position(options, logits, logits, Sampling(1.0), rows, seed=part).tokens for part in range(draws // rows)
    ]
    compare(torch.cat(parts), logits.double().softmax(0), len(logits))


def test_a_drafter_that_is_the_target() -> None:
    check_one_position(100_000)


@pytest.mark.slow
def test_millions_of_draws_of_a_drafter_that_is_the_target() -> None:
    check_one_position(DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [sampled_in_bfloat16, remembered_in_bfloat16])
def test_draft_distributions_in_bfloat16_are_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    moved = (ROUNDED.bfloat16().float() / ROUNDED - 1).abs()
    assert moved[:4].min() > 0.0038
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        check_one_position(DRAWS)
