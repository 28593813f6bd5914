"""What fedspu says in Flower's processes: plain lines, apart from Flower's own."""

import logging
import sys

log = logging.getLogger("fedspu")


class Lines(logging.Handler):
    """Prints each message as one line; Flower collects what is printed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, with its level if it is a warning or worse."""
        before = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        # Flower replaces sys.stdout while an app runs, so it is looked up each time.
        sys.stdout.write(f"{before}{record.getMessage()}\n")
        sys.stdout.flush()


def speak() -> None:
    """Print what fedspu logs; called by the apps that Flower loads."""
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, Lines) for handler in log.handlers):
        log.addHandler(Lines())
