"""The app that Flower runs on each device: ``fedspu.flower.client_app:app``."""

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedspu.engines.flower.log import log, speak
from fedspu.engines.flower.wire import (
    PACKET,
    Refusal,
    is_name,
    pack,
    pack_hello,
    refuse,
    unpack,
)
from fedspu.errors import DataError, FedSPUError, ModelError, StorageError
from fedspu.federation.client_memory import LostError
from fedspu.federation.engine import Missing
from fedspu.flower.config import node_settings, split
from fedspu.flower.device import Device, OtherDeviceError, OtherModelError
from fedspu.flower.simulated import PARTITION, SimulatedDevice

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who this device is; or, the server says why it cannot take part."""
    speak()
    about = message.content.config_records.get(PACKET)
    if about is not None and "problem" in about:
        log.error("this device cannot take part, says the server: %s", about["problem"])
        return Message(refuse("understood"), reply_to=message)
    try:
        hello = _device(context).hello()
    except (FedSPUError, OSError) as error:
        log.error("this device cannot take part: %s", error)
        name = str(context.node_config.get("name"))
        said = refuse(_reason(error), name=name if is_name(name) else None)
        return Message(said, reply_to=message)
    log.info("here, with %s examples", f"{hello.num_examples:,}")
    return Message(pack_hello(hello), reply_to=message)


@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Train, or judge a model; what went wrong is said only in the device's own log."""
    speak()
    try:
        content = unpack(message.content)
        if isinstance(content, Refusal):
            raise ModelError("the server sent a refusal instead of a request")
        found = _device(context).respond(content)
    except OtherDeviceError as error:
        log.error("this device cannot take part: %s", error)
        return Message(refuse(str(error)), reply_to=message)
    except OtherModelError as error:
        log.error("%s", error)
        return Message(refuse(OTHER_MODEL), reply_to=message)
    except LostError as error:
        return Message(_lost(error, context), reply_to=message)
    except (FedSPUError, OSError) as error:
        log.error("not in this round: %s", error)
        return Message(refuse(_reason(error), has_failed=True), reply_to=message)
    if isinstance(found, Missing):
        log.error("not in this round: %s", found.reason)
        return Message(refuse(_failed(), has_failed=True), reply_to=message)
    log.info("%s", _done(message, found.up.took.wall))
    return Message(pack(found.up), reply_to=message)


def _done(message: Message, seconds: float) -> str:
    """What was done, in one line."""
    is_training = message.metadata.message_type == MessageType.TRAIN
    what = "trained" if is_training else "tested the model on own examples"
    return f"round {message.metadata.group_id}: {what}, {seconds:.1f} s"


def _lost(error: LostError, context: Context) -> RecordDict:
    """The personal model is gone: only the device's owner can say what to do."""
    if context.node_config.get("anew"):
        log.warning("%s: this device begins with a new model (--begin-anew)", error)
        return refuse("its model is lost, and it begins anew", begins_anew=True)
    log.error(
        "this device's own model is lost or damaged: %s. Put a copy of the folder "
        "back; or, to begin with a new model, end this command and start it again "
        "with --begin-anew",
        error,
    )
    return refuse(LOST)


LOST = (
    "its own model is lost; its owner must put the files back, or let it begin anew "
    "(its own log says how)"
)


OTHER_MODEL = (
    "its model is not the server's: another model, or another version of fedspu or "
    "PyTorch; its own log says more"
)


def _reason(error: Exception) -> str:
    """An error in words that show no example."""
    if isinstance(error, DataError):
        return "it cannot use its own examples; its own log says more"
    if isinstance(error, StorageError | OSError):
        return "it cannot use its own disk; its own log says more"
    return _failed(type(error).__name__)


def _failed(kind: str = "") -> str:
    """Only that a turn has failed: a message's text may show a part of an example."""
    return f"its turn failed{f' ({kind})' if kind else ''}; its own log says more"


def _device(context: Context) -> Device:
    given, _ = split(context.run_config)
    if PARTITION in context.node_config:
        return SimulatedDevice(given, context)
    return Device(given, node_settings(context.node_config))
