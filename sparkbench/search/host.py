"""Conditional best-first search on the host: the published constructions, kept as yardsticks.

All three walk a heap (heap.py) and differ in where a node's children come from:

- `reference`: everything is copied to the host, and each node costs a product with the whole of W2;
- `heap`: the same with the candidates alone;
- `table`: the distributions below every candidate at every depth are made beforehand, on the device.

They give the same tree as `level`. Rows of a batch are searched one after the other.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.search.assemble import root_alone
from sparkbench.search.candidates import SearchSpec, Space, Stage, TreeHead, log_probs, quiet, set_size, space_of
from sparkbench.search.heap import Children, Family, as_tree, walk
from sparkbench.search.ranking import best_ids, capacity

_SLAB = 2**29 // 4  # float32 entries in 512 MiB: the most that the table holds before it is ranked

Prepare = Callable[[Space, Tensor, int, Stage], Children]  # space of one row, its anchor [1], fan-out, stage


def reference_tree(
    logits: Tensor, head: TreeHead | None, anchors: Tensor, spec: SearchSpec, stage: Stage = quiet
) -> DraftTree:
    """The tree of `spec`, with a product over the whole vocabulary for every node."""
    return _search(logits, head, anchors, spec, stage, _on_demand, gather=False)


def heap_tree(
    logits: Tensor, head: TreeHead | None, anchors: Tensor, spec: SearchSpec, stage: Stage = quiet
) -> DraftTree:
    """The tree of `spec`, with a product over the candidates for every node."""
    return _search(logits, head, anchors, spec, stage, _on_demand)


def table_tree(
    logits: Tensor, head: TreeHead | None, anchors: Tensor, spec: SearchSpec, stage: Stage = quiet
) -> DraftTree:
    """The tree of `spec`, from a table of all transitions between candidates.

    Raises UsageError where those between two depths would fill more than 512 MiB.
    """
    return _search(logits, head, anchors, spec, stage, _table)


def _search(
    logits: Tensor,
    head: TreeHead | None,
    anchors: Tensor,
    spec: SearchSpec,
    stage: Stage,
    prepare: Prepare,
    gather: bool = True,
) -> DraftTree:
    _, depth, vocab = logits.shape
    width = 1 + capacity(depth, spec.fan_out(set_size(spec, depth, vocab)), spec.budget)
    if width == 1:
        return root_alone(anchors)
    rows = []
    for row in range(len(anchors)):
        anchor = anchors[row : row + 1]
        with stage("build/topk"):
            space = space_of(logits[row : row + 1], head and head.row(row), anchor, spec, gather=gather, trim=True)
        fanout = spec.fan_out(space.size)
        children = prepare(space, anchor, fanout, stage)
        with stage("build/expand"):
            rows.append(walk(int(anchor), depth, fanout, width, children))
    return as_tree(rows, width, anchors.device)


def _on_demand(space: Space, anchor: Tensor, fanout: int, stage: Stage) -> Children:
    """Children computed when they are asked for, and again where more of them are, which is rare."""
    with stage("build/transfer"):
        space = space if space.logits.is_cpu else on_host(space)

    def children(depth: int, token: int, count: int) -> Family:
        bias = space.bias(depth, space.latents(depth, torch.tensor([[token]])))
        logits, normaliser = space.distribution(depth, bias, 1)
        slots = best_ids(logits[0], count)
        steps = log_probs(logits[0].gather(1, slots), normaliser[0])
        return steps[0].tolist(), space.tokens(depth, slots)[0].tolist()

    return children


def on_host(space: Space) -> Space:
    """A copy of `space`, of one row, on the host. The head's own copy of its tables is made once and kept."""
    ids, hidden = (part if part is None else part.cpu() for part in (space.ids, space.hidden))
    w2 = None
    head = None if space.head is None else space.head.on_host()
    if head is not None and space.w2 is not None:
        w2 = head.w2 if space.w2.dim() == 2 else space.w2.cpu()
    return replace(space, logits=space.logits.cpu(), ids=ids, hidden=hidden, head=head, w2=w2)


def _table(space: Space, anchor: Tensor, fanout: int, stage: Stage) -> Children:
    """Children looked up: the `fanout` best below every candidate of the depth above."""
    parents = [anchor, *(_candidates(space, depth) for depth in range(space.depth - 1))]
    most = max(map(len, parents))
    check_table(most)
    ranked: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parents]
    rows = max(1, _SLAB // space.size)
    shared = space.w2 is not None and (space.w2.dim() == 2 or space.w2.shape[1] == 1)
    for start in range(0, most, rows):
        bias = previous = None
        for depth, every in enumerate(parents):
            part = every[None, start : start + rows]
            if not part.numel():
                continue
            with stage("build/bias"):
                latents = space.latents(depth, part)
                # A head that ignores the depth has one bias for all depths, if they have the same candidates.
                if latents is not None and not (shared and previous is not None and torch.equal(latents, previous)):
                    bias, previous = space.bias(depth, latents), latents
            with stage("build/expand"):
                logits, normaliser = space.distribution(depth, bias, part.shape[1])
                slots = best_ids(logits[0], fanout)
                steps = log_probs(logits[0].gather(1, slots), normaliser[0])
                ranked[depth].append((steps, space.tokens(depth, slots.reshape(1, -1)).view(slots.shape)))
    with stage("build/transfer"):
        steps_of, tokens_of = ([torch.cat([part[i] for part in parts]).cpu() for parts in ranked] for i in (0, 1))
        places = [{token: place for place, token in enumerate(every.tolist())} for every in parents]

    def children(depth: int, token: int, count: int) -> Family:
        place = places[depth][token]
        return steps_of[depth][place, :count].tolist(), tokens_of[depth][place, :count].tolist()

    return children


def check_table(candidates: int) -> None:
    """UsageError where so many candidates need too large a table."""
    if candidates**2 > _SLAB:
        raise UsageError(f"table: at most {int(_SLAB**0.5)} candidate tokens, not {candidates}; set candidates=C")


def _candidates(space: Space, depth: int) -> Tensor:
    """Ids of the candidates of a depth, for a space of one row."""
    if space.ids is not None:
        return space.ids[0, min(depth, space.ids.shape[1] - 1)]
    if space.hidden is not None:
        return (~space.hidden[0, min(depth, space.hidden.shape[1] - 1)]).nonzero().squeeze(1)
    return torch.arange(space.size, device=space.logits.device)
