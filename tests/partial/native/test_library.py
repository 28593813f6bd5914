"""The compiled library: compiled once, checked, and done without."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from fedspu.compiled import library

SCRIPT = """
import torch
from torch import nn
import fedspu
from fedspu.compiled.library import find
model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
neurons = fedspu.map_neurons(model, torch.zeros(2, 1, 2, 2))
with fedspu.partial_training(model, neurons, neurons.everything()):
    model(torch.ones(3, 1, 2, 2)).sum().backward()
print(find().library is not None, find().how)
"""

QUICK = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
sleep 0.2
cp {library} "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that is quick, because it copies what was compiled for other tests."""
    found = library.find()
    assert found.path is not None, found.how
    place = tmp_path / "quick"
    place.write_text(QUICK.format(library=found.path))
    place.chmod(0o755)
    return place


@pytest.fixture
def compiled(compiler: Path, tmp_path: Path) -> Path:
    """A cache with the library in it."""
    out, err = play(tmp_path, CXX=str(compiler))
    assert out == f"True compiled by {compiler}\n", (out, err)
    assert err.count("compiling its code") == 1
    return tmp_path


def play(cache: Path, **environment: str) -> tuple[str, str]:
    """What a fresh process says, and what it complains about."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def files(cache: Path) -> list[Path]:
    return sorted((cache / "fedspu" / "native").iterdir())


def test_it_is_compiled_once(compiled: Path, compiler: Path) -> None:
    assert [path.suffix for path in files(compiled)] == [".sha256", ".so"]
    again = play(compiled, CXX=str(compiler))
    assert again == (f"True compiled by {compiler}\n", "")


@pytest.mark.parametrize("damage", ["cut", "seal", "zeros", "gone"])
def test_a_damaged_library_is_compiled_again(
    damage: str, compiled: Path, compiler: Path
) -> None:
    seal, made = files(compiled)
    if damage == "cut":
        made.write_bytes(made.read_bytes()[:1000])
    elif damage == "zeros":
        made.write_bytes(bytes(made.stat().st_size))
    elif damage == "seal":
        seal.write_bytes(b"\xff\xfe")
    else:
        made.unlink()
    out, err = play(compiled, CXX=str(compiler))
    assert out.startswith("True")
    assert err.count("compiling its code") == 1
    assert len(files(compiled)) == 2


def test_two_processes_may_compile_at_once(tmp_path: Path, compiler: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=300)
        assert out.startswith("True"), err
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("words", ["no C++ compiler was found", "switched off"])
def test_without_a_compiler_pytorch_runs_it(words: str, tmp_path: Path) -> None:
    given = {"CXX": "nosuchcompiler"}
    if "off" in words:
        given = {"FEDSPU_NATIVE": "0"}
    out, err = play(tmp_path, **given)
    assert out.startswith("False")
    assert words in out
    assert err.count("small networks will run by PyTorch") == ("off" not in words)


def test_a_compiler_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        "#!/bin/sh\necho 'chain.cpp: error: no such flag' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    out, err = play(tmp_path, CXX=str(compiler))
    assert out == f"False {compiler}: chain.cpp: error: no such flag\n"
    assert err.endswith("PyTorch, more slowly: " + out.removeprefix("False "))
    assert list(tmp_path.glob("fedspu/native/*")) == []


ODD = {
    "silent": ("exit 3", "ended with 3"),
    "bytes": (r"printf '\\377 error' >&2; exit 1", "error"),
    "empty": ('while [ "$1" != -o ]; do shift; done; : > "$2"', "file too short"),
}
"""Compilers that fail in odd ways."""


@pytest.mark.parametrize("name", ODD)
def test_a_compiler_that_fails_in_an_odd_way(name: str, tmp_path: Path) -> None:
    script, reason = ODD[name]
    compiler = tmp_path / "odd"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    out, err = play(tmp_path, CXX=str(compiler))
    assert out.startswith(f"False {compiler}: ")
    assert reason in out
    assert len(err.splitlines()) == 2


def test_a_compiler_may_be_given_with_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "sh -c 'a b'")
    assert library.find_compiler() == f"{shutil.which('sh')} -c 'a b'"


def test_a_compiler_that_hangs_is_ended_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "SECONDS", 3)
    script = tmp_path / "hang"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    with pytest.raises(subprocess.TimeoutExpired):
        library._run([str(script)])
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")

    def is_ended() -> bool:
        try:
            return state.read_text().split()[2] == "Z"
        except OSError:
            return True

    # It was sent a signal; a busy machine may take a while to deliver it.
    for _ in range(100):
        if is_ended():
            break
        sleep(0.1)
    assert is_ended()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "fedspu").write_text("a file, not a folder")
    out, err = play(tmp_path)
    assert out.startswith("False")
    assert "fedspu" in out
    assert len(err.splitlines()) == 1


def test_the_key_depends_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, compiler: Path
) -> None:
    here = library._key(str(compiler))
    assert library._key(str(compiler)) == here
    monkeypatch.setattr(library, "processor", lambda: "another one")
    assert library._key(str(compiler)) != here


def test_a_wheel_may_bring_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = library.find().path
    assert made is not None
    ready = tmp_path / "chain-x86_64.so"
    shutil.copy(made, ready)
    shutil.copy(made.with_suffix(".sha256"), ready.with_suffix(".sha256"))
    monkeypatch.setattr(library, "prebuilt_path", lambda: ready)
    find = library.find.__wrapped__
    assert find().how == "prebuilt"
    monkeypatch.setattr(library, "processor", lambda: "a machine of 2005\nsse2")
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    assert find().library is None
    monkeypatch.undo()
    monkeypatch.setattr(library, "prebuilt_path", lambda: ready)
    ready.write_bytes(b"damaged")
    assert find().how.startswith("compiled by")
