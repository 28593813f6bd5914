"""FedRep: first the client's own head trains, then the shared body below it.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021. As in FedPer, the last layers stay with the
client; but head and body train one after the other, each while the other is frozen.

Taken from the paper: all of that, and one epoch of the body. Assumed: the head trains
for the other local epochs (``train.epochs`` - 1, at least one), so that a client works
as long as in other methods; in the paper it is 10. ``method.head_epochs`` sets another
number. Norms' running statistics follow the data in both phases. The loss that is
reported is that of the body's epoch.
"""

from dataclasses import replace
from functools import partial

from fedspu.methods.method import Method, Trained, Turn
from fedspu.methods.options import FedRepOptions
from fedspu.methods.whole_model.fedper import fedper
from fedspu.neurons.blocks import state_of
from fedspu.training.epochs import LocalTraining, train
from fedspu.training.last_layer import last_layers, only


def head_then_body(turn: Turn, local: LocalTraining, options: FedRepOptions) -> Trained:
    """Local epochs of the head, then one of the body."""
    names = {name for name, _ in local.model.named_parameters()}
    head = names & last_layers(turn.now.neurons, options.head)
    epochs = options.head_epochs or max(1, local.settings.epochs - 1)
    with only(local.model, head):
        loss = train(local.with_epochs(epochs))
    if head != names:  # a model of one layer has no body
        with only(local.model, names - head):
            loss = train(local.with_epochs(1))
    state = state_of(local.model)
    return Trained(loss, sent=state, own=state)


def fedrep(options: FedRepOptions) -> Method:
    """FedRep with a head of ``options.head`` layers."""
    return replace(
        fedper(options),
        name="fedrep",
        reference="Collins, Hassani, Mokhtari and Shakkottai, ICML 2021",
        in_words=(
            "the full model except its last layers, whatever the client's capacity",
            "its last layers, then the others",
            "a full model of its own",
            "its own model",
        ),
        train=partial(head_then_body, options=options),
        departs={"at_full_capacity_it_is_fedavg": "head and body train in turn"},
    )
