"""A web server on this machine that misbehaves as it is told."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Site:
    """What is served, how, and what was asked for."""

    files: dict[str, bytes]
    knows_ranges: bool = True
    cuts_after: int | None = None  # bytes of one answer, then the connection ends
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)  # one for each request


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    """Serve a site on a free port of the loopback address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            wanted = self.headers.get("Range")
            site.ranges.append(wanted)
            content = site.files.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(404)
                return
            start = 0
            if wanted and site.knows_ranges:
                found = re.fullmatch(r"bytes=(\d+)-", wanted)
                assert found
                start = int(found[1])
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{last + 1}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:][: site.cuts_after])

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
