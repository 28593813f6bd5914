"""FedSPU: random neurons train each round; the others stay frozen and personal.

Niu, Dong and Qin, "FedSPU: Personalized Federated Learning for Resource-Constrained
Devices with Stochastic Parameter Update", AAAI 2025. It follows the paper
throughout.

``method.context = "global"`` departs from it: in each round a client gets the whole of
the server's model, and trains its share of the neurons within that model. Training
costs the device the same time and memory, and it sends as much; only the download is
larger. ``fedspu-plus`` is this, with the settings that docs/beyond.md finds to be best.
"""

from dataclasses import replace

from fedspu.methods.method import Method, Turn, all_neurons, random_neurons
from fedspu.methods.options import FedSPUOptions, Options
from fedspu.neurons.table import Active

fedspu = Method(
    name="fedspu",
    reference="Niu, Dong and Qin, AAAI 2025",
    in_words=(
        "a random fraction p of every layer's neurons, new each round",
        "those neurons; the others are frozen",
        "a full model of its own",
        "its own model",
    ),
    judged_by="own",
    offer=random_neurons,
)


def random_share(turn: Turn) -> Active:
    """The neurons that a client trains, drawn as the paper's server would."""
    return random_neurons(turn.now).active


in_global_context = replace(
    fedspu,
    in_words=(
        "the full model",
        "a random fraction p of every layer's neurons, new each round",
        "a full model: the server's, with what it trained",
        "its own model",
    ),
    offer=all_neurons,
    keep=random_share,
)


def make_fedspu(options: FedSPUOptions) -> Method:
    """FedSPU, in the client's own model or in the server's."""
    return fedspu if options.context == "own" else in_global_context


def fedspu_plus(options: Options) -> Method:
    """FedSPU in the server's model; its settings are in the list of methods."""
    return replace(
        in_global_context,
        name="fedspu-plus",
        reference="docs/beyond.md",
        reading="original",
    )
