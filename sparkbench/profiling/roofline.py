"""The roofline: what a forward must read and compute, and what this machine can do at most, measured here and now.

A forward over few tokens is bound by reading the weights, one over many by arithmetic. The share of the measured
bandwidth or peak that a forward reaches says how far it is from that bound; both low means that something else costs,
such as kernel launches. Weights of a small model stay in the caches of a CPU, which is faster than the bandwidth of the
memory that is measured: shares above 100 % say just that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparkbench.decoding.target import Target, dtype_name
from sparkbench.profiling.experts import mixtures

READ_BYTES = {"cpu": 2**28, "cuda": 2**31}
SIDE = {"cpu": 1024, "cuda": 8192}
TRIES = 7


@dataclass(frozen=True)
class Peaks:
    """The best of TRIES: a sum over a float32 array of `read_bytes`, and a square product of `side` in `dtype`."""

    bytes_per_s: float
    flops_per_s: float
    read_bytes: int
    side: int
    dtype: str


@dataclass(frozen=True)
class Work:
    """What one forward of a target needs, by counting its weights.

    dense_bytes:    all weights that every forward reads: not the experts, nor an embedding that is not the head's too.
    dense_products: of these, weights that are multiplied with every token (all matrices).
    expert_weights: weights of one expert, in all layers together; 0 for a dense model.
    layers:         for each layer, the context tokens it reads at most; None without a window.
    """

    itemsize: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dense_bytes: int
    dense_products: int
    expert_weights: int
    experts: int
    active: int
    layers: tuple[int | None, ...]

    @classmethod
    def of(cls, target: Target) -> "Work":
        model, found = target.model, mixtures(target)
        inputs, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        routed = {id(weight): weight for mixture in found for weight in mixture.experts.parameters()}
        experts = found[0].experts.num_experts if found else 0
        dense = [w for w in model.parameters() if id(w) not in routed and (w is not inputs or w is head)]
        return cls(
            itemsize=target.dtype.itemsize,
            hidden=target.hidden_size,
            heads=int(model.config.num_attention_heads),
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            dense_bytes=sum(weight.numel() * weight.element_size() for weight in dense),
            dense_products=sum(weight.numel() for weight in dense if weight.dim() > 1),
            expert_weights=sum(weight.numel() for weight in routed.values()) // max(experts, 1),
            experts=experts,
            active=found[0].gate.top_k if found else 0,
            layers=tuple(None if window is None else window - 1 for window in target.layer_windows),
        )

    def read_bytes(self, batch_size: int, context: int, tokens: int, distinct: float = 0.0) -> float:
        """Bytes a forward must read, each once.

        weights of every forward + `distinct` experts + an embedding row a token + keys and values of the context:
        dense_bytes + distinct * expert_weights * itemsize + tokens * hidden * itemsize
        + sum over layers of 2 * kv_heads * head_dim * itemsize * batch_size * (context within the window).
        """
        row = 2 * self.kv_heads * self.head_dim * self.itemsize
        cached = sum(row * batch_size * seen for seen in self._seen(context))
        return self.dense_bytes + (distinct * self.expert_weights + tokens * self.hidden) * self.itemsize + cached

    def flops(self, batch_size: int, context: int, tokens: int) -> float:
        """Multiplications and additions of a forward over trees of tokens / batch_size nodes.

        products with weights + attention (scores and mixing, over context and tree, masked or not):
        2 * tokens * (dense_products + active * expert_weights)
        + sum over layers of 4 * heads * head_dim * tokens * (context within the window + nodes a row).
        """
        weights = 2 * tokens * (self.dense_products + self.active * self.expert_weights)
        pairs = sum(tokens * (seen + tokens / batch_size) for seen in self._seen(context))
        return weights + 4 * self.heads * self.head_dim * pairs

    def memory_bytes(self, batch_size: int, context: int, tokens: int, vocabulary: int) -> int:
        """Estimate of what measuring allocates beside the weights: cache, logits, and the residual of the prefill."""
        nodes = -(-tokens // batch_size)
        cache = 2 * len(self.layers) * self.kv_heads * self.head_dim * batch_size * (context + nodes)
        return (cache + batch_size * nodes * vocabulary + 8 * batch_size * context * self.hidden) * self.itemsize

    def _seen(self, context: int) -> list[int]:
        return [context if most is None else min(context, most) for most in self.layers]


@torch.inference_mode()
def measure_peaks(device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter) -> Peaks:
    """Measure both on the device, with the threads that are set."""
    read_bytes, side = READ_BYTES[device.type], SIDE[device.type]
    array = torch.ones(read_bytes // 4, device=device)
    read_s = _best(device, array.sum, clock)
    del array
    # Random values: a GPU computes with constant ones at a higher clock than any model sees.
    draws = torch.Generator(device).manual_seed(0)
    square = torch.randn(side, side, generator=draws, device=device).to(dtype)
    product_s = _best(device, lambda: square @ square, clock)
    return Peaks(read_bytes / read_s, 2 * side**3 / product_s, read_bytes, side, dtype_name(dtype))


def _best(device: torch.device, work: Callable[[], object], clock: Callable[[], float]) -> float:
    """The shortest of TRIES, in seconds, after one that warms up."""
    seconds = []
    for _ in range(TRIES + 1):
        _wait(device)
        started = clock()
        work()
        _wait(device)
        seconds.append(clock() - started)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
