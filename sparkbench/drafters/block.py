"""The block drafter: a few transformer layers that fill a block of masks in one forward. DFlash and DSpark are this.

Chen et al., arXiv 2602.06036, and DSpark, arXiv 2607.05147. Context: the target's features of all committed positions,
projected once and seen as keys and values by every layer. Block: embeddings of [anchor, mask, mask, ...]; every slot
sees the whole context and the whole block; there is no causal mask. DSpark adds the heads of `heads.py`.

The published layouts are told apart in `block_config.py`; the weights have the same names in all. Training is
`sparkbench.train.block`, from the same layers.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkbench.decoding.cache import RowCache
from sparkbench.decoding.method import Context
from sparkbench.decoding.target import Target
from sparkbench.drafters.block_config import BlockConfig
from sparkbench.drafters.heads import ConfidenceHead, MarkovHead
from sparkbench.drafters.parts import MLP, Block, RMSNorm, Rope, RopeTable, rope, rotate
from sparkbench.scheduling import Calibration


class Attention(nn.Module):
    """Projections of one layer; the attention itself is called where keys and values are known."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(hidden, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(hidden, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, hidden, bias=bias)
        self.q_norm = RMSNorm(width, config.eps)
        self.k_norm = RMSNorm(width, config.eps)


class Layer(nn.Module):
    """One draft layer, in the pieces that inference and training share."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def block_qkv(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, n, H] of block slots -> queries [B, heads, n, D], keys and values [B, kv_heads, n, D]."""
        attention = self.self_attn
        h = self.input_layernorm(x)
        queries = rotate(attention.q_norm(self._heads(attention.q_proj(h))), rope)
        keys = rotate(attention.k_norm(self._heads(attention.k_proj(h))), rope)
        values = self._heads(attention.v_proj(h))
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def attend(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The layer's output [B, n, H]: attention over all keys the mask allows, then the feed-forward part."""
        grouped = self.config.heads != self.config.kv_heads
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
        x = x + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))


class BlockDrafter(nn.Module):
    """The drafter's weights; parameter names are those of the published checkpoints."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.source = ""
        self.revision: str | None = None
        self.calibration: Calibration | None = None
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.eps)
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.windows)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        rank, hidden = config.markov_rank, config.hidden_size
        self.markov_head = MarkovHead(config.markov_kind, config.vocab_size, rank, hidden) if rank else None
        reads = config.confidence_rank
        self.confidence_head = None if reads is None else ConfidenceHead(hidden, reads)

    @property
    def max_length(self) -> int:
        """Longest committed length behind which a block fits the drafter's context."""
        return self.config.max_context - self.config.block_size

    @property
    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return cast(list[Layer], list(self.layers))

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Embeddings [..., H] of block tokens: the checkpoint's own or the target's."""
        return self.embed_tokens(ids) if self.config.own_embedding else target.embed(ids)

    def head(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [..., V] of the block's final hidden states."""
        return self.lm_head(hidden) if self.config.own_embedding else target.head(hidden)

    def context_weights(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Joint key and value projection of all layers, its bias, and the key norms [layers, 1, D].

        Context vectors are the same for every layer, so one product serves all.
        """
        parts = [part for layer in self.blocks for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        weight = torch.cat([part.weight for part in parts])
        bias = torch.cat([part.bias for part in parts]) if self.config.attention_bias else None
        return weight, bias, torch.stack([layer.self_attn.k_norm.weight for layer in self.blocks])[:, None]

    def context_kv(
        self,
        features: Tensor,
        rope: Rope,
        weights: tuple[Tensor, Tensor | None, Tensor] | None = None,
    ) -> Tensor:
        """Keys and values of context positions: features [B, n, F * H] -> [layers, 2, B, kv_heads, n, D]."""
        config = self.config
        weight, bias, norms = weights or self.context_weights()
        context = self.hidden_norm(self.fc(features))
        joint = F.linear(context, weight, bias).unflatten(-1, (len(self.layers), 2, config.kv_heads, config.head_dim))
        joint = joint.permute(2, 3, 0, 1, 4, 5)  # [layers, 2, B, n, kv_heads, D]
        keys = F.rms_norm(joint[:, 0], (config.head_dim,), None, config.eps) * norms[:, None, None]
        return torch.stack([rotate(keys, rope), joint[:, 1]], 1).transpose(3, 4)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Cosines and sines [..., 1, D] of positions [...]."""
        return rope(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def begin(self, target: Target, batch: int, capacity: int, depth: int) -> "BlockSession":
        """A session for `batch` rows that grow to about `capacity` positions, drafting `depth` tokens."""
        return BlockSession(self, target, batch, capacity, depth)


class BlockSession:
    """A drafter at work on one batch: its context cache follows what the target commits.

    depth: drafted slots that are wanted; None is the drafter's draft length.
    """

    def __init__(
        self, drafter: BlockDrafter, target: Target, batch: int, capacity: int, depth: int | None = None
    ) -> None:
        config = drafter.config
        self.drafter = drafter
        first = config.first_slot
        self._drafted = slice(first, config.block_size if depth is None else min(first + depth, config.block_size))
        self.target = target
        rows = capacity + config.block_size
        self.cache = RowCache(
            len(drafter.layers), config.kv_heads, config.head_dim, batch, rows, target.dtype, target.device
        )
        weight, bias, norms = drafter.context_weights()
        self._weights = (weight.t().contiguous().t() if weight.is_cpu else weight, bias, norms)
        self._rope = RopeTable(rows, config.head_dim, config.rope_theta, target.dtype, target.device)
        self._slots = torch.arange(config.block_size, device=target.device)
        masks = torch.full((1, config.block_size - 1), config.mask_token_id, device=target.device)
        self._mask_embeddings = drafter.embed(masks, target)

    def draft(self, context: Context) -> Block:
        """Take in the round's new features and run a block behind the anchors."""
        drafter, cache = self.drafter, self.cache
        assert context.features is not None
        width = context.features.shape[1]
        cache.open(width)
        cache.write_layers(drafter.context_kv(context.features, self._rope.behind(cache, width), self._weights))
        cache.commit(context.counts)

        block = drafter.config.block_size
        cache.open(block)
        rope = self._rope.behind(cache, block)
        x = torch.cat(
            [drafter.embed(context.anchors[:, None], self.target), self._mask_embeddings.expand(cache.batch, -1, -1)], 1
        )
        for index, layer in enumerate(drafter.blocks):
            queries, keys, values = layer.block_qkv(x, rope)
            keys, values = cache.write(index, keys, values)
            x = layer.attend(x, queries, keys, values, self._mask(drafter.config.windows[index]))
        hidden = drafter.norm(x[:, self._drafted])
        return Block(hidden, drafter.head(hidden, self.target))

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)

    def admit(self, rows: int) -> None:
        self.cache.admit(rows)

    def _mask(self, window: int | None) -> Tensor | None:
        """[B, 1, b or 1, span] bool: a slot sees its row's context (within the window) and the whole block."""
        cache = self.cache
        if cache.uniform and (window is None or cache.span <= window):
            return None
        ends = cache.lengths[:, None] + self._slots  # [B, b], positions of the slots
        slots = torch.arange(cache.span, device=self.target.device)
        seen = (slots <= ends[:, -1:])[:, None]
        if window is not None:
            seen = seen & (ends[:, :, None] - slots < window)
        return seen[:, None]
