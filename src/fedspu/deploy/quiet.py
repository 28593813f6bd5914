"""Flower's own processes: they say what matters, and end with the command above them.

Flower logs every request. Of that, only warnings and errors are shown (``processes.py``
sets the level), and what people wait for is said in our words.
"""

import logging
import os
import signal
import threading
import time

IN_WORDS = {"SuperNode ID: %s": "connected; waiting for a run"}
"""Lines of Flower that are said in other words."""

OUR_OWN = "[ApiError:2003]"
"""What the SuperLink says of our own question whether it knows a key: see fleet.py."""


class Quiet(logging.Filter):
    """Leaves out what we caused ourselves, and says some lines in other words."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown as Flower says it."""
        if isinstance(record.msg, str) and record.msg in IN_WORDS:
            print(IN_WORDS[record.msg], flush=True)  # noqa: T201  # it is for people
            return False
        return OUR_OWN not in record.getMessage()


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
