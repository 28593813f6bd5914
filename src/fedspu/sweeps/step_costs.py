"""The memory of one training step on a device, for each capacity of a run.

Measured as ``fedspu profile`` does, on the model and the neurons that a client of the
run trains, with a batch of the run's size. What a method keeps beside that model is not
counted.
"""

from fedspu.data.dataset import Dataset
from fedspu.data.own.pairs import Data
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation
from fedspu.methods.method import offer_to
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.slim import slim_model, slim_neurons, slimmable
from fedspu.neurons.table import Active
from fedspu.partial.context import partial_training
from fedspu.prepare import dataset_for
from fedspu.profile.peak_memory import step_bytes
from fedspu.tasks.task import checked_loss


class StepCosts:
    """Measures steps, each kind of step once."""

    def __init__(self, data: Data | None = None) -> None:
        self.data = data  # what the runs were given in Python, if anything
        self._datasets: dict[str, Dataset] = {}
        self._known: dict[str, int] = {}

    def by_capacity(self, plan: Plan, federation: Federation) -> dict[str, int]:
        """Capacity -> the most bytes that a step of a client that has it holds."""
        trained: dict[float, Active] = {}
        for client in range(plan.num_clients):
            p = float(plan.capacity(client))
            active = _trained(plan, federation, client)
            if active is not None and _number(active) > _number(trained.get(p, {})):
                trained[p] = active
        return {str(p): self._peak(plan, trained[p]) for p in sorted(trained)}

    def _peak(self, plan: Plan, active: Active) -> int:
        settings = plan.settings
        sizes = [len(indices) for indices in active.values()]
        what = (settings.model, settings.task, settings.data.name, plan.method.is_slim)
        key = repr((what, settings.train.model_dump(exclude={"lr", "epochs"}), sizes))
        if key not in self._known:
            self._known[key] = self._measured(plan, active)
        return self._known[key]

    def _measured(self, plan: Plan, active: Active) -> int:
        train, task = plan.settings.train, plan.task
        x, y = self._dataset(plan).take(slice(train.batch_size))
        with undisturbed():
            model, neurons = plan.build().train(), plan.neurons
            if plan.method.is_slim:
                held = slimmable(neurons, active)
                model = slim_model(model, neurons, held)
                neurons = slim_neurons(neurons, held)
                active = neurons.everything()
            with partial_training(
                model,
                neurons,
                active,
                train.gradient,
                saves=train.saves,
                kernels=train.kernels,
            ) as trainable:
                loss = checked_loss(task, task.loss)
                return step_bytes(model, trainable, x, y, loss).peak

    def _dataset(self, plan: Plan) -> Dataset:
        name = plan.settings.data.name
        if name not in self._datasets:
            self._datasets[name] = dataset_for(plan.settings, self.data, plan.task)
        return self._datasets[name]


def _trained(plan: Plan, federation: Federation, client: int) -> Active | None:
    """The neurons that a client trains; None if it has not chosen them yet."""
    method = plan.method
    if method.is_choice:
        return federation.kept.get(client)
    now = plan.client_round(max(1, federation.round), client, None, federation.extra)
    offer = offer_to(method, now)
    return plan.neurons.everything() if offer is None else offer.active


def _number(active: Active) -> int:
    return sum(len(indices) for indices in active.values())
