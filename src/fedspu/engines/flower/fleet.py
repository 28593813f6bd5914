"""Who is there: devices by name, and the Flower nodes that they are at now.

A node's id changes with every start of a device, its name does not. A node that is seen
for the first time is asked who it is; a device that cannot take part is told why.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedspu.engines.flower.engine import EXPIRED, why
from fedspu.engines.flower.log import log
from fedspu.engines.flower.wire import PACKET, Hello, Refusal, unpack_hello
from fedspu.errors import FedSPUError, ModelError

HELLO_SECONDS = 300.0
"""How long a device may take to say who it is; then it is asked again."""

AGAIN_SECONDS = 60.0
"""After how long a device that cannot take part is asked again."""


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
    _again: dict[int, float] = field(default_factory=dict)  # when to ask nodes again
    _problems: dict[str, str] = field(default_factory=dict)  # by name, as last said

    def look(self) -> None:
        """See who has come and who has left; nobody is waited for."""
        here = set(self.grid.get_node_ids())
        for name, node in self.nodes.items():
            if node not in here:
                log.warning("%s is no longer connected", name)
        self.nodes = {name: node for name, node in self.nodes.items() if node in here}
        self._known &= here
        self._known -= {
            node for node, when in self._again.items() if monotonic() > when
        }
        self._again = {n: when for n, when in self._again.items() if n in self._known}
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
                    f"{seconds:g} s ({', '.join(sorted(self.nodes)) or 'none'}"
                    f"{self._in_words()}); start more, or lower deploy.devices"
                )
            sleep(self.poll)
            self.look()

    def refuse(self, name: str, reason: str) -> None:
        """A device cannot take part; it is asked again later, or if it comes back."""
        node = self.nodes.pop(name, None)
        self.devices.pop(name, None)
        self._cannot(node, name, reason)

    def is_late(self, name: str) -> None:
        """A device did not answer in time; it must first say that it is here again.

        It may still be at work on the old message: until it is done, it would let every
        round wait in vain.
        """
        node = self.nodes.pop(name, None)
        if node is not None:
            self._known.discard(node)
            log.warning(
                "%s is late; the rounds go on without it until it answers", name
            )

    def _cannot(self, node: int | None, name: str, reason: str) -> None:
        if self._problems.get(name) != reason:
            log.warning("%s cannot take part: %s", name, reason)
        self._problems[name] = reason
        if node is not None:
            self._again[node] = monotonic() + AGAIN_SECONDS

    def _in_words(self) -> str:
        return "".join(f"; {name}: {why}" for name, why in self._problems.items())

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
        if reply.has_error() and reply.error.code == EXPIRED:
            self._known.discard(node)  # it was busy for long: it is asked again
            return
        if reply.has_error():
            self._cannot(node, f"node {node}", why(reply))
            return
        try:
            found = unpack_hello(reply.content)
        except ModelError as error:
            self._cannot(node, f"node {node}", f"it sent {error}")
            return
        if isinstance(found, Refusal):
            self._cannot(node, found.name or f"node {node}", found.reason)
            return
        problem = self.check(found)
        if found.name in self.nodes:
            problem = "another device with this name is connected"
        if problem:
            self._cannot(node, found.name, problem)
            self._tell(node, problem)
            return
        self._problems.pop(found.name, None)
        log.info("%s is here (p = %g)", found.name, found.capacity)
        self.nodes[found.name] = node
        self.devices[found.name] = found

    def _tell(self, node: int, problem: str) -> None:
        """Tell a device why it cannot take part, for its own log."""
        content = RecordDict({PACKET: ConfigRecord({"problem": problem})})
        self.grid.push_messages([Message(content, node, MessageType.QUERY, ttl=60.0)])
