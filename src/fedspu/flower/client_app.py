"""The app that Flower runs on each device: ``fedspu.flower.client_app:app``."""

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedspu.engines.flower.wire import (
    PACKET,
    Refusal,
    pack,
    pack_hello,
    refuse,
    unpack,
)
from fedspu.errors import FedSPUError, ModelError, StorageError
from fedspu.federation.engine import Missing
from fedspu.flower.config import node_settings, split
from fedspu.flower.device import Device, OtherModelError
from fedspu.flower.simulated import PARTITION, SimulatedDevice

log = logging.getLogger("flwr")
app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who this device is; or, the server says why it cannot take part."""
    about = message.content.config_records.get(PACKET)
    if about is not None and "problem" in about:
        log.error("the server says: this device cannot take part: %s", about["problem"])
        return Message(refuse("understood"), reply_to=message)
    try:
        return Message(pack_hello(_device(context).hello()), reply_to=message)
    except FedSPUError as error:
        log.error("this device cannot take part: %s", error)
        reason = f"{context.node_config.get('name', 'it')}: {type(error).__name__}"
        return Message(refuse(f"{reason}; its own log says more"), reply_to=message)


@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Train, or judge a model; what went wrong is said only in the device's own log."""
    try:
        content = unpack(message.content)
        if isinstance(content, Refusal):
            raise ModelError("the server sent a refusal instead of a request")
        found = _device(context).respond(content)
    except OtherModelError as error:
        log.error("%s", error)
        return Message(refuse(OTHER_MODEL), reply_to=message)
    except StorageError as error:
        log.error("%s", error)
        said = refuse("it cannot use its own disk; its log says more", has_failed=True)
        return Message(said, reply_to=message)
    except FedSPUError as error:
        log.error("%s", error)
        said = refuse(_failed(type(error).__name__), has_failed=True)
        return Message(said, reply_to=message)
    if isinstance(found, Missing):
        log.error("this turn failed: %s", found.reason)
        return Message(refuse(_failed(), has_failed=True), reply_to=message)
    return Message(pack(found.up), reply_to=message)


OTHER_MODEL = (
    "its model is not the server's: another model, or another version of fedspu or "
    "PyTorch; its own log says more"
)


def _failed(kind: str = "") -> str:
    """Only that a turn has failed: a message's text may show a part of an example."""
    return f"its turn failed{f' ({kind})' if kind else ''}; its own log says more"


def _device(context: Context) -> Device:
    given, _ = split(context.run_config)
    if PARTITION in context.node_config:
        return SimulatedDevice(given, context)
    return Device(given, node_settings(context.node_config))
