from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspu.data.examples import allot, divide
from fedspu.data.own.arrays import from_arrays
from fedspu.errors import DataError, FedSPUError, ModelError, SettingsError
from fedspu.federation.plan import MOST_KNOWN
from fedspu.neurons.choose import choose_random
from fedspu.prepare import prepare
from fedspu.resolve import resolve
from fedspu.tasks import find_task
from tests.oracles.federation import (
    ConvNet,
    examples,
    mlp,
    named,
    plan_for,
    prepared_for,
    same_bits,
    wide_mlp,
)

# Capacities --------------------------------------------------------------------------


def capacities(number: int, given: list[float]) -> list[Fraction]:
    plan = plan_for(
        wide_mlp,
        clients__number=number,
        clients__capacities=given,
        data__min_examples=3,
    )
    return [plan.capacity(client) for client in range(number)]


def test_the_default_is_five_equal_clusters_in_client_order() -> None:
    plan = prepare({"clients.number": 100, "data.name": "digits"}).plan
    found = [float(plan.capacity(client)) for client in range(100)]
    assert found == [p for p in (0.2, 0.4, 0.6, 0.8, 1.0) for _ in range(20)]


def test_a_capacity_is_the_decimal_that_was_typed() -> None:
    assert capacities(3, [0.7]) == [Fraction(7, 10)] * 3


def test_as_many_capacities_as_clients_means_one_for_each() -> None:
    tenths = [0.1, 0.9, 0.3, 1.0]
    assert capacities(4, tenths) == [Fraction(str(p)) for p in tenths]


def test_uneven_clusters_differ_by_one_client_at_most() -> None:
    counts = Counter(capacities(8, [0.2, 0.5, 1.0]))
    assert sorted(counts.values()) == [2, 3, 3]


def test_less_capacity_than_for_one_neuron_is_noted_and_one_is_active() -> None:
    with pytest.warns(UserWarning, match=r"0\.2 is less than one neuron of conv1; one"):
        plan = plan_for(clients__capacities=[0.2, 1.0])  # of 4 and 6 neurons
    assert plan.method.offer is not None
    offer = plan.method.offer(plan.client_round(1, 0))
    assert {name: len(indices) for name, indices in offer.active.items()} == {
        "conv1": 1,
        "conv2": 1,
    }


# Data --------------------------------------------------------------------------------


def test_every_example_has_one_owner_and_one_use() -> None:
    parts = [
        getattr(split, part)
        for split in prepared_for().examples.splits
        for part in ("train", "val", "test")
    ]
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))


def test_the_division_depends_on_seed_and_data_alone() -> None:
    def owned(**given: Any) -> list[list[int]]:
        splits = prepared_for(**given).examples.splits
        return [split.train.tolist() for split in splits]

    same = owned()
    assert owned(model=mlp, method="local", train__lr=3.0, rounds=9) == same
    assert owned(early_stopping=True, clients__capacities=[1.0]) == same
    assert owned(seed=1) != same


def test_settings_and_owners_reach_the_partition() -> None:
    x, y = examples()
    data = from_arrays(x, y, owners=np.arange(120) % 6)
    given = {"model": "mlp", "clients.number": 6, "clients.per_round": 1}
    given["clients.capacities"] = [1.0]
    task = find_task("classification")
    natural = resolve({**given, "data.partition": "natural"})
    assert allot(natural, data, task)[4].tolist() == list(range(4, 120, 6))
    shards = {**given, "data.partition": "shards", "data.min_examples": 3}
    one = allot(resolve({**shards, "data.shards": 1}), data, task)
    assert max(len(set(y[part].tolist())) for part in one) <= 2
    many = allot(resolve({**shards, "data.shards": 20}), data, task)
    assert min(len(set(y[part].tolist())) for part in many) == 3


def test_as_many_examples_as_emnist_are_split_over_ten_thousand_clients() -> None:
    labels = np.random.default_rng(0).integers(0, 62, 814_255)
    data = from_arrays(np.zeros((814_255, 1), dtype=np.float32), labels)
    settings = resolve({"model": "mlp", "clients.number": 10_000})
    divided = divide(settings, data, find_task("classification"))
    assert len(divided.splits) == 10_000


def test_examples_are_the_client_s_own() -> None:
    divided, (x, y) = prepared_for().examples, examples()
    positions = divided.splits[2].val
    got_x, got_y = divided.part(2, "val")
    assert torch.equal(got_x, torch.from_numpy(x[positions]))
    assert got_y.tolist() == y[positions].tolist()


def test_the_first_model_depends_on_the_seed_alone() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(99)
        first = plan_for().initial
        torch.rand(3)
        assert same_bits(plan_for().initial, first)
    assert not same_bits(plan_for(seed=1).initial, first)


# What cannot be played ---------------------------------------------------------------


class Returns(nn.Module):
    """A model that returns whatever a function makes of its scores."""

    def __init__(self, function: Any, outputs: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, outputs))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.net(x))


FOR_TWO = r"for two examples; expected \(2, 3\)"


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda scores: scores[0], rf"\(3,\) {FOR_TWO}"),
        (lambda scores: scores[:1], rf"\(1, 3\) {FOR_TWO}"),
        (lambda scores: scores[:, :, None], rf"\(2, 3, 1\) {FOR_TWO}"),
        (lambda scores: (scores, scores), "a tuple; expected a tensor"),
        (lambda scores: None, "a NoneType; expected a tensor"),
    ],
)
def test_a_model_that_returns_the_wrong_shape_is_refused(
    function: Any, found: str
) -> None:
    with pytest.raises(ModelError, match=rf"^the model returned {found}"):
        plan_for(lambda: Returns(function))


def test_labels_outside_the_model_s_classes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"scores for 2 classes.*go up to 2"):
        plan_for(lambda: Returns(lambda scores: scores, outputs=2))


def test_a_model_may_know_more_classes_than_there_are_labels() -> None:
    plan_for(lambda: Returns(lambda scores: scores, outputs=5))


@pytest.mark.parametrize("thing", [3, None, "net", ConvNet])
def test_what_is_no_module_is_refused(thing: Any) -> None:
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module"):
        plan_for(lambda: thing)


def test_a_model_in_the_place_of_its_builder_is_refused() -> None:
    with pytest.raises(FedSPUError):
        plan_for(ConvNet())


def test_a_model_that_cannot_take_the_examples_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"failed on two examples of shape \(1, 4, 4\)"
    ):
        plan_for(lambda: nn.Sequential(nn.Flatten(), nn.Linear(7, 3)))


def test_a_model_with_nothing_to_learn_is_refused() -> None:
    def build() -> nn.Module:
        return mlp().requires_grad_(False)

    with pytest.raises(ModelError, match="no learnable parameter"):
        plan_for(build)


def test_a_client_with_one_training_example_is_refused_if_there_are_batch_norms() -> (
    None
):
    few = {"clients__number": 40, "data__min_examples": 3, "data__partition": "iid"}
    with pytest.raises(DataError, match="client 0 has a single training example"):
        plan_for(ConvNet, **few)
    plan_for(mlp, **few)


def test_a_client_with_one_training_example_cannot_score_its_neurons() -> None:
    few = {"clients__number": 40, "data__min_examples": 3, "data__partition": "iid"}
    with pytest.raises(
        DataError, match=r"client 0 .* hermes train for an epoch to sco"
    ):
        plan_for(mlp, method="hermes", **few)


def test_a_client_left_without_a_test_example_is_refused_by_name() -> None:
    few = {"clients__number": 60, "data__min_examples": 2, "data__partition": "iid"}
    with pytest.raises(DataError, match=r"^client 0: .*2 examples"):
        plan_for(mlp, **few)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"clients\.number = 121: .* 1 to 120"):
        plan_for(mlp, clients__number=121)


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "", "cpux"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    if device.startswith("cuda") and torch.cuda.device_count() > 7:
        pytest.skip("it is here")
    with pytest.raises(SettingsError, match=rf"^device = '{device}': .*cpu"):
        plan_for(mlp, device=device)


def test_a_method_that_cannot_learn_the_task_is_refused() -> None:
    ready = prepared_for(mlp)
    picky = replace(ready.plan.method, tasks=frozenset({"regression", "other"}))
    with pytest.raises(
        SettingsError, match=r"^task = 'classification': fedspu .* other, regression$"
    ):
        plan_for(mlp, method_record=picky)


def test_class_weights_are_refused_where_there_are_no_classes() -> None:
    given = named(task="regression", train__class_weights="balanced")
    x, y = examples()
    with pytest.raises(SettingsError, match=r"^train\.class_weights = 'balanced'"):
        prepare(given, model=mlp, data=(x, y.astype(np.float32)))


def test_what_is_no_image_cannot_be_augmented() -> None:
    x, y = examples()
    given = named(train__augment=["flip"])
    with pytest.raises(DataError, match=r"^train\.augment = flip: .* have shape \(16,"):
        prepare(given, model=mlp, data=(x.reshape(len(x), 16), y))


def test_checking_leaves_the_model_s_mode_alone() -> None:
    class Watched(ConvNet):
        modes: list[bool] = []  # noqa: RUF012  # shared on purpose

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.modes.append(self.training)
            return super().state_dict(*args, **kwargs)

    plan = prepare(named(), model=Watched, data=examples()).plan
    assert Watched.modes
    assert all(Watched.modes)
    assert int(plan.initial["bn1.num_batches_tracked"]) == 0


# What travels ------------------------------------------------------------------------


def test_blocks_are_found_anew_for_each_choice_of_neurons() -> None:
    """Also for more choices than are remembered, and in any order."""
    plan = plan_for(wide_mlp)
    rng = np.random.default_rng(0)
    choices = [choose_random(plan.neurons, 0.5, rng) for _ in range(MOST_KNOWN + 3)]
    for active in (*choices, *reversed(choices)):
        found, expected = plan.travelling(active), plan.neurons.blocks(active)
        assert found.keys() == expected.keys() - plan.stays
        for name, where in found.items():
            for one, other in zip(where, expected[name], strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(one, other)
