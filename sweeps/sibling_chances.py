"""How often the sibling of each rank is accepted in sampled trees: what sparkbench.search.sampled.CHANCES rests on.

    python sweeps/sibling_chances.py [--method sparklingtree] [--temperature 1] [--limit 8]

Decodes bundled prompts with sampled trees under rejection and counts, at every node of an accepted path that had
children, which of them was taken: the chance of rank r is that of being accepted given that those before it were not.
"""

import argparse
import json

import torch

from sparkbench import models
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.method import Context
from sparkbench.decoding.sampling import noise_key
from sparkbench.decoding.tree import DraftTree
from sparkbench.measure import first_turns
from sparkbench.settings import SweepConfig
from sparkbench.sweep import plan


class Counter:
    """An observer of the loop. tried, taken: by rank."""

    def __init__(self) -> None:
        self.tried = [0] * 64
        self.taken = [0] * 64

    def __call__(self, context: Context, tree: DraftTree, acceptance: Acceptance) -> None:
        for row in range(tree.batch):
            parents, ranks = tree.parents[row].tolist(), tree.ranks[row].tolist()
            path = acceptance.path[row].tolist()
            accepted = int(acceptance.accepted[row])
            for depth in range(accepted + 1):
                children = [n for n in range(1, tree.width) if parents[n] == path[depth] and bool(tree.valid[row, n])]
                won = ranks[path[depth + 1]] if depth < accepted else len(children)
                for rank in range(min(won + 1, len(children))):
                    self.tried[rank] += 1
                if depth < accepted:
                    self.taken[won] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--method", default="sparklingtree")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--limit", type=int, default=8)
    arguments = parser.parse_args()
    config = SweepConfig(
        methods=(f"{arguments.method}:tree-draft=sampled:rule=rejection",),
        budgets=(arguments.budget,),
        temperatures=(arguments.temperature,),
        limit=arguments.limit,
    )
    planned = plan(config)
    loaded = models.load(planned, "chances")
    decode = DecodeConfig(config.max_new_tokens, config.sampling(arguments.temperature))
    counter = Counter()
    for ids in first_turns(planned, loaded):
        generate(loaded.target, loaded.methods[-1], [Request(ids, noise_key(ids, 0))], decode, counter)
    chances = [taken / tried for taken, tried in zip(counter.taken, counter.tried, strict=True) if tried >= 20]
    for rank, chance in enumerate(chances):
        print(f"rank {rank:>2}: accepted in {100 * chance:5.1f} % of {counter.tried[rank]}")
    print(json.dumps([round(chance, 3) for chance in chances]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
