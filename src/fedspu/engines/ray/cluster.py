"""The Ray cluster: connect to it, check it, or start one on this machine."""

import logging
import pickle
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import RayError

from fedspu.engines.machine import num_cores
from fedspu.errors import FedSPUError, SettingsError
from fedspu.federation.plan import first_line
from fedspu.settings import Settings

REACH = 5.0
"""Seconds in which something must answer at the cluster's address."""

HEALTHY = 20.0
"""Seconds in which a cluster must say that it is well."""

START = 60.0
"""Seconds in which at least one actor must begin."""


def connect(settings: Settings) -> bool:
    """Connect to the cluster, or start one here; whether to leave it again.

    If this process is connected to a cluster already, that one is used.
    """
    address = settings.ray_address
    if ray.is_initialized():
        _refuse_another(address)
        return False
    if address is not None:
        check_reachable(address)
    given: dict[str, Any] = {"address": address}
    if address is None:
        number = settings.workers or num_cores()
        given = {"address": "local", "num_cpus": number, "include_dashboard": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about its own future
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **given)
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise FedSPUError(_why_not_connected(address, first_line(error))) from error
    hush()
    return True


def hush() -> None:
    """Leave what Ray says about its nodes to its logs: it would print into ours.

    ``log_to_driver=False`` is not enough for messages about lost nodes, and there is no
    public switch for these.
    """
    printing: Any = import_module("ray._private.worker")
    if hasattr(printing, "_worker_logs_enabled"):
        printing._worker_logs_enabled = False


def _why_not_connected(address: str | None, why: str) -> str:
    if address is None:
        return f"engine = 'ray': no Ray cluster can be started here ({why})"
    return (
        f"ray_address = {address!r}: cannot connect ({why}); a node of the cluster "
        "must run on this machine: `ray start --address=HOST:PORT --num-cpus=0`"
    )


def _refuse_another(address: str | None) -> None:
    known = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", known):
        raise SettingsError(
            f"ray_address = {address!r}: this process is connected to the Ray cluster "
            f"at {known}; leave it out, or call ray.shutdown() first"
        )


def check_reachable(address: str) -> None:
    """Refuse an address at which no Ray cluster answers; Ray would wait for minutes."""
    start = (
        "start a cluster with `ray start --head`, or leave the address out, and fedspu "
        "starts one for this run"
    )
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise FedSPUError(
                f"ray_address = {address!r}: nothing answers there ({why}); {start}"
            ) from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    try:
        asked = subprocess.run(
            [*command, "--address", address],
            capture_output=True,
            text=True,
            timeout=HEALTHY,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FedSPUError(
            f"ray_address = {address!r}: no Ray cluster answers there within "
            f"{HEALTHY:g} s; {start}"
        ) from None
    if asked.returncode != 0:
        said = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "Could not find any running Ray instance" in said:
            said = "none runs on this machine"
        raise FedSPUError(
            f"ray_address = {address!r}: no Ray cluster can be used ({said}); {start}"
        )


def num_actors(settings: Settings) -> int:
    """How many actors play clients; warns if fewer than asked for."""
    cpus = _num_cpus(ray.cluster_resources)
    if cpus < 1:
        raise FedSPUError(
            "the Ray cluster has no CPU; start a node with at least one: "
            "`ray start --address=HOST:PORT --num-cpus=1`"
        )
    asked = settings.workers
    if asked is not None and asked > cpus:
        warnings.warn(
            f"workers = {asked}: the Ray cluster has only {cpus} CPUs; using {cpus}",
            stacklevel=5,
        )
    return min(asked or cpus, cpus, settings.clients.per_round)


def _num_cpus(resources: Callable[[], dict[str, float]]) -> int:
    return int(resources().get("CPU", 0))


def why_none_begins() -> str:
    """Why no worker has begun in time, in one line."""
    free = _num_cpus(ray.available_resources)
    why = "all its CPUs are taken" if free < 1 else "its nodes may be lost or busy"
    return (
        f"no worker of the Ray cluster could begin within {START:g} s: {why}; see "
        "`ray status`, and try again later"
    )


def put(value: Any) -> Any:
    """Place a value in the cluster; a reference to it."""
    try:
        return ray.put(value)
    except RayError as error:  # its memory for objects is full
        raise FedSPUError(
            f"Ray cannot hold the data ({first_line(error)}); start its nodes with a "
            "larger --object-store-memory"
        ) from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SettingsError(
            "engine = 'ray': what was given in Python cannot be sent to other "
            f"processes ({first_line(error)}); define it in a module"
        ) from error
