"""A copy of a model on which a neuron table can be tried without harm."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.calls import (
    Operations,
    Wide,
    all_tensors,
    as_double,
    call,
    copy_model,
    flat_tensors,
    outputs_of,
    plain_tensors,
)
from fedspu.neurons.shaking import (
    are_close,
    disturb,
    noise_like,
    num_examples,
    other_like,
    part_of,
    tolerance,
)
from fedspu.neurons.slimming.sizes import Mismatch, Reshape

NUM_QUICK = 3
"""Trials from this number on are for neurons that are hard to hear: with all examples.
"""

AMOUNTS = (1.0, 0.3, 0.1, 0.01)
"""How much of each weight is random while a table is tried."""

SMALL = 100_000
"""Tensors with at most so many entries show how a model amplifies rounding."""

IN_CACHE = 65_536
"""So many entries are put into another order at once."""

FEW = 8
"""If at most one in so many places is moved, a tensor is changed and changed back."""


class Probe:
    """A copy of the model in eval mode, and its example; in float64 if that works.

    It has the model's own weights until ``shake`` gives it random ones.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.is_wide, self._wide, self._tables = False, Wide(), _Tables()
        self._recorded: list[Tensor] = []  # the output, with its gradients
        self._prepare(model, example)
        self.whole_example = self.example
        self.plain = dict(plain_tensors(self.model))
        self.computed: frozenset[str] = frozenset()  # of these, by the model itself
        self.tensors = {**dict(all_tensors(self.model)), **self.plain}
        # The user's own tensors, to be read alone: a copy of them would only cost.
        own = {name: tensor.detach() for name, tensor in all_tensors(model)}
        self._own = {
            name: own[name] if name in own else tensor.detach().clone()
            for name, tensor in all_tensors(self.model)
        }
        self.trials_left = 0  # of slim copies
        self.mismatches: list[Mismatch] = []  # in the last of these
        self.reshapes: dict[str, list[Reshape]] = {}  # of the full model, once needed
        self.is_deaf = False  # whether the output depends on hardly any neuron
        self._amount = self._most = AMOUNTS[0]  # how random weights are, and may be
        self._fewer: Any = None  # examples, once they are known to be independent
        self._spare: dict[str, Tensor] = {}  # memory to be used again
        self._moved: list[tuple[str, int, Tensor, Tensor]] = []  # to be put back

    def _prepare(self, model: nn.Module, example: Any) -> None:
        """Copy the model and record its output: in float64, if it runs in that."""
        for is_wide in (True, False):  # some models only run in their own precision
            self.model, self.example = _copy(model).double(), as_double(example)
            self.is_wide = is_wide
            with suppress(ModelError):
                self.record()
                if self.output:
                    self.is_wide &= self._wide.has_widened  # else it only costs
                    return
        self.model, self.example, self.is_wide = _copy(model), example, False
        returned = call(self.model, example)
        if not outputs_of(returned):
            raise ModelError(
                f"the model returned a {type(returned).__name__}; expected a tensor, "
                "or a tuple, list or dict of tensors"
            )
        self.record()

    def _few_examples(self) -> Any:
        """As few examples as prove as much; all of them if they are not independent.

        They are if the first and the last have the same output alone as among all. One
        is enough if its output is more than one number: a single one has no spread.
        """
        whole, number = self.whole_example, num_examples(self.whole_example)
        few = 1 + any(out.dim() == 0 or out.numel() == len(out) for out in self.output)
        if number <= few or number != num_examples(self.output):
            return whole
        for part in (slice(number - few, number), slice(few)):
            try:
                with torch.no_grad():
                    now = self.call(self.model, part_of(whole, part))
            except ModelError:
                return whole
            if not are_close(now, part_of(self.output, part)):
                return whole
        return part_of(whole, part)

    def know(self, tables: Mapping[str, Tensor]) -> None:
        """Let values that the model computes of sizes be tried like its tensors."""
        if tables:  # their sizes may be those of the whole example
            self._fewer = self.whole_example
        self.computed = frozenset(tables)
        for name, value in tables.items():
            self.plain[name] = self.tensors[name] = value.clone()
            self._tables.pairs.append((value, self.plain[name]))

    def call(self, model: nn.Module, example: Any) -> list[Tensor]:
        """All tensors in the output of the model, or of one derived from it."""
        forget(model)
        drawn = torch.get_rng_state()
        torch.manual_seed(0)  # some models draw numbers in eval mode too
        try:
            with self.wide(), self._tables if self._tables.pairs else nullcontext():
                return outputs_of(call(model, example))
        finally:
            torch.set_rng_state(drawn)

    def wide(self) -> AbstractContextManager[Any]:
        """Inside, the model computes everything in float64, if it can."""
        return self._wide if self.is_wide else nullcontext()

    @contextmanager
    def trying(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these tensors may be given other data; then they get theirs back."""
        own = {name: self.tensors[name].data for name in names}
        try:
            yield
        finally:
            for name, values in own.items():
                if self.tensors[name].data_ptr() != values.data_ptr():
                    self._spare[name] = self.tensors[name].data
                self.tensors[name].data = values
            for name, dim, where, part in reversed(self._moved):
                self.tensors[name].data.index_copy_(dim, where, part)
            self._moved.clear()

    def reorder(self, name: str, sources: Mapping[int, np.ndarray]) -> None:
        """While ``trying`` a tensor: put at each place what lay at its source.

        ``sources`` has the source of every place along some axes.
        """
        tensor, data = self.tensors[name], self.tensors[name].data
        moved = {
            dim: np.flatnonzero(source != np.arange(len(source)))
            for dim, source in sources.items()
        }
        # Memory that is new to the process costs more than what is done with it.
        if isinstance(tensor, nn.Parameter) and all(
            FEW * len(places) <= data.shape[dim] for dim, places in moved.items()
        ):
            for dim, places in moved.items():
                where = torch.from_numpy(places).to(data.device)
                self._moved.append((name, dim, where, data.index_select(dim, where)))
                source = torch.from_numpy(sources[dim][places]).to(data.device)
                data.index_copy_(dim, where, data.index_select(dim, source))
            return
        spare = self._spare.pop(name, None)
        wanted = {
            dim: torch.from_numpy(s).to(data.device) for dim, s in sources.items()
        }
        out = torch.empty_like(data) if spare is None else spare
        tensor.data = _gathered(data, wanted, out)

    def blank(self, name: str, places: Mapping[int, Tensor]) -> None:
        """While ``trying`` a tensor: set it to zero at these places along some axes."""
        tensor, spare = self.tensors[name], self._spare.pop(name, None)
        own = tensor.data
        tensor.data = own.clone() if spare is None else spare.copy_(own)
        for dim, where in places.items():
            tensor.data.index_fill_(dim, where.to(own.device), 0)

    def shake(self, trial: int, with_gradients: bool = True) -> bool:
        """Set random weights (and input, except in trial 0); False if that fails.

        Trial 0 has all examples; the next ones may do with fewer. Gradients cost time.

        Weights are random because a norm that starts at zero would hide a wrong table.
        An output that overflowed proves nothing, so smaller changes are tried as well.
        """
        given = self.whole_example
        if self._fewer is not None and 0 < trial < NUM_QUICK:
            given = self._fewer
        for amount in (a for a in AMOUNTS if a <= self._most):
            for example in (noise_like(given), given)[trial == 0 :]:
                disturb(self.model, self._own, amount)
                self.example = example
                try:
                    if with_gradients:
                        self.record()
                    else:
                        self.output = self.run()
                except ModelError:  # the model may not accept random input
                    continue
                if all(bool(out.isfinite().all()) for out in self.output):
                    self._amount = amount
                    if self._fewer is None and trial == 0:
                        self._fewer = self._few_examples()
                    return True
        return False

    def calm_down(self) -> bool:
        """Change weights less from now on, if the output is mostly rounding.

        Some models amplify it: those that multiply activations with one another. Then
        an output that moved proves nothing. False if there is nothing to be done.
        """
        small = [n for n, p in self._learnt().items() if p.numel() <= SMALL]
        with self.trying(small), torch.no_grad():
            for name in small:  # in their last bit
                tensor = self.tensors[name]
                last = torch.finfo(tensor.dtype).eps
                tensor.data = tensor.data * (1 + last * torch.randn_like(tensor))
            is_calm = are_close(self.run(), self.output, 0.01)
        less = [amount for amount in AMOUNTS if amount < self._amount]
        if is_calm or not less:
            return False
        self._most = less[0]
        return True

    def record(self) -> None:
        """Run the model for its output, and for gradients if it has any here."""
        for parameter in self._learnt().values():
            parameter.requires_grad_()
        try:
            self._recorded = self.call(self.model, self.example)
        except ModelError:  # it may write to its own parameters
            self._recorded = self.run()
        self.output = [out.detach().clone() for out in self._recorded]

    def _learnt(self) -> dict[str, nn.Parameter]:
        """The parameters that can have gradients."""
        parameters = self.model.named_parameters()
        return {n: p for n, p in parameters if p.is_leaf and p.is_floating_point()}

    def run(self) -> list[Tensor]:
        """The model's output on the example."""
        with torch.no_grad():
            return self.call(self.model, self.example)

    def runs_in_training(self) -> bool:
        """Whether the model as it is now runs in training mode."""
        self.model.train()
        try:
            with torch.no_grad(), self.wide():
                call(self.model, self.example)
        except ModelError:
            return False
        finally:
            self.model.eval()
        return True

    def forget_gradients(self) -> None:
        """Free what was kept for ``influences`` of the present weights."""
        self._recorded = []

    def is_unchanged(self) -> bool:
        """Whether the model still gives the output it gave after the last shake."""
        try:
            return are_close(self.run(), self.output)
        except ModelError:
            return False

    def least(self) -> float:
        """The smallest change of the output that cannot be mistaken for rounding."""
        return 10 * min(float(tolerance(out)) for out in self.output if out.numel())

    def influences(
        self, names: Collection[str] | None = None
    ) -> dict[str, Tensor] | None:
        """How much the output, in a random direction, changes with each entry.

        That is, by how much if the entry were twice as large; of these parameters
        (default: all). None if the model has no backward pass here.
        """
        floats = self._learnt()
        if names is not None:
            floats = {name: p for name, p in floats.items() if name in names}
            if not floats:
                return {}
        if not self._recorded:
            self.record()
        try:
            outputs = self._recorded
            rng = torch.Generator().manual_seed(0)
            total = sum(
                (out * torch.randn(out.shape, generator=rng).to(out)).sum()
                for out in outputs
                if out.requires_grad
            )
            if not isinstance(total, Tensor):
                return None
            found = torch.autograd.grad(
                total, list(floats.values()), retain_graph=True, allow_unused=True
            )
        except Exception:  # the user's own code
            return None
        return {
            name: (gradient * floats[name].detach()).abs()
            for name, gradient in zip(floats, found, strict=True)
            if gradient is not None
        }

    def unreached(self) -> tuple[str, ...] | None:
        """Parameters that the output does not depend on, according to autograd.

        To be asked before ``shake``. None if the model has no backward pass here.
        """
        parameters = {n: p for n, p in self.model.named_parameters() if p.is_leaf}
        total = sum(out.sum() for out in self._recorded if out.requires_grad)
        self.forget_gradients()
        if not isinstance(total, Tensor):
            return tuple(parameters)
        leaves = list(parameters.values())
        if not {id(leaf) for leaf in leaves} - _leaves_of(total):
            return ()
        try:
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
        except Exception:  # the user's own code
            return None
        return tuple(n for n, g in zip(parameters, grads, strict=True) if g is None)

    def has_finite_gradients(self) -> bool:
        """Whether no gradient of the model as it is now is infinite or not a number.

        Also if it has no backward pass here.
        """
        outputs = [out for out in self.call(self.model, self.example) if out.grad_fn]
        totals = [out.square().sum() for out in outputs]
        leaves = list(self._learnt().values())
        try:
            grads = torch.autograd.grad(totals, leaves, allow_unused=True)
        except Exception:  # the user's own code
            return True
        return all(g is None or bool(g.isfinite().all()) for g in grads)

    def reaches(self, names: Iterable[str]) -> bool:
        """Whether any other input makes use of these parameters."""
        wanted = {id(self.tensors[name]) for name in names}
        for trial in range(4):
            for scale in (1.0, -3.0):
                seen = _Seen()
                example = other_like(self.whole_example, trial, scale)
                try:
                    with torch.no_grad(), self.wide(), seen:
                        call(self.model, example)
                except ModelError:  # the model may not accept random input
                    pass
                if seen.tensors & wanted:
                    return True
        return False


def _gathered(data: Tensor, sources: Mapping[int, Tensor], out: Tensor) -> Tensor:
    """Put at each place what lay at its source; some rows at a time, for the cache."""
    rest = {dim: source for dim, source in sources.items() if dim}
    if not rest:
        return torch.index_select(data, 0, sources[0], out=out)
    *others, last = rest.items()
    number = max(1, IN_CACHE // max(1, data[0].numel()))
    for first in range(0, len(data), number):
        rows = slice(first, first + number)
        part = data.index_select(0, sources[0][rows]) if 0 in sources else data[rows]
        for dim, source in others:
            part = part.index_select(dim, source)
        torch.index_select(part, *last, out=out[rows])
    return out


def _leaves_of(value: Tensor) -> set[int]:
    """The tensors from which autograd saw a value computed, by their ids."""
    leaves, seen, todo = set(), set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            todo.extend(before for before, _ in node.next_functions)
    return leaves


def forget(model: nn.Module) -> None:
    """Let a model drop what it kept of earlier weights, and leave it in eval mode.

    Some layers compute a table once in eval mode, and again after training.
    """
    if any(type(layer).train is not nn.Module.train for layer in model.modules()):
        model.train()
        model.eval()


class _Tables(Operations):
    """Inside, operations that are given one of some values get another instead."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*map(self._now, args), **(kwargs or {}))

    def _now(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            for value, now in self.pairs:
                if given.shape == value.shape and torch.equal(given, value):
                    return now.detach()
        return given


class _Seen(Operations):
    """Inside, the tensors that operations are applied to are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.tensors.update(map(id, flat_tensors((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy_model(model).eval()
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({error}); map_neurons works on "
            "a deep copy, so the model must support copy.deepcopy"
        ) from error
