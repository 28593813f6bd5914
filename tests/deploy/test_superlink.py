"""The gate before the SuperLink: who may ask for what."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fedspu.deploy.control import Run
from fedspu.deploy.serving import why_it_ended
from fedspu.deploy.superlink import VERSIONS, Gate, Scope, may_pass
from tests.deploy.stand_ins import made

THERE = ("192.168.1.10", 8000)


def request(path: str, client: str | None) -> dict[str, Any]:
    where = (client, 50000) if client else None
    return {"type": "http", "path": path, "client": where, "server": THERE}


@pytest.mark.parametrize(
    "client", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "192.168.1.10"]
)
@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/x", "/docs"])
def test_this_machine_may_ask_for_everything(client: str, path: str) -> None:
    assert may_pass(request(path, client))


@pytest.mark.parametrize("client", ["192.168.1.11", "::ffff:10.0.0.1", "2001:db8::1"])
def test_others_may_ask_only_for_what_devices_need(client: str) -> None:
    assert may_pass(request("/health", client))
    assert may_pass(request("/v1/fleet/pull-messages", client))
    for path in ("/v1/control/start-run", "/v1/runtime/x", "/docs", "/", "", "/v1"):
        assert not may_pass(request(path, client))
    for path in ("/health/", "/v1/fleet", "//v1/fleet/", "/V1/fleet/x"):
        assert not may_pass(request(path, client))


@pytest.mark.parametrize("client", [None, "", "localhost", "unknown"])
def test_who_has_no_address_is_another_machine(client: str | None) -> None:
    assert not may_pass(request("/v1/control/start-run", client))


def answer(scope: Scope) -> tuple[bool, list[Scope]]:
    """Whether the app was asked, and what was sent."""
    asked, sent = [], []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        asked.append(scope)
        if scope["type"] == "http":
            start = {"type": "http.response.start", "status": 200, "headers": []}
            await send(start)

    async def receive() -> Scope:
        return {}

    async def send(message: Scope) -> None:
        sent.append(message)

    asyncio.run(Gate(app)(scope, receive, send))
    return bool(asked), sent


def test_a_refused_request_does_not_reach_the_app() -> None:
    asked, sent = answer(request("/v1/control/start-run", "10.0.0.9"))
    assert (asked, sent[0]["status"]) == (False, 403)


def test_a_web_socket_of_another_machine_is_closed() -> None:
    scope = {**request("/v1/runtime/x", "10.0.0.9"), "type": "websocket"}
    assert answer(scope) == (False, [{"type": "websocket.close", "code": 1008}])


def test_only_health_says_which_versions_there_are() -> None:
    _, sent = answer(request("/health", "10.0.0.9"))
    assert dict(sent[0]["headers"])[VERSIONS.encode()].startswith(b"fedspu=")
    _, sent = answer(request("/v1/fleet/x", "10.0.0.9"))
    assert sent[0]["headers"] == []


def test_the_start_of_the_server_passes() -> None:
    assert answer({"type": "lifespan"}) == (True, [])


def test_a_killed_superlink_says_how_the_run_goes_on(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "hall")
    said = why_it_ended(server, -9)
    assert said.startswith("the SuperLink was ended by signal 9: was it killed")
    assert said.endswith(f"`fedspu deploy start {server.root}`")
    assert "(exit code 1): the lines above say why. Start" in why_it_ended(server, 1)


def test_a_run_whose_process_was_killed_is_said_in_words() -> None:
    details = "No heartbeat received from the task"
    run = Run("1", "finished:failed", details, "")
    assert run.in_words == "failed (its process, or the server, ended suddenly)"


def test_why_a_run_failed_is_said_without_flowers_words() -> None:
    details = "ServerApp failed with exception: nets: no such module"
    run = Run("1", "finished:failed", details, "")
    assert run.in_words == "failed (nets: no such module)"
