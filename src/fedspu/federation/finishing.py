"""The end of a run for one client: the server's model, trained once more, or its own.

Once all rounds are played, every client gets the whole of the server's model once. It
trains the neurons that it would train in a round, for ``method.finish`` epochs, and the
last layer alone, for ``method.finish_last`` epochs: each at the run's learning rate and
at a lower one, from the model as it came. It looks at each model half-way, too. Of
these, and of the server's model as it came, it takes the three that are best on its
validation examples, and keeps their mean; or its own model, if that is better than each
of the three. Nothing is sent back. With ``train.adjust_logits``, the model as it came
has the client's own class shares in its last bias, and all others begin from there.

Why a mean: a client has few validation examples, so which model is best is mostly
chance. The mean of models that were trained from the same one is rarely worse than the
best of them (Wortsman et al., "Model soups", ICML 2022).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import torch

from fedspu.errors import TrainingError
from fedspu.methods.method import Method, ModelState, Turn, answered, offer_to
from fedspu.neurons.blocks import state_of
from fedspu.neurons.table import Active, State
from fedspu.settings import Settings
from fedspu.training.epochs import LocalTraining, train
from fedspu.training.evaluation import Score
from fedspu.training.last_layer import inputs_of_last_layer, train_last_layer
from fedspu.training.logit_adjustment import with_offsets

RATES = (1.0, 0.3)
"""The learning rates that are tried, as shares of train.lr."""

NUM_BEST = 3
"""The mean of so many models is kept."""

Judge = Callable[[ModelState], Score]


@dataclass(frozen=True)
class Candidate:
    """A model that a client may keep: how well it does, and its last training loss."""

    state: State
    score: Score
    train_loss: float


def finish(turn: Turn, method: Method, settings: Settings, judge: Judge) -> Candidate:
    """The model that the client keeps; of equals, the one that was made first."""

    def rank(candidate: Candidate) -> tuple[float, float]:
        score = candidate.score
        sign = 1 if turn.task.metric.is_higher_better else -1
        return sign * score.value, -score.loss

    train_loss, best = 0.0, list[Candidate]()
    for state, loss in _models(turn, method, settings):
        train_loss = loss or train_loss
        best += _judged(state, judge, train_loss)
        best = sorted(best, key=rank, reverse=True)[:NUM_BEST]

    # Models far apart may have a mean worse than each of them: then the best is kept.
    found = best[:1]
    if len(best) > 1:
        mean = _judged(mean_of([c.state for c in best]), judge, train_loss)
        found = [*(m for m in mean if rank(m) >= rank(best[-1])), *found][:1]
    if method.keeps_own:
        own = _judged(turn.own, judge, train_loss)
        found = [*(o for o in own if not best or rank(o) >= rank(best[0])), *found][:1]
    if not found:
        raise TrainingError(
            "none of its models has a finite score on its validation examples; lower "
            f"train.lr (it is {settings.train.lr})"
        )
    return replace(found[0], train_loss=train_loss)


def _judged(state: State, judge: Judge, train_loss: float) -> list[Candidate]:
    """The model as a candidate; none if its score is not finite."""
    score = judge(ModelState(state))
    if not (isfinite(score.loss) and isfinite(score.value)):
        return []
    return [Candidate(state, score, train_loss)]


def mean_of(states: Sequence[State]) -> State:
    """The mean of models; what is no number with a fraction is as in the first."""
    return {
        name: values
        if not (values.is_floating_point() or values.is_complex())
        else torch.stack([state[name] for state in states])
        .to(torch.promote_types(values.dtype, torch.float64))
        .mean(0)
        .to(values.dtype)
        for name, values in states[0].items()
    }


def _models(
    turn: Turn, method: Method, settings: Settings
) -> Iterator[tuple[State, float | None]]:
    """The server's model, and as trained; with each, the loss of its training."""
    local = turn.prepare(ModelState(turn.merged), "finish")
    begin = with_offsets(turn.merged, local.offsets, local.model, turn.x[:2])
    yield begin, None
    chosen, active = settings.method, _trained(turn, method)
    yield from _trained_further(turn, settings, begin, chosen.finish, train, active)
    if chosen.finish_last:
        local = turn.prepare(ModelState(begin), "finish")
        run = partial(train_last_layer, inputs=inputs_of_last_layer(local))
        yield from _trained_further(turn, settings, begin, chosen.finish_last, run)


def _trained_further(
    turn: Turn,
    settings: Settings,
    begin: State,
    epochs: int,
    run: Callable[[LocalTraining], float],
    active: Active | None = None,
) -> Iterator[tuple[State, float]]:
    """The server's model at each rate, after half of the epochs and after all."""
    half = (epochs + 1) // 2
    lengths = [n for n in (half, epochs - half) if n]
    for share in RATES if lengths else ():
        local = turn.prepare(ModelState(begin), "finish", active)
        changes = {"lr": share * settings.train.lr, "adjust_logits": False}
        for length in lengths:
            changed = local.settings.model_copy(update={**changes, "epochs": length})
            try:
                loss = run(replace(local, settings=changed))
            except TrainingError:  # it overflowed: others may not
                break
            yield state_of(local.model), loss


def _trained(turn: Turn, method: Method) -> Active:
    """The neurons that the client would train if this were another round."""
    offer = offer_to(method, turn.now)
    return answered(method, "keep", method.keep(replace(turn, offer=offer)), dict)
