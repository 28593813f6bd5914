"""A method of your own: clients train the same random neurons in every round."""

import fedspu
from fedspu.methods.method import ClientRound, Method, Offer
from fedspu.neurons.choose import choose_random
from fedspu.random_streams import stream


def always_the_same(now: ClientRound) -> Offer:
    """A random part of the model that a client keeps for the whole run."""
    rng = stream(now.seed, "always the same", now.client)
    return Offer(choose_random(now.neurons, now.capacity, rng))


steady = Method(
    name="steady",
    reference="an example",
    in_words=(
        "the same random neurons in every round",
        "those neurons; the others are frozen",
        "a full model of its own",
        "its own model",
    ),
    judged_by="own",
    offer=always_the_same,
)

settings = {"data.name": "digits", "rounds": 8}
ours = fedspu.simulate(settings, method=steady)
theirs = fedspu.simulate(settings)
print(ours)
print(theirs)
