"""SDPA that leaves grouped keys and values as they are, for targets on a CPU.

With a mask, the stock SDPA path of transformers copies every key and value once a query group before it calls torch,
since on a GPU the masked kernels want it so. On a CPU torch takes grouped heads with a mask directly, and the copies
would cost more than the attention over a draft tree. Registered under a name of its own; masks are made as for `sdpa`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_SDPA = "sparkbench_grouped_sdpa"


def implementation(device: torch.device) -> str:
    """The `attn_implementation` of transformers to load a target with, registered where it is ours."""
    if device.type != "cpu":
        return "sdpa"
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
    return GROUPED_SDPA


def grouped_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of queries [B, heads, N, D] to keys and values [B, kv_heads, S, D]; the output is [B, N, heads, D].

    Without a mask a query of several tokens is causal, as in transformers' own SDPA.
    """
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None and query.shape[2] > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None
