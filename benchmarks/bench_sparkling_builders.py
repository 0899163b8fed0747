"""Compares the builders of SparklingTree's tree on one machine, in one process.

    python benchmarks/bench_sparkling_builders.py

Builders take turns, and the median of the paired ratios is printed (above 1: `level` is faster), so that a machine busy
with something else slows all alike. Times are the process's own (CPU) and wall. Three settings: about 2,000 tokens
that are all candidates, so that the search alone is measured; 151,936 with 128 candidates a depth, which adds
the shortlist that all builders share; and the whole vocabulary. Drafts are synthetic: noise, one token a row raised
to a probability that falls from 0.9 to 0.3 with the depth, and a Markov bias of deviation 1.

On a GPU it adds the fixed-shape search as a CUDA graph: time, how often too few parents are expanded, memory, the
precision of the product with W2, and the time that reading W2 alone takes. The last line is one JSON object. That the
trees are equal is tested in tests/test_conditional_search.py.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkbench.search import CONDITIONAL_BUILDERS, SearchSpec, fixed_tree

RANK, ROWS = 256, 16
Row = dict[str, Any]


@dataclass(frozen=True)
class Head:
    w1: Tensor
    w2: Tensor

    def latents(self, depth: int, tokens: Tensor) -> Tensor:
        return self.w1[tokens]

    def row(self, row: int) -> "Head":
        return self

    def on_host(self) -> "Head":
        return self


def draft(vocab: int, generator: torch.Generator) -> Tensor:
    """[1, ROWS, vocab] float32."""
    logits = torch.randn(1, ROWS, vocab, generator=generator) * 3
    chance = torch.linspace(0.9, 0.3, ROWS)[None, :, None]
    token = torch.randint(vocab, (1, ROWS, 1), generator=generator)
    return logits.scatter(2, token, logits.logsumexp(-1, keepdim=True) + torch.logit(chance))


def head_of(vocab: int, generator: torch.Generator) -> Head:
    w1, w2 = (torch.randn(vocab, RANK, generator=generator) for _ in range(2))
    return Head(w1 / RANK**0.5, w2)


def timed(work: Mapping[str, Callable[[], object]], repeats: Mapping[str, int]) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall milliseconds of each turn; in a turn every piece of work runs that has repeats left."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for turn in range(1 + max(repeats.values())):
        for name, run in work.items():
            if turn <= repeats[name]:
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                times[name].append(((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3))
    return {name: each[1:] if len(each) > 2 else each for name, each in times.items()}  # the first turn warms up


def median(times: list[tuple[float, float]], which: int = 0) -> float:
    return statistics.median(each[which] for each in times)


def measure(setting: str, logits: Tensor, head: Head, spec: SearchSpec, repeats: Mapping[str, int]) -> Row:
    anchors = torch.zeros(1, dtype=torch.int64)
    work = {name: lambda name=name: CONDITIONAL_BUILDERS[name](logits, head, anchors, spec) for name in repeats}
    times = timed(work, repeats)
    row: Row = {"setting": setting, "budget": spec.budget, "fanout": spec.fanout}
    for name, each in times.items():
        row |= {f"{name}_cpu_ms": median(each), f"{name}_wall_ms": median(each, 1)}
        if name != "level":  # turns are paired from the end, where both have them
            row[f"{name}_over_level"] = statistics.median(
                slow[0] / fast[0] for slow, fast in zip(each, times["level"], strict=False)
            )
    shown = "  ".join(f"{name} {row[f'{name}_cpu_ms']:.1f} ({row[f'{name}_wall_ms']:.1f}) ms" for name in times)
    ratios = "  ".join(f"{name} {row[f'{name}_over_level']:.2f}" for name in times if name != "level")
    print(f"{setting:>18}  B {spec.budget:>3}  K {spec.fanout:>2}   {shown}   / level: {ratios}", flush=True)
    return row


def chain(logits: Tensor, head: Head, repeats: int) -> Row:
    """The greedy chain of DSpark: its Markov steps beside products with W2 alone."""
    latent = head.w1[0]

    def steps() -> None:
        token = torch.zeros(1, dtype=torch.int64)
        for row in logits[0]:
            token = (row + head.w2 @ head.latents(0, token)[0]).argmax()[None]

    def products() -> None:
        for _ in range(ROWS):
            head.w2 @ latent

    times = timed({"steps": steps, "products": products}, {"steps": repeats, "products": repeats})
    row: Row = {"chain_cpu_ms": median(times["steps"]), "products_cpu_ms": median(times["products"])}
    print(f"greedy chain of {ROWS}: {row['chain_cpu_ms']:.1f} ms, its products with W2 {row['products_cpu_ms']:.1f} ms")
    return row


def device_ms(run: Callable[[], object], repeats: int = 50) -> float:
    """Milliseconds of device time a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def on_gpu(vocab: int, draws: int, generator: torch.Generator) -> list[Row]:
    """The fixed-shape search as a CUDA graph at a budget of 64, and what bounds it."""
    head = Head(*(part.cuda() for part in vars(head_of(vocab, generator)).values()))
    logits, anchors = draft(vocab, generator).cuda(), torch.zeros(1, dtype=torch.int64, device="cuda")
    latents = head.w1[:64].contiguous()
    rows: list[Row] = [{"read_w2_ms": ROWS * device_ms(lambda: head.w2 @ latents[0])}]

    exact = latents.double() @ head.w2.double().T
    small, w2 = latents.bfloat16(), head.w2.bfloat16()
    products: dict[str, Callable[[], Tensor]] = {
        "float32": lambda: latents @ head.w2.T,
        "tf32": lambda: latents @ head.w2.T,
        "bfloat16": lambda: torch.mm(small, w2.T, out_dtype=torch.float32),
    }
    for name, product in products.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rows.append({"product": name, "worst_error": float((product() - exact).abs().max()), "ms": device_ms(product)})
    torch.set_float32_matmul_precision("highest")

    for candidates in (0, 128):
        spec = SearchSpec(64, candidates)
        for parents in (16, 32, 64):
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):  # fills the caches that must not be filled while capturing
                fixed_tree(logits, head, anchors, spec, parents=parents)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - held
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                _, overflow = fixed_tree(logits, head, anchors, spec, parents=parents)
            flags = 0
            for _ in range(draws):
                logits.copy_(draft(vocab, generator))
                graph.replay()
                flags += int(overflow.sum())
            setting = {"candidates": candidates, "parents": parents, "budget": spec.budget}
            rows.append(setting | {"ms": device_ms(graph.replay), "overflow": flags / draws, "peak_bytes": peak})
    print(*rows, sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--fanout", type=int, nargs="+", default=[0, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    many, few = options.repeats, 2
    settings: list[tuple[str, int, int, dict[str, int]]] = [
        ("2,000 tokens", 2000, 0, {"level": many, "heap": many, "table": few}),
        ("128 candidates", options.vocab, 128, {"level": many, "heap": many, "table": few, "reference": 1}),
        ("whole vocabulary", options.vocab, 0, {"level": few, "heap": few}),
    ]
    rows, others = [], []
    with torch.inference_mode():
        for setting, vocab, candidates, repeats in settings:
            head, logits = head_of(vocab, generator), draft(vocab, generator)
            for budget in options.budget:
                for fanout in options.fanout:
                    rows.append(measure(setting, logits, head, SearchSpec(budget, candidates, fanout), repeats))
        others.append(chain(logits, head, few))
        if torch.cuda.is_available():
            others += on_gpu(options.vocab, 64, generator)
    for setting, *_ in settings:
        for budget in options.budget:
            each = [row["heap_over_level"] for row in rows if (row["setting"], row["budget"]) == (setting, budget)]
            print(f"{setting}, budget {budget}: heap / level {min(each):.2f} to {max(each):.2f}")
    facts = {"benchmark": "sparkling_builders", "torch": torch.__version__, **vars(options)}
    print(json.dumps(facts | {"results": rows, "others": others}))


if __name__ == "__main__":
    main()
