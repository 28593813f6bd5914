"""The format ONNX: a graph with its weights, for ONNX Runtime and others.

The libraries are optional, and imported only here.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.exports.as_torch_export import reason, trace
from fedspu.exports.compare import Outputs
from fedspu.exports.facts import Facts
from fedspu.exports.quiet import quiet

INPUT, OUTPUT = "input", "output"
"""The names of the graph's one input and one output."""


def write(model: nn.Module, x: Tensor, facts: Facts, file: Path) -> Facts:
    """Write the model as a graph whose batch size is free."""
    import onnx

    program = trace(model, x)
    try:
        with quiet():
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                verbose=False,
            )
            assert made is not None
            graph = made.model_proto
            _tidy(graph)
            _name_batch(graph.graph)
            facts = {**facts, "opset": str(_opset(graph))}
            onnx.helper.set_model_props(graph, facts)
            onnx.checker.check_model(graph, full_check=True)
            file.write_bytes(graph.SerializeToString())
    except OSError:
        raise
    except Exception as error:  # an operation that ONNX does not have, or 2 GB
        raise ModelError(
            f"the model cannot be written as ONNX ({reason(error)}); try --format "
            "torch-export"
        ) from error
    return facts


def _opset(graph: "onnx.ModelProto") -> int:  # type: ignore[name-defined]  # noqa: F821  # optional
    """The version of ONNX's operations that a graph uses."""
    return int(next(used.version for used in graph.opset_import if not used.domain))


def load(file: Path, new_model: Callable[[], nn.Module]) -> Outputs:
    """What runs the file in ONNX Runtime, with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(
        str(file), options, providers=["CPUExecutionProvider"]
    )

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: x.numpy()})[0])

    return run


def _tidy(graph: "onnx.ModelProto") -> None:  # type: ignore[name-defined]  # noqa: F821  # optional
    """Remove notes of the exporter: they hold paths and source code of this machine."""
    for part in (graph.graph, *graph.functions):
        del part.metadata_props[:]
        for node in part.node:
            del node.metadata_props[:]
            node.doc_string = ""


def _name_batch(graph: "onnx.GraphProto") -> None:  # type: ignore[name-defined]  # noqa: F821  # optional
    """Call the free size ``batch``, which the exporter numbers."""
    values = [*graph.input, *graph.output, *graph.value_info]
    number = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for size in (d for value in values for d in value.type.tensor_type.shape.dim):
        if number and size.dim_param == number:
            size.dim_param = "batch"
