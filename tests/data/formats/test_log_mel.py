from math import cos, log10, pi

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedspu.data.formats.log_mel import SCALING, band_edges, log_mel, read_log_mel
from tests.data.clips import sound_file, tone


def steady(frequency: float, strength: float = 0.1) -> NDArray[np.float64]:
    return strength * np.sin(2 * np.pi * frequency * np.arange(16_000) / 16_000)


def test_bands_are_even_on_the_mel_scale_from_20_to_8000_hz() -> None:
    edges = band_edges()
    assert len(edges) == 34
    assert (round(edges[0], 6), round(edges[-1], 6)) == (20, 8000)
    mels = 2595 * np.log10(1 + edges / 700)
    np.testing.assert_allclose(np.diff(mels), (mels[-1] - mels[0]) / 33)


@pytest.mark.parametrize("band", range(32))
def test_a_pure_tone_peaks_in_its_band_in_every_frame(band: int) -> None:
    picture = log_mel(steady(band_edges()[band + 1]))
    assert (picture[:, 1:-1].argmax(axis=0) == band).all()


@pytest.mark.parametrize(("frequency", "band"), [(100, 0), (1000, 10), (4000, 24)])
def test_the_band_of_a_round_frequency_by_hand(frequency: float, band: int) -> None:
    # Peaks lie at 31.7 + 85.1 (band + 1) mel; the three are at 150, 1000, 2146 mel.
    picture = log_mel(steady(frequency))
    assert picture[:, 16].argmax() == band


def test_ten_times_weaker_is_twenty_decibels_lower() -> None:
    loud, soft = (log_mel(steady(1000, s))[10, 16] for s in (0.1, 0.01))
    assert abs(int(loud) - int(soft) - 20 * 255 / 120) <= 1


def test_the_level_of_a_tone_by_hand() -> None:
    # In the middle of a bin, a sine of strength a has the power (a 1024 / 4)² there and
    # a quarter of it in each neighbour; the triangle around it weighs all three.
    middle = 64 * 16_000 / 1024  # 1000 Hz, bin 64
    edges = band_edges()
    low, peak, high = edges[10], edges[11], edges[12]

    def weight(f: float) -> float:
        return float(min((f - low) / (peak - low), (high - f) / (high - peak)))

    step = 16_000 / 1024
    around = weight(middle) + (weight(middle - step) + weight(middle + step)) / 4
    decibels = 10 * log10((0.1 * 1024 / 4) ** 2 * around)
    assert log_mel(steady(1000, 0.1))[10, 16] == round((decibels + 80) * 255 / 120)


def test_silence_is_zero() -> None:
    assert not log_mel(np.zeros(16_000)).any()


def test_columns_are_time() -> None:
    click = np.zeros(16_000)
    click[512 * 20] = 1.0
    heard = np.flatnonzero(log_mel(click).sum(axis=0))
    assert heard.tolist() == [20]  # at the ends of frames 19 and 21 the window is 0


def test_a_short_clip_ends_in_silence() -> None:
    short = tone(500, seconds=0.3)
    whole = np.concatenate([short, np.zeros(16_000 - len(short))])
    assert np.array_equal(log_mel(short), log_mel(whole))


def test_a_long_clip_is_cut_after_a_second() -> None:
    long = np.concatenate([steady(500), steady(3000)])
    assert np.array_equal(log_mel(long), log_mel(steady(500)))


def test_the_quick_way_equals_the_plain_one() -> None:
    wave = np.random.default_rng(0).normal(0, 0.1, 16_000)
    edges = band_edges()
    padded = [*wave[512:0:-1], *wave, *wave[-2:-514:-1]]
    window = [0.5 - 0.5 * cos(2 * pi * n / 1024) for n in range(1024)]
    expected = np.zeros((32, 32))
    for frame in range(32):
        start = 512 * frame
        cut = [s * w for s, w in zip(padded[start : start + 1024], window, strict=True)]
        power = abs(np.fft.fft(cut)[:513]) ** 2
        for band in range(32):
            total = 0.0
            for place in range(513):
                low, peak, high = edges[band : band + 3]
                f = place * 16_000 / 1024
                if low < f < high:
                    rising, falling = (
                        (f - low) / (peak - low),
                        (high - f) / (high - peak),
                    )
                    total += power[place] * min(rising, falling)
            decibels = 10 * log10(max(total, 1e-8))
            expected[band, frame] = round((decibels + 80) * 255 / 120)
    assert np.array_equal(log_mel(wave), expected.clip(0, 255))


def test_a_file_gives_one_channel_of_bytes() -> None:
    picture = read_log_mel(sound_file(tone(440, 44_100), 44_100), "a.wav")
    assert picture.shape == (1, 32, 32)
    assert picture.dtype == np.uint8


def test_a_tone_has_the_same_picture_at_any_rate() -> None:
    one, other = (
        read_log_mel(sound_file(tone(440, rate), rate, subtype="FLOAT"), "a.wav")
        for rate in (16_000, 44_100)
    )
    # Where there is sound at all: the rest is the rounding of each.
    loud = one > 120
    assert loud.sum() > 50
    assert np.abs(one.astype(int) - other)[loud].max() <= 1


def test_bytes_are_taken_from_minus_one_to_one() -> None:
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    assert SCALING.apply(ends).flatten().tolist() == [-1, 1]
