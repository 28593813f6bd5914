"""A run so small that it can be played thousands of times."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fedspu
from fedspu.federation.storage.own_files import is_free
from tests.oracles.federation import examples, folder_content, mlp, named

GIVEN: dict[str, Any] = {
    "rounds": 3,
    "clients__number": 4,
    "clients__per_round": 2,
    "train__epochs": 1,
    "train__kernels": "torch",
    "server__optimizer": "momentum",
    "early_stopping__on": True,
    "early_stopping__patience": 3,
}


def play(path: Path, watch: Any = None, **given: Any) -> None:
    """Play the run from the beginning."""
    settings = named(out=path, **{**GIVEN, **given})
    fedspu.simulate(settings, model=mlp, data=examples(), watch=watch)


def take_up(path: Path, **given: Any) -> None:
    """What a user does after an accident: resume or begin again if nothing is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if is_free(path):
            play(path, **given)
        else:
            fedspu.resume(path, model=mlp, data=examples())


def compare_two(out: Path) -> None:
    """Two runs of a comparison, of a data set and a model known by their names."""
    given = {
        "data.name": "digits",
        "model": "tests.oracles.federation:digits_mlp",
        "workers": 1,
        "rounds": 2,
        "clients.number": 5,
        "clients.per_round": 2,
        "train.epochs": 1,
        "train.kernels": "torch",
        "judge.clients": 1,
    }
    fedspu.compare(["fedspu", "local"], given, seeds=[0], out=out, parallel=1)


def ends_alike(path: Path, expected: dict[str, bytes]) -> bool:
    """Whether a folder holds the finished run, and nothing of an accident."""
    return folder_content(path) == expected and (path / "summary.json").exists()


def in_a_process(work: Callable[[], None]) -> int:
    """Fork, work, and end; returns the exit code, or minus the signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:  # whatever it is, this process ends here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
