"""PyTorch loads much of itself with a process's first optimizer: seconds of no client.

Without this, the first turn in which an optimizer of PyTorch is used would seem to take
seconds, and a method that needs one would seem slow beside one that does not.
"""

import sys
from importlib import import_module
from time import perf_counter, process_time

_spent = [0.0, 0.0]


def load_optimizers() -> None:
    """Load what PyTorch would load with the first optimizer, and note the time."""
    if "torch._dynamo" in sys.modules:
        return
    began, cpu_began = perf_counter(), process_time()
    import_module("torch._dynamo")
    _spent[0] += perf_counter() - began
    _spent[1] += process_time() - cpu_began


def seconds_of_loading() -> tuple[float, float]:
    """Seconds that loading has taken in this process: of the clock, of the CPU."""
    return _spent[0], _spent[1]
