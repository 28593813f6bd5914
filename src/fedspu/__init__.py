"""Personalized federated learning for devices of unequal strength."""

from fedspu.core.active import choose_ordered, choose_random, choose_top
from fedspu.core.averaging import average
from fedspu.core.blocks import extract, merge
from fedspu.core.cache import FrozenCache
from fedspu.core.mapping import NeuronWarning, map_neurons
from fedspu.core.neurons import Axis, NeuronGroup, Neurons, load_state, state_of
from fedspu.core.partial import partial_training
from fedspu.core.slim import slim_model
from fedspu.core.streams import stream
from fedspu.core.types import Active, Blocks, Payload, State, Update
from fedspu.errors import FedSPUError
from fedspu.settings import Settings
from fedspu.simulation import Run, load_personal, resume, simulate

__all__ = [
    "Active",
    "Axis",
    "Blocks",
    "FedSPUError",
    "FrozenCache",
    "NeuronGroup",
    "NeuronWarning",
    "Neurons",
    "Payload",
    "Run",
    "Settings",
    "State",
    "Update",
    "average",
    "choose_ordered",
    "choose_random",
    "choose_top",
    "extract",
    "load_personal",
    "load_state",
    "map_neurons",
    "merge",
    "partial_training",
    "resume",
    "simulate",
    "slim_model",
    "state_of",
    "stream",
]
