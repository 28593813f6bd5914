"""What is asked of a running server: registered keys, runs, devices online."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedspu.deploy.keys import mark_of_key
from fedspu.deploy.layout import Server, names_of_keys
from fedspu.deploy.probe import Answer, reach
from fedspu.deploy.processes import CONNECTION, flwr
from fedspu.errors import DeploymentError
from fedspu.files import lock, read_file, write_whole

UNREGISTERED = "unregistered"

LONGEST = 300.0
"""Seconds to wait for another command that is registering keys."""


def reach_server(server: Server) -> Answer:
    """What the server of this machine says; a DeploymentError if it does not run."""
    return reach(server.local_host, server.port, server.authority)


def is_running(server: Server) -> bool:
    """Whether the server of this machine runs."""
    try:
        reach_server(server)
    except DeploymentError:
        return False
    return True


# Keys ---------------------------------------------------------------------------------


def register(server: Server) -> Iterator[str]:
    """Make the server know exactly the keys in public-keys/; yields what was done."""
    held = lock(server.folder / "register.lock", LONGEST)
    if held is None:
        raise DeploymentError(
            "another command has been registering keys for some minutes; try again"
        )
    with held:
        yield from _register(server)


def _register(server: Server) -> Iterator[str]:
    states = _states(server)
    listed = known(server)
    wanted = {
        name: mark_of_key(read_file(server.public_keys / f"{name}.pub"))
        for name in names_of_keys(server)
    }
    for name, entry in list(listed.items()):
        is_there = states.get(entry["node"], UNREGISTERED) != UNREGISTERED
        if is_there and wanted.get(name) == entry["key"]:
            continue
        if is_there:
            flwr(server, "supernode", "unregister", entry["node"], CONNECTION)
            which = "its old key" if name in wanted else "its key"
            yield f"{name}: {which} is no longer accepted"
        del listed[name]
        _write_known(server, listed)
    for name, mark in wanted.items():
        if name not in listed:
            node = _register_one(server, name)
            listed[name] = {"node": node, "key": mark}
            _write_known(server, listed)
            yield f"{name}: its key is registered"


def _register_one(server: Server, name: str) -> str:
    file = server.public_keys / f"{name}.pub"
    words = ("supernode", "register", str(file), CONNECTION, "--name", name)
    try:
        return str(flwr(server, *words)["node-id"])
    except DeploymentError as error:
        if "already in use" not in str(error):
            raise
        raise DeploymentError(
            f"{name}: its key is registered, but {server.registered} does not say so; "
            f"{_begin_anew(server)}"
        ) from None


def known(server: Server) -> dict[str, dict[str, str]]:
    """The devices that were registered: the server's number, the mark of the key."""
    if not server.registered.exists():
        return {}
    try:
        found = json.loads(read_file(server.registered))
        return {
            str(name): {"node": str(entry["node"]), "key": str(entry["key"])}
            for name, entry in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DeploymentError(
            f"{server.registered} cannot be read; remove it, and {_begin_anew(server)}"
        ) from None


def _begin_anew(server: Server) -> str:
    return (
        f"end the server, remove {server.database} (Flower's own list of runs and "
        "keys), and start it again: all keys are then registered anew, and the run "
        "folder stays as it is"
    )


def _write_known(server: Server, listed: dict[str, dict[str, str]]) -> None:
    write_whole(server.registered, json.dumps(listed, indent=2).encode(), durable=True)


def _states(server: Server) -> dict[str, str]:
    """The server's number for each device -> its state, like online."""
    nodes = flwr(server, "supernode", "list", CONNECTION)["nodes"]
    return {str(node["node-id"]): str(node["status"]) for node in nodes}


def device_states(server: Server) -> dict[str, str]:
    """Each device -> online, offline, never seen, or not registered."""
    states, listed = _states(server), known(server)
    words = {"registered": "never seen", UNREGISTERED: "not registered"}
    found = {}
    for name in server.capacities:
        state = states.get(listed.get(name, {}).get("node", ""), UNREGISTERED)
        found[name] = words.get(state, state)
    return found


# Runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run, as the server knows it."""

    id: str
    status: str  # pending, running, finished:completed …
    details: str
    started: str

    @property
    def is_going(self) -> bool:
        """Whether it has not ended yet."""
        return not self.status.startswith("finished")

    @property
    def in_words(self) -> str:
        """Its state: pending, running, completed, stopped or failed, and why."""
        word = self.status.removeprefix("finished:")
        if "heartbeat" in self.details:
            return f"{word} (its process, or the server, ended suddenly)"
        details = self.details.removeprefix("ServerApp failed with exception: ")
        return f"{word} ({details})" if details else word


def runs(server: Server) -> list[Run]:
    """All runs of this server, the latest last."""
    found = flwr(server, "ls", CONNECTION)["runs"]
    made = [
        Run(run["run-id"], run["status"], _details(run), run["pending-at"])
        for run in found
    ]
    return sorted(made, key=lambda run: run.started)


def _details(run: dict[str, Any]) -> str:
    text = str(run["status-details"] or "")
    return "" if text == "N/A" else text


def start_run(server: Server) -> str:
    """Start the app on the devices; the run's number."""
    going = [run.id for run in runs(server) if run.is_going]
    if going:
        raise DeploymentError(
            f"run {going[0]} is going on already; stop it first with "
            f"`fedspu deploy stop {server.root}`. If it has just crashed, wait: the "
            "server notices that within about a minute"
        )
    # The folder may have been moved since the app was written.
    here = f"deploy.out='{server.run}'"
    words = ("run", str(server.app), CONNECTION, "--run-config", here)
    return str(flwr(server, *words)["run-id"])


def stop_run(server: Server) -> str:
    """Stop the run that is going on; its number."""
    going = [run.id for run in runs(server) if run.is_going]
    if not going:
        raise DeploymentError(
            f"no run is going on; start one with `fedspu deploy start {server.root}`"
        )
    for run in going:
        flwr(server, "stop", run, CONNECTION)
    return going[-1]


def rounds_saved(server: Server) -> dict[str, Any]:
    """How far the run in the server's run folder is; empty if there is none."""
    file = server.run / "rounds.jsonl"
    if not file.is_file():
        return {}
    lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    is_finished = (server.run / "summary.json").is_file()
    return {"rounds": len(lines), "is_finished": is_finished, "folder": str(server.run)}
