"""The format torch-export: a graph with its weights, run by PyTorch alone."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fedspu.errors import ModelError
from fedspu.exports.compare import Outputs
from fedspu.exports.facts import Facts
from fedspu.exports.quiet import quiet

FACTS = "fedspu.json"
"""The file in the archive that says what model this is."""


def write(model: nn.Module, x: Tensor, facts: Facts, file: Path) -> Facts:
    """Write the model as a graph whose batch size is free."""
    program = trace(model, x)
    with quiet():
        torch.export.save(program, file, extra_files={FACTS: json.dumps(facts)})
    return facts


def load(file: Path, new_model: Callable[[], nn.Module]) -> Outputs:
    """What runs the file; no code of the model is needed."""
    with quiet():
        module: Outputs = torch.export.load(file).module()
    return module


def trace(model: nn.Module, x: Tensor) -> ExportedProgram:
    """The graph of a model in eval mode, for batches of any size."""
    # A size of one would be taken for fixed.
    example = x[torch.arange(2) % len(x)]
    try:
        program = _graph(model, example, strict=False)
    except Exception as error:  # the user's own code, or what PyTorch makes of it
        try:
            # PyTorch's other way reads Python's bytecode: it also follows len(x).
            program = _graph(model, example, strict=True)
        except Exception:
            raise ModelError(
                f"torch.export cannot follow this model ({reason(error)}); its forward "
                "must not depend on values or on one batch size; --format safetensors "
                "takes every model"
            ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths and source code of this machine
    return program


def _graph(model: nn.Module, example: Tensor, strict: bool) -> ExportedProgram:
    # PyTorch's fast path for attention is an operation that no other runtime has.
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(
                model, (example,), dynamic_shapes=({0: Dim("batch")},), strict=strict
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)


def reason(error: BaseException) -> str:
    """What an exporter's error says first, without its pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= MOST else f"{text[:MOST]}…"


MOST = 200
"""Characters of a reason."""
