import os
import time
import tomllib
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspu.errors import SettingsError
from fedspu.resolve import resolve
from fedspu.settings import (
    SAME_BITS,
    ServerSettings,
    Settings,
    TrainSettings,
    known_fields,
    known_names,
)
from fedspu.settings_text import SHORT_FORMS, flatten, nest, parse_override, read_toml
from fedspu.training.schedule import in_round

GOOD: dict[str, tuple[Any, Any]] = {
    # name: (the paper's value or ours where the paper has none, another good one)
    "method.name": ("fedspu", "local"),
    "method.reading": (None, "original"),
    "method.finish": (0, 10),
    "method.finish_last": (0, 10),
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
    "clients.max_examples": (10_000_000, 500),
    "clients.deadline": (None, 90.0),
    "rounds": (500, 20),
    "train.epochs": (5, 1),
    "train.batch_size": (128, 16),
    "train.lr": (0.1, 0.0),
    "train.optimizer": ("sgd", "adamw"),
    "train.momentum": (0.0, 0.9),
    "train.weight_decay": (0.0, 0.01),
    "train.schedule": ("constant", "step"),
    "train.schedule_rounds": (None, 50),
    "train.schedule_factor": (0.1, 0.5),
    "train.clip": (0.0, 2.5),
    "train.class_weights": ("none", "balanced"),
    "train.adjust_logits": (False, True),
    "train.augment": ((), ("flip", "crop")),
    "train.gradient": ("exact", "truncated"),
    "train.saves": ("fast", "lean"),
    "train.kernels": ("auto", "torch"),
    "server.optimizer": ("none", "adam"),
    "server.lr": (1.0, 0.1),
    "server.momentum": (0.9, 0.0),
    "server.beta2": (0.99, 0.999),
    "server.epsilon": (1e-3, 1e-8),
    "server.average": ("last", "ema"),
    "server.decay": (0.9, 0.5),
    "guard.rule": ("none", "krum"),
    "guard.share": (0.2, 0.4),
    "guard.noise": (0.0, 1.5),
    "guard.clip": (0.0, 0.5),
    "guard.delta": (1e-5, 1e-3),
    "store.cache": (200.0, 0.0),
    "store.durable": (True, False),
    "workers": (None, 3),
    "engine": ("here", "ray"),
    "ray_address": (None, "auto"),
    "early_stopping.on": (False, True),
    "early_stopping.blend": (0.7, 0.5),
    "early_stopping.patience": (1, 3),
    "norm.policy": ("aggregate", "local"),
    "wire.values": ("float32", "bfloat16"),
    "wire.down": (None, "float16"),
    "judge.every": (10, 1),
    "judge.clients": (None, 5),
    "seed": (0, 7),
    "device": ("cpu", "cuda"),
    "out": (None, "runs/mine"),
    "model": ("mlp", "mypackage.mymodule:build"),
    "task": ("classification", "segmentation"),
}

NEEDS: dict[str, dict[str, Any]] = {
    # name: what else must be given for it to have a meaning
    "ray_address": {"engine": "ray"},
    "method.reading": {"method.name": "fjord"},
    "method.finetune": {"method.name": "fedavg"},
    "method.distillation": {"method.name": "fjord", "method.reading": "original"},
    "train.schedule": {"train.schedule_rounds": 20},
    "train.schedule_rounds": {"train.schedule": "cosine"},
    "train.schedule_factor": {"train.schedule": "step", "train.schedule_rounds": 2},
    "server.lr": {"server.optimizer": "momentum"},
    "server.momentum": {"server.optimizer": "momentum"},
    "server.beta2": {"server.optimizer": "adam"},
    "server.epsilon": {"server.optimizer": "adam"},
    "server.decay": {"server.average": "ema"},
    "guard.share": {"guard.rule": "trimmed-mean"},
    "guard.noise": {"guard.clip": 1.0},
    "guard.clip": {"guard.noise": 1.0},
    "guard.delta": {"guard.noise": 1.0, "guard.clip": 1.0},
}


def value_of(settings: Settings, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


def make(**given_values: Any) -> Settings:
    """Settings for data that suggests none."""
    return resolve({"model": "mlp", "data.name": "arrays:my.npz", **given_values})


# Every setting -----------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_has_its_default_and_takes_another_value(name: str) -> None:
    default, other = GOOD[name]
    assert value_of(Settings(model="mlp"), name) == default
    assert name == "data.name" or value_of(make(), name) == default
    changed = value_of(make(**NEEDS.get(name, {}), **{name: other}), name)
    assert (str(changed) if isinstance(changed, Path) else changed) == other


def test_there_is_no_setting_that_this_file_does_not_know() -> None:
    assert set(known_names()) == set(GOOD)


def test_settings_are_frozen() -> None:
    settings = make()
    with pytest.raises(Exception, match="frozen"):
        settings.rounds = 3
    with pytest.raises(Exception, match="frozen"):
        settings.train.lr = 3


def test_every_setting_says_what_it_is() -> None:
    about = {name: field.description for name, field in known_fields()}
    assert set(about) == set(GOOD)
    assert all(about.values())


def test_no_two_settings_have_the_same_flag() -> None:
    flags = [field.json_schema_extra["flag"] for _, field in known_fields()]
    given_flags = [flag for flag in flags if flag is not None]
    assert len(given_flags) == len(set(given_flags))
    assert all(flag.startswith("--") for flag in given_flags)


def test_short_forms_and_settings_without_effect_are_settings() -> None:
    assert set(GOOD) >= SAME_BITS
    assert set(SHORT_FORMS.values()) <= set(GOOD)


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
    changed = {name: GOOD[name][1]} if name in GOOD else {}
    settings = make(**NEEDS.get(name, {}), **changed)
    file = tmp_path / "settings.toml"
    file.write_text(settings.to_toml())
    assert resolve(read_toml(file)) == settings


def test_the_file_holds_the_options_of_the_method(tmp_path: Path) -> None:
    settings = make(**{"method": "apfl", "method.mix": 0.25, "method.adaptive": False})
    file = tmp_path / "settings.toml"
    file.write_text(settings.to_toml())
    again = resolve(read_toml(file))
    assert again == settings
    assert again.method.options == {"mix": 0.25, "adaptive": False}


def test_a_written_file_names_every_setting_that_has_a_value() -> None:
    written = dict(flatten(tomllib.loads(make().to_toml())))
    assert set(GOOD) - set(written) == {
        "method.reading",
        "data.dir",
        "clients.deadline",
        "judge.clients",
        "out",
        "train.schedule_rounds",
        "workers",
        "ray_address",
        "wire.down",
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
            "data.name": st.text(min_size=1).map("arrays:{}".format),
            "train.clip": st.floats(0, 1e6),
            "train.augment": st.lists(st.sampled_from(["flip", "crop"])).map(tuple),
        },
    )
)
def test_any_value_survives_the_file(values: dict[str, Any]) -> None:
    named = {"model": "mlp", "data.name": "arrays:my.npz", **values}
    settings = resolve(named, in_python={"model"})  # any name is as good as another
    again = resolve(tomllib.loads(settings.to_toml()), in_python={"model"})
    assert again == settings


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), st.integers()))
def test_dotted_names_survive_being_nested(flat: dict[str, int]) -> None:
    assert dict(flatten(nest(flat))) == flat


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = ", "not valid TOML"),
        (b"rounds: 3", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"rounds = " + b"[" * 5000, "not valid TOML"),
        (b"rounds = " + b"{a = " * 5000, "not valid TOML"),
        (b"rounds = " + b"9" * 5000, "not valid TOML (Exceeds the limit"),
        (b"rounds = 2026-99-99", "not valid TOML"),
        (b"# " + b"x" * 2**20, "more than 1,048,576 bytes"),
        (b"a." * 100_000 + b"a = 1", "a name of more than 20 parts"),
        (b"'='." * 100_000 + b"a = 1", "a name of more than 20 parts"),
        (b'"\\"". ' * 100_000 + b"a = 1", "a name of more than 20 parts"),
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


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for file in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(SettingsError, match="not an ordinary file"):
            read_toml(file)


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 300_000,
        "'\"" * 300_000,
        "a" * 10**6,
        "." * 10**6,
        "a.b " * 10**5,
    ],
)
def test_looking_for_long_names_takes_little_time(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    start = time.perf_counter()
    with pytest.raises(SettingsError):
        read_toml(tmp_path / "a.toml")
    assert time.perf_counter() - start < 5


def test_dots_that_are_in_no_name_are_fine(tmp_path: Path) -> None:
    capacities = ", ".join(["0.5"] * 50)
    text = f"# {'.' * 60}\nout = '{'a.b.' * 30}'\nclients.capacities = [{capacities}]\n"
    (tmp_path / "a.toml").write_text(text)
    assert len(read_toml(tmp_path / "a.toml")["clients"]["capacities"]) == 50


@pytest.mark.parametrize("name", ["a\nb", "a" * 300, ".".join("a" * 30)])
def test_a_strange_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(SettingsError, match="no such setting") as caught:
        dict(flatten({name: 1}))
    assert len(str(caught.value)) < 150
    assert "\n" not in str(caught.value)


def test_many_options_are_refused_in_little_time() -> None:
    start = time.perf_counter()
    with pytest.raises(SettingsError, match=r"method\.a0 = 1: .* no such option"):
        resolve({"method": {f"a{n}": 1 for n in range(50_000)}})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "text", ["[" * 5000, "9" * 5000, "-" * 5000 + "1", "{" * 300, "(" * 60_000]
)
def test_a_strange_value_is_plain_text(text: str) -> None:
    assert parse_override(f"rounds={text}") == ("rounds", text)


def test_a_value_that_is_too_long_is_refused() -> None:
    with pytest.raises(SettingsError, match="a value of 70,000 characters; expected"):
        parse_override("rounds=" + "x" * 70_000)


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
        ("early_stopping=true", "early_stopping.on", True),
        ("early_stopping.on=False", "early_stopping.on", False),
        ("clients.capacities=[0.2, 1]", "clients.capacities", [0.2, 1]),
        ("clients.capacities=[.2,.4]", "clients.capacities", [0.2, 0.4]),
        ("method=local", "method.name", "local"),
        ("method.name=local", "method.name", "local"),
        ("method.mix=0.5", "method.mix", 0.5),
        ('train.augment=["flip"]', "train.augment", ["flip"]),
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
        ("server.optimiser", "server.optimizer"),
        ("schedule", "train.schedule"),
        ("train.agument", "train.augment"),
        ("tasks", "task"),
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
    ("data.alpha", 0, "above 0"),
    ("data.alpha", -1.5, "above 0"),
    ("data.alpha", float("nan"), "number above 0"),
    ("data.alpha", float("inf"), "finite"),
    ("data.alpha", "much", "number"),
    ("data.shards", 0, "a whole number, 1 or more"),
    ("data.shards", -2, "a whole number, 1 or more"),
    ("data.shards", 1.5, "a whole number"),
    ("data.shards", "few", "a whole number"),
    ("data.partition", 3, "a text"),
    ("data.partition", ["iid"], "a text"),
    ("data.min_examples", 2.5, "a whole number"),
    ("data.split", "four-way", "'three-way' or 'paper'"),
    ("data.min_examples", 0, "a whole number, 1 or more"),
    ("clients.number", 0, "a whole number, 1 or more"),
    ("clients.number", -3, "a whole number, 1 or more"),
    ("clients.number", 2.5, "a whole number"),
    ("clients.per_round", 0, "a whole number, 1 or more"),
    ("clients.per_round", 101, r"at most clients\.number = 100"),
    ("clients.capacities", [0.0], "above 0"),
    ("clients.capacities", [0.5, -0.2], "above 0"),
    ("clients.capacities", [0.5, 1.01], "above 0 and at most 1"),
    ("clients.capacities", [float("nan")], "each above 0 and at most 1"),
    ("clients.capacities", [], "at least one"),
    ("clients.capacities", 0.5, "a list of"),
    ("clients.capacities", ["half"], "number"),
    ("clients.capacities", [0.5] * 101, r"at most clients\.number = 100"),
    ("rounds", 0, "a whole number, 1 or more"),
    ("rounds", "many", "a whole number"),
    ("train.epochs", 0, "a whole number, 1 or more"),
    ("train.batch_size", 0, "a whole number, 1 or more"),
    ("train.lr", -0.1, "number, 0 or more"),
    ("train.lr", float("nan"), "number, 0 or more"),
    ("train.lr", float("inf"), "finite"),
    ("train.optimizer", "sdg", "'sgd', 'adam' or 'adamw'"),
    ("train.momentum", 1.0, "below 1"),
    ("train.momentum", -0.1, "number, 0 or more"),
    ("train.weight_decay", -1, "number, 0 or more"),
    ("train.schedule", "linear", "'constant', 'cosine' or 'step'"),
    ("train.schedule_rounds", 0, "a whole number, 1 or more"),
    ("train.schedule_rounds", 2.5, "a whole number"),
    ("train.schedule_factor", 0, "above 0"),
    ("train.schedule_factor", 1.5, "above 0 and at most 1"),
    ("train.clip", -1, "number, 0 or more"),
    ("train.clip", float("inf"), "finite"),
    ("train.clip", "short", "number"),
    ("train.class_weights", "equal", "'none' or 'balanced'"),
    ("train.adjust_logits", "often", "true or false"),
    ("train.augment", ["turn"], "'flip' or 'crop'"),
    ("train.augment", ["flip", "turn"], "'flip' or 'crop'"),
    ("train.augment", "flip,turn", "'flip' or 'crop'"),
    ("train.augment", 3, "a list of"),
    ("train.gradient", "half", "'exact' or 'truncated'"),
    ("train.saves", "little", "'fast' or 'lean'"),
    ("train.kernels", "cuda", "'auto', 'native' or 'torch'"),
    ("server.optimizer", "sgd", "'none', 'momentum' or 'adam'"),
    ("server.lr", 0, "above 0"),
    ("server.lr", float("inf"), "finite"),
    ("server.momentum", 1.0, "below 1"),
    ("server.momentum", -0.5, "number, 0 or more"),
    ("server.beta2", 1.0, "below 1"),
    ("server.beta2", -0.5, "number, 0 or more"),
    ("server.epsilon", 0, "above 0"),
    ("server.epsilon", float("nan"), "number above 0"),
    ("guard.rule", "crum", "'clip', 'trimmed-mean', 'median' or 'krum'"),
    ("guard.share", 0.7, "a number above 0 and below 0.5"),
    ("guard.share", 0, "above 0"),
    ("guard.noise", -1, "number, 0 or more"),
    ("guard.noise", float("nan"), "number, 0 or more"),
    ("guard.clip", -1, "number, 0 or more"),
    ("guard.clip", float("inf"), "a finite number"),
    ("guard.clip", "median", "number"),
    ("guard.delta", 0, "above 0"),
    ("guard.delta", 1, "below 1"),
    ("store.cache", -1, "number, 0 or more"),
    ("workers", 0, "a whole number, 1 or more"),
    ("workers", -2, "a whole number, 1 or more"),
    ("workers", 1.5, "a whole number"),
    ("early_stopping.on", "perhaps", "true or false"),
    ("early_stopping.blend", 0, "above 0"),
    ("early_stopping.blend", 1.5, "below 1"),
    ("early_stopping.patience", 0, "a whole number, 1 or more"),
    ("norm.policy", "global", "'aggregate' or 'local'"),
    ("wire.values", "float8", "'float32', 'float16' or 'bfloat16'"),
    ("wire.values", 16, "'float32', 'float16' or 'bfloat16'"),
    ("wire.down", "float8", "'float32', 'float16' or 'bfloat16'"),
    ("server.average", "mean", "'last' or 'ema'"),
    ("server.decay", 1.0, "below 1"),
    ("server.decay", -0.5, "number, 0 or more"),
    ("method.finish", -1, "a whole number, 0 or more"),
    ("method.finish", 1.5, "a whole number"),
    ("judge.every", 0, "a whole number, 1 or more"),
    ("judge.clients", 0, "a whole number, 1 or more"),
    ("seed", -1, "number, 0 or more"),
    ("seed", 1.5, "a whole number"),
    ("model", 3, "a text"),
    ("task", 3, "a text"),
    ("device", 3, "a text"),
    ("method.name", 3, "a text"),
    ("method.reading", "theirs", "'paper' or 'original'"),
    ("method.reading", 1, "'paper' or 'original'"),
    ("method.finetune", -1, "a whole number, 0 or more"),
    ("method.finetune", 1.5, "a whole number"),
    ("method.distillation", "perhaps", "true or false"),
    ("out", 3, "a path"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_a_bad_value_is_one_line_with_its_name_itself_and_what_was_expected(
    name: str, value: Any, expected: str
) -> None:
    with pytest.raises(SettingsError, match=expected) as caught:
        make(**NEEDS.get(name, {}), **{name: value})
    message = str(caught.value)
    assert name in message
    assert "expected" in message
    assert "\n" not in message
    shown = len(value) if isinstance(value, list) and len(value) > 5 else value
    assert str(shown) in message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("train.lr", "fast", "a number, 0 or more"),
        ("train.lr", float("inf"), "a finite number, 0 or more"),
        ("workers", 0, "a whole number, 1 or more"),
        ("train.momentum", 1, "a number, 0 or more and below 1"),
        ("early_stopping.blend", 0, "a number above 0 and below 1"),
        ("early_stopping.on", "perhaps", "true or false"),
        ("train.augment", 3, "a list of 'flip' or 'crop'"),
    ],
)
def test_what_is_expected_is_said_in_plain_words(
    name: str, value: Any, expected: str
) -> None:
    assert refusal(**{name: value}) == f"{name} = {value!r}: expected {expected}"


@pytest.mark.parametrize("device", ["tpu", "cuda:one", "", "GPU"])
def test_an_unknown_device_is_refused_with_those_there_are(device: str) -> None:
    assert refusal(device=device) == (
        f"device = {device!r}: expected auto, cpu, cuda or mps"
    )


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps"])
def test_a_known_device_may_be_named_on_any_machine(device: str) -> None:
    assert make(device=device).device == device


def test_a_missing_model_is_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"^model: not given.*--model"):
        resolve({"rounds": 2, "data.name": "arrays:my.npz"})


def test_all_of_several_mistakes_are_one_line() -> None:
    with pytest.raises(SettingsError) as caught:
        make(**{"rounds": 0, "seed": -1, "train.lr": "fast"})
    message = str(caught.value)
    assert "\n" not in message
    for name in ("rounds = 0", "seed = -1", "train.lr = 'fast'"):
        assert f"{name}: expected" in message


# Settings that depend on each other --------------------------------------------------


def refusal(**given_values: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        make(**given_values)
    return str(caught.value)


def test_a_schedule_of_steps_needs_its_length() -> None:
    assert refusal(**{"train.schedule": "step"}) == (
        "train.schedule = 'step' needs a length: set train.schedule_rounds, the rounds "
        "between two steps"
    )


def test_a_cosine_needs_no_length() -> None:
    assert make(**{"train.schedule": "cosine"}).train.schedule_rounds is None


def test_a_length_without_a_schedule_is_refused() -> None:
    assert refusal(**{"train.schedule_rounds": 7}) == (
        "train.schedule_rounds = 7: has no effect with train.schedule = 'constant'; "
        "set train.schedule to cosine or step"
    )


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_factor_without_steps_is_refused(schedule: str) -> None:
    assert refusal(**{"train.schedule": schedule, "train.schedule_factor": 0.5}) == (
        "train.schedule_factor = 0.5: has no effect with train.schedule = "
        f"{schedule!r}; set train.schedule to step"
    )


@pytest.mark.parametrize("name", ["lr", "momentum", "beta2", "epsilon"])
def test_a_setting_of_the_server_without_an_optimizer_is_refused(name: str) -> None:
    value = GOOD[f"server.{name}"][1]
    needed = "momentum or adam" if name in ("lr", "momentum") else "adam"
    assert refusal(**{f"server.{name}": value}) == (
        f"server.{name} = {value}: has no effect with server.optimizer = 'none'; set "
        f"it to {needed}"
    )


@pytest.mark.parametrize("name", ["beta2", "epsilon"])
def test_a_setting_of_adam_is_refused_with_momentum(name: str) -> None:
    value = GOOD[f"server.{name}"][1]
    given_values = {"server.optimizer": "momentum", f"server.{name}": value}
    assert refusal(**given_values) == (
        f"server.{name} = {value}: has no effect with server.optimizer = 'momentum'; "
        "set it to adam"
    )


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_with_an_optimizer_the_server_has_its_learning_rate(optimizer: str) -> None:
    settings = make(**{"server.optimizer": optimizer, "server.lr": 0.5})
    assert settings.server.lr == 0.5


def test_the_server_s_own_defaults_may_be_written_out() -> None:
    written = ServerSettings().model_dump()
    assert make(server=written).server == ServerSettings()


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        (
            {"share": 0.3},
            "guard.share = 0.3: has no effect with guard.rule = 'none'; set it to "
            "trimmed-mean or krum",
        ),
        (
            {"rule": "median", "share": 0.3},
            "guard.share = 0.3: has no effect with guard.rule = 'median'; set it to "
            "trimmed-mean or krum",
        ),
        (
            {"clip": 2.0},
            "guard.clip = 2.0: has no effect with guard.noise = 0; set guard.noise",
        ),
        (
            {"delta": 1e-6},
            "guard.delta = 1e-06: has no effect with guard.noise = 0; set guard.noise",
        ),
        (
            {"noise": 1.0},
            "guard.noise = 1.0 needs a limit: set guard.clip, the largest norm of a "
            "client's update",
        ),
        *(
            (
                {"noise": noise, "clip": 1.0},
                f"guard.noise = {noise}: expected 0, or a number from 0.001 to 1000000",
            )
            for noise in (5e-324, 1e-155, 0.00099, 1.1e6)
        ),
        *(
            (
                {"noise": 1.0, "clip": clip},
                f"guard.clip = {clip}: expected a number from 0.000001 to 1000000",
            )
            for clip in (1e-300, 9e-7, 1.1e6)
        ),
        (
            {"noise": 1.0, "clip": 1.0, "rule": "krum"},
            "guard.noise = 1.0 with guard.rule = 'krum': only a plain sum of updates "
            "has a known epsilon; leave one of the two out",
        ),
    ],
)
def test_settings_of_a_guard_that_do_not_fit_are_refused(
    given_values: dict[str, Any], said: str
) -> None:
    assert refusal(**{f"guard.{k}": v for k, v in given_values.items()}) == said


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        (
            {"clients.number": 5, "clients.per_round": 6},
            "clients.per_round = 6: expected at most clients.number = 5; set it too, "
            "like --per-round 5",
        ),
        (
            {"clients.number": 1, "clients.per_round": 1},
            "clients.capacities has 5 numbers: expected at most clients.number = 1; "
            "set fewer too, like --capacities 1",
        ),
    ],
)
def test_there_are_enough_clients_for_a_round_and_for_the_capacities(
    given_values: dict[str, Any], said: str
) -> None:
    assert refusal(**given_values) == said


# The learning rate of a round --------------------------------------------------------


def rates(rounds: int, **given_values: Any) -> list[float]:
    """The learning rate of each round, for a rate of 0.8."""
    train = TrainSettings(lr=0.8, **given_values)
    return [in_round(train, t, rounds).lr for t in range(1, rounds + 1)]


def test_a_constant_rate_is_the_same_in_every_round() -> None:
    train = TrainSettings(lr=0.8)
    assert all(in_round(train, t, 5) is train for t in range(1, 6))


def test_a_cosine_falls_from_the_whole_rate_to_0_in_all_rounds() -> None:
    found = rates(8, schedule="cosine")
    assert found == pytest.approx([0.4 * (1 + cos(pi * t / 8)) for t in range(8)])
    assert found[0] == 0.8
    assert found[4] == pytest.approx(0.4)
    assert found == sorted(found, reverse=True)
    assert found[-1] > 0
    train = TrainSettings(lr=0.8, schedule="cosine")
    assert in_round(train, 9, 8).lr == pytest.approx(0)


def test_a_cosine_of_its_own_length_stays_at_0_behind_it() -> None:
    found = rates(7, schedule="cosine", schedule_rounds=4)
    assert found == pytest.approx(
        [0.8, 0.4 * (1 + cos(pi / 4)), 0.4, 0.4 * (1 - cos(pi / 4)), 0, 0, 0]
    )


def test_a_step_divides_the_rate_again_and_again() -> None:
    found = rates(7, schedule="step", schedule_rounds=3, schedule_factor=0.5)
    assert found == [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2]


def test_a_step_is_to_a_tenth_by_default() -> None:
    found = rates(4, schedule="step", schedule_rounds=2)
    assert found == pytest.approx([0.8, 0.8, 0.08, 0.08])


def test_steps_do_not_depend_on_the_number_of_rounds() -> None:
    train = TrainSettings(lr=0.8, schedule="step", schedule_rounds=2)
    assert in_round(train, 3, 10) == in_round(train, 3, 1000)


@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_a_schedule_changes_nothing_but_the_rate(schedule: Any) -> None:
    train = TrainSettings(
        schedule=schedule, schedule_rounds=2, epochs=3, clip=1.5, momentum=0.5
    )
    later = in_round(train, 3, 10)
    assert later.lr != train.lr
    assert later.model_copy(update={"lr": train.lr}) == train
