from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu.errors import DataError, FedSPUError, ModelError, SettingsError
from fedspu.federation.plan import allot, divide
from fedspu.settings import make_settings
from tests.oracles.federation import (
    ConvNet,
    examples,
    mlp,
    named,
    plan_for,
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
    plan = fedspu.runs.lay_out({"clients.number": 100, "data.name": "digits"})
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
    offer = plan.method.offer(plan.situation(1, 0))
    assert offer is not None
    assert {name: len(indices) for name, indices in offer.active.items()} == {
        "conv1": 1,
        "conv2": 1,
    }


# Data --------------------------------------------------------------------------------


def test_every_example_has_one_owner_and_one_use() -> None:
    plan = plan_for()
    parts = [
        getattr(split, part)
        for split in plan.splits
        for part in ("train", "val", "test")
    ]
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))


def test_the_division_depends_on_seed_and_data_alone() -> None:
    def owned(**given: Any) -> list[list[int]]:
        return [split.train.tolist() for split in plan_for(**given).splits]

    same = owned()
    assert owned(model=mlp, method="local", train__lr=3.0, rounds=9) == same
    assert owned(early_stopping=True, clients__capacities=[1.0]) == same
    assert owned(seed=1) != same


def test_settings_and_owners_reach_the_partition() -> None:
    x, y = examples()
    data = fedspu.data.from_arrays(x, y, owners=np.arange(120) % 6)
    given = {"model": "net", "clients.number": 6, "clients.per_round": 1}
    given["clients.capacities"] = [1.0]
    natural = make_settings({**given, "data.partition": "natural"})
    assert allot(natural, data)[4].tolist() == list(range(4, 120, 6))
    shards = {**given, "data.partition": "shards", "data.min_examples": 3}
    one = allot(make_settings({**shards, "data.shards": 1}), data)
    assert max(len(set(y[part].tolist())) for part in one) <= 2
    many = allot(make_settings({**shards, "data.shards": 20}), data)
    assert min(len(set(y[part].tolist())) for part in many) == 3


def test_as_many_examples_as_emnist_are_split_over_ten_thousand_clients() -> None:
    labels = np.random.default_rng(0).integers(0, 62, 814_255)
    data = fedspu.data.from_arrays(np.zeros((814_255, 1), dtype=np.float32), labels)
    settings = make_settings({"model": "net", "clients.number": 10_000})
    splits = divide(settings, data)
    assert len(splits) == 10_000


def test_examples_are_the_client_s_own() -> None:
    plan, (x, y) = plan_for(), examples()
    positions = plan.splits[2].val
    got_x, got_y = plan.examples(2, "val")
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


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda scores: scores[0], r"\(3,\)"),
        (lambda scores: scores[:1], r"\(1, 3\)"),
        (lambda scores: scores[:, :, None], r"\(2, 3, 1\)"),
        (lambda scores: (scores, scores), "tuple"),
        (lambda scores: None, "NoneType"),
    ],
)
def test_a_model_that_returns_the_wrong_shape_is_refused(
    function: Any, found: str
) -> None:
    wanted = rf"^the model returned {found} for two examples; expected \(2, 3\)"
    with pytest.raises(ModelError, match=wanted):
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
    with pytest.raises(SettingsError, match=rf"^device = '{device}': .*try cpu"):
        plan_for(mlp, device=device)


def test_checking_leaves_the_model_s_mode_alone() -> None:
    class Watched(ConvNet):
        modes: list[bool] = []  # noqa: RUF012  # shared on purpose

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.modes.append(self.training)
            return super().state_dict(*args, **kwargs)

    plan = fedspu.runs.lay_out(named(), Watched, examples())
    assert Watched.modes
    assert all(Watched.modes)
    assert int(plan.initial["bn1.num_batches_tracked"]) == 0
