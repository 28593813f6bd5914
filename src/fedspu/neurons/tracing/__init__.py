"""Follow every neuron of a model through one forward pass."""

from fedspu.neurons.tracing.trace import BLOCK, OUTPUT, SILENT, Traced, trace
from fedspu.neurons.tracing.units import Units

__all__ = ["BLOCK", "OUTPUT", "SILENT", "Traced", "Units", "trace"]
