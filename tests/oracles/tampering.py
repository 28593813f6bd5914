"""An engine between server and clients that changes what one client sends."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fedspu import State
from fedspu.engines.local import LocalEngine
from fedspu.federation.engine import Answer, Facts, Missing
from fedspu.federation.messages import (
    JudgeRequest,
    Packet,
    Reply,
    Request,
    TrainReply,
    pack_reply,
    unpack_reply,
)
from fedspu.federation.plan import Plan
from fedspu.prepare import Prepared

Change = Callable[[Plan, Request, Answer], Answer | Missing]
"""From what a client was asked and answered to what arrives instead."""


class Tampering:
    """One client's answers in one round are changed: to train, or to judge."""

    facts = Facts()

    def __init__(
        self,
        ready: Prepared,
        t: int,
        client: int,
        change: Change,
        kind: type[Request] | None = None,
    ) -> None:
        self.plan, self.inner = ready.plan, LocalEngine(ready.plan, ready.examples)
        self.t, self.client, self.change, self.kind = t, client, change, kind

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        asked = {client: requests[client] for client in requests}
        for client, answer in self.inner.exchange(asked, broadcast):
            request = asked[client]
            is_kind = (
                isinstance(request, self.kind)
                if self.kind
                else not isinstance(request, JudgeRequest)
            )
            if is_kind and (request.round, client) == (self.t, self.client):
                assert isinstance(answer, Answer)
                yield client, self.change(self.plan, request, answer)
            else:
                yield client, answer

    def close(self) -> None: ...


def packed(change: Callable[[Packet], Packet]) -> Change:
    """A change of the bytes."""

    def changed(plan: Plan, request: Request, answer: Answer) -> Answer:
        return replace(answer, up=change(answer.up))

    return changed


def read(change: Callable[[Any], Reply]) -> Change:
    """A change of what the bytes say, written as a client would write it."""

    def changed(plan: Plan, request: Request, answer: Answer) -> Answer:
        reply = change(unpack_reply(plan, request, answer.up))
        return replace(answer, up=pack_reply(plan, request, reply))

    return changed


def fields(**given: Any) -> Change:
    """Some fields of the reply are changed."""
    return read(lambda reply: replace(reply, **given))


def absent(plan: Plan, request: Request, answer: Answer) -> Missing:
    """The client does not answer at all."""
    return Missing("it is not there")


def with_values(change: Callable[[TrainReply], dict[str, Any]]) -> Change:
    """Some tensors of the reply are changed."""

    def changed(reply: TrainReply) -> TrainReply:
        return replace(reply, payload={**reply.payload, **change(reply)})

    return read(changed)
