"""The SuperLink as fedspu starts it: other machines reach only what devices need.

Flower serves three things on one port: what devices use, where a key is needed, and
what its own command and its apps use, where none is. Whoever reached the latter could
run code of their own on the server and on every device. So here they are for this
machine alone.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEALTH = "/health"
FOR_DEVICES = "/v1/fleet/"
VERSIONS = "fedspu-versions"
"""The header of /health that says which versions the server has."""


class Gate:
    """An ASGI app that refuses other machines all but health and devices' calls."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not may_pass(scope):
            if scope["type"] == "http":
                await _refuse(send)
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] == HEALTH:
            await self.app(scope, receive, _with_versions(send))
        else:
            await self.app(scope, receive, send)


def may_pass(scope: Scope) -> bool:
    """Whether a request is for devices, or from this machine itself."""
    if scope["path"] == HEALTH or scope["path"].startswith(FOR_DEVICES):
        return True
    client, own = scope.get("client"), scope.get("server")
    if not client:
        return False
    # A connection from the very address that was called comes from this machine.
    return _is_loopback(client[0]) or bool(own and client[0] == own[0])


def _is_loopback(host: str) -> bool:
    try:
        found = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_loopback or bool(mapped and mapped.is_loopback)


async def _refuse(send: Send) -> None:
    text = b"only for the server's own machine\n"
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _with_versions(send: Send) -> Send:
    text = " ".join(f"{name}={found}" for name, found in versions().items())

    async def sending(message: Scope) -> None:
        if message["type"] == "http.response.start":
            header = (VERSIONS.encode(), text.encode())
            message["headers"] = [*message["headers"], header]
        await send(message)

    return sending


def versions() -> dict[str, str]:
    """The installed versions that server and devices should share."""
    found = {}
    for name in ("fedspu", "flwr", "torch"):
        try:
            found[name] = version(name).partition("+")[0]  # 2.6.0+cpu is 2.6.0
        except PackageNotFoundError:
            found[name] = "none"
    return found


def main() -> None:
    """Run the SuperLink behind the gate; arguments are those of flower-superlink."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    from fedspu.deploy.quiet import be_quiet, end_with_parent

    be_quiet()
    end_with_parent()
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
