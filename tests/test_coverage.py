"""Coverage, against drafting at every token of a text and ranking by hand."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from probes import context_of
from tiny_drafters import DART_LAYERS, config_of, dart_config, dspark_config, save_dart, save_drafter

from sparkbench import drafters
from sparkbench.decoding.target import Target
from sparkbench.train.coverage import covered


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dart"])
def test_coverage(tmp_path: Path, kind: str) -> None:
    target = Target.wrap(tiny_model(layers=DART_LAYERS), name="tiny")
    layers = {"num_target_layers": DART_LAYERS}
    config = config_of("z-lab") if kind == "dflash" else dspark_config("vanilla")
    folder = save_dart(tmp_path, dart_config()) if kind == "dart" else save_drafter(tmp_path, config | layers)
    drafter = drafters.load(kind, str(folder), target)
    ids = torch.randint(97, (70,), generator=torch.Generator().manual_seed(0))
    ids[30:] = ids[5:6]  # some tokens are frequent, so that ranks vary
    start, best, length = 9, (1, 20, 60), drafter.config.draft_length
    session = target.session(1, 80, drafter.config.target_layer_ids)
    features = session.prefill([ids.tolist()]).features
    session.close()
    assert features is not None
    expected = torch.zeros(4, length, dtype=torch.int64)
    with torch.inference_mode():
        for anchor in range(start, len(ids) - 1):
            context = context_of(target, features[:, :anchor], [anchor], [int(ids[anchor])], ids[None, :anchor])
            block = drafter.begin(target, 1, 100, length).draft(context)
            for slot in range(min(length, len(ids) - 1 - anchor)):
                logits = block.logits[0, slot].clone()
                if kind == "dspark":
                    logits += drafter.markov_head.forced(ids[anchor + slot][None, None], block.hidden)[0, 0]
                order = sorted(range(97), key=lambda token: (-logits[token].item(), token))
                rank = order.index(int(ids[anchor + slot + 1]))
                expected[:, slot] += torch.tensor([1, *(rank < count for count in best)])
    found = covered(drafter, target, ids.tolist(), start, best)
    assert found.tolist() == expected.tolist()
    assert 0 < found[2].sum() < found[3].sum() < found[0].sum()
