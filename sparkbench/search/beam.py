"""Beam search with fixed widths, as published beside the best-first tree.

Its shape is decided before the draft is seen: depth d holds the widths[d] best children of the nodes kept above,
whatever the other depths would have offered. It is no exact builder and stands beside the others to show what a fixed
shape costs.
"""

from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.search.assemble import all_nodes, root_alone
from sparkbench.search.candidates import SearchSpec, Stage, TreeHead, quiet, space_of
from sparkbench.search.conditional import fixed_levels

SCHEDULES = "flat[-LEAST], flat_depth-DEPTHS, geometric[-DECAY], inv_geometric[-DECAY] or widths such as 16/16/8/8"


def beam_tree(
    logits: Tensor, head: TreeHead | None, anchors: Tensor, spec: SearchSpec, stage: Stage = quiet
) -> DraftTree:
    """The tree with spec.widths (empty: the flat schedule) nodes a depth, in order of depth, then score.

    The root's token joins no shortlist, and a node may have any number of children. Widths of 0 or less are left
    out, those beyond the draft are not used. Raises UsageError if the widths exceed the budget.
    """
    _, depth, vocab = logits.shape
    planned = planned_widths(spec, depth)
    if not planned or not vocab:
        return root_alone(anchors)
    with stage("build/topk"):
        space = space_of(logits, head, anchors, spec, root=False)
    levels, _ = fixed_levels(space, anchors, planned, space.size, stage)
    with stage("build/expand"):
        return all_nodes(levels)


def planned_widths(spec: SearchSpec, depth: int) -> tuple[int, ...]:
    """The widths that `beam_tree` uses. UsageError if they exceed the budget."""
    planned = spec.widths or widths("flat", spec.budget, depth)
    planned = tuple(width for width in planned if width > 0)[:depth]
    if sum(planned) > spec.budget:
        raise UsageError(f"beam: widths must add up to the budget of {spec.budget} or less, not {sum(planned)}")
    return planned


def widths(schedule: str, budget: int, depth: int, min_width: int = 2, decay: float = 0.6) -> tuple[int, ...]:
    """Nodes of each depth for a draft of `depth` rows. `schedule` is one of SCHEDULES, else UsageError:

    flat            as many depths as leave each `min_width` nodes, the remainder to the first ones;
    flat_depth      the same with a given number of depths;
    geometric       each depth has `decay` times the nodes of the one above; may leave some of the budget;
    inv_geometric   that, reversed;
    explicit ones are given as they are.
    """
    if all(part.isdecimal() for part in schedule.split("/")):
        return tuple(map(int, schedule.split("/")))
    name, dash, text = schedule.partition("-")
    try:
        if name == "flat":
            least = _positive(int(text) if dash else min_width)
            return _flat(budget, budget // least, depth)
        if name == "flat_depth":
            return _flat(budget, _positive(int(text)), depth)
        if name in ("geometric", "inv_geometric"):
            falling = _geometric(budget, depth, float(text) if dash else decay)
            return falling if name == "geometric" else falling[::-1]
    except ValueError:
        pass
    raise UsageError(f"widths must be {SCHEDULES}, not {schedule!r}")


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(number)
    return number


def _flat(budget: int, levels: int, depth: int) -> tuple[int, ...]:
    if not budget or not depth:
        return ()
    each, extra = divmod(budget, levels := max(1, min(levels, depth, budget)))
    return tuple(each + (level < extra) for level in range(levels))


def _geometric(budget: int, depth: int, decay: float) -> tuple[int, ...]:
    if not 0 < decay < 1:
        raise ValueError(decay)
    found: list[int] = []
    wanted = max(1.0, budget * (1 - decay))
    while len(found) < depth and sum(found) < budget:
        found.append(max(1, min(budget - sum(found), round(wanted))))
        wanted *= decay
    return tuple(found)
