"""Laws about what server and client send each other."""

from dataclasses import fields

import torch

from fedspu.conformance.cases import Case
from fedspu.conformance.entries import (
    as_bytes,
    at_full_size,
    first_difference,
    is_active,
)
from fedspu.conformance.laws.law import Broken, law, played_to_its_end
from fedspu.conformance.recorded_turns import (
    are_active,
    arrived,
    as_received,
    bytes_at,
    model_at_full_size,
    offered,
    sent_at_full_size,
    training_of,
    travelling,
    up_of,
)
from fedspu.conformance.recording import RecordedTraining, RecordedTurn, Recording
from fedspu.federation.messages import Packet, TrainReply, Way, pack_reply
from fedspu.federation.record import COSTS
from fedspu.federation.server import EMA, MEAN, SQUARE
from fedspu.neurons.table import Active


@law
def what_came_is_where_it_belongs(case: Case) -> None:
    """A client begins from its own model, updated with what it was sent.

    Its own model is w0 at first, and stays w0 in methods whose clients keep no model.
    What it was sent may be rounded (``wire.values``, ``wire.down``); all else is bit
    for bit its own.
    """
    run = played_to_its_end(case.usual)
    for turn in run.turns:
        offer, own = turn.request.offer, turn.before.own
        wanted = dict(run.initial)
        if own is not None and own.active is not None:
            wanted, _ = at_full_size(
                run.plan.neurons, own.active, own.state, run.initial
            )
        elif own is not None:
            wanted = dict(own.state)
        server = run.federations[turn.round - 1].global_state
        for name in travelling(run.plan) if offer else ():
            inside = are_active(run, offered(turn), name)
            came = as_received(run.plan, name, server[name], "down")
            wanted[name] = torch.where(inside, came, wanted[name])
        begin, exists = model_at_full_size(run, turn, training_of(turn).begin)
        if wrong := first_difference(begin, wanted, exists):
            raise Broken(
                f"in round {turn.round} client {turn.client} begins to train from a "
                f"model in which {wrong}"
            )


@law
def only_what_was_trained_leaves_a_client(case: Case) -> None:
    """Only entries trained this round, positions, counts and losses leave a client.

    Packets are checked byte by byte: they hold nothing else. Training changes no other
    learnable entry. A client receives only entries of the global model, or w0. All that
    the server keeps about a client's model is which neurons it trained.
    """
    run = case.usual
    for turn in run.turns:
        _account_for_request(run, turn)
        if turn.reply is not None:
            _account_for_training(turn, training_of(turn))
            _account_for_reply(run, turn, turn.reply)
    played_to_its_end(run)
    for federation in run.federations:
        if extra := {entry.name for entry in fields(federation)} - SERVER_KNOWS:
            raise Broken(f"the server also keeps {', '.join(sorted(extra))}")
        own = {n for n in federation.extra if not n.startswith((MEAN, SQUARE, EMA))}
        if own and case.method.server is None:
            raise Broken(f"the server also keeps {', '.join(sorted(own))}")
        for client, kept in federation.kept.items():
            sizes = {group.name: group.size for group in run.plan.neurons.groups}
            for name, indices in kept.items():
                if indices.is_floating_point() or len(indices) > sizes.get(name, 0):
                    raise Broken(
                        f"the server keeps {indices.numel()} numbers for client "
                        f"{client} as {name}, which are not neurons of that group"
                    )


SERVER_KNOWS = {
    *("round", "global_state", "stopped", "last", "kept", "extra", "num_examples"),
    "is_finished",
}
REPLY_HOLDS = {
    *(
        "round",
        "client",
        "active",
        "payload",
        "num_examples",
        "train_loss",
        "val_loss",
        "has_stopped",
    ),
}


def _account_for_request(run: Recording, turn: RecordedTurn) -> None:
    who = f"in round {turn.round} the request to client {turn.client}"
    server = run.federations[turn.round - 1].global_state
    wanted = b""
    if turn.request.offer is not None:
        wanted = bytes_at(run, server, offered(turn), "down")
    if turn.down.values != wanted:
        raise Broken(
            f"{who} has {len(turn.down.values)} bytes of values that are not the "
            f"{len(wanted)} bytes of the global model's entries it was offered"
        )
    table = list(run.plan.neurons.shapes)
    never_trained = sorted(
        name
        for name, values in run.initial.items()
        if values.is_floating_point() and name not in table
    )
    allowed = [
        b"".join(as_bytes(run.initial[name]) for name in names)
        for names in ([], never_trained, [*table, *never_trained])
    ]
    if turn.down.initial not in allowed:
        raise Broken(f"{who} has {len(turn.down.initial)} bytes that are not w0")


def _account_for_training(turn: RecordedTurn, seen: RecordedTraining) -> None:
    outside = {
        name: ~is_active(seen.neurons, seen.active, name, tuple(values.shape))
        for name, values in seen.begin.items()
        if name in seen.learnable
    }
    if wrong := first_difference(seen.sent, seen.begin, outside):
        raise Broken(
            f"in round {turn.round} client {turn.client} changed what it did not "
            f"train: {wrong}"
        )


def _account_for_reply(run: Recording, turn: RecordedTurn, reply: TrainReply) -> None:
    who = f"in round {turn.round} the reply of client {turn.client}"
    if extra := {entry.name for entry in fields(reply)} - REPLY_HOLDS:
        raise Broken(f"{who} also holds {', '.join(sorted(extra))}")
    seen, up = training_of(turn), turn.up
    counts = {
        "num_examples": (reply.num_examples, seen.num_examples),
        "train_loss": (reply.train_loss, seen.loss),
    }
    for what, (said, true) in counts.items():
        if said != true:
            raise Broken(f"{who} says {what} = {said}, but it is {true}")
    if up is None:
        return
    wanted = b""
    if reply.active is not None:
        wanted = bytes_at(run, sent_at_full_size(run, turn), reply.active, "up")
        _same_neurons(who, run, turn, reply.active)
    if len(up.values) != len(wanted):
        raise Broken(
            f"{who} has {len(up.values)} bytes of values; the entries it trained are "
            f"{len(wanted)} bytes"
        )
    if up.values != wanted:
        raise Broken(f"{who} has values that are not those it trained")
    if turn.arrived is not None:
        again = pack_reply(run.plan, turn.request, turn.arrived)
        for part in ("header", "positions", "values", "initial"):
            sent, read = getattr(up, part), getattr(again, part)
            if sent != read:
                raise Broken(
                    f"{who} has {len(sent)} bytes of {part}; what the server read, "
                    f"packed again, gives {len(read)} different ones"
                )


def _same_neurons(who: str, run: Recording, turn: RecordedTurn, active: Active) -> None:
    """Check that a reply names as many neurons of each group as were trained."""
    trained = {name: len(indices) for name, indices in training_of(turn).active.items()}
    named = {name: len(indices) for name, indices in active.items()}
    if trained != named:
        raise Broken(
            f"{who} names {named} neurons by group, but {trained} were trained"
        )


@law
def bytes_reported_are_bytes_sent(case: Case) -> None:
    """The bytes that engines, records and summaries report are those of the packets."""
    run = played_to_its_end(case.stopping)
    for turn in run.turns:
        packets: tuple[tuple[Packet, Active | None, Way], ...] = (
            (turn.down, offered(turn) if turn.request.offer else None, "down"),
            (up_of(turn), arrived(turn).active, "up"),
        )
        for packet, active, way in packets:
            wanted = len(bytes_at(run, run.initial, active, way)) if active else 0
            if len(packet.values) != wanted:
                raise Broken(
                    f"in round {turn.round} a packet of client {turn.client} has "
                    f"{len(packet.values)} bytes of values, but its entries take "
                    f"{wanted}"
                )
    sent = {(turn.round, turn.client): _bytes_of(turn) for turn in run.turns}
    for when, reports in case.elsewhere.items():
        for report in reports:
            for client, answer in report.answers.items():
                t = report.federation.round
                if (t, client) not in sent:
                    raise Broken(
                        f"{when} client {client} takes part in round {t}, unlike before"
                    )
                for name, wanted in sent[t, client].items():
                    found = getattr(answer.cost, name)
                    if found != wanted:
                        raise Broken(
                            f"{when} {name} = {found} is reported for client {client} "
                            f"in round {t}, but its packets have {wanted}"
                        )
    for name in COSTS:
        found = case.resumed.run.summary[name]
        wanted = sum(of_turn[name] for of_turn in sent.values())
        if found != wanted:
            raise Broken(f"the summary says {name} = {found}; {wanted} were sent")


def _bytes_of(turn: RecordedTurn) -> dict[str, int]:
    """The bytes of a turn's packets, counted part by part."""
    down, up = turn.down, up_of(turn)
    beside = (down.header, down.positions, up.header, up.positions)
    return {
        "bytes_initial": len(down.initial),
        "bytes_down": len(down.values),
        "bytes_up": len(up.values),
        "index_bytes": sum(map(len, beside)),
    }
