"""Examples that are given in Python, in the forms that people have them in."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedspu.data.own.pairs import as_arrays
from fedspu.errors import DataError, ModelError
from fedspu.runs import simulate
from tests.oracles.federation import examples, mlp, named


class Pairs(Dataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


x, y = map(torch.as_tensor, examples())


@pytest.mark.parametrize(
    "data",
    [
        (x, y),
        [x, y],
        TensorDataset(x, y),
        Pairs(x, y),
        Pairs(x.numpy(), y.tolist()),
        list(zip(x, y.tolist(), strict=True)),
    ],
    ids=["tuple", "list", "TensorDataset", "Dataset", "arrays", "list of pairs"],
)
def test_the_same_examples_in_any_form_give_the_same_run(data: Any) -> None:
    found = simulate(named(rounds=1), model=mlp, data=data)
    wanted = simulate(named(rounds=1), model=mlp, data=(x, y))
    assert found.rounds == wanted.rounds


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (x, "data is a Tensor of .*; expected arrays"),
        (3, "data is a int; expected arrays"),
        (Endless(), "without a length"),
        (Pairs([], []), "data has no items"),
        ([(1, 2, 3)], "item 0 of data is a tuple, no pair"),
        (Pairs([x[0], x[0].flatten()], [0, 1]), "several kinds or shapes"),
        (Pairs(["a", "b"], [0, 1]), r"kinds or shapes \(str\).* add a transform"),
    ],
)
def test_what_is_no_data_is_one_clear_line(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_arrays(data)


def test_a_model_in_place_of_its_function_is_named() -> None:
    with pytest.raises(ModelError, match="pass the function that builds it"):
        simulate(named(rounds=1), model=mlp(), data=(x, y))


def test_a_round_prints_as_a_line() -> None:
    shown: list[str] = []
    simulate(
        named(rounds=1),
        model=mlp,
        data=(np.asarray(x), np.asarray(y)),
        watch=lambda plan, played: shown.append(repr(played)),
    )
    assert shown == ["Round(1: 3 clients took part, 0 turns lost, 0 stopped)"]
