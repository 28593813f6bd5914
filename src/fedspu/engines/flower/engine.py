"""Carries messages to clients through a Flower grid.

Replies are told apart by the id of the message that they answer, never by who sent
them: an error reply in the name of a lost node comes from the SuperLink.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic, sleep

from flwr.app import Array, Message, MessageType
from flwr.serverapp import Grid

from fedspu.engines.flower.wire import Refusal, Seat, as_array, pack, unpack
from fedspu.errors import FedSPUError, ModelError
from fedspu.federation.engine import Answer, Cost, Facts, Missing
from fedspu.federation.messages import (
    JudgeRequest,
    Packet,
    Request,
    pack_request,
    pack_state,
)
from fedspu.federation.plan import Plan
from fedspu.neurons.table import State


@dataclass(frozen=True)
class Sent:
    """A message on its way."""

    client: int
    down: Packet
    until: float  # monotonic seconds; then the client counts as missing


class FlowerEngine:
    """Reaches each client at its node.

    ``node_of`` gives a client's node, or None if it is not connected. ``seats`` are
    what each client must know of the run; none are needed if clients have the plan. At
    most ``window`` messages are on their way at once. ``poll``: seconds between two
    looks for replies. ``refused`` is told of clients that cannot take part, and why,
    ``late`` of those that did not answer in time, ``anew`` of those that have lost what
    they kept and want to begin again. ``is_trusted``: clients are of this machine, and
    may end the run. ``is_alive`` is called again and again while it waits, and may
    raise.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        node_of: Callable[[int], int | None],
        *,
        seats: Callable[[int], Seat] | None = None,
        facts: Facts | None = None,
        window: float = math.inf,
        poll: float = 0.5,
        deadline: float = math.inf,
        refused: Callable[[int, str], None] | None = None,
        late: Callable[[int], None] = lambda client: None,
        anew: Callable[[int], None] = lambda client: None,
        is_trusted: bool = False,
        is_alive: Callable[[], None] | None = None,
    ) -> None:
        self.plan, self.grid, self.node_of = plan, grid, node_of
        self.seats, self.facts = seats, facts or Facts()
        self.window, self.poll, self.deadline = window, poll, deadline
        self.refused, self.is_trusted, self.is_alive = refused, is_trusted, is_alive
        self.late, self.anew = late, anew

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Send each request to its client's node; answers come as they arrive."""
        state = None
        if broadcast is not None:
            state = as_array(pack_state(self.plan, broadcast))
        waiting: dict[str, Sent] = {}
        clients = deque(sorted(requests))
        while clients or waiting:
            while clients and len(waiting) < self.window:
                client = clients.popleft()
                found = self._send(client, requests[client], state)
                if isinstance(found, Missing):
                    yield client, found
                else:
                    waiting.update(found)
            yield from self._arrived(waiting)
            yield from self._overdue(waiting)

    def close(self) -> None:
        """Nothing to close: the grid is its owner's."""

    def _send(
        self, client: int, request: Request, state: Array | None
    ) -> dict[str, Sent] | Missing:
        node = self.node_of(client)
        if node is None:
            return Missing("it is not connected")
        down = pack_request(self.plan, request)
        is_judging = isinstance(request, JudgeRequest)
        message = Message(
            pack(down, self.seats(client) if self.seats else None, state),
            node,
            MessageType.EVALUATE if is_judging else MessageType.TRAIN,
            group_id=str(request.round),
            ttl=self.deadline if self.has_deadline else None,
        )
        ids = list(self.grid.push_messages([message]))
        if len(ids) != 1 or not ids[0]:
            return Missing("the SuperLink did not take its message")
        return {ids[0]: Sent(client, down, monotonic() + self.deadline)}

    def _arrived(
        self, waiting: dict[str, Sent]
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Answers that have come; waits a moment if there are none."""
        if not waiting:
            return
        replies = list(self.grid.pull_messages(list(waiting)))
        for reply in replies:
            sent = waiting.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                yield sent.client, self._answer(sent, reply)
        if self.is_alive is not None:
            self.is_alive()
        if not replies:
            sleep(self.poll)

    def _answer(self, sent: Sent, reply: Message) -> Answer | Missing:
        if reply.has_error() and reply.error.code == EXPIRED and self.has_deadline:
            return self._too_late(sent)
        if reply.has_error():
            return Missing(why(reply), has_failed=is_own_error(reply))
        try:
            found = unpack(reply.content)
        except ModelError as error:
            return Missing(f"it sent {error}", has_failed=True)
        if isinstance(found, Refusal):
            if found.is_fatal and self.is_trusted:
                raise FedSPUError(found.reason)
            if found.begins_anew:
                self.anew(sent.client)
                return Missing(found.reason)
            if not found.has_failed and self.refused is not None:
                self.refused(sent.client, found.reason)
            return Missing(found.reason, has_failed=found.has_failed)
        return Answer(found.packet, Cost.of(sent.down, found.packet))

    def _overdue(self, waiting: dict[str, Sent]) -> Iterator[tuple[int, Missing]]:
        now = monotonic()
        for message_id, sent in list(waiting.items()):
            if now > sent.until:
                del waiting[message_id]
                yield sent.client, self._too_late(sent)

    @property
    def has_deadline(self) -> bool:
        """Whether clients must answer within a time."""
        return not math.isinf(self.deadline)

    def _too_late(self, sent: Sent) -> Missing:
        self.late(sent.client)
        return Missing(f"no answer within {self.deadline:g} s")


EXPIRED = 3
"""Flower's error code for a message whose time is over."""

WORDS = {
    1: "its app could not be loaded; see its log",
    2: "its app raised an exception; see its log",
    3: "its message was lost on the way",
    4: "its answer was lost on the way",
    5: "its connection was lost",
    7: "its copy of the app is damaged",
    8: "its app crashed; see its log",
}
"""Flower's error codes."""

OWN_ERRORS = frozenset({1, 2, 7, 8})


def why(reply: Message) -> str:
    """An error reply in words; its own text may hold a part of an example."""
    code = reply.error.code
    return WORDS.get(code, f"Flower reports error {code}")


def is_own_error(reply: Message) -> bool:
    """Whether the client's own code went wrong."""
    return reply.error.code in OWN_ERRORS
