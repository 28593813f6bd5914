"""FedSPU as a Flower strategy, for a server app of your own.

::

    from flwr.serverapp import ServerApp
    from fedspu.flower import FedSPUStrategy

    app = ServerApp()

    @app.main()
    def main(grid, context):
        strategy = FedSPUStrategy({"model": "digits", "rounds": 20}, devices=3)
        strategy.start(grid)

Clients run ``fedspu.flower.client_app:app``, with these settings in their run config.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedspu.federation.plan import Build, Plan
from fedspu.federation.rounds import Round
from fedspu.flower.config import PREFIX, split
from fedspu.flower.server import Server
from fedspu.methods.method import Method
from fedspu.settings_text import flatten
from fedspu.tasks.task import Task


class FedSPUStrategy(Strategy):
    """Plays a whole run of fedspu on the clients of a Flower app.

    ``settings`` are fedspu's, by (dotted or nested) name, without those of the data and
    of how many clients there are: clients say so. ``model``, ``method`` and ``task``
    replace what the settings name. The run is saved in ``out`` after every round, and
    goes on from there. ``devices``: how many to wait for before the first round.

    It has a loop of its own, because payloads differ from client to client, and clients
    that no longer gain leave: ``start`` is all that is called.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        model: Build | None = None,
        method: Method | None = None,
        task: Task | None = None,
        out: Path | str | None = None,
        devices: int = 2,
        wait: float = 600.0,
    ) -> None:
        self.settings = dict(flatten(settings))
        self.given: dict[str, Any] = {"model": model, "method": method, "task": task}
        self.deploy = {"out": out, "devices": devices, "wait": wait}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Play the run; the server's model and each round's metrics.

        ``num_rounds`` and ``timeout`` (seconds for one message) replace the settings.
        ``evaluate_fn`` is called with the server's model after each round. The model
        begins as fedspu's seed says, so there are no
        ``initial_arrays``; nor are there configs, as clients have the settings.
        """
        for name, value in (
            ("initial_arrays", initial_arrays),
            ("train_config", train_config),
            ("evaluate_config", evaluate_config),
        ):
            if value is not None:
                raise ValueError(f"{name}: has no effect with fedspu; leave it out")
        given = {**self.settings, "clients.deadline": timeout}
        if num_rounds is not None:
            given["rounds"] = num_rounds
        own = {f"{PREFIX}{n}": v for n, v in self.deploy.items() if v is not None}
        result = Result()

        def watch(plan: Plan, played: Round) -> None:
            t, metric = played.federation.round, plan.task.metric.name
            losses = [reply.train_loss for _, reply in played.replies()]
            if losses:
                mean = sum(losses) / len(losses)
                result.train_metrics_clientapp[t] = MetricRecord({"train_loss": mean})
            if (score := played.scores.personal_mean) is not None:
                found = MetricRecord(
                    {
                        f"personal_{metric}": score.test,
                        f"personal_val_{metric}": score.val,
                    }
                )
                result.evaluate_metrics_clientapp[t] = found
            result.arrays = as_arrays(played.federation.shown_state)
            if evaluate_fn and (found_there := evaluate_fn(t, result.arrays)):
                result.evaluate_metrics_serverapp[t] = found_there

        Server(grid, *split({**given, **own}), **self.given, watch=watch).run()
        return result

    def summary(self) -> None:
        """Nothing: the log has every round."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used: ``start`` has its own loop."""
        raise NotImplementedError(LOOP)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not used: ``start`` has its own loop."""
        raise NotImplementedError(LOOP)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used: ``start`` has its own loop."""
        raise NotImplementedError(LOOP)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Not used: ``start`` has its own loop."""
        raise NotImplementedError(LOOP)


LOOP = "FedSPUStrategy plays its rounds itself; call start"


def as_arrays(state: Mapping[str, Any]) -> ArrayRecord:
    """A state as Flower's arrays."""
    return ArrayRecord({name: Array(w.numpy()) for name, w in state.items()})
