"""Google Speech Commands, version 2: 105,829 clips of 35 words by 2,618 speakers.

P. Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition", 2018,
https://arxiv.org/abs/1804.03209, CC BY 4.0. A clip is a WAV file of at most a second,
``<word>/<speaker>_nohash_<n>.wav``; all are joined, whatever official part they are in.
Their spectrograms (log_mel.py) are the examples.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath

import numpy as np
import torch

from fedspu.data import bounds
from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import Dataset
from fedspu.data.files import Download, not_here, opened, places, read, shown
from fedspu.data.formats import log_mel, tar
from fedspu.data.formats.class_folders import list_classes
from fedspu.data.formats.sound import FORMATS
from fedspu.errors import DataError

RECIPE = f"speech, 1; {log_mel.RECIPE}"
UNPACKED = "speech_commands_v0.02"
DOWNLOADS = (
    Download(
        "https://storage.googleapis.com/download.tensorflow.org/data/"
        "speech_commands_v0.02.tar.gz",
        size=2_428_923_189,
        checksum="sha256:"
        "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
    ),
)
WORDS = (
    *("backward", "bed", "bird", "cat", "dog", "down", "eight", "five", "follow"),
    *("forward", "four", "go", "happy", "house", "learn", "left", "marvin", "nine"),
    *("no", "off", "on", "one", "right", "seven", "sheila", "six", "stop", "three"),
    *("tree", "two", "up", "visual", "wow", "yes", "zero"),
)
NOISE = "_background_noise_"  # long recordings without words
Clip = tuple[str, str, bytes]
"""Its folder, the name of its file, and the file's bytes."""


def find(folder: Path | None) -> list[Path]:
    """The unpacked folder, or else the archive; empty if neither is here."""
    for place in places("speech", folder, ["SpeechCommands"]):  # torchaudio's
        for unpacked in (place / UNPACKED, place):
            if any((unpacked / word).is_dir() for word in WORDS):
                return [unpacked]
        archive = place / DOWNLOADS[0].name
        if archive.is_file():
            return [archive]
    return []


def load(folder: Path | None = None) -> Dataset:
    """All clips with a word, as spectrograms of bytes, (105829, 1, 32, 32)."""
    found = find(folder)
    if not found:
        raise not_here("speech", folder, DOWNLOADS)
    source = found[0]
    notes: tuple[str, ...] = ()
    if source.is_dir():
        listing = list_classes(source, FORMATS, "WAV or FLAC files")
        found, notes = list(listing.files), listing.notes

    arrays = cached("speech", RECIPE, found, lambda: _decode(source, found))
    num_left_out = int(arrays["left_out"][0])
    if num_left_out > 0:
        notes = (f"left out, without words ({NOISE}): {num_left_out}", *notes)
    return Dataset(
        name="speech",
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(arrays["y"]),
        num_classes=len(WORDS),
        classes=WORDS,
        owners=torch.from_numpy(arrays["owners"]),
        scaling=log_mel.SCALING,
        sources=tuple(found),
        cache=cache_place("speech", RECIPE, found),
        notes=notes,
    )


def _in_folder(files: list[Path]) -> Iterator[Clip]:
    for file in files:
        yield file.parent.name, file.name, read(file, bounds.SOUND_FILE)


def _in_archive(archive: Path) -> Iterator[Clip]:
    """The clips of a .tar.gz, in its order; nothing is unpacked to disk."""
    with opened(archive) as stream:
        members = tar.members(stream, shown(archive), bounds.SPEECH_ARCHIVE, _wanted)
        for path, content in members:
            yield path.parent.name, path.name, content


def _wanted(path: PurePath) -> int:
    is_clip = path.suffix in FORMATS and not path.name.startswith(".")
    return bounds.SOUND_FILE if is_clip else 0


def _decode(source: Path, files: list[Path]) -> Arrays:
    """Spectrograms, words and speakers, sorted by file, whatever order they come in."""
    clips = _in_folder(files) if source.is_dir() else _in_archive(source)
    names, speakers, spectra, left_out = [], [], [], 0
    for word, file, content in clips:
        name = str(source / word / file)
        if word == NOISE:
            left_out += 1
            continue
        speaker = re.fullmatch(r"([0-9a-f]+)_nohash_\d+\.(wav|flac)", file)
        if word not in WORDS or speaker is None:
            raise DataError(
                f"{shown(name)}: expected <word>/<speaker>_nohash_<n>.wav with one of "
                "the 35 words; for clips of your own use sounds:FOLDER"
            )
        names.append(f"{word}/{file}")
        speakers.append(speaker[1])
        spectra.append(log_mel.read_log_mel(content, name))

    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{shown(source)}: {shown(twice)} is there twice; remove one")
    words = [name.partition("/")[0] for name in names]
    missing = sorted(set(WORDS) - set(words))
    if missing:
        raise DataError(
            f"{shown(source)}: {len(missing)} of the 35 words have no clips "
            f"({', '.join(missing)}); expected version 2 of the data set; for some of "
            "the words use sounds:FOLDER"
        )
    order = np.argsort(names)
    return {
        "x": np.stack(spectra)[order],
        "y": np.array([WORDS.index(word) for word in words])[order],
        "owners": np.unique(speakers, return_inverse=True)[1][order],
        "left_out": np.array([left_out]),
    }
