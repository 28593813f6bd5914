"""A played federation beside a slow one: what must be equal."""

from typing import Any

from torch import Tensor

from fedspu import State
from fedspu.federation.plan import Build
from fedspu.prepare import Prepared
from tests.oracles.federation import (
    ConvNet,
    Played,
    distance,
    in_double,
    mlp,
    prepared_for,
)
from tests.oracles.methods import CONV, MLP, FedAvg, Kept, Net, Round

CLOSE = 1e-10

NETS: dict[str, tuple[Build, Net]] = {"conv": (ConvNet, CONV), "mlp": (mlp, MLP)}


def in_float64(method: str, build: Build, **given: Any) -> Prepared:
    """A run in float64: of six clients, four a round."""
    given = {"clients__per_round": 4, "rounds": 3, "train__batch_size": 6, **given}
    return in_double(prepared_for(build, method__name=method, **given))


def listed(active: dict[str, Tensor]) -> Kept:
    return {name: indices.tolist() for name, indices in active.items()}


def only(state: State, net: Net) -> State:
    """The tensors that a net by hand knows: all but counts of batches."""
    return {name: state[name] for name in net.axes}


def assert_same_rounds(
    ready: Prepared, played: Played, slow: list[Round], net: Net
) -> None:
    """Every round's turns, bytes, losses, global model and accuracies are equal."""
    plan = ready.plan
    assert len(played.rounds) == len(slow)
    for found, expected in zip(played.rounds, slow, strict=True):
        assert set(found.answers) == set(expected.turns)
        for client, reply in found.replies():
            turn, cost = expected.turns[client], found.answers[client].cost
            assert reply.active is not None
            kept = listed(reply.active)
            assert {name: kept[name] for name in net.sizes} == turn.kept
            assert reply.num_examples == len(ready.examples.splits[client].train)
            assert abs(reply.train_loss - turn.train_loss) < CLOSE
            if plan.settings.early_stopping.on:
                assert reply.val_loss is not None
                assert abs(reply.val_loss - turn.val_loss) < CLOSE
            assert (cost.bytes_initial, cost.bytes_down, cost.bytes_up) == (
                turn.bytes_initial,
                turn.bytes_down,
                turn.bytes_up,
            )
        state = found.federation.global_state
        assert distance(only(state, net), expected.global_state) < CLOSE
        assert found.federation.stopped == expected.stopped
        assert found.scores.personal == expected.personal
        assert found.scores.global_ == expected.global_accuracy


def assert_same_sub_models(played: Played, slow: FedAvg) -> None:
    """What clients keep: neurons, weights, statistics and how many batches they saw."""
    assert set(played.federation.last) == set(slow.own)
    for client, (kept, state) in slow.own.items():
        own = played.memory(client).own
        assert own is not None
        assert own.active is not None
        assert listed(own.active) == kept
        assert listed(dict(played.federation.kept[client])) == kept
        assert distance(only(own.state, slow.net), state) < CLOSE
        for name, values in own.state.items():
            if name not in state:
                assert name.endswith("num_batches_tracked")
                assert int(values) == slow.tracked[client]


def assert_same_personal_models(played: Played, slow: FedAvg) -> None:
    """What clients keep at full size."""
    assert set(played.federation.last) == set(slow.own)
    for client, (_, state) in slow.own.items():
        assert distance(only(played.own(client), slow.net), state) < CLOSE
