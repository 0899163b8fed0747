"""What the host learns of a round: one small array a round, and the record made of it.

Everything else of a round stays on the device. Stopping is decided here on the host, from the tokens.
"""

import struct
from dataclasses import dataclass

import torch

from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.tree import DraftTree


@dataclass(frozen=True)
class Round:
    """One round of one row. In a batch, `stages_ns` are those of the whole batch's round.

    cold:        round 0, in which a drafter also runs over the prompt.
    nodes:       draft nodes proposed, root not counted.          max_depth: depth of the deepest.
    accepted:    A, draft tokens accepted, also beyond a stop token or the limit.
    committed:   M, tokens added to the output.
    offered_next:      a child existed below the deepest accepted node.
    accepted_node:     index of that node in the order of proposal, 0 for the root.
    expected_accepted: sum of exp(log_prob) over draft nodes, None where scores are no probabilities.
    """

    cold: bool
    nodes: int
    max_depth: int
    offered_next: bool
    accepted: int
    committed: int
    expected_accepted: float | None
    accepted_node: int
    stages_ns: dict[str, int]


@dataclass
class Fact:
    """What the host learns of one row's round, before it is truncated: `tokens` are the A accepted and the bonus token.

    in_place: the accepted path lies where it was written, so that nothing has to be moved.
    """

    accepted: int
    tokens: list[int]
    nodes: int
    max_depth: int
    offered_next: bool
    accepted_node: int
    in_place: bool
    expected: float | None
    committed: int = 0

    def as_round(self, cold: bool, stages: dict[str, int]) -> Round:
        return Round(
            cold=cold,
            nodes=self.nodes,
            max_depth=self.max_depth,
            offered_next=self.offered_next,
            accepted=self.accepted,
            committed=self.committed,
            expected_accepted=self.expected,
            accepted_node=self.accepted_node,
            stages_ns=stages,
        )


def to_host(tree: DraftTree, acceptance: Acceptance) -> list[Fact]:
    """One copy to the host: accepted count, expectation, path, tokens and tree facts of each row."""
    steps = tree.max_depth + 1
    columns = [acceptance.accepted[:, None], acceptance.tokens]
    if tree.log_probs is not None:
        # float64 bits travel as int64, so that one array holds everything
        chances = torch.where(tree.valid, tree.log_probs.double().exp(), 0.0)[:, 1:]
        columns.append(chances.sum(1, keepdim=True).view(torch.int64))
    if not tree.chain:
        end = acceptance.path[:, -1:]
        offered = (tree.parents == end).any(1, keepdim=True)
        nodes = tree.valid.sum(1, keepdim=True) - 1
        columns += [nodes, tree.depths.amax(1, keepdim=True), offered, acceptance.path]
    facts = []
    for accepted, *rest in torch.cat(columns, 1).tolist():
        tokens, rest = rest[: accepted + 1], rest[steps:]
        expected = None
        if tree.log_probs is not None:
            (expected,) = struct.unpack("<d", struct.pack("<q", rest[0]))
            rest = rest[1:]
        if tree.chain:
            facts.append(Fact(accepted, tokens, steps - 1, steps - 1, accepted < steps - 1, accepted, True, expected))
        else:
            nodes, depth, has_child, *path = rest
            in_place = path[: accepted + 1] == list(range(accepted + 1))
            facts.append(Fact(accepted, tokens, nodes, depth, bool(has_child), path[-1], in_place, expected))
    return facts
