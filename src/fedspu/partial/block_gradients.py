"""Weighted operations whose backward pass computes only the active block.

Each computes the same output as the plain operation. In the backward pass, the weight's
gradient is computed only for the block of active entries, from the active channels of
the input and of the gradient. The gradient of the input is the true one (``exact``), or
passes only from active outputs to active inputs (``truncated``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedspu.partial.memory_format import compact, empty, format_of, is_last, rows_of
from fedspu.partial.remake import remake_of
from fedspu.partial.spans import Span, is_same, num_in, take_span, take_spans

_SAVE_THEIR_RESULT = ("Relu", "Sigmoid", "Tanh", "Softmax", "Exp")
"""Operations that keep their output for their own backward pass."""


_MANY = 64
"""A 1x1 convolution runs as a matrix product on maps of at least this many places."""

_FEW = 16
"""On maps of one channel, kernels of at most this many entries run as a product."""


@dataclass(frozen=True)
class Part:
    """Which part of a weighted operation trains.

    ``rows`` and ``columns`` are along the weight's first two axes, ``bias`` along the
    bias; ``inputs`` and ``outputs`` are channels of the operation.
    """

    rows: Span
    columns: Span
    bias: Span
    inputs: Span
    outputs: Span
    is_truncated: bool
    rounds_as_torch: bool = False


def read_by_part(
    x: Tensor, dim: int, inputs: Span
) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    """What is kept of the input for the weight's gradient, and how to read that.

    Nothing new is kept if the input can be made again from what is kept anyway.
    Otherwise the active channels are copied, unless the operation before keeps all of
    ``x`` itself: then a copy would only need more memory.
    """
    dim %= x.dim()
    remake = remake_of(x)
    if remake is not None and remake.gives(inputs, dim):
        span = inputs if remake.has is None else None
        return remake.tensors, partial(remake.make, span, dim)
    if inputs is None:
        return (x,), _as_it_is
    name = x.grad_fn.name() if x.grad_fn is not None else ""
    if name.startswith(_SAVE_THEIR_RESULT) or (x.grad_fn is None and x.is_leaf):
        return (x,), partial(take_span, dim=dim, span=inputs)
    return (_shared_copy(x, dim, inputs),), _as_it_is


def _shared_copy(x: Tensor, dim: int, inputs: Span) -> Tensor:
    """The active channels of an input; the same copy for all layers that read it."""
    known = getattr(x, "_fedspu_copy", None)
    if known is not None:
        version, along, span, copied = known
        if version == x._version and along == dim and is_same(span, inputs):
            found: Tensor = copied
            return found
    copied = compact(take_span(x, dim, inputs))
    if not x.is_inference():
        x._fedspu_copy = (x._version, dim, inputs, copied)  # type: ignore[attr-defined]
    return copied


def _as_it_is(x: Tensor) -> Tensor:
    return x


def fill(part: Tensor, dim: int, span: Span, shape: torch.Size) -> Tensor:
    """A tensor of zeros with ``part`` at the positions of one axis."""
    if span is None:
        return part
    whole = empty(shape, like=part).zero_()
    if isinstance(span, int):
        whole.narrow(dim, 0, span).copy_(part)
        return whole
    return whole.index_copy_(dim, span.to(part.device), part)


@dataclass(frozen=True)
class Convolution:
    """The numbers of a convolution, as PyTorch's own functions take them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def is_simple(self) -> bool:
        """Whether each output is made by one row of the weight, from all inputs."""
        return self.groups == 1 and not self.is_transposed

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rounds_as_torch: bool
    ) -> Tensor:
        """The forward pass."""
        if is_last(x) and self._is_product(weight.shape) and not rounds_as_torch:
            return _product(x, weight.flatten(1).t(), bias)
        columns = None if rounds_as_torch else self._columns(x, weight.shape)
        if columns is None:
            numbers = self._numbers(self.groups)
            plain: Tensor = torch.ops.aten.convolution(x, weight, bias, *numbers)
            return plain
        size = (len(x), len(weight), *self.size_of_output(x.shape, weight.shape))
        # Not a view: the next operation may change the output in place, as ReLU can.
        product = torch.matmul(weight.flatten(1), columns)
        out: Tensor = torch.ops.aten._unsafe_view(product, size)
        return out if bias is None else out.add_(bias[:, None, None])

    def size_of_output(self, x: torch.Size, weight: torch.Size) -> tuple[int, ...]:
        """The sizes of the output's maps: height and width, in two dimensions."""
        numbers = zip(
            x[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True
        )
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in numbers
        )

    def grad_input(
        self, grad: Tensor, shape: torch.Size, weight: Tensor, groups: int
    ) -> Tensor:
        """The gradient of an input of this shape, in the memory format of ``grad``."""
        found: Tensor
        if is_last(grad) and self._is_product(weight.shape):
            return _product(grad, weight.flatten(1))
        if self._is_pointwise(shape, weight.shape) and not is_last(grad):
            found = torch.matmul(weight.flatten(1).t(), grad.flatten(2))
            return found.view(shape)
        like = _of_shape(shape, grad)
        found = torch.ops.aten.convolution_backward(
            grad, like, weight, None, *self._numbers(groups), [True, False, False]
        )[0]
        return found

    def grad_weight(
        self, grad: Tensor, x: Tensor, shape: tuple[int, ...], groups: int
    ) -> Tensor:
        """The gradient of a weight of this shape."""
        if is_last(x) and self._is_product(shape):
            return torch.mm(rows_of(grad).t(), rows_of(x)).view(shape)
        columns = self._columns(x, shape)
        if columns is not None:
            products = torch.bmm(grad.flatten(2), columns.transpose(1, 2))
            return products.sum(0).view(shape)
        like = grad.new_empty(1).expand(shape)
        found: Tensor = torch.ops.aten.convolution_backward(
            grad, x, like, None, *self._numbers(groups), [False, True, False]
        )[1]
        return found

    def _columns(self, x: Tensor, weight: tuple[int, ...]) -> Tensor | None:
        """What the kernel reads for each place of the output, (n, entries, places).

        None unless that is so little that one product is faster than PyTorch's own way.
        """
        if is_last(x):
            return None
        if self._is_pointwise(x.shape, weight):
            return x.flatten(2)
        is_small = len(weight) == 4 and weight[2] * weight[3] <= _FEW
        if not (is_small and weight[1] == 1 and self.is_simple):
            return None
        x = F.pad(x, [side for side in reversed(self.padding) for _ in range(2)])
        for dim, (width, step, gap) in enumerate(
            zip(weight[2:], self.stride, self.dilation, strict=True), start=2
        ):
            x = x.unfold(dim, gap * (width - 1) + 1, step)[..., ::gap]
        n, _, height, width, *_ = x.shape
        return (
            x[:, 0]
            .permute(0, 3, 4, 1, 2)
            .reshape(n, weight[2] * weight[3], height * width)
        )

    def _is_pointwise(self, x: tuple[int, ...], weight: tuple[int, ...]) -> bool:
        """Whether it is simply a product of matrices, and not a small one."""
        return self._is_product(weight) and x[2] * x[3] >= _MANY

    def _is_product(self, weight: tuple[int, ...]) -> bool:
        """Whether it is simply a product of matrices."""
        return (
            tuple(weight[2:]) == (1, 1)
            and self.is_simple
            and self.stride == (1, 1)
            and self.padding == (0, 0)
        )

    def _numbers(self, groups: int) -> tuple[Any, ...]:
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.is_transposed,
            self.output_padding,
            groups,
        )


def _of_shape(shape: torch.Size, like: Tensor) -> Tensor:
    """A tensor of which only the shape and the memory format are read.

    It takes no memory of its own if it can lie where another one is.
    """
    if not is_last(like):
        return like.new_empty(1).expand(shape)
    _, channels, height, width = shape
    if like.is_contiguous(memory_format=torch.channels_last) and (
        like.numel() >= shape.numel()
    ):
        strides = (height * width * channels, 1, width * channels, channels)
        return like.as_strided(shape, strides)
    return empty(shape, like)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Maps with every place multiplied by a matrix (channels before, after)."""
    # Written in place: the next operation may change it, so it must not be a view.
    out = empty((len(x), matrix.shape[1], *x.shape[2:]), like=x)
    rows = out.permute(0, 2, 3, 1).view(-1, matrix.shape[1])
    if bias is None:
        torch.mm(rows_of(x), matrix, out=rows)
    else:
        torch.addmm(bias, rows_of(x), matrix, out=rows)
    return out


class ConvolutionPart(torch.autograd.Function):
    """A convolution, transposed or not, with the gradient of a part of its weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        leaf: Tensor,
        bias_leaf: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        part: Part,
        conv: Convolution,
    ) -> Tensor:
        """The plain operation; keeps what the active part's gradient reads."""
        kept, ctx.read = read_by_part(x, 1, part.inputs)
        ctx.save_for_backward(weight, *kept)
        ctx.part, ctx.conv, ctx.shape = part, conv, x.shape
        ctx.format = format_of(x)
        return conv.run(x, weight, bias, part.rounds_as_torch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the leaves."""
        weight, *kept = ctx.saved_tensors
        part: Part = ctx.part
        conv: Convolution = ctx.conv
        if grad.dim() == 4 and format_of(grad) is not ctx.format:
            grad = grad.contiguous(memory_format=ctx.format)
        num_in_active = num_in(part.inputs, ctx.shape[1])
        is_depthwise = conv.groups == ctx.shape[1]
        groups = num_in_active if is_depthwise else conv.groups
        grad_x = grad_leaf = grad_bias = None
        if ctx.needs_input_grad[0] and part.is_truncated:
            block = take_spans(weight, (part.rows, part.columns))
            shape = torch.Size((ctx.shape[0], num_in_active, *ctx.shape[2:]))
            active = take_span(grad, 1, part.outputs)
            grad_part = conv.grad_input(active, shape, block, groups)
            grad_x = fill(grad_part, 1, part.inputs, ctx.shape)
        elif ctx.needs_input_grad[0]:
            grad_x = conv.grad_input(grad, ctx.shape, weight, conv.groups)
        if ctx.needs_input_grad[1]:
            shape_leaf = (
                num_in(part.rows, weight.shape[0]),
                num_in(part.columns, weight.shape[1]),
                *weight.shape[2:],
            )
            if isinstance(part.rows, Tensor) and _fills_groups(part.rows, conv, weight):
                shape_all = (len(weight), *shape_leaf[1:])
                found = conv.grad_weight(grad, ctx.read(*kept), shape_all, groups)
                grad_leaf = take_span(found, 0, part.rows)
            else:
                active = take_span(grad, 1, part.outputs)
                found = ctx.read(*kept)
                grad_leaf = conv.grad_weight(active, found, shape_leaf, groups)
        if ctx.needs_input_grad[2]:
            others = [dim for dim in range(grad.dim()) if dim != 1]
            grad_bias = take_span(grad, 1, part.bias).sum(others)
        return grad_x, grad_leaf, grad_bias, None, None, None, None


def in_groups(count: int) -> int:
    """How many channels PyTorch computes for so many: it takes them in groups."""
    return 8 if count <= 8 else -(-count // 16) * 16


def _fills_groups(rows: Tensor, conv: Convolution, weight: Tensor) -> bool:
    """Whether some outputs cost as much as all, so that to pick them saves nothing."""
    return conv.is_simple and in_groups(len(rows)) == in_groups(len(weight))


class EmbeddingPart(torch.autograd.Function):
    """``F.embedding`` with the gradient of some columns of its weight."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        leaf: Tensor,
        weight: Tensor,
        columns: Span,
        padding: int,
        by_frequency: bool,
    ) -> Tensor:
        """The plain operation; keeps the tokens."""
        ctx.save_for_backward(tokens)
        ctx.columns, ctx.rest = columns, (len(weight), padding, by_frequency)
        return torch.embedding(weight, tokens, padding, by_frequency)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the leaves."""
        (tokens,) = ctx.saved_tensors
        active = take_span(grad, -1, ctx.columns).contiguous()
        grad_leaf = torch.ops.aten.embedding_dense_backward(active, tokens, *ctx.rest)
        return None, grad_leaf, None, None, None, None


class _Cut(torch.autograd.Function):
    """The identity; backward keeps the gradient at some positions of one axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, span: Span) -> Tensor:
        ctx.dim, ctx.span = dim, span
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        part = take_span(grad, ctx.dim, ctx.span)
        return fill(part, ctx.dim, ctx.span, grad.shape), None, None


def cut(x: Tensor, dim: int, span: Span) -> Tensor:
    """The same values, whose gradient passes only at some positions of one axis."""
    if span is None:
        return x
    found: Tensor = _Cut.apply(x, dim, span)  # type: ignore[no-untyped-call]  # torch has no hints here
    return found
