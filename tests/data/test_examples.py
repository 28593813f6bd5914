from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedspu.data.dataset import Dataset, with_targets
from fedspu.data.examples import DividedData, allot, divide, strata
from fedspu.errors import DataError, SettingsError
from fedspu.resolve import resolve
from fedspu.settings import PARTITIONS, Settings
from fedspu.tasks import TASKS, find_task
from fedspu.tasks.choices import WITHOUT_CLASSES

NUMBER = 60


def data_for(task: str) -> Dataset:
    """Sixty examples, of which the first pixel or token says which they are."""
    place = torch.arange(NUMBER)
    if task == "language-model":
        given = Dataset("texts", place[:, None].repeat(1, 4), place[:, None] % 7)
        given = replace(given, y=given.y.repeat(1, 4))
    else:
        x = place.float().view(-1, 1, 1, 1).repeat(1, 1, 2, 2)
        y = {
            "classification": place % 3,
            "regression": place.float(),
            "segmentation": (place % 3).view(-1, 1, 1).repeat(1, 2, 2),
        }[task]
        given = Dataset("images", x, y)
    return with_targets(replace(given, owners=place % 12), find_task(task))


def settings_for(task: str, **given: Any) -> Settings:
    small = {"clients.number": 6, "clients.per_round": 2, "data.min_examples": 5}
    named = {name.replace("__", "."): value for name, value in given.items()}
    whole = {"model": "mlp", "data.name": "arrays", "data.alpha": 1.0, "task": task}
    return resolve({**whole, **small, **named})


def divided(task: str, **given: Any) -> DividedData:
    return divide(settings_for(task, **given), data_for(task), find_task(task))


@pytest.mark.parametrize("task", TASKS)
def test_every_example_is_one_client_s_and_in_one_part(task: str) -> None:
    found = divided(task)
    taken = [
        found.part(client, part)[0].flatten(1)[:, 0]
        for client in range(6)
        for part in ("train", "val", "test")
    ]
    assert torch.cat(taken).sort().values.tolist() == list(range(NUMBER))


@pytest.mark.parametrize("task", TASKS)
def test_examples_have_their_own_targets(task: str) -> None:
    found, data = divided(task), data_for(task)
    for client in range(6):
        x, y = found.part(client, "test")
        places = x.flatten(1)[:, 0].long()
        assert torch.equal(y, data.y[places])


def test_a_client_has_as_many_examples_as_all_its_parts() -> None:
    found = divided("classification")
    for client in range(6):
        parts = [len(found.part(client, name)[1]) for name in ("train", "val", "test")]
        assert found.num_examples(client) == sum(parts)


def test_one_seed_divides_alike_and_another_does_not() -> None:
    one, again, other = (
        [found.part(client, "train")[0].flatten().tolist() for client in range(6)]
        for found in (divided("classification", seed=s) for s in (1, 1, 2))
    )
    assert one == again
    assert one != other


@pytest.mark.parametrize("kind", PARTITIONS)
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"language-model"}))
def test_a_task_with_classes_is_divided_in_any_way(task: str, kind: str) -> None:
    shares = allot(
        settings_for(task, data__partition=kind), data_for(task), find_task(task)
    )
    assert sorted(np.concatenate(shares).tolist()) == list(range(NUMBER))


@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
def test_texts_are_divided_in_ways_that_need_no_classes(kind: str) -> None:
    settings = settings_for("language-model", data__partition=kind)
    shares = allot(settings, data_for("language-model"), find_task("language-model"))
    assert sorted(np.concatenate(shares).tolist()) == list(range(NUMBER))


@pytest.mark.parametrize("kind", sorted(set(PARTITIONS) - set(WITHOUT_CLASSES)))
def test_texts_have_no_classes_to_divide_by(kind: str) -> None:
    with pytest.raises(SettingsError) as caught:
        divided("language-model", data__partition=kind)
    assert str(caught.value) == (
        f"data.partition = {kind!r}: examples of the task language-model have no "
        "classes to divide by; use one of iid, natural, quantity"
    )


def test_classes_of_examples_are_those_of_their_task() -> None:
    def of(task: str) -> list[int]:
        return list(map(int, strata(data_for(task), find_task(task))))

    thirds = [place % 3 for place in range(NUMBER)]
    assert of("classification") == thirds
    assert of("segmentation") == thirds  # the class of most pixels
    assert of("regression") == [place // 6 for place in range(NUMBER)]  # ten bins
    assert of("language-model") == [0] * NUMBER


def test_few_numbers_in_a_shard_are_near_each_other() -> None:
    settings = settings_for("regression", data__partition="shards", data__shards=1)
    shares = allot(settings, data_for("regression"), find_task("regression"))
    spans = [int(share.max() - share.min()) for share in shares]
    assert max(spans) < 2 * NUMBER // 6


def test_a_client_with_too_few_examples_is_named() -> None:
    settings = settings_for(
        "classification",
        clients__number=25,
        data__partition="iid",
        data__min_examples=1,
    )
    with pytest.raises(
        DataError, match=r"^client \d+: 2 examples; expected at least 3"
    ):
        divide(settings, data_for("classification"), find_task("classification"))
