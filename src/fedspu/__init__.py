"""Personalized federated learning for devices of unequal strength."""

# Nothing is imported here, so that Ctrl-C finds the command ready for it.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from fedspu.errors import FedSPUError
    from fedspu.exports.as_safetensors import load_exported
    from fedspu.exports.saved_client import export
    from fedspu.neurons.average import Update, average
    from fedspu.neurons.blocks import extract, load_state, merge, state_of
    from fedspu.neurons.choose import choose_ordered, choose_random, choose_top
    from fedspu.neurons.layers import LayerKind, LinearLike, register
    from fedspu.neurons.mapping import NeuronWarning, map_neurons
    from fedspu.neurons.slim import slim_model
    from fedspu.neurons.table import (
        Active,
        Axis,
        Blocks,
        NeuronGroup,
        Neurons,
        Payload,
        State,
    )
    from fedspu.partial.context import partial_training
    from fedspu.random_streams import stream
    from fedspu.run_records import RunRecords, load_run
    from fedspu.runs import Run, load_global, load_personal, resume, simulate
    from fedspu.settings import Settings
    from fedspu.sweeps.compare import Comparison, compare

_HOMES = {
    "errors": ("FedSPUError",),
    "exports.as_safetensors": ("load_exported",),
    "exports.saved_client": ("export",),
    "neurons.average": ("Update", "average"),
    "neurons.blocks": ("extract", "load_state", "merge", "state_of"),
    "neurons.choose": ("choose_ordered", "choose_random", "choose_top"),
    "neurons.layers": ("LayerKind", "LinearLike", "register"),
    "neurons.mapping": ("NeuronWarning", "map_neurons"),
    "neurons.slim": ("slim_model",),
    "neurons.table": (
        *("Active", "Axis", "Blocks", "NeuronGroup", "Neurons", "Payload", "State"),
    ),
    "partial.context": ("partial_training",),
    "random_streams": ("stream",),
    "run_records": ("RunRecords", "load_run"),
    "runs": ("Run", "load_global", "load_personal", "resume", "simulate"),
    "settings": ("Settings",),
    "sweeps.compare": ("Comparison", "compare"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Active",
    "Axis",
    "Blocks",
    "Comparison",
    "FedSPUError",
    "LayerKind",
    "LinearLike",
    "NeuronGroup",
    "NeuronWarning",
    "Neurons",
    "Payload",
    "Run",
    "RunRecords",
    "Settings",
    "State",
    "Update",
    "average",
    "choose_ordered",
    "choose_random",
    "choose_top",
    "compare",
    "export",
    "extract",
    "load_exported",
    "load_global",
    "load_personal",
    "load_run",
    "load_state",
    "map_neurons",
    "merge",
    "partial_training",
    "register",
    "resume",
    "simulate",
    "slim_model",
    "state_of",
    "stream",
]


def __getattr__(name: str) -> "Any":
    """Import a public name when it is first used, so that the command starts faster."""
    from importlib import import_module

    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names."""
    return sorted({*globals(), *__all__})
