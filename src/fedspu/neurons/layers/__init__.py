"""What fedspu knows about layers, one file for each kind.

A kind says where neurons lie in a layer's tensors, what makes them, and which sizes the
layer stores besides its tensors. A new kind is one class (``kind.py``).
"""

from fedspu.neurons.layers import attention, convolution, linear, norms, recurrent
from fedspu.neurons.layers.kind import (
    KINDS,
    Cut,
    LayerKind,
    Place,
    Ports,
    kind_of,
    register,
)
from fedspu.neurons.layers.linear import LinearLike

__all__ = [
    "KINDS",
    "Cut",
    "LayerKind",
    "LinearLike",
    "Place",
    "Ports",
    "attention",
    "convolution",
    "kind_of",
    "linear",
    "norms",
    "recurrent",
    "register",
]
