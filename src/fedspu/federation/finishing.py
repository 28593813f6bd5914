"""The end of a run for one client: the server's model, trained once more, or its own.

Once all rounds are played, every client gets the whole of the server's model once. It
trains the neurons that it would train in a round, for ``method.finish`` epochs, and the
last layer alone, for ``method.finish_last`` epochs: each at the run's learning rate and
at a lower one, from the model as it came. It looks at each model half-way, too. Of
these, of the server's model as it came, and of the model that the client has, it keeps
the one that is best on its validation examples. Nothing is sent back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

from fedspu.errors import TrainingError
from fedspu.methods.method import Method, ModelState, Turn, answered, offer_to
from fedspu.neurons.blocks import state_of
from fedspu.neurons.table import Active, State
from fedspu.settings import Settings
from fedspu.training.epochs import LocalTraining, train
from fedspu.training.evaluation import Score
from fedspu.training.last_layer import inputs_of_last_layer, train_last_layer

RATES = (1.0, 0.3)
"""The learning rates that are tried, as shares of train.lr."""

Judge = Callable[[ModelState], Score]


@dataclass(frozen=True)
class Candidate:
    """A model that a client may keep: how well it does, and its last training loss."""

    state: State
    score: Score
    train_loss: float


def finish(turn: Turn, method: Method, settings: Settings, judge: Judge) -> Candidate:
    """The best model on the client's validation examples; of equals, the first."""
    best: Candidate | None = None
    train_loss = 0.0
    for state, loss in _models(turn, method, settings):
        train_loss = loss or train_loss
        score = judge(ModelState(state))
        if not (isfinite(score.loss) and isfinite(score.value)):
            continue
        if best is None or _is_better(turn, score, best.score):
            best = Candidate(state, score, train_loss)
    if best is None:
        raise TrainingError(
            "none of its models has a finite score on its validation examples; lower "
            f"train.lr (it is {settings.train.lr})"
        )
    return replace(best, train_loss=train_loss)


def _is_better(turn: Turn, score: Score, than: Score) -> bool:
    sign = 1 if turn.task.metric.is_higher_better else -1
    return (sign * score.value, -score.loss) > (sign * than.value, -than.loss)


def _models(
    turn: Turn, method: Method, settings: Settings
) -> Iterator[tuple[State, float | None]]:
    """The models to choose from; with each that was just trained, its training loss."""
    if method.keeps_own:
        yield turn.own, None
    yield turn.merged, None
    chosen, active = settings.method, _trained(turn, method)
    yield from _trained_further(turn, settings, chosen.finish, train, active)
    if chosen.finish_last:
        local = turn.prepare(ModelState(turn.merged), "finish")
        run = partial(train_last_layer, inputs=inputs_of_last_layer(local))
        yield from _trained_further(turn, settings, chosen.finish_last, run)


def _trained_further(
    turn: Turn,
    settings: Settings,
    epochs: int,
    run: Callable[[LocalTraining], float],
    active: Active | None = None,
) -> Iterator[tuple[State, float]]:
    """The server's model at each rate, after half of the epochs and after all."""
    half = (epochs + 1) // 2
    lengths = [n for n in (half, epochs - half) if n]
    for share in RATES if lengths else ():
        local = turn.prepare(ModelState(turn.merged), "finish", active)
        rate = {"lr": share * settings.train.lr}
        for length in lengths:
            changed = local.settings.model_copy(update={**rate, "epochs": length})
            try:
                loss = run(replace(local, settings=changed))
            except TrainingError:  # it overflowed: others may not
                break
            yield state_of(local.model), loss


def _trained(turn: Turn, method: Method) -> Active:
    """The neurons that the client would train if this were another round."""
    offer = offer_to(method, turn.now)
    return answered(method, "keep", method.keep(replace(turn, offer=offer)), dict)
