"""What the tests of a deployment share: settings, a stand-in for a server."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

from fedspu.deploy import keys
from fedspu.deploy.layout import Server
from fedspu.deploy.making import make
from fedspu.deploy.superlink import VERSIONS, versions
from fedspu.resolve import resolve

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
VALID = keys.Period(NOW - DAY, NOW + DAY)
OVER = keys.Period(NOW - 3 * DAY, NOW - DAY)
TO_COME = keys.Period(NOW + DAY, NOW + 3 * DAY)


def made(root: Path, *names: str, port: int = 8000, **settings: Any) -> Server:
    """A new deployment for these devices."""
    number = len(names)
    given = {"clients.number": number, "clients.per_round": number, "rounds": 2}
    complete = resolve({**given, "clients.capacities": [1.0], **settings})
    return make(root, complete, dict.fromkeys(names, 0.5), port=port)


@contextmanager
def https_server(
    folder: Path,
    pair: keys.Pair | None,
    *,
    ahead: float = 0.0,
    status: int = 200,
    found: dict[str, str] | None = None,
) -> Iterator[int]:
    """A server with this certificate (None: without TLS) that says it is well."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(status)
            there = datetime.now(UTC) - timedelta(seconds=ahead)
            self.send_header("date", format_datetime(there, usegmt=True))
            told = found if found is not None else versions()
            text = " ".join(f"{name}={value}" for name, value in told.items())
            self.send_header(VERSIONS, text)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *args: Any) -> None:
            pass  # a client that refuses our certificate

    server = Quiet(("127.0.0.1", 0), Health)
    if pair is not None:
        (folder / "stand-in.key").write_bytes(pair.private)
        (folder / "stand-in.crt").write_bytes(pair.public)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "stand-in.crt", folder / "stand-in.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
