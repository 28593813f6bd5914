"""Who is there: devices by name, and the Flower nodes that they are at now.

A node's id changes with every start of a device, its name does not. A node that is seen
for the first time is asked who it is; a device that cannot take part is told why.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedspu.engines.flower.engine import why
from fedspu.engines.flower.wire import PACKET, Hello, Refusal, unpack_hello
from fedspu.errors import FedSPUError, ModelError

log = logging.getLogger("flwr")

HELLO_SECONDS = 300.0
"""How long a device may take to say who it is; then it is asked again."""


@dataclass
class Fleet:
    """The devices that are connected now.

    ``check`` says why a device cannot take part; an empty text if it can.
    """

    grid: Grid
    check: Callable[[Hello], str] = lambda hello: ""
    poll: float = 0.5
    devices: dict[str, Hello] = field(default_factory=dict)  # that can take part
    nodes: dict[str, int] = field(default_factory=dict)  # their nodes, if connected
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # by message
    _known: set[int] = field(default_factory=set)  # nodes that were asked

    def look(self) -> None:
        """See who has come and who has left; nobody is waited for."""
        here = set(self.grid.get_node_ids())
        self.nodes = {name: node for name, node in self.nodes.items() if node in here}
        self._known &= here
        for node in sorted(here - self._known):
            self._ask(node)
        if self._asked:
            for reply in self.grid.pull_messages(list(self._asked)):
                node, _ = self._asked.pop(reply.metadata.reply_to_message_id)
                if node in here:
                    self._heard(node, reply)
        self._ask_again()

    def wait_for(self, number: int, seconds: float) -> None:
        """Wait until so many devices are connected; an error if they are too few."""
        until = monotonic() + seconds
        self.look()
        while len(self.nodes) < number:
            if monotonic() > until:
                raise FedSPUError(
                    f"{len(self.nodes)} of {number} devices are connected after "
                    f"{seconds:g} s ({', '.join(sorted(self.nodes)) or 'none'}); start "
                    "more, or lower deploy.devices"
                )
            sleep(self.poll)
            self.look()

    def refuse(self, name: str, reason: str) -> None:
        """A device cannot take part; it is not asked again until it comes back."""
        log.warning("%s cannot take part: %s", name, reason)
        self.nodes.pop(name, None)
        self.devices.pop(name, None)

    def _ask(self, node: int) -> None:
        self._known.add(node)
        content = RecordDict({PACKET: ConfigRecord({"ask": "hello"})})
        message = Message(content, node, MessageType.QUERY, ttl=HELLO_SECONDS)
        for message_id in self.grid.push_messages([message]):
            if message_id:
                self._asked[message_id] = node, monotonic() + HELLO_SECONDS

    def _ask_again(self) -> None:
        now = monotonic()
        for message_id, (node, until) in list(self._asked.items()):
            if now > until:
                del self._asked[message_id]
                self._known.discard(node)

    def _heard(self, node: int, reply: Message) -> None:
        if reply.has_error():
            log.warning("node %s cannot take part: %s", node, why(reply))
            return
        try:
            found = unpack_hello(reply.content)
        except ModelError as error:
            log.warning("node %s cannot take part: it sent %s", node, error)
            return
        if isinstance(found, Refusal):
            log.warning("node %s cannot take part: %s", node, found.reason)
            return
        problem = self.check(found)
        if found.name in self.nodes:
            problem = "another device with this name is connected"
        if problem:
            log.warning("%s cannot take part: %s", found.name, problem)
            self._tell(node, problem)
            return
        log.info("%s is here (p = %g)", found.name, found.capacity)
        self.nodes[found.name] = node
        self.devices[found.name] = found

    def _tell(self, node: int, problem: str) -> None:
        """Tell a device why it cannot take part, for its own log."""
        content = RecordDict({PACKET: ConfigRecord({"problem": problem})})
        self.grid.push_messages([Message(content, node, MessageType.QUERY, ttl=60.0)])
