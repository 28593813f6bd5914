"""Follow every neuron of a model through one forward pass."""

from fedspu.neurons.tracing.trace import (
    BLOCK,
    OUTPUT,
    SILENT,
    Places,
    Traced,
    Unit,
    trace,
)

__all__ = ["BLOCK", "OUTPUT", "SILENT", "Places", "Traced", "Unit", "trace"]
