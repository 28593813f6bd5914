"""A second of sound as a picture of 32x32 bytes: its log-mel spectrogram.

The paper's code reads ready-made 32x32 inputs and does not say how they were made; this
recipe is ours:

1. cut the wave, or fill it up with silence, to 16,000 samples (a second);
2. reflect 512 samples at each end, and take 32 frames of 1,024 samples, 512 apart,
   each under a Hann window;
3. take the power spectrum of each frame, and sum it under 32 triangles whose corners
   are evenly spaced on the mel scale (HTK's: 2595 log10(1 + f/700)) from 20 to 8,000
   Hz;
4. convert that to decibels, 10 log10(max(power, 1e-8)), and map -80 to 40 dB onto the
   bytes 0 to 255.

Rows are mel bands from low to high, columns are frames in time.
"""

from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedspu.data.dataset import Scaling
from fedspu.data.formats.sound import RATE, decode

RECIPE = "log-mel 32x32, 1"
"""To be changed whenever ``log_mel`` gives other bytes: caches depend on it."""

SCALING = Scaling(mean=(0.5,), deviation=(0.5,))
"""As in the paper's code: x / 255, then (x - 0.5) / 0.5."""

NUM_SAMPLES = 16_000
NUM_FRAMES = 32
NUM_BANDS = 32
FRAME = 1024
HOP = 512
LOWEST, HIGHEST = 20.0, 8000.0
SILENCE, LOUDEST = -80.0, 40.0


def read_log_mel(content: bytes, name: str) -> NDArray[np.uint8]:
    """The log-mel spectrogram of the sound file ``name``, (1, bands, frames)."""
    return log_mel(decode(content, name, NUM_SAMPLES / RATE))[None]


def log_mel(wave: NDArray[np.floating]) -> NDArray[np.uint8]:
    """The log-mel spectrogram (bands, frames) of a wave from -1 to 1 at 16 kHz."""
    second = np.zeros(NUM_SAMPLES)
    second[: len(wave)] = wave[:NUM_SAMPLES]
    padded = np.pad(second, FRAME // 2, mode="reflect")
    frames = sliding_window_view(padded, FRAME)[::HOP][:NUM_FRAMES]

    power = np.abs(np.fft.rfft(frames * _window())) ** 2
    decibels = 10 * np.log10(np.maximum(_triangles() @ power.T, 1e-8))
    scaled = (decibels - SILENCE) * 255 / (LOUDEST - SILENCE)
    picture: NDArray[np.uint8] = np.clip(np.round(scaled), 0, 255).astype(np.uint8)
    return picture


def band_edges() -> NDArray[np.float64]:
    """The corners of the triangles in Hz: band b has its peak at corner b + 1."""
    lowest, highest = (2595 * np.log10(1 + f / 700) for f in (LOWEST, HIGHEST))
    mels = np.linspace(lowest, highest, NUM_BANDS + 2)
    return np.asarray(700 * (10 ** (mels / 2595) - 1))


@cache
def _window() -> NDArray[np.float64]:
    """A Hann window with the period of a frame."""
    return np.hanning(FRAME + 1)[:-1]


@cache
def _triangles() -> NDArray[np.float64]:
    """How much of each frequency each band takes: (bands, frequencies)."""
    frequencies = np.fft.rfftfreq(FRAME, 1 / RATE)
    edges = band_edges()[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - low) / (middle - low)
    falling = (high - frequencies) / (high - middle)
    return np.maximum(np.minimum(rising, falling), 0)
