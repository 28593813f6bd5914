"""Convolutions, norms over channels, pooling and resizing."""

from typing import Any

import torch
from torch import Tensor

from fedspu.neurons.tracing.classes import NONE
from fedspu.neurons.tracing.follow import Follower, Operand, Slots, dims
from fedspu.neurons.tracing.live import tensors_in
from fedspu.neurons.tracing.rules.rule import argument, name_of, rule, that_fit


@rule(
    "convolution _convolution conv2d conv1d conv3d mkldnn_convolution "
    "convolution_overrideable"
)
def _convolved(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x, weight = args[:2]
    bias = argument(func, args, kwargs, "bias")
    groups = argument(func, args, kwargs, "groups") or 1
    transposed = bool(argument(func, args, kwargs, "transposed"))
    unbatched = weight.dim() - x.dim()
    seen = now.operand(x)
    if unbatched:
        seen = seen.lifted(lambda t: t.unsqueeze(0))
    channels = _channel_labels(now, seen.slots)
    tied = now.tie_all(weight, range(2, weight.dim()))
    rows = _only(now, tied, 0, len(weight))
    columns = _only(now, tied, 1, weight.shape[1])
    is_depthwise = groups == x.shape[1 - bool(unbatched)] > 1
    for slot in now.operand(weight).raw:
        if dims(slot) == {int(transposed and not is_depthwise)}:
            now.makers.append(slot)
        elif dims(slot) <= {0, 1}:
            now.readers.append(slot)

    inputs = seen.shape[1]
    owns_outputs = is_depthwise and not transposed and len(weight) > inputs
    if channels is None and not seen.is_even(1) and not owns_outputs:
        channels = now.classes.new(1).expand(inputs)  # places along the input matter
    made = _match(now, channels, rows, columns, groups, inputs, transposed)
    labels = made.view(1, -1, *(1,) * (weight.dim() - 2))
    labels = labels.squeeze(0) if unbatched else labels
    slots = [] if labels.numel() < 2 else [labels]
    if isinstance(bias, Tensor):
        shape = [1] * out.dim()
        shape[-weight.dim() + 1] = len(bias)
        side = now.operand(bias).lifted(lambda t: t.view(shape))
        slots = now.combine([Operand(slots, tuple(out.shape)), side])
    now.put(out, slots, [t for t in (x, weight, bias) if isinstance(t, Tensor)])


def _match(
    now: Follower,
    channels: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    groups: int,
    inputs: int,
    transposed: bool,
) -> Tensor:
    """Join what a convolution reads with its weight; the labels of its outputs."""
    join = now.classes.join
    if channels is None:
        channels = torch.full((inputs,), NONE)
    if groups == inputs > 1:  # depthwise: a channel owns the outputs made from it
        if transposed:
            join(channels, rows)
            return rows.repeat_interleave(len(columns))
        join(channels[:, None], rows.view(groups, -1))
        return rows
    # In a grouped layer the active entries would be block-diagonal, which one index
    # vector per axis cannot express. So the channels with the same local index in all
    # groups are one neuron. (Axis 1 has only the local index anyway.)
    if groups > 1:
        by_group = rows.view(groups, -1)
        join(by_group, by_group[:1])
    if transposed:
        join(channels, rows)
        return columns.repeat(groups)
    join(channels.view(groups, -1), columns[None])
    return rows


def _channel_labels(now: Follower, slots: Slots) -> Tensor | None:
    """Labels along axis 1, once all other axes are tied."""
    found = None
    for slot in slots:
        tied = now.tie(slot, [d for d in range(slot.dim()) if d != 1])
        if tied is not None:
            if found is not None:
                now.classes.join(found, tied.reshape(-1))
            found = tied.reshape(-1)
    return found


def _only(now: Follower, slots: Slots, dim: int, size: int) -> Tensor:
    """Labels along one axis of a weight; new, tied ones if it has none there."""
    for slot in slots:
        if dims(slot) == {dim}:
            return slot.reshape(-1)
    for slot in slots:
        if dim in dims(slot):
            now.tie(slot, range(slot.dim()))
    return now.classes.new(1).expand(size)


@rule(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_no_training native_group_norm batch_norm "
    "_batch_norm_with_update _batch_norm_no_update group_norm instance_norm"
)
def _normed(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Values for each channel, on axis 1."""
    x = args[0]
    shape = [1] * x.dim()
    shape[1] = -1
    sides = [now.operand(x)]
    for tensor in tensors_in((args[1:], kwargs)):
        if tensor.numel() == x.shape[1]:
            sides.append(now.operand(tensor).lifted(lambda t: t.reshape(shape)))
    first = next(tensors_in(out))
    raw = [slot for side in sides for slot in side.raw]  # a weight may be normed, too
    now.put(first, now.combine(sides), [x, *tensors_in(args[1:])], raw)


@rule(
    "max_pool2d_with_indices max_pool3d_with_indices max_pool2d max_pool1d "
    "max_pool1d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d upsample_linear1d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d grid_sampler_2d grid_sampler_3d "
    "max_unpool2d grid_sampler"
)
def _spatial(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Pixels are mixed; channels stay apart."""
    x = args[0]
    name = name_of(func)
    space = next((n for n in (1, 2, 3) if f"{n}d" in name), 2)
    if "grid" in name:
        space = x.dim() - 2
        now.tie_all(args[1])
    mixed = list(range(x.dim() - space, x.dim()))
    kernel = argument(func, args, kwargs, "kernel_size")
    if kernel is not None and len(kernel) == space:
        mixed = [d for d, size in zip(mixed, kernel, strict=True) if size != 1]
    slots = now.tie_all(x, mixed)
    for tensor in tensors_in(out):
        now.put(tensor, that_fit(slots, tensor), [x])
