"""Multi-head attention whose stream and heads have shrunk apart.

``nn.MultiheadAttention`` insists on ``embed_dim = num_heads * head_dim``. A slim model
keeps fewer channels of the residual stream and, independently, fewer whole heads; the
width of a head, and so the scale of its scores, stays.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SlimAttention(nn.MultiheadAttention):
    """A sliced ``nn.MultiheadAttention``; same tensors by name, same call.

    Made from a sliced layer by ``shrink``; never constructed.
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
        # Keeps the fused kernels for whole layers from looking past this class.
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

        q, k, v = self._project(query, key, value)
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))

        q, k, v = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + mask
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out = self.out_proj((weights @ v).transpose(1, 2).flatten(2))

        if average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            out, weights = out.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if need_weights else None

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases: Any = (None,) * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        return [F.linear(*three) for three in zip(inputs, weights, biases, strict=True)]

    def _mask(
        self, attn: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor
    ) -> Tensor:
        """What is added to the scores, (batch or 1, heads or 1, queries, keys)."""
        mask = q.new_zeros(1, 1, 1, k.shape[1])
        if attn is not None:
            attn = _additive(attn, q)
            if attn.dim() == 3:  # one mask for each example and head of the full layer
                attn = attn.unflatten(0, (len(q), -1))[:, self.heads]
            mask = mask + attn
        if padding is not None:
            mask = mask + _additive(padding, q).view(len(q), 1, 1, -1)
        return mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)
