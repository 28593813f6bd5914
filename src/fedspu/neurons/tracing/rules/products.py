"""Sums of products: matrices, attention, embeddings."""

from typing import Any

from torch import Tensor

from fedspu.neurons.tracing.follow import Follower, Operand, Slots, dims
from fedspu.neurons.tracing.live import tensors_in
from fedspu.neurons.tracing.rules.rule import (
    VOCABULARY,
    anything,
    argument,
    last_aligned,
    rule,
)


def _product(now: Follower, a: Operand, b: Operand) -> Slots:
    """The slots of (…, m, k) times (…, k, n), batch axes broadcast."""
    size = max(len(a.shape), len(b.shape))
    a, b = last_aligned(a, size), last_aligned(b, size)
    a, b = a.lifted(lambda t: t.unsqueeze(-1)), b.lifted(lambda t: t.unsqueeze(-3))
    return [s.squeeze(-2) for s in now.contract(a, b, [size - 1])]


@rule("mm bmm matmul _sparse_mm")
def _multiplied(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    a, b = now.operand(args[0]), now.operand(args[1])
    now.put(out, _product(now, a, b), args[:2])


@rule("_grouped_mm grouped_mm_fallback")
def _multiplied_by_experts(
    now: Follower, func: Any, args: Any, kwargs: Any, out: Any
) -> None:
    """Rows of a matrix times one of several matrices: all experts have one width."""
    x, experts = args[:2]
    if x.dim() != 2 or experts.dim() != 3:
        anything(now, func, args, kwargs, out)
        return
    side = now.operand(experts)
    first, raw = (
        [slot.select(0, 0) for slot in slots if slot.shape[0] == 1]
        for slots in (side.slots, side.raw)
    )
    one = Operand(first, side.shape[1:], experts[0], side.is_weight, raw)
    now.put(out, _product(now, now.operand(x), one), [x, experts])


@rule("addmm baddbmm addbmm _addmm_activation")
def _multiplied_and_added(
    now: Follower, func: Any, args: Any, kwargs: Any, out: Any
) -> None:
    bias, a, b = args[:3]
    product = Operand(_product(now, now.operand(a), now.operand(b)), tuple(out.shape))
    side = last_aligned(now.operand(bias), out.dim())
    now.put(out, now.combine([product, side]), args[:3])


@rule("mv addmv dot")
def _by_vector(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    a, b = args[-2:]
    left, right = now.operand(a), now.operand(b)
    left = left.lifted(lambda t: t.reshape((1,) * (2 - t.dim()) + tuple(t.shape)))
    slots = _product(now, left, right.lifted(lambda t: t.unsqueeze(-1)))
    slots = [s.reshape(s.shape[:-1]) for s in slots]
    if out.dim() == 0:
        slots = []
    if len(args) == 3:
        slots = now.combine([Operand(slots, tuple(out.shape)), now.operand(args[0])])
    now.put(out, slots, args)


@rule("linear")
def _linear(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x, weight = now.operand(args[0]), now.operand(args[1])
    weight = weight.lifted(lambda t: t.t())
    if len(x.shape) == 1:
        x = x.lifted(lambda t: t.unsqueeze(0))
    slots = _product(now, x, weight)
    slots = [s.reshape((*s.shape[-out.dim() :],)) for s in slots]
    bias = args[2] if len(args) > 2 else None
    if bias is not None:
        side = last_aligned(now.operand(bias), out.dim())
        slots = now.combine([Operand(slots, tuple(out.shape)), side])
    now.put(out, slots, args)


@rule("embedding")
def _embedded(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    weight, index = args[:2]
    now.makers.extend(s for s in now.of(weight).raw if dims(s) == {1})
    now.operation = VOCABULARY
    slots = now.tie_all(weight, [0])
    slots = [s.reshape((1,) * index.dim() + (s.shape[-1],)) for s in slots]
    now.put(out, slots, args)


@rule("_embedding_bag _embedding_bag_forward_only")
def _bagged(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    now.makers.extend(s for s in now.of(args[0]).raw if dims(s) == {1})
    now.operation = VOCABULARY
    slots = now.tie_all(args[0], [0])
    now.put(out[0], slots, args[:2])


@rule(
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_attention_math "
    "scaled_dot_product_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_attention_math_for_mps "
    "_scaled_dot_product_fused_attention_overrideable"
)
def _attention(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Softmax of queries times keys, plus a mask, times values."""
    q, k, v = (now.operand(t) for t in args[:3])
    if q.shape[-3:-2] != k.shape[-3:-2]:  # several queries share keys and values
        times = q.shape[-3] // k.shape[-3]
        k, v = (side.lifted(lambda t: _repeated(t, times)) for side in (k, v))
    mask = argument(func, args, kwargs, "attn_mask", "attn_bias")
    scores = _product(now, q, k.lifted(lambda t: t.transpose(-1, -2)))
    shape = (*q.shape[:-1], k.shape[-2])
    if isinstance(mask, Tensor):
        side = last_aligned(now.operand(mask), len(shape))
        scores = now.combine([Operand(scores, shape), side])
    first = next(tensors_in(out))
    slots = _product(now, Operand(scores, shape), v)
    now.put(first, slots, [t for t in (*args[:3], mask) if isinstance(t, Tensor)])


def _repeated(heads: Tensor, times: int) -> Tensor:
    return heads.repeat_interleave(times, -3) if heads.shape[-3] > 1 else heads


@rule("_weight_norm_interface")
def _weight_normed(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    v, g = args[:2]
    sides = [now.operand(v), now.operand(g)]
    raw = [s for side in sides for s in side.raw]
    now.put(out[0], now.combine(sides), args[:2], raw)
