"""What was probably meant is suggested, by what is there."""

import sys
from pathlib import Path

import pytest

from tests.cli.commands import Command


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--model mynet.py:build", "mynet:build"),
        ("--model elsewhere/mynet.py:build", "mynet:build"),
        ("--model inner.py", "lab.inner:build"),
        ("--model mynet", "mynet:build"),
        ("--model Mynet:make", "mynet:make"),
        ("--model inner:build", "lab.inner:build"),
        ("--method FedSPU", "fedspu"),
        ("--method Local", "local"),
        ("digits", "--data digits"),
        ("arrays:f.npz", "--data arrays:f.npz"),
        ("fedavg", "--method fedavg"),
        ("smal.toml", "small.toml"),
    ],
)
def test_a_mistyped_word_is_answered_with_what_is_there(
    command: Command, words: str, meant: str
) -> None:
    Path("mynet.py").touch()
    Path("lab").mkdir()
    Path("lab/inner.py").touch()
    result = command("run", *words.split())
    assert result.code == 2
    assert result.error.endswith(f"(did you mean {meant}?)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rum", "No such command 'rum'. Did you mean 'run'? See `fedspu --help`"),
        ("run --nope", "No such option '--nope'"),
        ("export a zero", "'zero' is not a valid int"),
        ("run --rounds", "Option '--rounds' requires an argument. See"),
    ],
)
def test_words_that_cannot_be_understood_are_one_line(
    command: Command, words: str, said: str
) -> None:
    result = command(*words.split())
    assert result.code == 2
    assert said in result.error
    assert len(result.err.splitlines()) == 1


@pytest.mark.usefixtures("nets")
def test_a_run_folder_is_no_file_of_settings(command: Command) -> None:
    Path("mine").mkdir()
    Path("mine/settings.toml").touch()
    error = command("run", "mine").error
    assert "resume it with --resume mine, or play it again with mine/settings" in error


@pytest.mark.usefixtures("nets")
def test_a_folder_in_use_names_a_command_that_resumes_it(command: Command) -> None:
    command("run", "small.toml", "--rounds", 1, "--out", "mine")
    error = command("run", "small.toml", "--out", "mine").error
    assert error.endswith("`fedspu run --resume mine --trust`")


@pytest.mark.usefixtures("nets")
def test_a_model_whose_code_has_changed_is_not_exported(
    command: Command, nets: str
) -> None:
    words = ("run", "small.toml", "--model", f"{nets}:narrower", "--rounds", 4)
    command(*words, "--out", "mine")
    file = Path(f"{nets}.py")
    file.write_text(file.read_text().replace("nn.Linear(16, 3)", "nn.Linear(16, 10)"))
    sys.modules.pop(nets)
    error = command("export", "mine", 0, "--trust").error
    assert "has shape (10,) in the model and (3,) in the state; expected" in error
    assert "use the code of that time" in error


@pytest.mark.usefixtures("nets")
def test_tensorboard_is_told_where_the_files_are(command: Command) -> None:
    pytest.importorskip("tensorboard")
    words = ("run", "small.toml", "--rounds", 1, "--log", "tensorboard")
    said = command(*words, "--out", "mine").out
    assert "`tensorboard --logdir mine/tensorboard`" in said
    assert any(Path("mine/tensorboard").iterdir())
