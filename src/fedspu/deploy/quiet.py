"""Flower's own processes: they say what matters, and end with the command above them.

Flower logs every request. Of that, only errors are shown (``processes.py`` sets the
level), and what people wait for is said in our words.
"""

import logging
import os
import signal
import threading
import time

IN_WORDS = {
    # A SuperNode
    "SuperNode ID: ": "connected; waiting for a run",
    "[code: 2004]": "the server still takes this device for connected, for up to a "
    "minute after a sudden end; if this goes on, another device uses the same key",
    # The SuperLink; the first is our own question whether it knows a key: see fleet.py
    "[ApiError:2003]": "",
    "[ApiError:2004]": "a device was refused: its key is not registered, or it is "
    "still taken for connected",
}
"""What is in lines of Flower that are said in other words, or not at all."""


class Quiet(logging.Filter):
    """Says some lines in other words."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown as Flower says it."""
        said = record.getMessage()
        for text, words in IN_WORDS.items():
            if text in said:
                if words:
                    print(words, flush=True)  # noqa: T201  # it is for people
                return False
        return True


def be_quiet() -> None:
    """Show only what matters of what Flower logs in this process."""
    import uvicorn.config
    from flwr.supercore.logger import FLOWER_LOGGER

    FLOWER_LOGGER.addFilter(Quiet())
    # Its loggers are set up when it starts; on INFO, each request is a line.
    for settings in uvicorn.config.LOGGING_CONFIG["loggers"].values():
        settings["level"] = "WARNING"


def end_with_parent() -> None:
    """End this process if the command that started it is killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
