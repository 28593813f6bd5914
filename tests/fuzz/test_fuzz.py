"""Every decoder on its corpus, and on changes to it: read, or refused in one line."""

import struct
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import REFUSED, TARGETS

CORPUS = Path(__file__).parent / "corpus"
MOST = 64 * 2**20  # bytes that reading a small file may take

NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**27, 2**31 - 1, 2**31, 2**32 - 1)
FORMS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")
WORDS = (
    *(b"", b"\0", b"\n", b"\xff" * 4, b"-1", b"9" * 20, b"nan", b"[" * 50, b"PK\5\6"),
    *(b"'descr': '|O'", b"(999999999,)", b"c", b"R", b"r\xff\xff\xff\x07", b"\x1f\x8b"),
    *(
        b"7777777",
        b"../",
        b"data\xff\xff\xff\xff",
        b"a." * 30,
        b"= [[1]]\n",
        b"method.",
    ),
)


@cache
def inputs(name: str) -> tuple[bytes, ...]:
    return tuple(file.read_bytes() for file in sorted((CORPUS / name).iterdir()))


@st.composite
def changed(draw: st.DrawFn, name: str) -> bytes:
    """A file of the corpus after a few changes."""
    content = draw(st.sampled_from(inputs(name)))
    for _ in range(draw(st.integers(1, 4))):
        # Headers are at the start, the lists of archives at the end.
        near = draw(st.sampled_from((64, 600, len(content))))
        place = min(draw(st.integers(0, near)), len(content))
        place = len(content) - place if draw(st.booleans()) else place
        end = min(len(content), place + draw(st.integers(0, 20)))
        kind = draw(st.sampled_from(("flip", "cut", "word", "number", "twice", "join")))
        if kind == "flip" and place < len(content):
            bit = 1 << draw(st.integers(0, 7))
            changed = bytes([content[place] ^ bit])
            content = content[:place] + changed + content[place + 1 :]
        elif kind == "cut":
            content = content[:place] + content[end:]
        elif kind == "word":
            content = content[:place] + draw(st.sampled_from(WORDS)) + content[end:]
        elif kind == "number":
            form = draw(st.sampled_from(FORMS))
            most = 2 ** (8 * struct.calcsize(form)) - 1
            number = struct.pack(form, min(draw(st.sampled_from(NUMBERS)), most))
            content = content[:place] + number + content[place + len(number) :]
        elif kind == "twice":
            content = content[:end] + content[place:]
        else:
            other = draw(st.sampled_from(inputs(name)))
            content = content[:place] + other[min(place, len(other)) :]
    return content


@pytest.mark.parametrize(
    ("name", "file"),
    [(f.parent.name, f.name) for f in sorted(CORPUS.glob("*/*"))],
)
def test_an_input_of_the_corpus_is_read_or_refused(name: str, file: str) -> None:
    TARGETS[name]((CORPUS / name / file).read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_valid_is_not_refused(name: str) -> None:
    for file in sorted((CORPUS / name).glob("valid-*")):
        TARGETS[name](file.read_bytes())
        assert REFUSED == [], file.name


def test_every_target_has_a_corpus() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=250)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused_in_little_memory(
    name: str, data: st.DataObject
) -> None:
    content = data.draw(changed(name))
    tracemalloc.start()
    try:
        TARGETS[name](content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
