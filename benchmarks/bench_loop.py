"""The decode loop, measured beside what it must not be worse than.

1. Autoregressive decoding of this project against `generate` of transformers, same model, same process, at a short and
   a long context. AR is the baseline of every speedup, so a slow AR would flatter all of them.
2. The share of decode time that no stage covers (`other`), for AR, DFlash and DDTree.

    python benchmarks/bench_loop.py [--target embedded] [--tokens 64] [--repeats 9]

The runs of a pair are interleaved and their order alternates; ratios are medians of paired ratios. The last line is one
JSON object.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from sparkbench import catalog, drafters, registry
from sparkbench.decoding.loop import DecodeConfig, Generation, Request, generate
from sparkbench.decoding.method import Method
from sparkbench.decoding.target import Target
from sparkbench.decoding.timing import covered

CONTEXTS = (64, 1024)


def against_generate(target: Target, context: int, tokens: int, repeats: int) -> float:
    """Median of (seconds of `generate` / seconds of our AR) over paired runs that return the same tokens."""
    ids = torch.randint(target.vocab_size, (1, context), generator=torch.Generator().manual_seed(context))
    ids = ids.to(target.device)
    request = Request(tuple(ids[0].tolist()))
    config = DecodeConfig(tokens, stop_ids=frozenset())
    method = registry.build(registry.Variant.parse("autoregressive"))
    outputs: dict[str, list[int]] = {}

    def ours() -> None:
        outputs["ours"] = list(generate(target, method, [request], config)[0].output_ids)

    def theirs() -> None:
        found = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs["theirs"] = found[0, context:].tolist()

    ratios = []
    for repeat in range(repeats + 1):
        first, second = (ours, theirs) if repeat % 2 else (theirs, ours)
        times = {run.__name__: _seconds(run, target.device) for run in (first, second)}
        if repeat:  # the first pair warms up
            ratios.append(times["theirs"] / times["ours"])
    if outputs["ours"] != outputs["theirs"]:
        raise SystemExit(f"AR and generate disagree at context {context}: {outputs}")
    return statistics.median(ratios)


def other_share(generations: list[Generation]) -> float:
    """Share of decode time outside all stages."""
    inside = sum(covered(round_.stages_ns) for generation in generations for round_ in generation.rounds)
    return 1 - inside / 1e9 / sum(generation.decode_s for generation in generations)


def methods_of(target: Target) -> dict[str, Method]:
    """AR, DFlash and DDTree-16 for the target's default drafter."""
    found: dict[str, Method] = {"autoregressive": registry.build(registry.Variant.parse("autoregressive"))}
    drafter = drafters.load("dflash", catalog.resolve_drafter("dflash", target.name), target)
    for name, budget in (("dflash", None), ("ddtree", 16)):
        found[name] = registry.build(registry.Variant.parse(name), drafter=drafter, budget=budget)
    return found


def _seconds(run: object, device: torch.device) -> float:
    assert callable(run)
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = catalog.resolve_target(arguments.target)
    target = Target.load(source, name=arguments.target, device=arguments.device)

    ratios = {c: against_generate(target, c, arguments.tokens, arguments.repeats) for c in CONTEXTS}
    for context, ratio in ratios.items():
        print(f"context {context:>5}: generate takes {ratio:.3f} times as long as our AR")

    ids = torch.randint(target.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    config = DecodeConfig(arguments.tokens, stop_ids=frozenset(), profile=True)
    shares = {}
    for name, method in methods_of(target).items():
        generate(target, method, [Request(tuple(ids[0]))], config)
        generations = [
            generation
            for _ in range(arguments.repeats)
            for row in ids
            for generation in generate(target, method, [Request(tuple(row))], config)
        ]
        shares[name] = other_share(generations)
        print(f"{name:<15}: {100 * shares[name]:.2f} % of decode time is outside all stages")
    print(json.dumps({"generate_over_ours": ratios, "other_share": shares}))


if __name__ == "__main__":
    main()
