"""Sound files, WAV and FLAC, as waves of one channel at 16 kHz.

They are read by the soundfile library, which includes libsndfile: the extra ``audio``.
"""

from io import BytesIO
from math import ceil, gcd
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.files import reason, shown
from fedspu.errors import DataError, how_to_install

RATE = 16_000

FORMATS = {".wav": ("WAV", "WAVEX", "RF64"), ".flac": ("FLAC",)}
"""A sound file's suffix -> the formats that libsndfile may find in it."""

STARTS = (b"RIFF", b"RF64", b"fLaC")  # libsndfile would take many more kinds
LOWEST_RATE, HIGHEST_RATE = 1_000, 1_000_000  # beyond these a header is damaged

Wave = NDArray[np.float64]


def decode(content: bytes, name: str, seconds: float) -> Wave:
    """The first ``seconds`` of the sound file ``name``, or all of a shorter one.

    Integers of any width are scaled to -1 to 1, floats are kept, channels are averaged.
    """
    soundfile = _library()
    if not content.startswith(STARTS):
        raise _broken(name, "cannot be read (neither WAV nor FLAC)")
    _refuse_cut_wav(content, name)
    try:
        with soundfile.SoundFile(BytesIO(content)) as opened:
            kind, rate, num_frames = opened.format, opened.samplerate, opened.frames
            _refuse_odd(name, rate, opened.channels)
            wanted = min(num_frames, ceil(seconds * rate))
            channels = opened.read(wanted, dtype="float64", always_2d=True)
    except DataError:
        raise
    except Exception as error:  # damage, which the library tells in many ways
        why = getattr(error, "error_string", "").strip(" .") or reason(error)
        raise _broken(name, f"cannot be read ({why})") from None

    expected = FORMATS[Path(name).suffix.lower()]
    if kind not in expected:
        raise DataError(
            f"{shown(name)} holds {kind} sound; expected {expected[0]}; give it the "
            "right suffix, or convert it"
        )
    if num_frames == 0:
        raise _broken(name, "holds no sound: 0 samples")
    if len(channels) < wanted:
        raise _broken(name, f"is cut off: {len(channels)} of {wanted} samples")
    if not np.isfinite(channels).all():
        raise _broken(name, "holds NaN or infinite samples")
    return resample(channels.mean(axis=1), rate)


def resample(wave: Wave, rate: int) -> Wave:
    """A wave of ``rate`` samples a second as one of 16,000.

    Its Fourier series is cut at the lower of the two Nyquist frequencies, or continued
    with zeros; silence added at the end keeps it from wrapping around to the start.
    """
    if rate == RATE:
        return wave
    step = rate // gcd(rate, RATE)  # this many samples become a whole number of ours
    before = step * ceil((len(wave) + rate) / step)
    after = before * RATE // rate
    spectrum = np.fft.rfft(wave, before)
    kept = np.zeros(after // 2 + 1, dtype=spectrum.dtype)
    same = min(before, after) // 2
    kept[:same] = spectrum[:same]
    return np.fft.irfft(kept, after)[: ceil(len(wave) * RATE / rate)] * after / before


def _refuse_odd(name: str, rate: int, num_channels: int) -> None:
    """Raise a DataError for a header that would take much memory."""
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise _broken(name, f"has {rate} samples a second")
    if num_channels > bounds.SOUND_CHANNELS:
        raise _broken(
            name, f"has {num_channels} channels, more than {bounds.SOUND_CHANNELS}"
        )


def _refuse_cut_wav(content: bytes, name: str) -> None:
    """Raise a DataError for a WAV file that ends early; libsndfile does not notice."""
    size = int.from_bytes(content[4:8], "little") + 8
    is_open_ended = content[4:8] == b"\xff" * 4  # the writer did not know the size
    if content[:4] == b"RIFF" and not is_open_ended and size > len(content):
        raise _broken(name, f"is cut off: {len(content)} of {size} bytes")


def _broken(name: str, found: str) -> DataError:
    return DataError(
        f"{shown(name)} {found}; expected a whole sound file; replace or remove it"
    )


def _library() -> ModuleType:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: libsndfile is missing
        raise DataError(
            "reading sound needs the soundfile library; install it with: "
            f"{how_to_install('audio')}"
        ) from None
    return soundfile  # type: ignore[no-any-return]  # it ships no type hints
