import builtins
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fedspu.data import DATASETS, FROM_MEMORY, Source
from fedspu.data.partition import PARTITIONS as DIVIDERS
from fedspu.errors import FedSPUError, ModelError, SettingsError
from fedspu.methods import CATALOGUE, METHODS, Entry
from fedspu.models import MODELS
from fedspu.resolve import TASKS_WITHOUT_CLASSES, resolve
from fedspu.settings import PARTITIONS, Settings, known_names
from fedspu.settings_text import flatten
from fedspu.tasks import TASKS, find_task
from fedspu.tasks.classification import classification

MINE = {"data.name": "arrays:my.npz", "model": "mlp"}
"""Data that suggests nothing, and a model for it."""


def of_mine(**given: Any) -> Settings:
    return resolve({**MINE, **given})


def refusal(given: dict[str, Any], *in_python: str) -> str:
    """The one line with which settings are refused."""
    with pytest.raises(FedSPUError) as caught:
        resolve(given, in_python)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def values_of(settings: Settings) -> dict[str, Any]:
    return dict(flatten(settings.model_dump()))


# What goes first ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_a_data_set_brings_the_settings_that_suit_it(name: str) -> None:
    source = DATASETS[name]
    whole = f"{name}:mine" if source.file else name
    found = values_of(resolve({"model": "mlp", **source.defaults, "data.name": whole}))
    if "model" in source.defaults:
        assert values_of(resolve({"data.name": whole})) == found
    assert source.defaults.items() <= found.items()


def test_nothing_given_is_a_whole_run_on_the_digits() -> None:
    settings = resolve({})
    assert (settings.data.name, settings.model) == ("digits", "digits")
    assert (settings.rounds, settings.clients.number) == (20, 30)
    assert settings.method.name == "fedspu"


def test_all_that_nobody_suggests_is_the_paper_s() -> None:
    paper = values_of(Settings(model="digits"))
    found = values_of(resolve({}))
    changed = {name for name in paper if found[name] != paper[name]}
    assert changed == set(DATASETS["digits"].defaults) - {"model"}


def test_what_is_given_goes_before_what_the_data_set_suggests() -> None:
    settings = resolve({"rounds": 4, "train": {"epochs": 2}, "model": "mlp"})
    assert (settings.rounds, settings.train.lr, settings.train.epochs) == (4, 0.02, 2)
    assert settings.model == "mlp"


def test_even_the_paper_s_own_value_goes_before_a_suggestion() -> None:
    assert resolve({"rounds": 500}).rounds == 500


def test_nothing_given_as_none_goes_before_a_suggestion() -> None:
    assert resolve({"rounds": None, "train": {"lr": None}}) == resolve({})


def test_a_suggestion_is_held_against_what_is_given() -> None:
    assert refusal({"clients.per_round": 31}) == (
        "clients.per_round = 31: expected at most clients.number = 30; set it too, "
        "like --per-round 30"
    )


def test_arrays_from_memory_suggest_nothing() -> None:
    settings = resolve({"data.name": FROM_MEMORY, "model": "mlp"})
    assert values_of(settings) == {
        **values_of(Settings(model="mlp")),
        "data.name": FROM_MEMORY,
    }


def test_texts_are_divided_at_random_unless_something_else_is_said() -> None:
    text = {"task": "language-model"}
    assert of_mine(**text).data.partition == "iid"
    assert of_mine(**text, **{"data.partition": "quantity"}).data.partition == (
        "quantity"
    )
    assert of_mine(task="regression").data.partition == "dirichlet"


def test_a_data_set_s_suggestion_goes_before_the_task_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plays = Source("plays", "own.arrays", defaults={"data.partition": "natural"})
    monkeypatch.setitem(DATASETS, "plays", plays)
    given = {"data.name": "plays", "model": "mlp", "task": "language-model"}
    assert resolve(given).data.partition == "natural"


@pytest.mark.parametrize("name", ["digits", "cifar10", "speech", "sounds:mine"])
def test_whole_settings_are_resolved_to_themselves(name: str) -> None:
    settings = resolve(
        {"data.name": name, "method": "ditto", "method.pull": 2, "seed": 3}
    )
    assert resolve(settings.model_dump()) == settings
    assert resolve(values_of(settings)) == settings


def test_what_is_given_is_left_as_it_was() -> None:
    given = {"train": {"lr": 0.5}, "method": "fedavg", "method.finetune": 2}
    resolve(given)
    assert given == {"train": {"lr": 0.5}, "method": "fedavg", "method.finetune": 2}


# Before any file ----------------------------------------------------------------------


def no_file(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a file was opened")


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be opened."""
    for owner in (builtins, io, os, Path):
        monkeypatch.setattr(owner, "open", no_file)


@pytest.mark.usefixtures("without_files")
def test_all_settings_at_once_open_no_file() -> None:
    given = values_of(Settings(model="digits")) | {
        "method.reading": "paper",
        "data.dir": "somewhere",
        "train.schedule": "cosine",
        "train.schedule_rounds": 9,
        "workers": 2,
        "engine": "ray",
        "ray_address": "auto",
        "judge.clients": 5,
        "clients.deadline": 5.0,
        "wire.down": "bfloat16",
        "out": "runs/mine",
    }
    assert set(given) == set(known_names())
    assert dict(flatten(resolve(given).model_dump(mode="json"))).keys() == given.keys()


@pytest.mark.usefixtures("without_files")
@pytest.mark.parametrize("name", DATASETS)
def test_no_file_of_a_data_set_is_opened(name: str) -> None:
    whole = f"{name}:mine" if DATASETS[name].file else name
    assert resolve({"data.name": whole, "model": "mlp"}).data.name == whole


@pytest.mark.usefixtures("without_files")
@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: f"{e.name}-{e.reading}")
def test_no_file_of_a_method_is_opened(entry: Entry) -> None:
    method = {"name": entry.name, "reading": entry.reading}
    assert resolve({"method": method}).method.name == entry.name


@pytest.mark.usefixtures("without_files")
@pytest.mark.parametrize(
    "given",
    [
        {"data.name": "digit"},
        {"model": "mpl"},
        {"task": "regresion"},
        {"method": "fedspo"},
        {"method.finetune": 1},
        {"rounds": 0},
        {"round": 1},
    ],
)
def test_a_mistake_is_found_before_any_file(given: dict[str, Any]) -> None:
    assert refusal(given)


def test_a_mistake_is_found_without_pytorch() -> None:
    code = (
        "import sys\n"
        "from fedspu.errors import SettingsError\n"
        "from fedspu.resolve import resolve\n"
        "resolve({'method': 'ditto', 'method.pull': 2, 'task': 'regression'})\n"
        "try:\n"
        "    resolve({'train.lr': -1})\n"
        "except SettingsError as error:\n"
        "    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "train.lr = -1: expected a number, 0 or more",
        "False",
    ]


# Mistakes -----------------------------------------------------------------------------


def test_all_that_is_wrong_is_said_at_once() -> None:
    given = {
        **MINE,
        "rounds": 0,
        "clients.per_round": 200,
        "train.schedule": "step",
        "server.lr": 2,
        "data.split": "none",
        "train.lr": "fast",
    }
    problems = refusal(given).split("; ")
    assert "rounds = 0: expected a whole number, 1 or more" in problems
    assert "clients.per_round = 200: expected at most clients.number = 100" in problems
    assert "data.split = 'none': expected 'three-way' or 'paper'" in problems
    assert any(problem.startswith("train.lr = 'fast': ") for problem in problems)
    assert any(problem.startswith("server.lr = 2.0: ") for problem in problems)


def test_a_missing_model_is_one_of_several_mistakes() -> None:
    said = refusal({"data.name": "arrays:my.npz", "rounds": 0})
    assert "model: not given, and this data set suggests none; give your own" in said
    assert "rounds = 0: expected" in said


def test_the_same_mistake_is_said_once() -> None:
    said = refusal({**MINE, "clients.capacities": [2.0, 2.0, 2.0]})
    assert said.count("clients.capacities") == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [("train.lrr", "train.lr"), ("server.beta", "server.beta2"), ("tsk", "task")],
)
def test_an_unknown_setting_is_refused_with_the_nearest(name: str, meant: str) -> None:
    assert refusal({name: 1}) == (
        f"{name}: no such setting (did you mean {meant}?); `fedspu settings` lists them"
    )


def test_a_setting_like_no_other_is_refused() -> None:
    assert refusal({"zzz": 1}) == "zzz: no such setting; `fedspu settings` lists them"


def test_an_unknown_setting_in_a_table_is_refused_by_its_whole_name() -> None:
    assert refusal({"train": {"speed": 3}}).startswith("train.speed: no such setting")


@pytest.mark.parametrize("names", [("name", "name.more"), ("name.more", "name")])
def test_a_table_that_is_also_a_value_is_refused(names: tuple[str, str]) -> None:
    assert refusal({f"method.{name}": "local" for name in names}) == (
        "method.name, method.name.more: a table and a value have the same name"
    )


# Data ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit", "(did you mean digits?)"),
        ("digits:mine", "data.name = 'digits:mine': expected digits"),
        ("images", "data.name = 'images': expected images:FOLDER"),
        ("arrays:", "data.name = 'arrays:': expected arrays:FILE.npz"),
    ],
)
def test_data_that_is_not_there_is_refused(name: str, said: str) -> None:
    assert refusal({"data.name": name}).endswith(said)


def test_there_is_a_divider_for_each_partition() -> None:
    assert set(PARTITIONS) == set(DIVIDERS)


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_may_be_named(name: str) -> None:
    assert of_mine(**{"data.partition": name}).data.partition == name


def test_an_unknown_partition_is_refused_with_the_nearest() -> None:
    assert refusal({"data.partition": "shard"}) == (
        "data.partition = 'shard': expected one of dirichlet, dirichlet-client, iid, "
        "natural, quantity, shards (did you mean shards?)"
    )


# Tasks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TASKS, "fedspu.tasks.regression:regression"])
def test_a_task_may_be_named(name: str) -> None:
    assert of_mine(task=name).task == name


def test_a_task_in_no_module_is_refused() -> None:
    assert refusal({"task": "none_such.tasks:mine"}).startswith(
        "task = 'none_such.tasks:mine': no module named none_such is installed"
    )


def test_tasks_without_classes_are_known_without_their_records() -> None:
    found = {name for name in TASKS if find_task(name).strata is None}
    assert found == TASKS_WITHOUT_CLASSES


@pytest.mark.parametrize("strata", [None, classification.strata])
def test_how_to_divide_follows_from_the_record_of_a_task(strata: Any) -> None:
    task = replace(classification, name="mine", strata=strata)
    settings = resolve({**MINE, "task": "mine"}, in_python={"task"}, task=task)
    assert settings.data.partition == ("iid" if strata is None else "dirichlet")


@pytest.mark.parametrize("name", TASKS)
def test_a_task_named_by_its_place_is_divided_in_the_same_way(name: str) -> None:
    by_name, by_place = of_mine(task=name), of_mine(task=TASKS[name])
    assert by_name.data == by_place.data


@pytest.mark.parametrize("name", ["regresion", "none_such.tasks", ":mine", "a b:c"])
def test_an_unknown_task_is_refused(name: str) -> None:
    said = refusal({"task": name})
    assert said.startswith(
        f"task = {name!r}: expected one of classification, regression, "
        "language-model, segmentation, or your own as package.module:task"
    )
    assert said.endswith("(did you mean regression?)") == (name == "regresion")


def test_a_task_in_python_may_have_any_name() -> None:
    assert resolve({"task": "my task"}, in_python={"task"}).task == "my task"


# Models -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODELS, "none_such.nets:build"])
def test_a_model_may_be_named(name: str) -> None:
    assert of_mine(model=name).model == name


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"^model = 'mpl': .*\(did you mean mlp\?\)$"):
        of_mine(model="mpl")


def test_a_model_in_python_may_have_any_name() -> None:
    given = {**MINE, "model": "mine:<lambda>"}
    assert resolve(given, in_python={"model"}).model == "mine:<lambda>"
    assert refusal(given, "task", "method").startswith("model = 'mine:<lambda>': ")


# Methods ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_may_be_named(name: str) -> None:
    settings = resolve({"method": name})
    assert settings.method.name == name
    assert settings.method.options == {}


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    said = refusal({"method": "fedspo"})
    assert said.startswith("method = 'fedspo': expected one of fedspu, fedspu-plus, ")
    assert said.endswith("or package.module:method (did you mean fedspu?)")


def test_a_reading_that_a_method_has_not_is_refused() -> None:
    assert refusal({"method": {"name": "hermes", "reading": "original"}}) == (
        "method.reading = 'original': hermes has only paper here; `fedspu methods` "
        "lists them all"
    )
    assert refusal({"method": {"name": "ditto", "reading": "paper"}}).startswith(
        "method.reading = 'paper': ditto has only original here"
    )


OPTIONS = [(entry, name) for entry in CATALOGUE for name in entry.options.model_fields]


@pytest.mark.parametrize(
    ("entry", "name"), OPTIONS, ids=[f"{e.name}.{n}" for e, n in OPTIONS]
)
def test_an_option_of_a_method_takes_its_own_default(entry: Entry, name: str) -> None:
    default = entry.options.model_fields[name].default
    given = {"method.name": entry.name, "method.reading": entry.reading}
    settings = resolve(given | {f"method.{name}": default})
    expected = {} if default is None else {name: default}
    assert settings.method.options == expected


def test_the_methods_have_options_at_all() -> None:
    assert {"finetune", "distillation", "pull", "mix", "head", "mix_lr"} <= {
        name for _, name in OPTIONS
    }


def test_options_are_those_given_and_in_their_types() -> None:
    given = {"method": {"name": "fedala", "layers": "2", "mix_lr": 3}}
    options = resolve(given).method.options
    assert options == {"layers": 2, "mix_lr": 3.0}
    assert [type(value) for value in options.values()] == [int, float]


def test_an_option_of_another_method_says_whose_it_is() -> None:
    assert refusal({"method.finetune": 1}) == (
        "method.finetune = 1: fedspu (paper) has no such option; fedavg (paper) has it"
    )
    assert refusal({"method": "local", "method.head": 2}) == (
        "method.head = 2: local (paper) has no such option; fedper (original), fedrep "
        "(original) have it"
    )


def test_an_option_of_another_reading_says_whose_it_is() -> None:
    assert refusal({"method": "fjord", "method.distillation": True}) == (
        "method.distillation = True: fjord (paper) has no such option; fjord "
        "(original) has it"
    )


def test_an_option_that_nobody_has_is_refused_with_the_nearest() -> None:
    assert refusal({"method": "fedavg", "method.finetun": 1}) == (
        "method.finetun = 1: fedavg (paper) has no such option (did you mean "
        "finetune?); `fedspu methods` lists them"
    )


@pytest.mark.parametrize(
    ("method", "option", "value", "expected"),
    [
        ("fedavg", "finetune", -1, "a whole number, 0 or more"),
        ("fedavg", "finetune", 1.5, "a whole number, 0 or more"),
        ("ditto", "pull", 0, "a number above 0"),
        ("apfl", "mix", 1.5, "a number, 0 or more and at most 1"),
        ("apfl", "adaptive", "perhaps", "true or false"),
        ("fedper", "head", 0, "a whole number, 1 or more"),
        ("fedrep", "head_epochs", 0, "a whole number, 1 or more"),
        ("fedala", "layers", "all", "a whole number, 1 or more"),
        ("fedala", "share", 0, "a number above 0 and at most 1"),
        ("fedala", "mix_lr", float("inf"), "a finite number"),
    ],
)
def test_a_bad_option_is_refused_by_its_whole_name(
    method: str, option: str, value: Any, expected: str
) -> None:
    said = refusal({"method": method, f"method.{option}": value})
    assert said.startswith(f"method.{option} = {value!r}: expected {expected}")


def test_options_of_a_method_in_python_are_its_own_business() -> None:
    given = {"method": {"name": "mine", "reading": "original", "depth": 3}}
    settings = resolve(given, in_python={"method"})
    assert settings.method.options == {"depth": 3}


OWN_METHOD = """
from dataclasses import replace

from fedspu.methods.whole_model.fedavg import fedavg
from fedspu.methods.options import FedAvgOptions, Options
from fedspu.settings import Count, setting

class Mine(Options):
    depth: Count = setting(1, "How deep.")

whole = fedavg(FedAvgOptions())
SIZE = 3

def deep(options: Mine):
    return replace(whole, name=f"deep-{options.depth}")
"""


@pytest.fixture
def own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with methods of one's own, left without traces."""
    name = f"methods_of_{tmp_path.name}"  # what is found is remembered by its place
    (tmp_path / f"{name}.py").write_text(OWN_METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return name


def test_a_method_of_one_s_own_may_be_named(own_methods: str) -> None:
    name = f"{own_methods}:whole"
    assert resolve({"method": name}).method.name == name
    assert refusal({"method": name, "method.depth": 2}) == (
        f"method.depth = 2: {name} (paper) has no such option; `fedspu methods` lists "
        "them"
    )


def test_a_method_of_one_s_own_may_have_options(own_methods: str) -> None:
    name = f"{own_methods}:deep"
    assert resolve({"method": name, "method.depth": 2}).method.options == {"depth": 2}
    assert refusal({"method": name, "method.depth": 0}) == (
        "method.depth = 0: expected a whole number, 1 or more"
    )


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("SIZE", "is a int; expected a fedspu.methods.method.Method, or a function"),
        ("depe", "has no depe (did you mean deep?)"),
    ],
)
def test_what_is_no_method_is_refused(
    own_methods: str, attribute: str, said: str
) -> None:
    place = f"{own_methods}:{attribute}"
    found = refusal({"method": place})
    assert found.startswith(f"method = {place!r}: ")
    assert said in found


def test_a_method_in_no_module_is_refused() -> None:
    with pytest.raises(SettingsError, match="no module named none_such is installed"):
        resolve({"method": "none_such.methods:mine"})
