"""Small sounds for the tests, made on the spot."""

from io import BytesIO
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

Wave = NDArray[np.float64]


def tone(frequency: float, rate: int = 16_000, seconds: float = 1.0) -> Wave:
    """A sine that swells and fades: its edges hold no other frequencies."""
    time = np.arange(round(seconds * rate)) / rate
    return np.sin(np.pi * time / seconds) ** 2 * np.sin(2 * np.pi * frequency * time)


def sound_file(wave: Wave, rate: int = 16_000, **how: Any) -> bytes:
    """A WAV file with 16 bits a sample, unless ``how`` says something else."""
    file = BytesIO()
    soundfile.write(file, wave, rate, **{"format": "WAV", "subtype": "PCM_16", **how})
    return file.getvalue()
