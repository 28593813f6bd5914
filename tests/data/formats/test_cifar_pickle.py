import pickle
import tracemalloc
from pathlib import PurePosixPath

import pytest

from fedspu.data.formats import cifar_pickle
from fedspu.errors import DataError
from tests.data import files

FILE = PurePosixPath("data_batch_1")


def refusal(content: bytes) -> str:
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            cifar_pickle.read_batch(content, FILE, 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [files.python2_batch([6, 9]), files.python3_batch([6, 9])]
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("unpickled"))
    for batch in batches:
        pixels, labels = cifar_pickle.read_batch(batch, FILE, 2)
        assert labels.tolist() == [6, 9]
        assert pixels.tolist() == files.records([6, 9])[:, 1:].tolist()


@pytest.mark.parametrize("place", [2**27, 2**32 - 1])
def test_a_high_place_in_the_memo_takes_no_memory(place: int) -> None:
    content = b"\x80\x02}r" + place.to_bytes(4, "little") + b"."
    assert "it holds no data and labels" in refusal(content)


def test_a_key_that_takes_for_ever_to_hash_is_refused() -> None:
    deep = b")" + b"".join(b"q\0h\0\x86" for _ in range(60))  # a tuple of itself, twice
    assert "a key that is no text" in refusal(b"\x80\x02}(" + deep + b"K\x01u.")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"N" * 5000 + b".", "more than 2,020 steps"),
        (b"N" * 20_000 + b".", "more than 14,800 bytes"),
        (b"X\xff\xff\xff\x7fabc.", "expected 2147483647 bytes"),
        (b"\x8e" + b"\xff" * 8 + b".", "."),
        (b"I" + b"9" * 5000 + b"\n.", "."),
        (b"}}s.", "a step finds no dict"),
        (b"(a.", "a step has no value to take"),
        (b"Na.", "a step finds no list"),
        (b"u.", "a step has no mark"),
        (b"q\0.", "a step finds no"),
        (b"h\0.", "it asks for value 0 before it has one"),
        (b"cnumpy\ndtype\n)R.", "it calls what is no function"),
        (b"NNR.", "it calls what is no function"),
        (b"NNb.", "it changes what is no array"),
        (b"\x80\x02cos\nsystem\n(X\x02\0\0\0lstR.", "it asks for os.system"),
        (b"Pid\n.", "the step PERSID, which no batch has"),
        (b"\x82\x01.", "the step EXT1, which no batch has"),
        (b"(ios\nsystem\n.", "the step INST, which no batch has"),
        (b".", "a step has no value to take"),
    ],
)
def test_a_strange_pickle_is_refused_in_little_memory(
    content: bytes, says: str
) -> None:
    assert says in refusal(content)
