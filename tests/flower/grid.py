"""A Flower grid in this process: real messages, real apps, no network.

Every message is turned into Flower's bytes and back, so nothing is shared by accident.
Nodes can be cut off, slowed down or replaced between two messages.
"""

from collections.abc import Callable, Iterable
from itertools import count
from time import monotonic
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Answer = Callable[[Message], Message | None]
"""What a node says to a message; None: nothing."""


class Nodes(Grid):
    """Nodes of one run, by id; each has its own node config and its own app."""

    def __init__(self, run_config: dict[str, Any]) -> None:
        self.run_config = run_config
        self.answers: dict[int, Answer] = {}
        self.ids = count(100)
        self.message_ids = count(1)
        self.replies: dict[str, tuple[float, Message]] = {}  # and when it is there
        self.bytes_down = self.bytes_up = 0
        self.sent: list[Message] = []
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

    def add(self, node_config: dict[str, Any], app: ClientApp) -> int:
        """A new node; its id."""
        node = next(self.ids)
        context = Context(
            run_id=1,
            node_id=node,
            node_config=node_config,
            state=RecordDict(),
            run_config=self.run_config,
        )

        def answer(message: Message) -> Message:
            try:
                return app(message, context)
            except Exception as error:  # as a SuperNode does
                return Message(Error(code=2, reason=str(error)), reply_to=message)

        self.answers[node] = answer
        return node

    def get_node_ids(self) -> list[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = f"m{next(self.message_ids)}"
            arrived, size = _through(message)
            self.bytes_down += size
            ids.append(arrived.metadata.message_id)
            node = self.answers.get(arrived.metadata.dst_node_id)
            reply: Message | None = Message(
                Error(code=5, reason="gone"), reply_to=arrived
            )
            if node is not None:
                reply = node(arrived)
            if reply is not None:
                seconds = getattr(reply, "seconds", 0.0)
                reply, size = _through(reply)
                self.bytes_up += size
                self.replies[ids[-1]] = monotonic() + seconds, reply
        return ids

    def push_again(self, message: Message) -> None:
        """A message that its node takes up only now."""
        arrived, _ = _through(message)
        reply = self.answers[arrived.metadata.dst_node_id](arrived)
        if reply is not None:
            self.replies[message.metadata.message_id] = monotonic(), _through(reply)[0]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        now = monotonic()
        there = [i for i in message_ids if i in self.replies]
        there = [i for i in there if self.replies[i][0] <= now]
        return [self.replies.pop(i)[1] for i in there]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Run) -> None:
        pass

    @property
    def run(self) -> Run:
        raise NotImplementedError


def _through(message: Message) -> tuple[Message, int]:
    """A message after its way over a network, and its bytes."""
    sent = message_to_proto(message).SerializeToString()
    proto = message_to_proto(message)
    proto.ParseFromString(sent)
    return message_from_proto(proto), len(sent)
