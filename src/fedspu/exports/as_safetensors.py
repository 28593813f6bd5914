"""The format safetensors: a model's tensors by name, and what model this is."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedspu import models
from fedspu.errors import ModelError, SettingsError, StorageError
from fedspu.exports.compare import Outputs
from fedspu.exports.facts import Facts
from fedspu.federation.plan import Build, build_model
from fedspu.imports import is_place
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.mapping import map_neurons
from fedspu.neurons.slim import slim_model
from fedspu.neurons.table import Active


def check_installed() -> None:
    """Needs no more than fedspu itself."""


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
    name. Code that the file names is imported only with ``trust``.
    """
    path = Path(path)
    facts = _facts(path)
    with undisturbed():
        model = _new_model(path, facts, build, trust)
    _fill(model, path)
    return model.eval()


# Reading ------------------------------------------------------------------------------


def _facts(path: Path) -> Facts:
    if not path.is_file():
        raise StorageError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(f"{path}: cannot be read as safetensors ({error})") from None
    if "fedspu" not in facts:
        raise StorageError(
            f"{path}: was not written by fedspu export; load it with your own code"
        )
    return facts


def _new_model(path: Path, facts: Facts, build: Build | None, trust: bool) -> nn.Module:
    name = facts.get("model", "")
    if build is None and "remodelled" in facts:
        raise ModelError(
            f"{path}: the method {facts['remodelled']} changed the model {name}; give "
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
            model = models.build(name, int(facts["num_outputs"]))
        if "kept" not in facts or "remodelled" in facts:
            return model
        return _slim(model, facts)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(f"{path}: its metadata is damaged ({error!r})") from None


def _slim(model: nn.Module, facts: Facts) -> nn.Module:
    """The model with only the neurons that the file has."""
    shape = [int(size) for size in facts["input_shape"].split(",")]
    example = torch.zeros(2, *shape, dtype=getattr(torch, facts["input_dtype"]))
    neurons = map_neurons(model, example)
    kept: Active = {
        name: torch.tensor(indices)
        for name, indices in json.loads(facts["kept"]).items()
    }
    neurons.blocks(kept)  # refuses a choice of another model
    return slim_model(model, neurons, kept)


def _fill(model: nn.Module, path: Path) -> None:
    """Put the tensors of a file into a model that has exactly these."""
    state = load_file(path)
    forms = {name: (t.shape, t.dtype) for name, t in _tensors(model)}
    if forms != {name: (t.shape, t.dtype) for name, t in state.items()}:
        raise ModelError(
            f"{path} is of another model: its tensors differ in name, shape or type"
        )
    model.load_state_dict(state, strict=False)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of the state_dict; a layer may also put other things there."""
    items = model.state_dict().items()
    return [(name, value) for name, value in items if isinstance(value, Tensor)]
