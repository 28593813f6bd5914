import sys
import wave
from io import BytesIO

import numpy as np
import pytest

from fedspu.data.formats.sound import decode
from fedspu.errors import DataError
from tests.data.clips import sound_file, tone

TONE = tone(440)


def test_sixteen_bits_are_read_exactly() -> None:
    file = BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, 16_000, 0, "NONE", ""))
        opened.writeframes(np.array([0, 1, -32768, 16384], dtype="<i2").tobytes())
    samples = decode(file.getvalue(), "a.wav", seconds=1)
    assert samples.tolist() == [0, 1 / 32768, -1, 0.5]


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_U8", 1 / 127),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "PCM_32", 1e-8),
        ("WAV", "FLOAT", 1e-7),
        ("WAV", "DOUBLE", 1e-12),
        ("WAVEX", "PCM_16", 1e-4),
        ("FLAC", "PCM_16", 1e-4),
        ("FLAC", "PCM_24", 1e-6),
    ],
)
def test_any_width_is_read(kind: str, subtype: str, tolerance: float) -> None:
    content = sound_file(TONE, format=kind, subtype=subtype)
    name = "a.flac" if kind == "FLAC" else "a.wav"
    np.testing.assert_allclose(decode(content, name, 1), TONE, atol=tolerance)


def test_channels_are_averaged() -> None:
    content = sound_file(np.stack([TONE, TONE / 2], axis=1), subtype="FLOAT")
    np.testing.assert_allclose(decode(content, "a.wav", 1), TONE * 0.75, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 16001, 22050, 44100, 48000])
def test_any_rate_becomes_sixteen_thousand(rate: int) -> None:
    content = sound_file(tone(440, rate), rate, subtype="FLOAT")
    np.testing.assert_allclose(decode(content, "a.wav", 1), TONE, atol=1e-3)


def test_what_sixteen_thousand_samples_cannot_hold_vanishes() -> None:
    content = sound_file(tone(10_000, 48_000), 48_000, subtype="FLOAT")
    assert np.abs(decode(content, "a.wav", 1)).max() < 1e-3


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 8000), (3.0, 16_000)])
def test_a_short_clip_is_kept_and_a_long_one_cut(
    rate: int, seconds: float, expected: int
) -> None:
    content = sound_file(tone(440, rate, seconds), rate)
    assert len(decode(content, "a.wav", seconds=1)) == expected


def test_a_clip_of_one_sample_is_a_clip() -> None:
    assert len(decode(sound_file(np.array([0.5]), 48_000), "a.wav", 1)) == 1


def test_a_wav_whose_writer_did_not_know_its_size_is_read() -> None:
    content = bytearray(sound_file(TONE))
    content[4:8] = content[40:44] = b"\xff" * 4  # of the file, of its samples
    np.testing.assert_allclose(decode(bytes(content), "a.wav", 1), TONE, atol=1e-4)


def test_a_suffix_may_be_in_capitals() -> None:
    assert len(decode(sound_file(TONE), "A.WAV", 1)) == 16_000


NOISE = np.random.default_rng(0).uniform(-1, 1, 16_000)
FLAC = sound_file(NOISE, format="FLAC")
DAMAGED = FLAC[:9000] + b"\x55" * 3000 + FLAC[12_000:]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.wav", b"", "cannot be read (.*)"),
        ("a.wav", b"hello" * 100, "cannot be read (.*)"),
        ("a.flac", b"fLaC" + b"hello" * 100, "cannot be read (.*)"),
        ("a.wav", sound_file(TONE)[:20_000], "is cut off: 20000 of 32044 bytes"),
        ("a.wav", sound_file(TONE)[:30], "is cut off: 30 of 32044 bytes"),
        ("a.flac", FLAC[:9000], "(is cut off|cannot be read)"),
        ("a.flac", DAMAGED, "(is cut off|cannot be read)"),
        ("a.wav", sound_file(np.zeros(0)), "holds no sound: 0 samples"),
        ("a.wav", sound_file(TONE, 2_000_000), "has 2000000 samples a second"),
        ("a.wav", sound_file(TONE, 2), "has 2 samples a second"),
        (
            "a.wav",
            sound_file(np.full(9, np.nan), subtype="FLOAT"),
            "holds NaN or infinite",
        ),
        (
            "a.wav",
            sound_file(np.full(9, np.inf), subtype="FLOAT"),
            "holds NaN or infinite",
        ),
        ("a.wav", FLAC, "holds FLAC sound; expected WAV"),
        ("a.flac", sound_file(TONE), "holds WAV sound; expected FLAC"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    name: str, content: bytes, complaint: str
) -> None:
    with pytest.raises(DataError, match=f"^{name} {complaint}") as caught:
        decode(content, name, seconds=1)
    assert "; expected " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_that_asks_for_much_memory_is_refused() -> None:
    content = bytearray(sound_file(np.zeros((9, 17))))
    with pytest.raises(DataError, match="has 17 channels, more than 16"):
        decode(bytes(content), "a.wav", seconds=1)
    content = bytearray(FLAC)
    content[21] |= 0x0F  # the high bits of the number of samples
    with pytest.raises(DataError, match=r"(is cut off|cannot be read)"):
        decode(bytes(content), "a.flac", seconds=1)


def test_other_formats_of_the_library_are_refused() -> None:
    for kind in ("AIFF", "OGG", "CAF"):
        content = sound_file(TONE, format=kind, subtype=None)
        with pytest.raises(DataError, match="neither WAV nor FLAC"):
            decode(content, "a.wav", seconds=1)


def test_a_missing_library_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        DataError, match=r"pip install .* '\.\[audio\]' in the folder of fedspu$"
    ):
        decode(sound_file(TONE), "a.wav", 1)
