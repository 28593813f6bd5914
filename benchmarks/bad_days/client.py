"""fedspu's app on a device, with faults: what bad days let devices run.

A device's folder may hold ``fault.json``: ``{"slow": 60}`` (seconds before it trains),
``{"version": "0.0.1"}`` (what it says of itself) or ``{"model": "mlp"}`` (what it
builds). ``busy`` is there while it trains.
"""

import copy
import json
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedspu.flower import client_app, device

app = ClientApp()


def _faults() -> dict[str, Any]:
    file = Path("fault.json")  # apps run in the device's folder
    return dict(json.loads(file.read_text())) if file.exists() else {}


@app.query()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answer as fedspu does, but for the faults."""
    faults = _faults()
    if "version" in faults:
        setattr(device, "fedspu_version", lambda: str(faults["version"]))  # noqa: B010
    if "model" in faults:
        context = copy.copy(context)
        context.run_config = {**context.run_config, "model": faults["model"]}
    return client_app.app(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as fedspu does, but slowly if it is to."""
    busy = Path("busy")
    busy.touch()
    try:
        time.sleep(_faults().get("slow", 0))
        return answer(message, context)
    finally:
        busy.unlink(missing_ok=True)
