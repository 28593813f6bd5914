"""For methods whose clients score their neurons once, and keep the best for good.

At its first participation a client gets the whole model and trains it for one epoch, on
its own examples and in a random stream of its own. That only scores the neurons: the
weights it ends with are thrown away, its time and memory are counted. The client cuts
what it was sent to the top-scored fraction p of every layer, trains that slim model as
usual, and returns it. From then on it is sent those neurons alone. A client that keeps
everything has nothing to score.
"""

from fedspu.methods.method import Method, Offer, Own, Score, Situation, own_model
from fedspu.neurons.blocks import merge
from fedspu.neurons.choose import choose_top, num_active
from fedspu.neurons.slim import slimmable
from fedspu.neurons.table import Active


def what_it_kept(now: Situation) -> Offer:
    """The neurons the client kept; all of them at first, so that it can choose."""
    return Offer(now.neurons.everything() if now.kept is None else now.kept)


def top_scored(now: Situation, offer: Offer | None, own: Own) -> Active:
    """What the client kept before; at first, the top-scored neurons."""
    if now.kept is not None:
        return now.kept
    groups = now.neurons.groups
    if all(num_active(now.capacity, g.size) == g.size or not g.slim for g in groups):
        return now.neurons.everything()
    return slimmable(now.neurons, choose_top(now.neurons, now.capacity, own.scores()))


def keeps_best(name: str, reference: str, score: Score, in_words: str) -> Method:
    """A method whose clients keep their best neurons; ``in_words`` says by what."""
    return Method(
        name=name,
        reference=reference,
        offer=what_it_kept,
        start=merge,
        keep=top_scored,
        judge=own_model,
        keeps_own=True,
        is_slim=True,
        score=score,
        in_words=(
            "the full model once; then the neurons the client kept",
            f"a fraction p of every layer, chosen once, by {in_words} after an epoch "
            "of full training",
            "its sub-model",
            "its own sub-model",
        ),
    )
