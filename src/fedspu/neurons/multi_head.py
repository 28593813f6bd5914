"""Multi-head attention whose projections the caller chooses.

``nn.MultiheadAttention`` insists on ``embed_dim = num_heads * head_dim`` and on its own
linear operations. Partial training brings its own operations; a slim model keeps fewer
channels of the residual stream and, independently, fewer whole heads. The width of a
head, and so the scale of its scores, stays the same.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def multi_head(
    projected: tuple[Tensor, Tensor, Tensor],
    project_out: Callable[[Tensor], Tensor],
    num_heads: int,
    *,
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    add_zero_attn: bool = False,
    dropout: float = 0.0,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    heads: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention from projected queries, keys and values (batch, tokens, channels).

    ``heads`` are the heads left of the full layer: where ``attn_mask`` has a mask for
    each head of the full layer, only theirs are used.
    """
    q, k, v = projected
    mask = _mask(attn_mask, key_padding_mask, q, k, heads)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(len(k), 1, -1)], 1)
        v = torch.cat([v, bias_v.expand(len(v), 1, -1)], 1)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))

    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    if not need_weights:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return project_out(mixed.transpose(1, 2).flatten(2)), None
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), dropout)
    out = project_out((weights @ v).transpose(1, 2).flatten(2))
    return out, weights.mean(1) if average_attn_weights else weights


def _mask(
    attn: Tensor | None,
    padding: Tensor | None,
    q: Tensor,
    k: Tensor,
    heads: Tensor | None,
) -> Tensor | None:
    """What is added to the scores, (batch or 1, heads or 1, queries, keys)."""
    if attn is None and padding is None:
        return None
    mask = q.new_zeros(1, 1, 1, k.shape[1])
    if attn is not None:
        attn = _additive(attn, q)
        if attn.dim() == 3:  # one for each example and head of the full layer
            attn = attn.unflatten(0, (len(q), -1))
            attn = attn if heads is None else attn[:, heads]
        mask = mask + attn
    if padding is not None:
        mask = mask + _additive(padding, q).view(len(q), 1, 1, -1)
    return mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


class SlimAttention(nn.MultiheadAttention):
    """A sliced ``nn.MultiheadAttention``; same tensors by name, same call.

    Made from a sliced layer by ``shrink``; never constructed directly.
    """

    heads: Tensor

    @classmethod
    def shrink(cls, layer: nn.MultiheadAttention, heads: Tensor) -> None:
        """Turn ``layer``, whose tensors are sliced already, into a slim attention.

        ``heads`` are the ones of the full layer that are left.
        """
        layer.__class__ = cls
        layer.embed_dim = layer.out_proj.weight.shape[0]
        layer.num_heads = len(heads)
        layer.out_proj.out_features, layer.out_proj.in_features = (
            layer.out_proj.weight.shape
        )
        layer.heads = heads
        # Otherwise the fused kernels for whole layers would bypass this class.
        layer._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``; ``is_causal`` is a hint it does not need."""
        is_batched = query.dim() == 3
        if is_batched and not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if not is_batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        out, weights = multi_head(
            self._project(query, key, value),
            self.out_proj,
            self.num_heads,
            bias_k=self.bias_k,
            bias_v=self.bias_v,
            add_zero_attn=self.add_zero_attn,
            dropout=self.dropout if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            heads=self.heads,
            need_weights=need_weights,
            average_attn_weights=average_attn_weights,
        )
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases: Any = (None,) * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(*three) for three in zip(inputs, weights, biases, strict=True)
        )
        return q, k, v
