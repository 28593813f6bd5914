"""Operations that treat values one by one, sum them up, or depend on their order."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedspu.neurons.tracing.follow import Follower, Operand
from fedspu.neurons.tracing.live import tensors_in
from fedspu.neurons.tracing.rules.rule import (
    argument,
    axes_of,
    last_aligned,
    name_of,
    rule,
    that_fit,
)


@rule(
    "native_dropout _to_copy _prelu_kernel prelu bernoulli polar complex where "
    "masked_fill rrelu_with_noise dropout lerp nan_to_num addcmul addcdiv "
    "native_layer_norm _fused_rms_norm layer_norm rms_norm lift_fresh fill zero "
    "angle expand_as hardswish log_sigmoid log_sigmoid_forward floor_divide real "
    "imag _conj _conj_physical fake_quantize_per_tensor_affine_cachemask"
)
def pointwise(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Values at the same place meet, aligned at their last axes."""
    outs = list(tensors_in(out))
    if not outs:
        return
    given = [t for t in tensors_in((args, kwargs)) if t.dim() <= outs[0].dim()]
    size = outs[0].dim()
    sides = [last_aligned(now.operand(t), size) for t in given]
    met = [slot for side in sides for slot in side.slots]
    if met:
        sides = [now.with_table(*pair, met) for pair in zip(given, sides, strict=True)]
    slots = now.combine(sides)
    raw = [s for side in sides for s in side.raw]
    slots = that_fit(slots, outs[0])
    for tensor in outs:
        is_whole = tensor.shape == outs[0].shape
        now.put(tensor, slots if is_whole else [], given, raw if is_whole else [])


@rule("_softmax _log_softmax softmax _safe_softmax contiguous")
def _kept(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Every value stays where it is, whatever it is mixed with."""
    now.put(out, now.of(args[0]).slots, [args[0]])


@rule(
    "cumsum cumprod logcumsumexp cummax cummin sort topk argsort kthvalue "
    "_fft_r2c _fft_c2c _fft_c2r"
)
def _in_order(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Places along the given axes matter; along others they do not."""
    x = args[0]
    axes = axes_of(argument(func, args, kwargs, "dim"), x.dim())
    slots = now.tie_all(x, axes)
    for tensor in tensors_in(out):
        now.put(tensor, slots, [x])


def reduction(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Values are summed up, or the like, along some axes."""
    x = args[0]
    axes = axes_of(argument(func, args, kwargs, "dim"), x.dim())
    keeps = bool(argument(func, args, kwargs, "keepdim"))
    slots = now.of(x).slots
    if name_of(func) in ("argmax", "argmin"):
        slots = now.tie_all(x, axes)
    slots = now.reduce(slots, axes)
    if not keeps:
        slots = [_without(slot, axes) for slot in slots]
    for tensor in tensors_in(out):
        fits = [s for s in slots if s.dim() == tensor.dim()]
        now.put(tensor, fits, [x])


@rule(
    "sum mean amax amin max min var std var_mean std_mean norm linalg_vector_norm prod "
    "logsumexp all any argmax argmin aminmax count_nonzero median nansum"
)
def _reduced(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """``max`` of two tensors is pointwise; of one it is a reduction."""
    is_pair = len(args) > 1 and isinstance(args[1], Tensor)
    (pointwise if is_pair else reduction)(now, func, args, kwargs, out)


def _without(slot: Tensor, axes: Sequence[int]) -> Tensor:
    kept = [n for d, n in enumerate(slot.shape) if d not in axes]
    return slot.reshape(kept)


@rule(
    "new_zeros new_ones new_full new_empty new_empty_strided zeros_like ones_like "
    "full_like empty_like rand_like randn_like randint_like normal uniform random "
    "exponential sym_size"
)
def _made(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Only the size of the operand is used."""
    for tensor in tensors_in(out):
        now.put(tensor, [], [])


@rule("glu")
def _gated(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """The first half of the channels meets the second."""
    x = args[0]
    dim = argument(func, args, kwargs, "dim") % x.dim()
    half = x.shape[dim] // 2
    sides = []
    for start in (0, half):
        part = x.narrow(dim, start, half)
        slots = [
            slot.narrow(dim, start, half) if slot.shape[dim] > 1 else slot
            for slot in now.of(x).slots
        ]
        sides.append(Operand(now.tidied(slots), tuple(part.shape), part))
    now.put(out, now.combine(sides), [x])
