"""A device in the foreground: ``fedspu deploy device`` keeps its SuperNode running."""

import subprocess
import threading
import time
from collections.abc import Callable

from fedspu.deploy import fleet
from fedspu.deploy.keys import load_device_key
from fedspu.deploy.layout import Device, check_private_key, split_address
from fedspu.deploy.probe import Answer, reach
from fedspu.deploy.processes import (
    end,
    start,
    supernode_command,
    until_told_to_end,
    write_node_config,
)
from fedspu.errors import DeploymentError
from fedspu.files import read_file

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds before it is tried again: twice as long each time, up to a minute."""

LONG_ENOUGH = 60.0
"""A SuperNode that ran for this many seconds had a connection."""

WATCH = 60.0
"""Seconds between two looks whether the server can still be reached."""

Say = Callable[[str], None]


def supervise(device: Device, say: Say, anew: bool = False) -> None:
    """Keep the device connected until this process is told to end.

    ``anew``: if its own model is lost, it begins with a new one.
    """
    check_device_files(device)
    prepare_folders(device, anew)
    pause = FIRST_PAUSE
    with until_told_to_end() as told:
        while not told.is_set():
            began = time.monotonic()
            why = _try_once(device, told, say)
            if told.is_set():
                break
            if time.monotonic() - began > LONG_ENOUGH:
                pause = FIRST_PAUSE
            say(f"{why}; trying again in {pause:.0f} seconds")
            told.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    say("ended")


def _try_once(device: Device, told: threading.Event, say: Say) -> str:
    """Run the SuperNode until it ends; why it ended, or why it was not started."""
    why = what_is_wrong(device)
    if why:
        return why
    process = start(supernode_command(device), device.home, device.root)
    try:
        say(f"{device.name}: connecting to {device.server}")
        _watch(device, process, told, say)
    finally:
        end(process)
    return "" if told.is_set() else _why_it_ended(device, process)


def _watch(
    device: Device, process: subprocess.Popen[bytes], told: threading.Event, say: Say
) -> None:
    """Wait for the SuperNode, which keeps trying by itself, and say what it cannot."""
    looked, before = time.monotonic(), ""
    while process.poll() is None and not told.wait(0.5):
        if time.monotonic() - looked < WATCH:
            continue
        now, looked = _unreachable(device), time.monotonic()
        if now != before:
            say(f"{now}; this device keeps trying" if now else "the server is back")
        before = now


def _unreachable(device: Device) -> str:
    """Why the server cannot be reached, in words; empty if it can."""
    try:
        reach(*split_address(device.server, device.name), device.authority)
    except DeploymentError as error:
        return str(error)
    return ""


def _why_it_ended(device: Device, process: subprocess.Popen[bytes]) -> str:
    why = what_is_wrong(device)
    if why:
        return why
    if process.returncode < 0:
        return f"the SuperNode was ended by signal {-process.returncode}"
    return (
        f"the SuperNode ended (exit code {process.returncode}; the line above says "
        "why), but the server can be reached and knows this key"
    )


def what_is_wrong(device: Device) -> str:
    """Why the device cannot connect, in words; empty if it can."""
    try:
        answer = reach(*split_address(device.server, device.name), device.authority)
        return key_in_words(device, fleet.ask(device), answer)
    except DeploymentError as error:
        return str(error)


def key_in_words(device: Device, knows: fleet.Knows, answer: Answer) -> str:
    """What the server's answer about a key means; empty if all is well."""
    if knows is fleet.Knows.NO:
        return (
            f"the server does not know the key of {device.name}; if it has only just "
            "started, wait a little; else, on its machine, run "
            f"`fedspu deploy rotate DIR {device.name}` and copy the new key here, or "
            "`fedspu deploy check DIR` to see which keys it knows"
        )
    if knows is fleet.Knows.CLOCK:
        by = "" if answer.ahead is None else f" by {describe_ahead(answer.ahead)}"
        return (
            f"the server refuses what this device signs: their clocks differ{by}; set "
            "this machine's clock (at most 5 seconds ahead, 5 minutes behind)"
        )
    return ""


def describe_ahead(seconds: float) -> str:
    """How far our clock is from another one, in words."""
    size = abs(seconds)
    text = f"{size:.0f} seconds" if size < 120 else f"{size / 60:.0f} minutes"
    if size >= 2 * 86400:
        text = f"{size / 86400:.0f} days"
    return f"{text} (this machine is {'ahead' if seconds > 0 else 'behind'})"


def check_device_files(device: Device) -> None:
    """Refuse a device whose key or certificate is not there, or is open to others."""
    how = "copy the device's folder again from the server's machine"
    check_private_key(device.key, how)
    load_device_key(read_file(device.key), str(device.key))
    if not device.authority.is_file():
        raise DeploymentError(f"{device.authority} is missing; {how}")


def prepare_folders(device: Device, anew: bool = False) -> None:
    """Make the folder of the device's models, which only its owner can read."""
    try:
        device.models.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_node_config(device, anew)
    except OSError as error:
        raise DeploymentError(
            f"{error.filename or device.models}: cannot be written "
            f"({error.strerror}); the user of this command must own {device.root}"
        ) from None
