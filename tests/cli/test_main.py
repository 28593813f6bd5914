"""The command as a whole: help, unknown words, exit codes, what it needs."""

import subprocess
import sys

import pytest

from fedspu.cli.app import COMMANDS as COMMAND_TABLE
from fedspu.cli.app import load_command
from fedspu.cli.console import LOADING
from tests.cli.commands import Command

COMMANDS = (
    "run",
    "compare",
    "neurons",
    "profile",
    "device",
    "export",
    "methods",
    "settings",
    "data",
    "doctor",
    "deploy",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_by_example(command: Command, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0
    assert "Usage" in result.out
    if name in ("run", "compare", "neurons", "profile", "device", "export"):
        assert f"fedspu {name} " in result.out


def test_help_names_every_command(command: Command) -> None:
    result = command("--help")
    assert (result.code, result.err) == (0, "")
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", ["neurons", "profile"])
def test_help_says_what_p_is(command: Command, name: str) -> None:
    assert "Shares of neurons to" in command(name, "--help").out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run --nosuchflag", "--nosuchflag"),
        ("walk", "walk"),
        ("run --lr fast", "train.lr = 'fast': expected a number"),
        ("run --lr", "--lr"),
        ("run --early-stopping=maybe", "--early-stopping"),
        ("neurons", "model"),
        ("run one.toml two.toml", "two.toml"),
    ],
)
def test_a_word_the_command_does_not_know(
    command: Command, words: str, named: str
) -> None:
    result = command(*words.split())
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
    assert named in result.err.lower()


def test_a_bug_of_ours_shows_its_traceback(nets: str) -> None:
    """Exit 1 is kept for what is no mistake of the user's."""
    code = "import fedspu.runs as s, fedspu.cli as c; s.simulate = None; c.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "run", "small.toml", "--out", "mine"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_the_command_needs_no_more_than_is_installed_with_it() -> None:
    """Not what only the extras bring, and what they bring along."""
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'flwr', 'ray', 'onnx', 'onnxruntime',\n"
        "             'onnxscript', 'pytest', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "import fedspu.cli\n"
        "sys.argv = ['fedspu', 'methods']\n"
        "fedspu.cli.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, f"{LOADING}\n")
    assert "fedspu" in result.stdout


def test_the_command_is_also_a_module_to_run() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fedspu.cli", "methods", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, f"{LOADING}\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("run --help", 0),
        ("settings", 0),
        ("run --set train.lrr=1", 2),
        ("run --method fedspoo", 2),
        ("run --set method.finetune=1", 2),
        ("compare --set train.lrr=1", 2),
        ("device --memory 64", 2),
        ("device --set train.lrr=1", 2),
        ("export mine 0 --format onxx", 2),
    ],
)
def test_help_and_wrong_settings_take_no_pytorch(words: str, code: int) -> None:
    """What takes a second to import is left until it is needed."""
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom fedspu.cli import main\nmain()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *words.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, "Traceback" in result.stderr) == (code, False)


@pytest.mark.parametrize("name", COMMAND_TABLE)
def test_the_list_of_commands_says_what_each_says_itself(name: str) -> None:
    told = (load_command(name).help or "").split("\n\n")[0]
    assert " ".join(told.split()) == COMMAND_TABLE[name]


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("--help", ("torch", "numpy", "pydantic")),
        ("--version", ("torch", "numpy", "pydantic", "typer", "rich")),
    ],
)
def test_what_takes_long_to_import_is_not_imported_in_vain(
    words: str, unneeded: tuple[str, ...]
) -> None:
    program = (
        "import sys\nfrom fedspu.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {unneeded} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr in ("", f"{LOADING}\n")
    assert result.stdout.splitlines()[-1] == "[]"
