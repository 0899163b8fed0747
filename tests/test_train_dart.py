"""Training of DART drafters: what a slot may see, that training computes what inference does, and the divergence."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import tiny_model
from probes import context_of
from tiny_drafters import DART_LAYERS
from torch import Tensor

from sparkbench import drafters
from sparkbench.decoding.target import Target
from sparkbench.drafters.dart import DartDrafter, DartLayer
from sparkbench.train import block
from sparkbench.train.fit import step_generator
from sparkbench.train.loss import BlockTargets, divergence, slot_weights
from sparkbench.train.recipe import DartRecipe, Optimisation, Phase, Recipe
from sparkbench.train.responses import Responses
from sparkbench.train.slots import dart_hidden, hidden_at

RECIPE = DartRecipe(
    hidden_size=32,
    intermediate_size=40,
    head_dim=8,
    init_std=0.3,
    block_size=5,
    target_layer_ids=(0, 2, 3),
    sequences_per_step=2,
    anchors=3,
    max_length=24,
    precision="float32",
    compile=False,
    phases=(Phase(Optimisation(steps=6, lr=1e-2), 2.0),),
)
ANCHORS = torch.tensor([[3, 7, 11], [5, 5, 1]])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.wrap(tiny_model(layers=DART_LAYERS), name="tiny")


def drafter_of(target: Target, recipe: DartRecipe = RECIPE) -> DartDrafter:
    built = block.build(recipe, block.checkpoint_config(recipe, target, 0), target, seed=3)
    assert isinstance(built, DartDrafter)
    return built.eval()


def looking_around(target: Target) -> DartDrafter:
    """A drafter whose masks attend to all rows, not, as those of a new one, to the rows just before them alone."""
    drafter = drafter_of(target)
    attention, draws = drafter.midlayer.self_attn, torch.Generator().manual_seed(1)
    for projection in (attention.q_proj, attention.k_proj):
        torch.nn.init.normal_(projection.weight, std=0.1, generator=draws)
    return drafter


@pytest.fixture(scope="module")
def read(target: Target) -> tuple[Tensor, Tensor]:
    """Ids [2, 14] and the target's features of them."""
    ids = torch.randint(target.vocab_size, (2, 14), generator=torch.Generator().manual_seed(0))
    session = target.session(2, 20, RECIPE.target_layer_ids)
    features = session.prefill(ids.tolist()).features
    session.close()
    assert features is not None
    return ids, features


@pytest.mark.parametrize("shifted", [True, False])
def test_training_computes_what_inference_does(target: Target, read: tuple[Tensor, Tensor], shifted: bool) -> None:
    ids, features = read
    drafter = drafter_of(target, replace(RECIPE, shifted=shifted))
    with torch.inference_mode():
        trained = hidden_at(drafter, target, features, ids, ANCHORS)
        assert trained.shape == (2, 3, 5, 32)
        for row in range(2):
            for place, anchor in enumerate(ANCHORS[row].tolist()):
                part, before = features[row : row + 1, :anchor], ids[row : row + 1, :anchor]
                context = context_of(target, part, [anchor], [int(ids[row, anchor])], before)
                inferred = drafter.begin(target, 1, 32, 5).draft(context)
                torch.testing.assert_close(trained[row, place], inferred.hidden[0], rtol=1e-4, atol=1e-4)
                logits = drafter.head(trained[row, place], target)
                torch.testing.assert_close(logits, inferred.logits[0], rtol=1e-4, atol=1e-4)


def test_the_future_is_not_seen(target: Target, read: tuple[Tensor, Tensor]) -> None:
    """A block changes with the features before its anchor and with the anchor's token, and with nothing later."""
    ids, features = read
    drafter = looking_around(target)
    hidden = dart_hidden(drafter, target, features, ids, ANCHORS)
    for place, anchor in enumerate(ANCHORS[0].tolist()):
        later, tokens = features.clone(), ids.clone()
        later[0, anchor:] += 1.0
        tokens[0, anchor + 1 :] = (tokens[0, anchor + 1 :] + 1) % target.vocab_size
        changed = dart_hidden(drafter, target, later, tokens, ANCHORS)
        assert torch.equal(changed[0, place], hidden[0, place])
        for what, where in ((features.clone(), "features"), (ids.clone(), "ids")):
            if where == "features":
                what[0, anchor - 1] += 1.0
                seen = dart_hidden(drafter, target, what, ids, ANCHORS)
            else:
                what[0, anchor] = (what[0, anchor] + 1) % target.vocab_size
                seen = dart_hidden(drafter, target, features, what, ANCHORS)
            assert all(not torch.allclose(seen[0, place, slot], hidden[0, place, slot]) for slot in range(5))


def test_blocks_do_not_see_each_other(target: Target, read: tuple[Tensor, Tensor]) -> None:
    """Masks of one block are changed in the keys and values that attention reads; only slots behind them may notice."""
    ids, features = read
    drafter = looking_around(target)
    hidden = dart_hidden(drafter, target, features, ids, ANCHORS)
    masks = drafter.config.masks
    keys_values: Callable[..., tuple[Tensor, Tensor]] = DartLayer.keys_values
    for changed_block, changed_mask in ((0, 0), (1, 2), (2, masks - 1)):

        def spoilt(
            layer: DartLayer, inputs: Tensor, rope: Any, at: int = changed_block * masks + changed_mask
        ) -> tuple[Tensor, Tensor]:
            keys, values = keys_values(layer, inputs, rope)
            if inputs.shape[1] == ANCHORS.shape[1] * masks:
                keys[:, :, at] += 3.0
                values[:, :, at] += 3.0
            return keys, values

        with patch.object(DartLayer, "keys_values", spoilt), torch.no_grad():
            found = dart_hidden(drafter, target, features, ids, ANCHORS)
        for place in range(3):
            for slot in range(5):
                same = torch.equal(found[0, place, slot], hidden[0, place, slot])
                # slot s is the row of mask s - 1; slot 0 is the last row of the prefix
                assert same == (place != changed_block or slot - 1 < changed_mask), (place, slot)


def test_masks_begin_by_looking_back(target: Target, read: tuple[Tensor, Tensor]) -> None:
    """A new drafter's masks attend to the rows just before them."""
    ids, features = read
    drafter = drafter_of(target)
    layer, last = drafter.midlayer, ids.shape[1] - 1
    with torch.no_grad():
        inputs = layer.inputs(target.embed(ids[:, 1:]), drafter.fc(features[:, :-1]))
        keys, _ = layer.keys_values(inputs, drafter.rope(torch.arange(last), torch.float32))
        masks = layer.mask_rep.expand(1, 1, -1)
        queries = layer.queries(masks, drafter.rope(torch.tensor([last]), torch.float32))
        scores = (queries @ keys.repeat_interleave(2, 1).transpose(2, 3)).mean((0, 1, 2))
    assert scores[-1] > scores[-3] > scores[0]
    assert scores[-1] > block.LOOK_BACK**2 * 8 / 3  # of 8 for rows at no distance, all of whose inputs are common


def test_divergence(target: Target) -> None:
    """KL from the target by its definition, weighted; 0 where both agree; least at the mean of several targets."""
    generator = torch.Generator().manual_seed(1)
    logits, wanted = (torch.randn(2, 3, 4, 11, generator=generator) for _ in range(2))
    weights = torch.rand(2, 3, 4, generator=generator)
    zeros = torch.zeros(2, 3, 4, dtype=torch.int64)
    p, q = wanted.softmax(-1), logits.softmax(-1)
    expected = ((p * (p / q).log()).sum(-1) * weights).sum() / weights.sum()
    torch.testing.assert_close(divergence(logits, BlockTargets(zeros, zeros, weights, wanted)), expected)
    assert divergence(wanted, BlockTargets(zeros, zeros, weights, wanted)).abs() < 1e-6

    table = p.reshape(-1, 11).mean(0).log().requires_grad_()
    even = BlockTargets(zeros, zeros, torch.ones(2, 3, 4), wanted)
    divergence(table.expand(2, 3, 4, 11), even).backward()
    assert table.grad is not None
    assert table.grad.abs().max() < 1e-6


def test_weights_are_those_of_the_paper() -> None:
    """gamma^(t - 1) with gamma = 0.6 for t = 1 to 8; and the same steps as the other drafters take."""
    recipe = Recipe()
    for phase in recipe.dart.phases:
        torch.testing.assert_close(slot_weights(8, phase.decay), 0.6 ** torch.arange(8))
    assert recipe.dart.block_size == 8
    assert [p.optimisation for p in recipe.dart.phases] == [p.optimisation for p in recipe.dflash.phases]


def test_train_and_export(target: Target, tmp_path: Path) -> None:
    """The loss falls, all weights learn, tokens beyond an answer's end count for nothing, and the file loads again."""
    draws = step_generator(5)
    rows = [(torch.randint(97, (4,), generator=draws).tolist(), [7, 8, 9, 10] * 3, False) for _ in range(4)]
    answers = Responses.of(rows)
    recipe = replace(RECIPE, phases=(Phase(Optimisation(steps=40, lr=1e-2), 2.0),))
    config = block.checkpoint_config(recipe, target, 0)
    start = block.trainable(drafter_of(target, recipe))
    drafter, result = block.train(recipe, config, target, answers, 3, tmp_path, "dart", lambda line: None)
    assert result.losses[-1] < 0.7 * result.losses[0]
    for name, weight in block.trainable(drafter).items():
        assert not torch.equal(weight, start[name]), name
    block.export(drafter, config, tmp_path / "out")
    loaded = drafters.load("dart", str(tmp_path / "out"), target)
    assert loaded.config.draft_length == 5
    assert loaded.target_ids is None

    losses = []
    for filler in (0, 5):
        padded = Responses(answers.ids.clone(), answers.starts, answers.ends - 4, answers.sampled)
        padded.ids[:, -4:] = filler
        again = block.train(recipe, config, target, padded, 3, tmp_path / str(filler), "dart", print, stop_after=1)
        losses.append(again[1].losses)
    assert losses[0] == losses[1]
