"""What comes from a device is read strictly: it may be anything."""

from contextlib import suppress
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedspu.engines.flower.wire import (
    ARRAYS,
    PACKET,
    Content,
    Hello,
    Like,
    Refusal,
    Seat,
    as_array,
    pack,
    pack_hello,
    refuse,
    unpack,
    unpack_hello,
)
from fedspu.errors import ModelError
from fedspu.federation.messages import Packet, Seconds

HELLO: dict[str, Any] = {
    "name": "hall",
    "capacity": 0.5,
    "version": "1",
    "protocol": 1,
    "task": "classification",
    "x_shape": (1, 8, 8),
    "x_dtype": "float32",
    "y_shape": (),
    "y_dtype": "int64",
    "num_outputs": 10,
    "num_examples": 7,
}
LIKE = Like(**{name: HELLO[name] for name in Like.model_fields})
SEAT = Seat(
    like=LIKE,
    run="0123456789abcdef",
    client=1,
    num_clients=3,
    capacity=0.5,
    capacities=(0.5, 1.0),
    num_outputs=10,
    table="0123456789abcdef",
)
some_bytes = st.binary(max_size=50)
times = st.builds(Seconds, st.floats(0, 1e9), st.floats(0, 1e9))
packets = st.builds(Packet, some_bytes, some_bytes, some_bytes, some_bytes, times)


@given(packets, st.booleans(), st.none() | st.binary(min_size=1, max_size=50))
def test_a_packet_comes_back_as_it_was(
    packet: Packet, is_seated: bool, state: bytes | None
) -> None:
    seat = SEAT if is_seated else None
    content = pack(packet, seat, None if state is None else as_array(state))
    assert unpack(content) == Content(packet, seat, state)


scalars = (
    st.binary(max_size=30)
    | st.text(max_size=30)
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.booleans()
)
names = st.sampled_from(["header", "positions", "seconds", "seat", "refusal", "hello"])
lists = st.lists(st.floats(), max_size=3) | st.lists(st.text(max_size=5), max_size=3)
configs = st.dictionaries(names | st.text(max_size=5), scalars | lists, max_size=6)
arrays = st.dictionaries(
    st.sampled_from(["values", "initial", "state", "other"]),
    st.binary(max_size=20).map(as_array),
    max_size=4,
)


@given(configs, arrays, st.sampled_from([PACKET, "x"]), st.sampled_from([ARRAYS, "x"]))
def test_whatever_comes_is_ours_or_refused(
    config: dict[str, Any], found: dict[str, Array], packet: str, values: str
) -> None:
    records: dict[str, Any] = {packet: ConfigRecord(config)}
    if values not in records:
        records[values] = ArrayRecord(found)
    for read in (unpack, unpack_hello):
        with suppress(ModelError):  # any other error is a fault
            assert isinstance(read(RecordDict(records)), Content | Refusal | Hello)


@pytest.mark.parametrize(
    "seconds", [1.5, "soon", ["1", "2"], [1, 2], [1.0, 2.0, 3.0], b"12"]
)
def test_times_that_are_no_times_are_refused(seconds: Any) -> None:
    content = pack(Packet(b"a", took=Seconds(1.5, 0.5)))
    assert list(content.config_records[PACKET]["seconds"]) == [1.5, 0.5]  # type: ignore[arg-type]  # a list
    content.config_records[PACKET]["seconds"] = seconds
    with pytest.raises(ModelError, match="not fedspu's"):
        unpack(content)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../etc"},
        {"name": "a b"},
        {"name": "x" * 64},
        {"capacity": 0},
        {"capacity": 1.5},
        {"capacity": float("nan")},
        {"x_shape": (10**5, 10**5)},
        {"x_shape": (2,) * 9},
        {"y_shape": (-1,)},
        {"num_outputs": 10**9},
        {"num_examples": 0},
        {"version": "x" * 201},
    ],
)
def test_a_hello_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    assert unpack_hello(pack_hello(Hello(**HELLO))) == Hello(**HELLO)
    content = pack_hello(Hello.model_construct(**{**HELLO, **change}))
    with pytest.raises(ModelError, match="not fedspu's"):
        unpack_hello(content)


def test_a_refusal_says_why() -> None:
    said = unpack(refuse("x" * 5000, has_failed=True))
    assert isinstance(said, Refusal)
    assert (len(said.reason), said.has_failed, said.is_fatal) == (1000, True, False)
