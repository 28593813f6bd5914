"""Personalized federated learning for devices of unequal strength."""

from fedspu.errors import FedSPUError
from fedspu.neurons.average import Update, average
from fedspu.neurons.blocks import extract, load_state, merge, state_of
from fedspu.neurons.choose import choose_ordered, choose_random, choose_top
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
from fedspu.runs import Run, load_personal, resume, simulate
from fedspu.settings import Settings
from fedspu.streams import stream

__all__ = [
    "Active",
    "Axis",
    "Blocks",
    "FedSPUError",
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
