"""The format safetensors: a model's tensors by name, and what model this is."""

import json
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedspu import models
from fedspu.errors import FedSPUError, ModelError, SettingsError, StorageError
from fedspu.exports.compare import Outputs
from fedspu.exports.facts import Facts
from fedspu.federation.plan import Build, build_model
from fedspu.imports import is_place
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.mapping import NeuronWarning, map_neurons
from fedspu.neurons.slim import slim_model
from fedspu.neurons.table import Active
from fedspu.settings_text import one_line


def write(model: nn.Module, x: Tensor, facts: Facts, file: Path) -> Facts:
    """Write all tensors of the model's state_dict, and the facts as metadata."""
    # Cloned, because a file cannot hold two tensors that share memory.
    state = {name: t.contiguous().clone() for name, t in _tensors(model)}
    save_file(state, file, metadata=facts)
    return facts


def load(file: Path, new_model: Callable[[], nn.Module]) -> Outputs:
    """A new model with the values of the file, in eval mode."""
    model = new_model()
    _fill(model, file)
    return model.eval()


def load_exported(
    path: Path | str, build: Build | None = None, *, trust: bool = False
) -> nn.Module:
    """The model of a safetensors file that fedspu has exported, in eval mode.

    ``build`` makes the whole model; leave it out if fedspu can find the model by its
    name. Code that the file names is imported only with ``trust``. The models of
    ``small``, ``heterofl`` and ``fjord`` as in its own paper have layers of their own
    and cannot be rebuilt: there, ``build`` must make the changed model.
    """
    path = Path(path)
    if path.suffix in LOADED_WITH:
        raise StorageError(
            f"{path}: expected a .safetensors file; load this one with "
            f"{LOADED_WITH[path.suffix]}"
        )
    facts, shapes = _read(path)
    with undisturbed():
        model = _new_model(path, facts, shapes, build, trust)
    _fill(model, path)
    return model.eval()


LOADED_WITH = {
    ".onnx": "onnxruntime.InferenceSession(file)",
    ".pt2": "torch.export.load(file).module()",
}
"""Other formats by their endings, and what reads them."""


# Reading ------------------------------------------------------------------------------

Shapes = dict[str, list[int]]

MOST_FACTS = 2**24
"""Characters of all facts of a file together."""

MOST_VALUES = 2**20
"""Values of one example: a slim model is found by running the whole one on zeros."""

MOST_AXES = 8


def _read(path: Path) -> tuple[Facts, Shapes]:
    """What a file of fedspu says about itself, and the shapes of its tensors."""
    facts, shapes = _header(path)
    if "fedspu" not in facts:
        raise StorageError(
            f"{path}: was not written by fedspu export; load it with your own code"
        )
    if sum(map(len, facts.values())) > MOST_FACTS:
        raise _damaged(path, f"it has more than {MOST_FACTS} characters")
    return facts, shapes


def _header(path: Path) -> tuple[Facts, Shapes]:
    """All of a file but the values of its tensors."""
    if not path.is_file():
        raise StorageError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            facts, names = file.metadata() or {}, list(file.keys())
            return facts, {n: file.get_slice(n).get_shape() for n in names}
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(
            f"{path}: cannot be read as safetensors ({_short(error)})"
        ) from None


def _new_model(
    path: Path, facts: Facts, shapes: Shapes, build: Build | None, trust: bool
) -> nn.Module:
    """A model with the layers of the file; its values are not those of the file yet."""
    name = facts.get("model", "")
    if build is None and "remodelled" in facts:
        method = one_line(facts["remodelled"])
        raise ModelError(
            f"{path}: the method {method} changed the model {one_line(name)}; give "
            "build, a function that makes the changed one, or use another format"
        )
    if build is None and is_place(name) and not trust:
        raise SettingsError(
            f"{path} names code of its own (model = {name!r}), which would be run; if "
            "you trust it, give trust=True, or the model as build"
        )
    try:
        if build is not None:
            model = build_model(build)
        else:
            number = None if is_place(name) else _num_outputs(facts, shapes)
            model = models.build(name, number)
        if "kept" not in facts or "remodelled" in facts:
            return model
        _check_part(path, model, shapes)
        return _slim(model, facts)
    except FedSPUError:
        raise
    except Exception as error:  # whatever forged facts lead to
        raise _damaged(path, _short(error)) from None


def _num_outputs(facts: Facts, shapes: Shapes) -> int:
    """The outputs of the model; some tensor of it is as long."""
    number = int(facts["num_outputs"])
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    if not 0 <= number <= longest:
        raise ValueError(f"num_outputs = {number}")
    return number


def _check_part(path: Path, model: nn.Module, shapes: Shapes) -> None:
    """Refuse tensors of which a slim model of this one cannot have been made."""
    whole = {name: list(t.shape) for name, t in _tensors(model)}
    if whole.keys() != shapes.keys() or not all(
        len(shape) == len(whole[name])
        and all(ours <= size for ours, size in zip(shape, whole[name], strict=True))
        for name, shape in shapes.items()
    ):
        raise _another_model(path)


def _slim(model: nn.Module, facts: Facts) -> nn.Module:
    """The model with only the neurons that the file has."""
    shape = [int(size) for size in facts["input_shape"].split(",")]
    if len(shape) > MOST_AXES or min(shape) < 1 or prod(shape) > MOST_VALUES:
        raise ValueError(f"input_shape = {facts['input_shape']}")
    dtype = getattr(torch, facts["input_dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"input_dtype = {facts['input_dtype']}")
    kept = _kept(facts["kept"])
    with warnings.catch_warnings():
        # Whoever made the run was told.
        warnings.simplefilter("ignore", NeuronWarning)
        neurons = map_neurons(model, torch.zeros(2, *shape, dtype=dtype))
    neurons.blocks(kept)  # refuses a choice of another model
    return slim_model(model, neurons, kept)


def _kept(text: str) -> Active:
    """The neurons of a slim model, by group."""
    found = json.loads(text)
    for indices in found.values():
        if not isinstance(indices, list) or not all(type(i) is int for i in indices):
            raise ValueError("kept: expected a list of numbers for each group")
    return {
        name: torch.tensor(indices, dtype=torch.int64)
        for name, indices in found.items()
    }


def _fill(model: nn.Module, path: Path) -> None:
    """Put the tensors of a file into a model that has exactly these."""
    forms = {name: (t.shape, t.dtype) for name, t in _tensors(model)}
    _, shapes = _header(path)
    if {name: list(shape) for name, (shape, _) in forms.items()} != shapes:
        raise _another_model(path)
    state = load_file(path)
    if forms != {name: (t.shape, t.dtype) for name, t in state.items()}:
        raise _another_model(path)
    model.load_state_dict(state, strict=False)


def _another_model(path: Path) -> ModelError:
    return ModelError(
        f"{path} is of another model: its tensors differ in name, shape or type"
    )


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(f"{path}: its metadata is damaged ({why})")


def _short(error: BaseException) -> str:
    """An error as a short line."""
    return one_line(f"{type(error).__name__}: {error}")[:200]


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of the state_dict; a layer may also put other things there."""
    items = model.state_dict().items()
    return [(name, value) for name, value in items if isinstance(value, Tensor)]
