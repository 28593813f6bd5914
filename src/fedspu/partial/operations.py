"""Weighted operations on partial weights, each run by a kernel for its active block.

``block_gradients.py`` has the arithmetic; here calls of PyTorch functions are mapped
to it.
"""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu.neurons.multi_head import multi_head
from fedspu.partial.block_gradients import (
    Convolution,
    ConvolutionPart,
    EmbeddingPart,
    Part,
    cut,
)
from fedspu.partial.costs import is_small, pays
from fedspu.partial.linear_gradients import LinearPart
from fedspu.partial.memory_format import compact, format_of
from fedspu.partial.norms import (
    BatchNormPart,
    NormPart,
    layer_normed,
    make_batch_normed,
)
from fedspu.partial.patterns import rms_normed, with_quick_gate
from fedspu.partial.remake import Remake, need_of, note, transposed
from fedspu.partial.spans import (
    Span,
    Spans,
    is_same,
    num_in,
    positions_of,
    spread,
    take_span,
)
from fedspu.partial.weight import (
    OPERATIONS,
    Arguments,
    How,
    PartialWeight,
    Piece,
    with_full_weights,
)


def linear(func: Any, given: Arguments) -> Any:
    """``F.linear``, with the gradient of the active block."""
    weight, bias = Piece(given["weight"]), Piece(given.get("bias"))
    if is_small(weight, given["input"], -1):
        return NotImplemented
    _mark(given["weight"], given.get("bias"))
    rows, columns = weight.spans
    how = weight.how
    part = Part(
        *(rows, columns, bias.span, columns, rows),
        how.is_truncated,
        given.get("how", how).rounds_as_torch,
    )
    x, full, offset = _in_autocast(given["input"], weight.full, bias.full)
    if how.has_code:
        x = with_quick_gate(x)
    return LinearPart.apply(x, weight.leaf, bias.leaf, full, offset, part)  # type: ignore[no-untyped-call]  # torch has no hints here


def convolution(func: Any, given: Arguments) -> Any:
    """A convolution, transposed or not, with the gradient of the active block."""
    weight, bias = Piece(given["weight"]), Piece(given.get("bias"))
    x, full = given["input"], weight.full
    assert full is not None
    num_dims = full.dim() - 2
    if is_small(weight, x, -num_dims - 1):
        return NotImplemented
    dilation = _tuple(given.get("dilation", 1), num_dims)
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        x, padding = _pad(x, padding, full, dilation)
    conv = Convolution(
        stride=_tuple(given.get("stride", 1), num_dims),
        padding=_tuple(padding, num_dims),
        dilation=dilation,
        is_transposed="transpose" in func.__name__,
        output_padding=_tuple(given.get("output_padding", 0), num_dims),
        groups=given.get("groups", 1),
    )
    inputs, outputs = _channels(weight.spans, full.shape, conv)
    if _is_ragged(inputs, outputs, x.shape[-num_dims - 1], full, conv):
        return NotImplemented
    if not pays(inputs, outputs, full, conv, weight.how):
        return NotImplemented
    _mark(given["weight"], given.get("bias"))
    rows, columns = weight.spans[:2]
    part = Part(
        rows,
        columns,
        bias.span,
        inputs,
        outputs,
        weight.how.is_truncated,
        given.get("how", weight.how).rounds_as_torch,
    )
    is_batched = x.dim() == full.dim()
    x, full, offset = _in_autocast(x if is_batched else x[None], full, bias.full)
    out: Tensor = ConvolutionPart.apply(  # type: ignore[no-untyped-call]  # as above
        x, weight.leaf, bias.leaf, full, offset, part, conv
    )
    if not is_batched:
        return out[0]
    is_last = weight.how.is_truncated or not x.requires_grad  # no gradient passes on
    is_cut = bias.full is None or is_same(bias.span, outputs)
    return note(out, need=outputs) if is_last and is_cut else out


def batch_norm(func: Any, given: Arguments) -> Any:
    """``F.batch_norm`` in training, with the gradient of only the channels needed."""
    done = batch_normed(given)
    return NotImplemented if done is None else done[0]


def batch_normed(given: Arguments) -> tuple[Tensor, Remake] | None:
    """The output of a batch norm in training, and how to make it again.

    None if the norm is left to PyTorch: in eval mode, or in another precision.
    """
    pieces = norm_pieces(given)
    if pieces is None:
        return None
    x, (weight, bias, part) = given["input"], pieces
    need = part.need
    kept = x.detach()
    if need is not None:
        kept = compact(take_span(kept, 1, need))
    running = given.get("running_mean"), given.get("running_var")
    momentum, eps = given.get("momentum", 0.1), given.get("eps", 1e-5)
    y, mean, deviation = BatchNormPart.apply(  # type: ignore[no-untyped-call]  # as above
        x,
        weight.leaf,
        bias.leaf,
        weight.full,
        bias.full,
        running,
        momentum,
        eps,
        kept,
        part,
    )
    values: Any = (mean, deviation, weight.full, bias.full)
    kept = (kept, *(take_span(value, 0, need) for value in values))
    remake = Remake(kept, make_batch_normed, dim=1, has=need)
    return note(y, need=need), remake


def norm_pieces(given: Arguments) -> tuple[Piece, Piece, NormPart] | None:
    """A batch norm's weight and bias, and what trains of them; None as above."""
    x, weight, bias = given["input"], Piece(given["weight"]), Piece(given["bias"])
    is_usual = (
        given.get("training", False)
        and weight.full is not None
        and bias.full is not None
        and x.dim() > 2
        and x.is_contiguous(memory_format=format_of(x))
        and x.dtype == weight.full.dtype == bias.full.dtype
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() > x.shape[1]
    )
    if not is_usual:
        return None
    _mark(given["weight"], given["bias"])
    need = need_of(x)
    if not (is_same(need, weight.span) and is_same(need, bias.span)):
        need = None
    how: How = given.get("how", weight.how)
    return weight, bias, NormPart(weight.span, bias.span, need, how.rounds_as_torch)


def _layer_norm(func: Any, given: Arguments) -> Any:
    done = layer_normed(given)
    if done is None:
        return NotImplemented
    _mark(given["weight"], given["bias"])
    return done[0]


def _product(func: Any, given: Arguments) -> Any:
    """A product with a weight, if that is the last step of an RMS norm."""
    terms = given["input"], given["other"]
    weight, x = terms if isinstance(terms[0], PartialWeight) else reversed(terms)
    if isinstance(x, PartialWeight) or not isinstance(x, Tensor):
        return NotImplemented
    y = rms_normed(x, weight)
    if y is None:
        return NotImplemented
    _mark(weight)
    return y


def _embedding(func: Any, given: Arguments) -> Any:
    weight, padding = given["weight"], given.get("padding_idx")
    if given.get("max_norm") is not None or given.get("sparse"):
        return NotImplemented  # it renormalises, or its gradient is not dense
    if not isinstance(weight, PartialWeight) or weight.spans[0] is not None:
        return NotImplemented
    if padding is None:
        padding = -1
    elif padding < 0:
        padding += len(weight.full)
    _mark(weight)
    by_frequency = bool(given.get("scale_grad_by_freq", False))
    return EmbeddingPart.apply(  # type: ignore[no-untyped-call]  # as above
        given["input"],
        weight.leaf,
        weight.now(),
        weight.spans[1],
        padding,
        by_frequency,
    )


def _attention(func: Any, given: Arguments) -> Any:
    """Attention whose projections go through our linear kernel.

    Heads do not mix between the projections, so the truncated gradient has to be cut
    only at these.
    """
    if given.get("static_k") is not None or given.get("static_v") is not None:
        return NotImplemented
    is_batched = given["query"].dim() == 3
    inputs = [given[name] for name in ("query", "key", "value")]
    is_self = inputs[0] is inputs[1] and inputs[1] is inputs[2]
    inputs = [transposed(x, 0, 1) if is_batched else x[None] for x in inputs]
    # All defaults here are those of the PyTorch function that this one replaces.
    dropout = given["dropout_p"] if given.get("training", True) else 0.0
    out, weights = multi_head(
        _projected(given, inputs, is_self),
        lambda x: _any_linear(x, given["out_proj_weight"], given["out_proj_bias"]),
        given["num_heads"],
        bias_k=with_full_weights(given["bias_k"]),
        bias_v=with_full_weights(given["bias_v"]),
        add_zero_attn=given["add_zero_attn"],
        dropout=dropout,
        key_padding_mask=given.get("key_padding_mask"),
        attn_mask=given.get("attn_mask"),
        need_weights=given.get("need_weights", True),
        average_attn_weights=given.get("average_attn_weights", True),
    )
    if is_batched:
        return out.transpose(0, 1), weights
    return out[0], None if weights is None else weights[0]


def _projected(
    given: Arguments, inputs: list[Tensor], is_self: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    packed, bias = given["in_proj_weight"], given["in_proj_bias"]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        biases = [None] * 3 if bias is None else list(with_full_weights(bias).chunk(3))
    elif is_self:
        q, k, v = _any_linear(inputs[0], packed, bias).chunk(3, -1)
        return q, k, v
    else:  # parts of one weight: the full gradient is computed, and cut down
        weights, biases = with_full_weights(packed).chunk(3), [None] * 3
        if bias is not None:
            biases = list(with_full_weights(bias).chunk(3))
        if Piece(packed).how.is_truncated:
            inputs = [cut(x, -1, packed.spans[1]) for x in inputs]
    q, k, v = map(_any_linear, inputs, weights, biases)
    return q, k, v


def _any_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear operation by our kernel where its weight is partial."""
    out = linear(F.linear, {"input": x, "weight": weight, "bias": bias})
    if out is NotImplemented:
        return F.linear(x, with_full_weights(weight), with_full_weights(bias))
    kernel: Tensor = out
    return kernel


def _mark(*weights: Tensor | None) -> None:
    """Remember that a kernel computes only the block."""
    for weight in weights:
        if isinstance(weight, PartialWeight):
            weight.path = "block"


def _in_autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """The same tensors in the precision that autocast asks for, if it is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return (x, *weights)
    low = torch.get_autocast_dtype(kind)
    return tuple(
        t if t is None or t.dtype == torch.float64 else t.to(low) for t in (x, *weights)
    )


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    listed = tuple(value) if isinstance(value, tuple | list) else (value,)
    return listed * length if len(listed) == 1 else listed


def _pad(
    x: Tensor, padding: str, weight: Tensor, dilation: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Padding given as a word, as numbers; an odd total adds one more on the right."""
    if padding == "valid":
        return x, 0
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, [total // 2 for total in totals]


def _channels(spans: Spans, shape: torch.Size, conv: Convolution) -> tuple[Span, Span]:
    """The active input and output channels of a convolution."""
    along, local = spans[:2]
    groups, is_transposed = conv.groups, conv.is_transposed
    width, per_group = shape[1], shape[0] // groups
    if (
        groups > 1 and is_transposed and per_group == 1
    ):  # depthwise: each input owns its outputs
        return along, spread(along, width)
    if groups > 1 and not is_transposed and width == 1:
        return _owners(along, per_group), along
    if local is not None and groups > 1:  # one local index stands for every group
        places = positions_of(local)
        assert places is not None
        local = torch.cat([places + group * width for group in range(groups)])
    return (along, local) if is_transposed else (local, along)


def _is_ragged(
    inputs: Span, outputs: Span, width: int, weight: Tensor, conv: Convolution
) -> bool:
    """Whether an input channel of a depthwise layer has only some outputs active.

    That happens where the inputs are those of the model, and each output is a neuron.
    """
    if conv.groups == 1 or conv.groups != width or conv.is_transposed:
        return False
    multiple = len(weight) // width
    return num_in(outputs, len(weight)) != multiple * num_in(inputs, width)


def _owners(span: Span, width: int) -> Span:
    """The inputs of a depthwise layer whose outputs, ``width`` each, are active."""
    if span is None or isinstance(span, int):
        return None if span is None else span // width
    found: Tensor = torch.unique(span // width)
    return found


_LINEAR = ("input", "weight", "bias")
_CONV = (*_LINEAR, "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = (
    *_LINEAR,
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)

OPERATIONS.update(
    {
        F.linear: (_LINEAR, linear),
        F.conv1d: (_CONV, convolution),
        F.conv2d: (_CONV, convolution),
        F.conv3d: (_CONV, convolution),
        F.conv_transpose1d: (_CONV_TRANSPOSE, convolution),
        F.conv_transpose2d: (_CONV_TRANSPOSE, convolution),
        F.conv_transpose3d: (_CONV_TRANSPOSE, convolution),
        F.batch_norm: (tuple(signature(F.batch_norm).parameters), batch_norm),
        F.layer_norm: (tuple(signature(F.layer_norm).parameters), _layer_norm),
        torch.mul: (("input", "other"), _product),
        Tensor.mul: (("input", "other"), _product),
        F.embedding: (tuple(signature(F.embedding).parameters), _embedding),
        F.multi_head_attention_forward: (
            tuple(signature(F.multi_head_attention_forward).parameters),
            _attention,
        ),
    }
)
