"""Run a model by the compiled code, where it can: in training, in epochs, judging."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedspu.compiled.library import find
from fedspu.errors import ModelError
from fedspu.partial.chain.find import MOST_GRAPHS, trace
from fedspu.partial.chain.native.calls import (
    Sgd,
    Training,
    Values,
    backward,
    forward,
    judge,
    make_gradients,
)
from fedspu.partial.chain.native.network import Network, Work
from fedspu.partial.chain.native.parts import (
    BATCH,
    norm_kind,
    parameters_of,
    read_parts,
)
from fedspu.partial.chain.native.reader import read_stages
from fedspu.partial.chain.native.stages import NotAChainError, Stage
from fedspu.partial.spans import Spans

Kernels = Literal["auto", "native", "torch"]
"""Which code runs training steps; ``auto`` is native where there is a compiler."""


def check_kernels(kernels: str) -> None:
    """Refuse kernels that do not exist, or that this machine cannot have."""
    if kernels not in get_args(Kernels):
        raise ModelError(f"kernels = {kernels!r}: expected auto, native or torch")
    if kernels == "native" and find().library is None:
        raise ModelError(
            f"kernels = 'native': there is no compiled code here: {find().how}; use "
            "auto or torch"
        )


def why_not(model: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Why the compiled code cannot run a model on such examples; None if it can."""
    if find().library is None:
        return find().how
    try:
        stages_of(model, shape)
    except NotAChainError as error:
        return str(error)
    return None


# Stages, read once for each model and shape -------------------------------------------

_READ: "WeakKeyDictionary[nn.Module, dict[Any, list[Stage] | NotAChainError]]" = (
    WeakKeyDictionary()
)


def stages_of(model: nn.Module, shape: tuple[int, ...]) -> list[Stage]:
    """The model's stages, for examples of this shape, in its present mode."""
    with _READING:  # tracing patches PyTorch for all threads
        return _stages_of(model, shape)


def _stages_of(model: nn.Module, shape: tuple[int, ...]) -> list[Stage]:
    traced = trace(model)
    if traced.graph is None:
        raise NotAChainError("a model that cannot be traced, or that has hooks")
    known = _READ.setdefault(model, {})
    name = (traced.made_of, shape)
    if name not in known:
        if len(known) == MOST_GRAPHS:
            known.clear()
        try:
            known[name] = read_stages(traced.graph, shape)
        except NotAChainError as error:
            known[name] = error
    found = known[name]
    if isinstance(found, NotAChainError):
        raise found
    return found


_READING = Lock()


def takes(x: Any) -> bool:
    """Whether examples are of a kind that the compiled code reads."""
    return (
        isinstance(x, Tensor)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not x.requires_grad
        and x.dim() in (2, 4)
        and len(x) > 0
        and not torch.is_autocast_enabled("cpu")
    )


def draw_key(network: Network) -> int:
    """A key for the dropout of one call, from PyTorch's own generator."""
    return int(torch.randint(2**62, ())) if network.has_dropout else 0


# In a user's own loop -----------------------------------------------------------------


class NativeChain(torch.autograd.Function):
    """The whole chain as one operation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        network: Network,
        value: Callable[[Tensor], Tensor],
        slots: Sequence[Sequence[int | None]],
        *leaves: Tensor,
    ) -> Tensor:
        """The model's own output; keeps what the backward pass reads."""
        network.check_batch(len(x))
        values = Values(network, value)
        ctx.work, ctx.key = network.work(len(x)), draw_key(network)
        ctx.x = x.contiguous()
        out = forward(network, ctx.work, values, ctx.x, ctx.key)
        network.count_batches(1)
        ctx.network, ctx.slots, ctx.num_leaves = network, slots, len(leaves)
        ctx.values, ctx.has_run = values, True
        ctx.save_for_backward(*values.parameters)  # torch notices if they change
        ctx.borrowed = _Borrowed(network, ctx.work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients of the leaves."""
        assert len(ctx.saved_tensors) > 0  # raises an error if one has changed
        found = make_gradients(ctx.network)
        ctx.values.put_gradients(found)
        if not ctx.has_run:  # a second backward pass needs what the first one used up
            again = ctx.values.without_statistics()
            forward(ctx.network, ctx.work, again, ctx.x, ctx.key)
        ctx.has_run = False
        backward(ctx.network, ctx.work, ctx.values, grad.contiguous(), ctx.key)
        grads: list[Tensor | None] = [None] * ctx.num_leaves
        for places, of_stage in zip(ctx.slots, found, strict=True):
            for place, tensor in zip(places, of_stage, strict=True):
                if place is not None:
                    grads[place] = tensor
        return (None, None, None, None, *grads)


class _Borrowed:
    """Gives memory back once no backward pass can need it any more."""

    def __init__(self, network: Network, work: Work) -> None:
        self.network, self.work = network, work

    def __del__(self) -> None:
        self.network.give_back(self.work)


@dataclass(frozen=True)
class Bound:
    """A network, and where the leaves of its parameters are among all leaves."""

    network: Network
    slots: list[list[int | None]]
    leaves: list[Tensor]

    def has_its_leaves(self) -> bool:
        """Whether its parameters are those that train, not others put in for a call."""
        return all(
            place is None or getattr(p, "leaf", p) is self.leaves[place]
            for stage, places in zip(self.network.stages, self.slots, strict=True)
            for p, place in zip(parameters_of(stage), places, strict=True)
        )


class NativeForward:
    """Runs a model in training, for examples of any one shape.

    Made outside of ``partial_training``, where parameters are still the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        spans: Mapping[str, Spans],
        trainable: Mapping[str, Tensor],
        is_truncated: bool,
        value: Callable[[Tensor], Tensor],
    ) -> None:
        self.model, self.spans, self.trainable = model, spans, trainable
        self.is_truncated, self.value = is_truncated, value
        self._graph, self._modes = trace(model).graph, modes(model)
        self._names = names_of(model)
        self._bound: dict[tuple[int, ...], Bound | None] = {}

    def __call__(self, x: Any) -> Tensor | None:
        """The model's output; None if it has to run in another way."""
        if self._graph is None or not takes(x) or not torch.is_grad_enabled():
            return None
        if self._modes != modes(self.model):
            return None
        shape = tuple(x.shape[1:])
        if shape not in self._bound:
            self._bound[shape] = self._bind(self._graph, shape)
        bound = self._bound[shape]
        if bound is None or not bound.has_its_leaves():
            return None
        arguments = (bound.network, self.value, bound.slots, *bound.leaves)
        try:
            out: Tensor = NativeChain.apply(x, *arguments)  # type: ignore[no-untyped-call]  # torch has no hints here
        except NotAChainError:  # a weight has another memory format or dtype now
            return None
        return out

    def _bind(self, graph: Any, shape: tuple[int, ...]) -> Bound | None:
        try:
            stages = read_stages(graph, shape)
            parts = read_parts(
                stages, self._names, self.spans, self.trainable.__contains__
            )
            network = Network(stages, parts, shape, self.is_truncated)
        except NotAChainError:
            return None
        places = {name: i for i, name in enumerate(self.trainable)}
        slots = [[places.get(n) for n in names] for names in map(self._names, stages)]
        return Bound(network, slots, list(self.trainable.values()))


def modes(model: nn.Module) -> tuple[Any, ...]:
    """Which layers are in training, and how much each drops."""
    return tuple((m.training, vars(m).get("p")) for m in model.modules())


def names_of(model: nn.Module) -> Callable[[Stage], list[str]]:
    """A function that gives the names of a stage's parameters; "" where it has none."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    found = {
        (id(layer), name): name_of[id(p)]
        for layer in model.modules()
        for name, p in layer._parameters.items()
        if p is not None
    }
    if len(set(found.values())) < len(found):
        raise NotAChainError("a weight that two layers share")

    def names(stage: Stage) -> list[str]:
        parts = (stage.layer, stage.layer, stage.norm, stage.norm)
        kinds = ("weight", "bias", "weight", "bias")
        return [
            found.get((id(part), kind), "")
            for part, kind in zip(parts, kinds, strict=True)
        ]

    return names


# Whole epochs -------------------------------------------------------------------------


def make_training(
    model: nn.Module,
    spans: Mapping[str, Spans],
    x: Tensor,
    y: Tensor,
    sgd: Sgd,
    is_truncated: bool,
    offsets: Callable[[int], Tensor] | None = None,
) -> Training | None:
    """Epochs of SGD on the cross-entropy; None if they have to run in another way.

    ``offsets`` gives what is added to the scores of so many classes.
    """
    if find().library is None or not takes(x):
        return None
    if y.dtype != torch.int64 or y.dim() != 1 or len(y) != len(x):
        return None
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        shape = tuple(x.shape[1:])
        stages = stages_of(model, shape)
        parts = read_parts(stages, names_of(model), spans, own.__contains__)
        network = Network(stages, parts, shape, is_truncated)
    except NotAChainError:
        return None
    if len(network.output) != 1 or not _are_classes(y, network.output[0]):
        return None
    added = None if offsets is None else offsets(network.output[0]).float()
    return Training(network, x.contiguous(), y.contiguous(), sgd, added)


def _are_classes(y: Tensor, number: int) -> bool:
    return bool((y.min() >= 0) & (y.max() < number))


# Judging ------------------------------------------------------------------------------


def make_judge(
    model: nn.Module, shape: tuple[int, ...]
) -> Callable[[Tensor], Tensor] | None:
    """A function that gives the model's output in eval mode; None if there is none."""
    if find().library is None:
        return None
    try:
        stages = stages_of(model, shape)
        if any(s.dropout > 0 or norm_kind(s) == BATCH for s in stages):
            return None  # its output depends on chance, or on the whole batch
        known = _JUDGES.get(model)
        if known is None or known[0].stages != tuple(stages):
            network = Network(stages, None, shape)
            at_once = FEW if _num_weights(model) < MANY_WEIGHTS else MANY
            known = _JUDGES[model] = network, Work(network, at_once, is_training=False)
        values = Values(known[0])
    except NotAChainError:
        return None
    network, work = known

    def run(x: Tensor) -> Tensor:
        with _JUDGING:  # threads would share the work's memory
            return judge(network, work, values, x.contiguous())

    return run


FEW, MANY, MANY_WEIGHTS = 16, 128, 2**19
"""Images that are judged together: few, so that their maps stay in the cache, but many
if the weights do not fit into it and have to be read again each time."""


def _num_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


_JUDGES: "WeakKeyDictionary[nn.Module, tuple[Network, Work]]" = WeakKeyDictionary()
"""The network of each model that was judged, for the next time."""

_JUDGING = Lock()
