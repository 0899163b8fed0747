"""The DART drafter: one layer over low, middle and high features of the target drafts d tokens in one forward.

DART, arXiv 2601.19278. Row j of the prefix joins the target's features at position j with the embedding of token j + 1,
which the target has sampled already, so the last row knows the root. Behind the prefix come m equal mask rows. All rows
are causal. The last prefix row predicts the token after the root, mask i the token i + 1 further on: m masks draft
d = m + 1 tokens. The drafter has a head of its own, over all tokens or some of them.

There is one layer, so a prefix row serves later ones by its keys and values alone: these are made once and kept, and a
drafting forward computes d rows. Training is `sparkbench.train.slots`, from the same pieces.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkbench.decoding.cache import RowCache
from sparkbench.decoding.method import Context
from sparkbench.decoding.target import Target
from sparkbench.drafters.dart_config import DartConfig
from sparkbench.drafters.heads import MarkovHead
from sparkbench.drafters.parts import MLP, Block, RMSNorm, Rope, RopeTable, rope, rotate

PUBLISHED_NORMS = 2  # times that the published code applies its last norm


class _Attention(nn.Module):
    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * hidden, config.heads * width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.heads * width, hidden, bias=False)


class DartLayer(nn.Module):
    """The layer, in the pieces that inference and training share.

    A row has an input of width 2H, which attention reads, and a residual of width H.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.config = config
        self.mask_rep = nn.Parameter(torch.randn(2 * config.hidden_size, generator=torch.Generator().manual_seed(0)))
        self.hidden_norm = RMSNorm(config.hidden_size, config.eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def inputs(self, embedded: Tensor, projected: Tensor) -> Tensor:
        """Inputs [..., 2H] of prefix rows: embeddings of the next tokens, and projected features, which are also the
        rows' residuals. The embedding enters through attention alone."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(projected)], -1)

    @property
    def mask_residual(self) -> Tensor:
        """[H]; the input of a mask row is `mask_rep`, without a norm."""
        return self.mask_rep[: self.config.hidden_size]

    def keys_values(self, inputs: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """inputs [B, n, 2H] -> keys, rotated, and values [B, kv_heads, n, D]."""
        keys = rotate(self._heads(self.self_attn.k_proj(inputs)), rope)
        return keys.transpose(1, 2), self._heads(self.self_attn.v_proj(inputs)).transpose(1, 2)

    def queries(self, inputs: Tensor, rope: Rope) -> Tensor:
        """inputs [B, n, 2H] -> queries, rotated [B, heads, n, D]."""
        return rotate(self._heads(self.self_attn.q_proj(inputs)), rope).transpose(1, 2)

    def attend(self, residuals: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The layer's output [B, n, H]: attention over the keys that `mask` allows, then the feed-forward part."""
        grouped = self.config.heads != self.config.kv_heads
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
        x = residuals + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))


class DartDrafter(nn.Module):
    """The drafter's weights; parameter names are those of the published checkpoints.

    target_ids: [V'] int64, the target's id of each row of the head; None where the head covers the whole vocabulary.
    """

    max_length: int | None = None  # positions are computed, so there is no longest one

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.config = config
        self.source = ""
        self.revision: str | None = None
        self.target_ids: Tensor | None = None
        self.markov_head: MarkovHead | None = None  # a foreign one, for ablations
        self.confidence_head: None = None
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.midlayer = DartLayer(config)
        self.norm = RMSNorm(hidden, config.eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        return rope(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def normed(self, hidden: Tensor, norms: int) -> Tensor:
        """What the head reads, for the layer's output [..., H]. The published code applies its norm twice."""
        for _ in range(norms):
            hidden = self.norm(hidden)
        return hidden

    def head(self, normed: Tensor, target: Target) -> Tensor:
        """Logits [..., V] over the target's vocabulary; -inf for tokens that the head does not cover."""
        logits = self.lm_head(normed)
        if self.target_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        whole[..., self.target_ids] = logits
        return whole

    def begin(
        self, target: Target, batch: int, capacity: int, depth: int, norms: int = PUBLISHED_NORMS
    ) -> "DartSession":
        """A session for a batch of `batch` rows that grow to about `capacity` positions, drafting `depth` tokens."""
        return DartSession(self, target, batch, capacity, depth, norms)


class DartSession:
    """A drafter at work on one batch: its cache holds a row's prefix and follows what the target commits."""

    def __init__(self, drafter: DartDrafter, target: Target, batch: int, capacity: int, depth: int, norms: int) -> None:
        config, layer = drafter.config, drafter.midlayer
        self.drafter, self.target, self.norms = drafter, target, norms
        self._masks = depth - config.shifted
        self._first = 0 if config.shifted else 1
        rows = capacity + config.masks
        self.cache = RowCache(1, config.kv_heads, config.head_dim, batch, rows, target.dtype, target.device)
        self._rope = RopeTable(rows, config.head_dim, config.rope_theta, target.dtype, target.device)
        self._steps = torch.arange(-1, self._masks, device=target.device)  # computed rows, from the end of the prefix
        self._mask_inputs = layer.mask_rep.expand(1, self._masks, -1)
        self._mask_residuals = layer.mask_residual.expand(1, self._masks, -1)

    def draft(self, context: Context) -> Block:
        """Take in the round's new prefix rows, and draft behind them."""
        drafter, layer, cache = self.drafter, self.drafter.midlayer, self.cache
        assert context.features is not None
        width = context.features.shape[1]
        even = min(context.counts) == width
        last = None if even else torch.tensor(context.counts, device=self.target.device) - 1
        following = torch.cat([context.tokens[:, 1:], context.anchors[:, None]], 1)
        if last is not None:
            following.scatter_(1, last[:, None], context.anchors[:, None])
        projected = drafter.fc(context.features)
        inputs = layer.inputs(self.target.embed(following), projected)
        cache.open(width)
        cache.write(0, *layer.keys_values(inputs, self._rope.behind(cache, width)))
        cache.commit(context.counts)

        cache.open(self._masks)
        masks = self._mask_inputs.expand(cache.batch, -1, -1)
        keys, values = cache.write(0, *layer.keys_values(masks, self._rope.behind(cache, self._masks)))
        computed = torch.cat([_entry(inputs, last), masks], 1)
        residuals = torch.cat([_entry(projected, last), self._mask_residuals.expand(cache.batch, -1, -1)], 1)
        queries = layer.queries(computed, self._rope.behind(cache, 1 + self._masks, back=1))
        ends = cache.lengths[:, None, None] + self._steps[:, None]
        seen = torch.arange(cache.span, device=ends.device) <= ends
        hidden = layer.attend(residuals, queries, keys, values, seen[:, None])[:, self._first :]
        normed = drafter.normed(hidden, self.norms)
        return Block(normed, drafter.head(normed, self.target))

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)

    def admit(self, rows: int) -> None:
        self.cache.admit(rows)


def _entry(rows: Tensor, places: Tensor | None) -> Tensor:
    """[B, 1, n]: entry `places` [B] of rows [B, C, n]; the last where that is None."""
    if places is None:
        return rows[:, -1:]
    return rows.gather(1, places[:, None, None].expand(-1, -1, rows.shape[2]))
