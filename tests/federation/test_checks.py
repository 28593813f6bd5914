"""What server and clients refuse; each test changes one thing in a sound message."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import Active
from fedspu.errors import ModelError
from fedspu.federation.checks import (
    check_broadcast,
    largest,
    read_reply,
    read_request,
)
from fedspu.federation.engine import Answer
from fedspu.federation.messages import (
    NO_TIME,
    JudgeReply,
    JudgeRequest,
    Packet,
    Reply,
    Request,
    Seconds,
    TrainReply,
    TrainRequest,
    pack_reply,
    pack_request,
)
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation
from fedspu.methods.method import Offer
from tests.oracles.federation import (
    ConvNet,
    client_of,
    empty_reply,
    prepared_for,
    request_for,
    wide_mlp,
)

NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@cache
def turn(
    method: str = "fedspu", model: str = "ConvNet", early: bool = False
) -> tuple[Plan, TrainRequest, TrainReply, Packet, Packet]:
    """Client 0's first turn: its plan, request, reply, and both as they are sent."""
    build = {"ConvNet": ConvNet, "wide": wide_mlp}[model]
    ready = prepared_for(build, method=method, early_stopping=early)
    client, plan = client_of(ready), ready.plan
    request = request_for(plan, Federation(0, plan.initial), 1, 0)
    down = pack_request(plan, request)
    answer = client.respond(down)
    assert isinstance(answer, Answer)
    up = replace(answer.up, took=NO_TIME)
    reply = read_reply(plan, request, up)
    assert isinstance(reply, TrainReply)
    return plan, request, reply, down, up


def why_not(
    plan: Plan, request: Request, reply: Reply, num_examples: int | None = None
) -> str:
    """Why the server refuses a reply, as a client would write it."""
    with pytest.raises(ModelError) as caught:
        read_reply(plan, request, pack_reply(plan, request, reply), num_examples)
    return str(caught.value)


def changed(reply: TrainReply, **given: Any) -> TrainReply:
    return replace(reply, **given)


JUDGE = JudgeRequest(5, 2, 0, "personal")


# The server: who, when and how many ---------------------------------------------------


@pytest.mark.parametrize("method", ["fedspu", "hermes", "heterofl", "local", "fedavg"])
def test_what_a_client_sends_is_taken(method: str) -> None:
    turn(method)
    turn(method, early=True)


@pytest.mark.parametrize(("t", "client"), [(0, 0), (2, 0), (1, 3), (4, 5)])
def test_a_reply_of_another_client_or_round_is_refused(t: int, client: int) -> None:
    plan, request, reply, *_ = turn()
    why = f"it belongs to client {client} in round {t}"
    assert why_not(plan, request, changed(reply, round=t, client=client)) == why
    judged = JudgeReply(t, client, 1, 0.5, 0.5, 0.5)
    assert why_not(plan, JUDGE, judged) == why


def test_a_reply_of_another_kind_is_refused() -> None:
    plan, request, *_ = turn()
    judged = JudgeReply(1, 0, 4, 0.5, 0.5, 0.5)
    assert why_not(plan, request, judged) == "it is a JudgeReply; expected a TrainReply"
    trained = empty_reply(5, 2)
    assert why_not(plan, JUDGE, trained) == "it is a TrainReply; expected a JudgeReply"


@pytest.mark.parametrize("count", [0, 10_000_001, 2**32 - 1])
def test_a_reply_from_no_examples_or_too_many_is_refused(count: int) -> None:
    plan, request, reply, *_ = turn()
    wanted = f"it is from {count} examples"
    assert why_not(plan, request, changed(reply, num_examples=count)).startswith(wanted)
    judged = JudgeReply(5, 2, count, 0.5, 0.5, 0.5)
    assert why_not(plan, JUDGE, judged).startswith(wanted)


def test_a_client_has_as_many_examples_as_it_had_before() -> None:
    plan, request, reply, _, up = turn()
    assert read_reply(plan, request, up, reply.num_examples) is not None
    found = why_not(plan, request, reply, reply.num_examples + 1)
    count = reply.num_examples
    assert found == f"it is from {count} examples; before, the client had {count + 1}"


@pytest.mark.parametrize("seconds", [*NOT_FINITE, -1.0])
def test_a_turn_of_impossible_length_is_refused(seconds: float) -> None:
    plan, request, _, _, up = turn()
    for took in (Seconds(seconds, 1.0), Seconds(1.0, seconds)):
        with pytest.raises(ModelError, match=rf"^it took {seconds} seconds$"):
            read_reply(plan, request, replace(up, took=took))


# Losses and scores --------------------------------------------------------------------


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_loss_or_score_that_is_not_finite_is_refused(value: float) -> None:
    plan, request, reply, *_ = turn(early=True)
    found = why_not(plan, request, changed(reply, train_loss=value))
    assert found == f"its training loss is {value}"
    found = why_not(plan, request, changed(reply, val_loss=value))
    assert found == f"its validation loss is {value}"
    for loss, score in ((0.5, value), (value, 0.5)):
        found = why_not(plan, JUDGE, JudgeReply(5, 2, 1, loss, score, 0.5))
        assert found == f"its accuracy is {score}, loss {loss}"
    found = why_not(plan, JUDGE, JudgeReply(5, 2, 1, 0.5, 0.75, value))
    assert found == f"its accuracy on validation examples is {value}, loss 0.5"


def test_without_early_stopping_nobody_validates_or_stops() -> None:
    plan, request, reply, *_ = turn()
    found = why_not(plan, request, changed(reply, has_stopped=True))
    assert found == "it says that the client stops, but early_stopping is off"
    found = why_not(plan, request, changed(reply, val_loss=0.5))
    assert found == "it validates, but early_stopping is off"


def test_with_early_stopping_everybody_validates() -> None:
    plan, request, reply, *_ = turn(early=True)
    found = why_not(plan, request, changed(reply, val_loss=None))
    assert found == "it has no validation loss, which early stopping needs"


@pytest.mark.parametrize("value", [-0.01, 1.01, 1e300])
def test_an_accuracy_is_a_share(value: float) -> None:
    plan, *_ = turn()
    found = why_not(plan, JUDGE, JudgeReply(5, 2, 1, 0.5, value, 0.5))
    assert found == f"its accuracy is {value}; expected 0 to 1"
    found = why_not(plan, JUDGE, JudgeReply(5, 2, 1, 0.5, 0.5, value))
    assert found == f"its accuracy on validation examples is {value}; expected 0 to 1"
    for sound in (0.0, 1.0, 1.0 + 1e-12):
        for scores in ((sound, 0.5), (0.5, sound)):
            reply = JudgeReply(5, 2, 1, 0.5, *scores)
            assert read_reply(plan, JUDGE, pack_reply(plan, JUDGE, reply)) == reply


@pytest.mark.parametrize("value", [-3.0, 1.01, 1e300])
def test_a_metric_that_is_no_share_may_be_any_finite_number(value: float) -> None:
    plan, *_ = turn()
    metric = replace(plan.task.metric, name="margin", is_share=False)
    plan = replace(plan, task=replace(plan.task, metric=metric))
    for scores in ((value, 0.5), (0.5, value)):
        reply = JudgeReply(5, 2, 1, 0.5, *scores)
        assert read_reply(plan, JUDGE, pack_reply(plan, JUDGE, reply)) == reply
    for bad in NOT_FINITE:
        found = why_not(plan, JUDGE, JudgeReply(5, 2, 1, 0.5, value, bad))
        assert found == f"its margin on validation examples is {bad}, loss 0.5"


# Neurons and values -------------------------------------------------------------------


def with_active(plan: Plan, reply: TrainReply, active: Active) -> TrainReply:
    """A reply with zeros for these neurons."""
    blocks = plan.travelling(active)
    payload = {
        name: torch.zeros(
            [
                n if axis is None else len(axis)
                for n, axis in zip(plan.initial[name].shape, where, strict=True)
            ]
        )
        for name, where in blocks.items()
    }
    return replace(reply, active=active, payload=payload)


def offered(request: TrainRequest) -> Active:
    assert request.offer is not None
    return request.offer.active


@pytest.mark.parametrize("method", ["fedspu", "hermes", "heterofl"])
def test_neurons_that_were_not_offered_are_refused(method: str) -> None:
    plan, request, reply, *_ = turn(method)
    # In hermes all neurons are offered at first, so ask for fewer.
    few = {name: indices[:1] for name, indices in offered(request).items()}
    asked = replace(request, offer=Offer(few))
    for name, active in few.items():
        group = next(g for g in plan.neurons.groups if g.name == name)
        other = (int(active[0]) + 1) % group.size
        more = {**few, name: torch.tensor(sorted({int(active[0]), other}))}
        found = why_not(plan, asked, with_active(plan, reply, more))
        assert found == f"it has neurons of {name} that were not offered"


def test_a_part_of_what_was_offered_is_for_methods_whose_clients_choose() -> None:
    for method, is_taken in (("fedspu", False), ("hermes", True)):
        plan, request, reply, *_ = turn(method)
        asked = replace(request, offer=Offer(plan.neurons.everything()))
        few = {n: indices[:1] for n, indices in offered(asked).items()}
        part = with_active(plan, reply, few)
        if is_taken:
            assert read_reply(plan, asked, pack_reply(plan, asked, part)) is not None
        else:
            found = why_not(plan, asked, part)
            assert found == "it lacks neurons of conv1 that were offered"


def test_values_are_there_if_and_only_if_they_are_exchanged() -> None:
    plan, request, reply, *_ = turn()
    nothing = changed(reply, active=None, payload={})
    assert why_not(plan, request, nothing) == "it has no values"
    alone, asked, *_ = turn("local")
    everything = alone.neurons.everything()
    found = why_not(alone, asked, with_active(alone, reply, everything))
    assert found == "it has values, but nothing is exchanged"


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    plan, request, reply, *_ = turn()
    for name, values in reply.payload.items():
        bad = values.clone()
        bad.view(-1)[-1] = value
        payload = {**reply.payload, name: bad}
        found = why_not(plan, request, changed(reply, payload=payload))
        assert found == f"its {name} is not finite"


# The form -----------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["header", "positions", "values", "initial"])
def test_a_reply_with_more_bytes_than_any_has_is_refused_unread(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, request, _, _, up = turn()
    most = {**vars(largest(plan)), "initial": 0}[part]
    monkeypatch.setattr("fedspu.federation.checks.unpack_reply", None)
    longer: dict[str, Any] = {part: bytes(most + 1)}
    with pytest.raises(ModelError, match=rf"{most + 1} bytes of {part}; .*most {most}"):
        read_reply(plan, request, replace(up, **longer))


def test_no_message_is_larger_than_the_largest() -> None:
    for method in ("fedspu", "fedavg", "hermes", "feddrop", "fedper"):
        for model in ("ConvNet", "wide"):
            plan, _, _, down, up = turn(method, model, True)
            most = largest(plan)
            for part in ("header", "positions", "values", "initial"):
                for packet in (down, up):
                    assert len(getattr(packet, part)) <= getattr(most, part)
    plan, _, _, down, up = turn("fedavg")  # the bounds are reached
    assert len(up.values) == len(down.values) == largest(plan).values
    judged = pack_reply(plan, JUDGE, JudgeReply(5, 2, 1, 0.5, 0.5, 0.5))
    assert len(up.header) < len(judged.header) == largest(plan).header
    _, _, _, down, _ = turn("fedspu")
    assert len(down.initial) == largest(turn("fedspu")[0]).initial


def test_a_second_way_to_say_the_same_is_refused() -> None:
    plan, request, _, down, up = turn()
    bitmap = down.positions
    assert bitmap[:1] == b"b"
    assert up.positions == b"="
    odd = [
        replace(up, positions=bitmap),  # = is shorter
        replace(up, positions=b"b" + bytes([bitmap[1], bitmap[2] | 1])),  # no neuron
        replace(up, header=with_byte(up.header, 14, 2)),  # has_stopped is 2
        replace(up, header=with_byte(up.header, 30, 7)),  # a loss that is not there
    ]
    for packet in odd:
        with pytest.raises(ModelError):
            read_reply(plan, request, packet)
    with pytest.raises(ModelError, match="bits of its header mean nothing"):
        read_reply(plan, request, odd[3])


def with_byte(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + bytes([value]) + content[place + 1 :]


PARTS = ["header", "positions", "values", "initial"]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[Packet], Packet]:
    """A change of some bytes of one part of a packet."""
    part = draw(st.sampled_from(PARTS))
    kind = draw(st.sampled_from(["flip", "cut", "more", "other"]))
    place = draw(st.floats(0, 1, exclude_max=True))
    bit = 1 << draw(st.integers(0, 7))
    content = draw(st.binary(max_size=40))

    def damage(packet: Packet) -> Packet:
        old = getattr(packet, part)
        at = int(place * len(old))
        new = {
            "flip": old and with_byte(old, at, old[at] ^ bit),
            "cut": old[:at],
            "more": old[:at] + content + old[at:],
            "other": content,
        }[kind]
        return replace(packet, **{part: new})

    return damage


KINDS = st.tuples(
    st.sampled_from(["fedspu", "hermes", "local", "fedavg"]),
    st.sampled_from(["ConvNet", "wide"]),
    st.booleans(),
)


@settings(max_examples=300)
@given(kind=KINDS, damage=damages())
def test_damaged_bytes_are_refused_or_sound(
    kind: Any, damage: Callable[[Packet], Packet]
) -> None:
    """Nothing is raised but a ModelError; what is read is what the bytes say."""
    plan, request, _, down, up = turn(*kind)
    packet = damage(up)
    try:
        read = read_reply(plan, request, packet)
    except ModelError:
        assert packet != up
    else:
        assert pack_reply(plan, request, read) == packet
    packet = damage(down)
    try:
        received = read_request(plan, packet)
    except ModelError:
        assert packet != down
    else:
        assert pack_request(plan, received) == packet


# A client -----------------------------------------------------------------------------


def refused_by_client(plan: Plan, request: Request) -> str:
    with pytest.raises(ModelError) as caught:
        read_request(plan, pack_request(plan, request))
    return str(caught.value)


def test_a_request_has_rounds_in_their_order() -> None:
    plan, request, *_ = turn()
    later = replace(request, initial=None)
    for t, last in ((1, 1), (3, 4), (0, 0)):
        found = refused_by_client(plan, replace(later, round=t, last=last))
        assert f"for round {t} says" in found
        assert f"in round {last}" in found
    read_request(plan, pack_request(plan, replace(later, round=3, last=2)))
    found = refused_by_client(plan, JudgeRequest(3, 0, 4, "personal"))
    assert "after round 3" in found
    read_request(plan, pack_request(plan, JudgeRequest(3, 0, 3, "personal")))


def test_the_initial_model_comes_at_first_contact_and_only_then() -> None:
    plan, request, *_ = turn()
    assert request.initial is not None
    found = refused_by_client(plan, replace(request, round=3, last=2))
    assert "with the initial model" in found
    found = refused_by_client(plan, replace(request, initial=None))
    assert "without the initial model" in found
    other, asked, *_ = turn("fedavg")  # its clients keep no model
    packet = replace(pack_request(other, asked), initial=b"\0" * 4)
    with pytest.raises(ModelError, match="4 bytes of initial; expected at most 0"):
        read_request(other, packet)


def test_what_is_offered_fits_the_method() -> None:
    plan, request, *_ = turn()
    found = refused_by_client(plan, replace(request, offer=None, payload={}))
    assert found == "a request offers nothing, unlike the method"
    alone, asked, *_ = turn("local")
    everything = with_active(alone, empty_reply(1, 0), alone.neurons.everything())
    offer = Offer(alone.neurons.everything())
    found = refused_by_client(
        alone, replace(asked, offer=offer, payload=everything.payload)
    )
    assert found == "a request offers values, unlike the method"
    found = refused_by_client(alone, JudgeRequest(3, 0, 0, "global"))
    assert found == "a request to judge a server's model, but there is none"


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_client_takes_no_value_that_is_not_finite(value: float) -> None:
    plan, request, *_ = turn()
    bad = torch.full_like(request.payload["fc.bias"], value)
    payload = {**request.payload, "fc.bias": bad}
    found = refused_by_client(plan, replace(request, payload=payload))
    assert found == "the server's fc.bias is not finite"
    initial = {**plan.initial, "fc.bias": bad}
    found = refused_by_client(plan, replace(request, initial=initial))
    assert found == "the initial fc.bias is not finite"
    with pytest.raises(ModelError, match=r"the server's fc\.bias is not finite"):
        check_broadcast(plan, initial)


def test_a_variance_is_not_negative() -> None:
    plan, request, reply, *_ = turn()
    name = "bn1.running_var"
    bad = reply.payload[name].clone()
    bad[-1] = -1e6
    found = why_not(plan, request, changed(reply, payload={**reply.payload, name: bad}))
    assert found == f"its {name} is negative; it is a variance"
    bad = request.payload[name].clone()
    bad[0] = -1e-30
    payload = {**request.payload, name: bad}
    found = refused_by_client(plan, replace(request, payload=payload))
    assert found == f"the server's {name} is negative; it is a variance"
    initial = {**plan.initial, name: -plan.initial[name]}
    found = refused_by_client(plan, replace(request, initial=initial))
    assert found == f"the initial {name} is negative; it is a variance"
    with pytest.raises(ModelError, match=rf"^the server's {name} is negative"):
        check_broadcast(plan, initial)


def test_a_mean_may_be_negative_and_a_variance_zero() -> None:
    plan, request, reply, *_ = turn()
    mean, variance = "bn1.running_mean", "bn1.running_var"
    payload = {
        **reply.payload,
        mean: torch.full_like(reply.payload[mean], -1.0),
        variance: torch.full_like(reply.payload[variance], -0.0),
    }
    read_reply(
        plan, request, pack_reply(plan, request, changed(reply, payload=payload))
    )


def test_a_broadcast_has_the_tensors_of_the_plan() -> None:
    plan, *_ = turn()
    check_broadcast(plan, plan.initial)
    bias = plan.initial["fc.bias"]
    less = {name: t for name, t in plan.initial.items() if name != "fc.bias"}
    for wrong in (
        less,
        {**less, "fc.bias": bias[:1]},
        {**less, "fc.bias": bias.double()},
        {**plan.initial, "more": bias},
    ):
        with pytest.raises(ModelError, match="other tensors than the plan"):
            check_broadcast(plan, wrong)
