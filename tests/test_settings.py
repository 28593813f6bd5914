import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspu.errors import SettingsError
from fedspu.settings import (
    Settings,
    flatten,
    known_names,
    make_settings,
    parse_override,
    read_toml,
)

GOOD: dict[str, tuple[Any, Any]] = {
    # name: (the paper's value or ours where the paper has none, another good one)
    "method.name": ("fedspu", "local"),
    "method.reading": (None, "original"),
    "method.finetune": (0, 3),
    "method.distillation": (False, True),
    "data.name": ("digits", "arrays:my.npz"),
    "data.dir": (None, "somewhere"),
    "data.partition": ("dirichlet", "iid"),
    "data.alpha": (0.1, 0.5),
    "data.shards": (2, 5),
    "data.split": ("three-way", "paper"),
    "data.min_examples": (10, 3),
    "clients.number": (100, 30),
    "clients.per_round": (10, 4),
    "clients.capacities": ((0.2, 0.4, 0.6, 0.8, 1.0), (0.5, 1.0)),
    "rounds": (500, 20),
    "train.epochs": (5, 1),
    "train.batch_size": (128, 16),
    "train.lr": (0.1, 0.0),
    "train.optimizer": ("sgd", "adamw"),
    "train.momentum": (0.0, 0.9),
    "train.weight_decay": (0.0, 0.01),
    "train.gradient": ("exact", "truncated"),
    "train.saves": ("fast", "lean"),
    "store.cache": (200.0, 0.0),
    "workers": (None, 3),
    "early_stopping.on": (False, True),
    "early_stopping.blend": (0.7, 0.5),
    "early_stopping.patience": (1, 3),
    "norm.policy": ("aggregate", "local"),
    "judge.every": (10, 1),
    "judge.clients": (None, 5),
    "seed": (0, 7),
    "device": ("cpu", "cuda"),
    "out": (None, "runs/mine"),
    "model": ("net", "mypackage.mymodule:build"),
}


def value_of(settings: Settings, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


def make(**given_values: Any) -> Settings:
    return make_settings({"model": "net", **given_values})


# Every setting -----------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_has_its_default_and_takes_another_value(name: str) -> None:
    default, other = GOOD[name]
    assert value_of(make(), name) == default
    changed = value_of(make(**{name: other}), name)
    assert (str(changed) if isinstance(changed, Path) else changed) == other


def test_there_is_no_setting_that_this_file_does_not_know() -> None:
    assert set(known_names()) == set(GOOD)


def test_settings_are_frozen() -> None:
    settings = make()
    with pytest.raises(Exception, match="frozen"):
        settings.rounds = 3
    with pytest.raises(Exception, match="frozen"):
        settings.train.lr = 3


def test_what_is_given_goes_before_what_the_data_set_suggests() -> None:
    suggested = {"model": "digits", "rounds": 30, "train.lr": 0.02}
    settings = make_settings({"rounds": 4, "train": {"epochs": 2}}, suggested)
    assert (settings.rounds, settings.train.lr, settings.train.epochs) == (4, 0.02, 2)
    assert settings.model == "digits"


def test_short_forms_and_tables_and_dotted_names_say_the_same() -> None:
    forms: list[dict[str, Any]] = [
        {"method": "local", "early_stopping": True},
        {"method.name": "local", "early_stopping.on": True},
        {"method": {"name": "local"}, "early_stopping": {"on": True}},
    ]
    first, *others = (make(**form) for form in forms)
    assert first.method.name == "local"
    assert first.early_stopping.on is True
    assert all(other == first for other in others)


# Settings as a file ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", *GOOD])
def test_the_file_a_run_writes_gives_the_same_settings(
    tmp_path: Path, name: str
) -> None:
    settings = make(**({name: GOOD[name][1]} if name in GOOD else {}))
    file = tmp_path / "settings.toml"
    file.write_text(settings.to_toml())
    assert make_settings(read_toml(file)) == settings


def test_a_written_file_names_every_setting_that_has_a_value() -> None:
    written = dict(flatten(tomllib.loads(make().to_toml())))
    assert set(GOOD) - set(written) == {
        "method.reading",
        "data.dir",
        "judge.clients",
        "out",
        "workers",
    }


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "train.lr": st.floats(0, 1e6),
            "data.alpha": st.floats(1e-9, 1e9),
            "clients.capacities": st.lists(
                st.floats(1e-6, 1), min_size=1, max_size=20
            ).map(tuple),
            "early_stopping.blend": st.floats(0.001, 0.999),
            "seed": st.integers(0, 2**63 - 1),
            "model": st.text(min_size=1),
            "data.name": st.text(),
        },
    )
)
def test_any_value_survives_the_file(values: dict[str, Any]) -> None:
    settings = make(**values)
    assert make_settings(tomllib.loads(settings.to_toml())) == settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = ", "not valid TOML"),
        (b"rounds: 3", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (None, "no such configuration file"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_by_name(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_toml(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_toml(tmp_path)


# --set -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.lr=0.05", "train.lr", 0.05),
        ("train.lr=.05", "train.lr", 0.05),
        ("train.lr=1e-3", "train.lr", 0.001),
        ("rounds=20", "rounds", 20),
        (" rounds = 20 ", "rounds", 20),
        ("early_stopping=true", "early_stopping", True),
        ("early_stopping.on=False", "early_stopping.on", False),
        ("clients.capacities=[0.2, 1]", "clients.capacities", [0.2, 1]),
        ("clients.capacities=[.2,.4]", "clients.capacities", [0.2, 0.4]),
        ("method=local", "method", "local"),
        ("model=my.module:build", "model", "my.module:build"),
        ("data.name=arrays:a=b.npz", "data.name", "arrays:a=b.npz"),
        ("out=runs/a b", "out", "runs/a b"),
        ('model="net"', "model", "net"),
        ("out=", "out", ""),
    ],
)
def test_an_override_is_read_as_toml_or_as_plain_text(
    text: str, key: str, value: Any
) -> None:
    assert parse_override(text) == (key, value)
    assert type(parse_override(text)[1]) is type(value)


@pytest.mark.parametrize("text", ["rounds", "", "=3", " = 3", "train.lr 3"])
def test_an_override_without_a_key_and_a_value_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--set .*expected key=value"):
        parse_override(text)


@given(st.text(alphabet="[]{}():,.019'\"=-+ \nabe#\\"))
def test_any_text_can_be_a_value(text: str) -> None:
    key, _ = parse_override(f"data.name={text}")
    assert key == "data.name"


@pytest.mark.parametrize("text", ["{[]: 1}", "{{}}", "{[1], [2]}", "(" * 300])
def test_odd_brackets_are_text_and_no_crash(text: str) -> None:
    assert parse_override(f"data.name={text}") == ("data.name", text)


# Mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.lrr", "train.lr"),
        ("lr", "train.lr"),
        ("alpha", "data.alpha"),
        ("epochs", "train.epochs"),
        ("round", "rounds"),
        ("clients.perround", "clients.per_round"),
        ("judge.evry", "judge.every"),
        ("early_stoping.on", "early_stopping.on"),
        ("norm.polcy", "norm.policy"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**{wrong: 1})
    message = str(caught.value)
    assert message.startswith(f"{wrong}: no such setting")
    assert f"did you mean {right}?" in message


@pytest.mark.parametrize("wrong", ["zzzzzz", "train", "clients", "train.lr.more", ""])
def test_an_unknown_setting_is_refused_even_if_nothing_is_near(wrong: str) -> None:
    with pytest.raises(SettingsError, match="no such setting"):
        make(**{wrong: 1})


BAD: list[tuple[str, Any, str]] = [
    ("data.alpha", 0, "greater than 0"),
    ("data.alpha", -1.5, "greater than 0"),
    ("data.alpha", float("nan"), "greater than 0|finite"),
    ("data.alpha", float("inf"), "finite"),
    ("data.alpha", "much", "number"),
    ("data.shards", 0, "greater than or equal to 1"),
    ("data.shards", -2, "greater than or equal to 1"),
    ("data.shards", 1.5, "integer"),
    ("data.shards", "few", "integer"),
    ("data.partition", 3, "string"),
    ("data.partition", ["iid"], "string"),
    ("data.min_examples", 2.5, "integer"),
    ("data.split", "four-way", "'three-way' or 'paper'"),
    ("data.min_examples", 0, "greater than or equal to 1"),
    ("clients.number", 0, "greater than or equal to 1"),
    ("clients.number", -3, "greater than or equal to 1"),
    ("clients.number", 2.5, "integer"),
    ("clients.per_round", 0, "greater than or equal to 1"),
    ("clients.per_round", 101, r"at most clients\.number = 100"),
    ("clients.capacities", [0.0], "greater than 0"),
    ("clients.capacities", [0.5, -0.2], "greater than 0"),
    ("clients.capacities", [0.5, 1.01], "less than or equal to 1"),
    ("clients.capacities", [float("nan")], "greater than 0|less than|finite"),
    ("clients.capacities", [], "at least 1"),
    ("clients.capacities", 0.5, "tuple|list"),
    ("clients.capacities", ["half"], "number"),
    ("clients.capacities", [0.5] * 101, r"at most clients\.number = 100"),
    ("rounds", 0, "greater than or equal to 1"),
    ("rounds", "many", "integer"),
    ("train.epochs", 0, "greater than or equal to 1"),
    ("train.batch_size", 0, "greater than or equal to 1"),
    ("train.lr", -0.1, "greater than or equal to 0"),
    ("train.lr", float("nan"), "greater than or equal to 0|finite"),
    ("train.lr", float("inf"), "finite"),
    ("train.optimizer", "sdg", "'sgd', 'adam' or 'adamw'"),
    ("train.momentum", 1.0, "less than 1"),
    ("train.momentum", -0.1, "greater than or equal to 0"),
    ("train.weight_decay", -1, "greater than or equal to 0"),
    ("train.gradient", "half", "'exact' or 'truncated'"),
    ("train.saves", "little", "'fast' or 'lean'"),
    ("store.cache", -1, "greater than or equal to 0"),
    ("workers", 0, "greater than or equal to 1"),
    ("workers", -2, "greater than or equal to 1"),
    ("workers", 1.5, "integer"),
    ("early_stopping.on", "perhaps", "boolean"),
    ("early_stopping.blend", 0, "greater than 0"),
    ("early_stopping.blend", 1.5, "less than 1"),
    ("early_stopping.patience", 0, "greater than or equal to 1"),
    ("norm.policy", "global", "'aggregate' or 'local'"),
    ("judge.every", 0, "greater than or equal to 1"),
    ("judge.clients", 0, "greater than or equal to 1"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 1.5, "integer"),
    ("model", 3, "string"),
    ("method.name", 3, "string"),
    ("method.reading", "theirs", "'paper' or 'original'"),
    ("method.reading", 1, "'paper' or 'original'"),
    ("method.finetune", -1, "greater than or equal to 0"),
    ("method.finetune", 1.5, "integer"),
    ("method.distillation", "perhaps", "boolean"),
    ("out", 3, "path"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_a_bad_value_is_one_line_with_its_name_itself_and_what_was_expected(
    name: str, value: Any, expected: str
) -> None:
    with pytest.raises(SettingsError, match=expected) as caught:
        make(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "expected" in message
    assert "\n" not in message
    shown = len(value) if isinstance(value, list) and len(value) > 5 else value
    assert str(shown) in message


def test_a_missing_model_is_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"^model: not given.*--model"):
        make_settings({"rounds": 2})


def test_the_first_of_several_mistakes_is_one_line() -> None:
    with pytest.raises(SettingsError) as caught:
        make(**{"rounds": 0, "seed": -1, "train.lr": "fast"})
    assert "\n" not in str(caught.value)
