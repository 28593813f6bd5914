"""A headless Chromium for tests, driven through chromedriver's plain HTTP interface."""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


class Browser:
    """One browser window."""

    def __init__(self, base: str, dark: bool, scripts: bool) -> None:
        self.base = base
        options: dict[str, Any] = {
            "binary": CHROMIUM,
            "args": [
                *("--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--hide-scrollbars"),
                *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            ],
        }
        if not scripts:
            options["prefs"] = {
                "profile.managed_default_content_settings.javascript": 2
            }
        asked = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self.base += f"/session/{found['sessionId']}"

    def open(self, file: Path) -> None:
        self._call("POST", "/url", {"url": file.absolute().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """What a script of the test returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": args})

    def devtools(self, command: str, **given: Any) -> Any:
        return self._call(
            "POST", "/goog/cdp/execute", {"cmd": command, "params": given}
        )

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page this width, as a phone or a screen would."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def press(self, *keys: str) -> None:
        actions = [
            {"type": kind, "value": key}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        source = {"type": "key", "id": "keys", "actions": actions}
        self._call("POST", "/actions", {"actions": [source]})

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer to this place of the window."""
        move = {"type": "pointerMove", "x": int(x), "y": int(y), "duration": 0}
        source = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._call("POST", "/actions", {"actions": [source]})

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG file."""
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, **{k: size[k] for k in ("width", "height")}, "scale": 1}
        found = self.devtools(
            "Page.captureScreenshot", clip=clip, captureBeyondViewport=True
        )
        file.write_bytes(base64.b64decode(found["data"]))

    def print(self, file: Path) -> None:
        """The page as a PDF file, as a printer would get it."""
        found = self.devtools("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        file.write_bytes(base64.b64decode(found["data"]))

    def console(self) -> list[str]:
        """What the console says."""
        found = self._call("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in found]

    def requested(self) -> list[str]:
        """Every address that was asked for."""
        found = self._call("POST", "/se/log", {"type": "performance"})
        events = [json.loads(line["message"])["message"] for line in found]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _call(self, verb: str, path: str, content: Any = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = Request(self.base + path, body, method=verb)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        self._call("DELETE", "")


@contextmanager
def browser(*, dark: bool = False, scripts: bool = True) -> Iterator[Browser]:
    """A browser that is closed again."""
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "NO_PROXY": "*"},
    )
    try:
        opened = _connected(f"http://127.0.0.1:{port}", dark, scripts)
        try:
            yield opened
        finally:
            opened.close()
    finally:
        driver.terminate()
        driver.wait(30)


def _connected(base: str, dark: bool, scripts: bool) -> Browser:
    until = time.monotonic() + 30
    while True:
        try:
            return Browser(base, dark, scripts)
        except (URLError, ConnectionError) as error:
            if time.monotonic() > until or hasattr(error, "code"):
                raise
            time.sleep(0.1)
