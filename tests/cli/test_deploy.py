"""``fedspu deploy`` as it is typed: what it makes, and every wrong word."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedspu.deploy.processes import free_port
from tests.cli.commands import Command

INIT = "init lab --devices a,b"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_deployment_is_made_with_settings_and_capacities(command: Command) -> None:
    Path("x.toml").write_text('rounds = 7\nout = "runs/old"\n[train]\nlr = 0.5\n')
    words = "deploy init lab x.toml --devices a,b --capacities 0.2,1 --port 8123"
    result = command(*words.split(), "--host", "LAB.example", "--host", "10.0.0.7")
    assert (result.code, result.err) == (0, "")
    assert "Left out, as a deployment has no use for them: out" in result.out
    assert "Next: `fedspu deploy server lab`" in result.out
    server = Path("lab/server/server.toml").read_text()
    assert re.search('bind = "0.0.0.0"', server)
    assert "capacity = 0.2" in Path("lab/devices/a/device.toml").read_text()
    device = Path("lab/devices/b/device.toml").read_text()
    assert 'server = "lab.example:8123"' in device
    assert "capacity = 1.0" in device
    app = Path("lab/server/app/pyproject.toml").read_text()
    assert "rounds = 7" in app
    assert "lr = 0.5" in app


def test_data_may_be_a_function_of_the_devices_own(command: Command) -> None:
    words = "deploy init lab --devices a --data mine:load --model digits --lr 0.1"
    assert command(*words.split()).code == 0
    assert 'data = "mine:load"' in Path("lab/devices/a/device.toml").read_text()
    command("deploy", "add", "lab", "b")
    assert 'data = "mine:load"' in Path("lab/devices/b/device.toml").read_text()
    command("deploy", "add", "lab", "c", "--data", "arrays:x.npz")
    assert 'data = "arrays:x.npz"' in Path("lab/devices/c/device.toml").read_text()


@pytest.mark.parametrize("from_file", [False, True])
def test_a_data_file_is_looked_up_in_each_devices_folder(
    command: Command, from_file: bool
) -> None:
    words = ["deploy", "init", "lab", "--devices", "a", "--model", "digits"]
    if from_file:
        Path("exp").mkdir()
        Path("exp/x.toml").write_text('[data]\nname = "arrays:x.npz"\n')
        words.insert(3, "exp/x.toml")
    else:
        words += ["--data", "arrays:x.npz"]
    assert command(*words, "--lr", 0.1).code == 0
    assert 'data = "arrays:x.npz"' in Path("lab/devices/a/device.toml").read_text()
    assert 'data = "arrays:x.npz"' in Path("lab/server/server.toml").read_text()
    app = Path("lab/server/app/pyproject.toml").read_text()
    assert 'name = "arrays:x.npz"' in app


WRONG = [
    ("--devices a,a", "--devices: a is there twice"),
    ("--devices a,b/c", "--devices 'b/c': expected a name of at most 63"),
    ("--devices ,", "--devices '': expected a name"),
    ("--devices a --port 0", "--port 0: expected a number from 1 to 65535"),
    ("--devices a --port 70000", "--port 70000: expected"),
    ("--devices a --host a:80", "--host 'a:80': expected a name or an IP address"),
    ("--devices a --days 0", "--days 0: expected a number from 1 to 3650"),
    ("--devices a --days -3", "--days -3: expected"),
    ("--devices a --capacities 0.2,1", r"clients\.capacities has 2 numbers"),
    ("--devices a --capacities 2", r"clients\.capacities = \[2\.0\]: expected a list"),
    ("--devices a --lr fast", r"train\.lr = 'fast': expected a number"),
    ("--devices a --data digitz", "did you mean digits"),
    ("--devices a --set clients.number=5", r"clients\.number = 5: --devices names 1"),
    ("--devices a --set out=x", "has no effect in this command; use the run folder"),
    ("--devices a --set engine=ray", "use fedspu run --engine"),
    ("--devices a --per-round 2", r"clients\.per_round = 2: expected at most"),
    ("--devices a none.toml", r"none\.toml: no such configuration file"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_word_of_init_is_one_line_and_nothing_is_made(
    command: Command, words: str, message: str
) -> None:
    result = command("deploy", "init", "lab", *words.split())
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("init", "Missing argument 'DIR'"),
        ("init lab", "Missing option '--devices'"),
        ("init lab --devices a --workers 2", "No such option"),
        ("add lab", "Missing argument 'NAME'"),
        ("add lab c --capacity much", "'much' is not a valid float"),
        ("serve lab", "No such command 'serve'"),
        ("status lab more", "unexpected extra argument"),
        ("renew lab --days soon", "'soon' is not a valid int"),
    ],
)
def test_words_that_are_missing_or_not_known(
    command: Command, words: str, message: str
) -> None:
    result = command("deploy", *words.split())
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.err


COMMANDS = ("server", "start", "stop", "status", "logs", "check", "renew")


@pytest.mark.parametrize("name", [*COMMANDS, "add", "remove", "rotate"])
def test_a_folder_without_a_deployment(command: Command, name: str) -> None:
    Path("file").touch()
    more = ["c"] if name in ("add", "remove", "rotate") else []
    for folder in ("none", ".", "file", "/"):
        result = command("deploy", name, folder, *more)
        assert (result.code, result.out) == (2, "")
        assert "no deployment is there" in result.error


def test_a_folder_that_is_no_device_s(command: Command) -> None:
    command("deploy", *INIT.split())
    for folder in ("none", "lab", "lab/devices"):
        result = command("deploy", "device", folder)
        assert result.code == 2
        assert "no device's folder (device.toml is missing)" in result.error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("add lab a", "a is one of the devices already; .*deploy rotate lab a"),
        ("add lab B", "B is one of the devices already"),
        ("add lab c/d", "NAME 'c/d': expected a name"),
        ("add lab c --capacity 0", r"--capacity 0\.0: expected a number in \(0, 1\]"),
        ("add lab c --capacity nan", "--capacity nan: expected"),
        ("add lab c --data digitz", "did you mean digits"),
        ("remove lab c", "'c': no such device; expected one of a, b"),
        ("rotate lab c", "'c': no such device"),
        ("renew lab --days 99999", "--days 99999: expected"),
        ("start lab", "the server does not run on this machine; start it with"),
        ("stop lab", "the server does not run on this machine"),
        ("status lab", "the server does not run on this machine"),
        ("logs lab", "the server does not run on this machine"),
        ("server lab --bind 203.0.113.77", "cannot listen there"),
        ("server lab --bind no.such.invalid", "not an address to listen on"),
        ("init lab --devices a", "lab is not empty; choose another folder"),
    ],
)
def test_a_wrong_word_is_one_line_and_nothing_is_changed(
    command: Command, words: str, message: str
) -> None:
    command("deploy", *INIT.split())
    before = contents()
    result = command("deploy", *words.split())
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)
    assert contents() == before


def contents() -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}


def test_a_device_is_added_removed_and_gets_a_new_key(command: Command) -> None:
    command("deploy", *INIT.split())
    result = command("deploy", "add", "lab", "c", "--capacity", "0.4")
    assert result.code == 0
    assert "copy it to the device" in result.out
    assert "The server does not run; it will know when it starts" in result.out
    result = command("deploy", "rotate", "lab", "c")
    assert (result.code, "New key: copy" in result.out) == (0, True)
    result = command("deploy", "remove", "lab", "c")
    assert (result.code, "Its folder is still there" in result.out) == (0, True)
    result = command("deploy", "renew", "lab", "--days", "9")
    assert (result.code, "restart the server" in result.out) == (0, True)


def test_keys_are_never_shown(command: Command) -> None:
    said = ""
    for words in (INIT, "add lab c", "rotate lab a", "remove lab b", "renew lab"):
        result = command("deploy", *words.split())
        said += result.out + result.err
    for file in Path("lab").rglob("*key"):
        assert not any(line in said for line in file.read_text().splitlines())


def test_a_check_is_also_json_and_its_exit_code_says_whether_all_is_well(
    command: Command,
) -> None:
    port = free_port()
    command("deploy", *INIT.split(), "--port", port)
    result = command("deploy", "check", "lab", "--json")
    found = json.loads(result.out)
    assert (result.code, found["is_well"]) == (2, False)
    assert result.error == "1 thing is wrong; the lines above say what to do"
    states = {one["what"]: one["state"] for one in found["findings"]}
    assert states == {"certificate": "ok", "run folder": "ok", "server": "wrong"}
    result = command("deploy", "check", "lab/devices/a")
    assert result.code == 2
    assert "✓ data: digits: 1,797 examples" in result.out
    assert f"✗ server: localhost:{port}: the port is closed" in result.out


@pytest.mark.parametrize("words", ["init lab --devices a", "check lab"])
def test_without_flower_it_says_what_to_install(command: Command, words: str) -> None:
    command("deploy", *INIT.split())
    target = words.replace("init lab", "init other")
    program = (
        "import sys\n"
        "for name in ('flwr', 'cryptography'):\n"
        "    sys.modules[name] = None\n"
        "from fedspu.cli import main\nmain()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "deploy", *target.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "fedspu deploy needs Flower: pip install" in result.stderr
    assert not Path("other").exists()


def test_help_teaches_by_example(command: Command) -> None:
    for name in (*COMMANDS, "init", "add", "remove", "rotate", "device"):
        result = command("deploy", name, "--help")
        assert result.code == 0
        assert f"fedspu deploy {name} " in result.out
