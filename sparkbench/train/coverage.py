"""Coverage: how often a drafter's k best tokens of a slot hold the token that the target then says.

Slot by slot and on its own: whether the slots before it were right does not matter, which sets this apart from
acceptance. All anchors of a text run in one forward (`slots.py`). A Markov head is given the true token before a slot.
The DART paper calls the first best alone hit@1.

Not covered: sliding windows. Texts should be no longer than a drafter's window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkbench.decoding.target import Target
from sparkbench.drafters.block import BlockDrafter
from sparkbench.drafters.dart import DartDrafter
from sparkbench.train.slots import hidden_at

ANCHORS = 32  # of a forward; bounds the logits that are held at once


@torch.inference_mode()
def covered(
    drafter: BlockDrafter | DartDrafter, target: Target, ids: Sequence[int], start: int, best: Sequence[int]
) -> Tensor:
    """[1 + len(best), L] int64: slots that were judged, and those whose token is among the `best` first ones.

    ids:   a prompt and what the target says after it.   start: where that begins, 1 or above.
    Every token from `start` on roots a block, of which the slots inside the text count. Equal logits rank by token id.
    """
    text = torch.tensor([list(ids)], device=target.device)
    session = target.session(1, len(ids), drafter.config.target_layer_ids)
    features = session.prefill([ids]).features
    session.close()
    assert features is not None
    length, last = drafter.config.draft_length, len(ids) - 1
    found = torch.zeros(1 + len(best), length, dtype=torch.int64)
    for anchors in torch.arange(start, last, device=target.device).split(ANCHORS):
        places = anchors[:, None] + torch.arange(length, device=target.device)
        inside = places.clamp(max=last - 1)
        hidden = hidden_at(drafter, target, features, text, anchors[None])[0]
        logits = drafter.head(hidden, target).float()
        if drafter.markov_head is not None:
            logits = logits + drafter.markov_head.forced(text[0, inside], hidden).float()
        labels = text[0, inside + 1, None]
        score = logits.gather(2, labels)
        before = torch.arange(logits.shape[2], device=logits.device) < labels
        rank = ((logits > score) | ((logits == score) & before)).sum(2)
        judged = places < last
        found += torch.stack([judged.sum(0), *((judged & (rank < count)).sum(0) for count in best)]).cpu()
    return found
