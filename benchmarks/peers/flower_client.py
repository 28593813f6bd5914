"""The client of flower.py; a module of its own, so that actors keep what it keeps."""

import os
from functools import cache

import torch
from common import Work, load_once, train, warm_up
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import TensorDataset

app = ClientApp()


@app.query()
def tell_number(message: Message, context: Context) -> Message:
    """Which client this node is; the actor reads the work and builds its model."""
    client = int(context.node_config["partition-id"])
    work = _work(message.content["config"])
    _model(work)
    _examples(work, client)
    who = ConfigRecord({"client": client, "process": os.getpid()})
    return Message(content=RecordDict({"who": who}), reply_to=message)


@app.train()
def take_turn(message: Message, context: Context) -> Message:
    """Train the model that came, and send it back."""
    config = message.content["config"]
    work = _work(config)
    model = _model(work)
    examples = _examples(work, int(context.node_config["partition-id"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = train(model, examples, work, str(config["batches"]))
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(examples), "steps": steps}),
        }
    )
    return Message(content=content, reply_to=message)


def _work(config: ConfigRecord) -> Work:
    wanted = config["work"], config["net"], config["rounds"], config["steps"]
    return load_once(*wanted)


@cache
def _model(work: Work) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_up(work)
    return work.model()


@cache
def _examples(work: Work, client: int) -> TensorDataset:
    return TensorDataset(*work.examples(client))
