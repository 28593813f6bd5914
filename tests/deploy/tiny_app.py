"""A small app of Flower: the server asks every device who it is, and writes it down."""

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Any, context: Any) -> None:
    """Wait for the devices, ask each of them, and write their answers."""
    config = context.run_config
    until = time.monotonic() + config["deploy.wait"]
    while len(list(grid.get_node_ids())) < config["deploy.devices"]:
        if time.monotonic() > until:
            raise RuntimeError("too few devices")
        time.sleep(0.5)
    asked = [
        Message(
            content=RecordDict({"config": ConfigRecord({"seed": config["seed"]})}),
            dst_node_id=node,
            message_type=MessageType.QUERY,
        )
        for node in grid.get_node_ids()
    ]
    replies = grid.send_and_receive(asked, timeout=60)
    said = [dict(reply.content["said"]) for reply in replies]
    out = Path(str(config["deploy.out"]))
    out.mkdir(exist_ok=True)
    (out / "said.json").write_text(json.dumps(said))


@client.query()
def query(message: Any, context: Any) -> Any:
    """Say what this device was told about itself, and where it works."""
    said = {**context.node_config, "seed": message.content["config"]["seed"]}
    said["here"] = str(Path.cwd())
    return Message(content=RecordDict({"said": ConfigRecord(said)}), reply_to=message)
