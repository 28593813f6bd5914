import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from fedspu.data import bounds
from fedspu.data.dataset import Dataset
from fedspu.data.formats import log_mel
from fedspu.data.sets import speech
from fedspu.errors import DataError
from tests.data.clips import sound_file, tone

Files = dict[str, bytes]
Put = Callable[[Path, Files], Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for each test, not the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSPU_CACHE", str(folder))
    return folder


@pytest.fixture
def files() -> Files:
    """A clip of each word by one speaker, and a second "yes" by another."""
    clips = {
        f"{word}/0a1b2c3d_nohash_0.wav": sound_file(
            tone(200 + 100 * label, seconds=0.1)
        )
        for label, word in enumerate(speech.WORDS)
    }
    clips["yes/00ff00ff_nohash_12.wav"] = sound_file(tone(500, seconds=0.1))
    return clips


def unpacked(folder: Path, files: Files) -> Path:
    root = folder / "data"
    for name, content in files.items():
        file = root / "speech_commands_v0.02" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return root


def packed(folder: Path, files: Files) -> Path:
    """The archive as it is distributed: names start with ./ and folders are members."""
    root = folder / "packed"
    root.mkdir()
    with tarfile.open(root / "speech_commands_v0.02.tar.gz", "w:gz") as archive:
        for name in sorted({name.partition("/")[0] for name in files if "/" in name}):
            member = tarfile.TarInfo(f"./{name}")
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return root


def equal(one: Dataset, other: Dataset) -> bool:
    assert one.owners is not None
    assert other.owners is not None
    return (
        torch.equal(one.x, other.x)
        and torch.equal(one.y, other.y)
        and torch.equal(one.owners, other.owners)
    )


def refuse(*_: object) -> NoReturn:
    raise AssertionError("decoded again")


def test_there_are_thirty_five_words_in_the_order_of_the_alphabet() -> None:
    assert len(set(speech.WORDS)) == 35
    assert sorted(speech.WORDS) == list(speech.WORDS)


def test_every_clip_has_its_word_and_its_speaker(tmp_path: Path, files: Files) -> None:
    dataset = speech.load(unpacked(tmp_path, files))
    assert dataset.classes == speech.WORDS
    assert dataset.y.bincount(minlength=35).tolist() == [1] * 33 + [2, 1]
    # "yes" by speaker 00ff00ff comes before "yes" by 0a1b2c3d.
    assert dataset.owners is not None
    assert dataset.owners.tolist() == [1] * 33 + [0, 1, 1]


def test_an_example_is_the_spectrogram_of_its_clip(
    tmp_path: Path, files: Files
) -> None:
    dataset = speech.load(unpacked(tmp_path, files))
    expected = log_mel.read_log_mel(files["backward/0a1b2c3d_nohash_0.wav"], "a.wav")
    assert dataset.x.dtype == torch.uint8
    assert dataset.x.shape == (36, 1, 32, 32)
    assert np.array_equal(dataset.x[0].numpy(), expected)
    x, _ = dataset.take(slice(0, 1))
    torch.testing.assert_close(x, (dataset.x[:1].float() / 255 - 0.5) / 0.5)


def test_the_archive_and_the_folder_give_the_same(tmp_path: Path, files: Files) -> None:
    one = speech.load(unpacked(tmp_path, files))
    other = speech.load(packed(tmp_path, files))
    assert equal(one, other)


def test_the_order_in_the_archive_does_not_matter(tmp_path: Path, files: Files) -> None:
    shuffled = dict(reversed(files.items()))
    one = speech.load(unpacked(tmp_path, files))
    assert equal(one, speech.load(packed(tmp_path, shuffled)))


@pytest.mark.parametrize("put", [unpacked, packed])
def test_background_noise_is_left_out_and_counted(
    tmp_path: Path, files: Files, put: Put
) -> None:
    files["_background_noise_/pink_noise.wav"] = sound_file(tone(100, seconds=0.1))
    files["_background_noise_/README.md"] = b"about the noise"
    files["LICENSE"] = b"CC BY 4.0"
    dataset = speech.load(put(tmp_path, files))
    assert len(dataset.y) == 36
    assert dataset.notes[0] == "left out, without words (_background_noise_): 1"


def test_flac_clips_are_as_good(tmp_path: Path, files: Files) -> None:
    one = speech.load(unpacked(tmp_path / "wav", files))
    flacs = {
        name.replace(".wav", ".flac"): sound_file(tone(100 * label), format="FLAC")
        for label, name in enumerate(files)
    }
    other = speech.load(unpacked(tmp_path / "flac", flacs))
    assert one.y.tolist() == other.y.tolist()


def test_a_second_load_decodes_nothing(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = packed(tmp_path, files)
    one = speech.load(root)
    monkeypatch.setattr(log_mel, "read_log_mel", refuse)
    assert equal(one, speech.load(root))


def test_a_new_clip_is_seen(tmp_path: Path, files: Files) -> None:
    assert len(speech.load(unpacked(tmp_path, files)).y) == 36
    files["zero/abc_nohash_1.wav"] = sound_file(tone(300))
    assert len(speech.load(unpacked(tmp_path, files)).y) == 37


@pytest.mark.parametrize(
    "place",
    [
        "speech/speech_commands_v0.02",
        "SpeechCommands/speech_commands_v0.02",
        "speech",
        ".",
    ],
)
def test_the_unpacked_folder_is_found(tmp_path: Path, files: Files, place: str) -> None:
    root = unpacked(tmp_path, files)
    target = tmp_path / "there" / place
    target.parent.mkdir(parents=True, exist_ok=True)
    (root / "speech_commands_v0.02").rename(target)
    assert len(speech.load(tmp_path / "there").y) == 36


def test_without_files_it_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"speech: .* fetch speech.*commands_v0\.02\.tar\.gz \(2,428,923,189 b",
    ):
        speech.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("yes/bad_nohash_0.wav", b"no sound", r"yes/bad_nohash_0\.wav cannot be read"),
        (
            "yes/bad_nohash_0.wav",
            sound_file(tone(9))[:99],
            "bad.* cut off: 99 of 32044",
        ),
        ("yes/bad_nohash_0.wav", sound_file(tone(9))[:0], "bad.* cannot be read"),
        ("yes/hello.wav", sound_file(tone(9)), r"yes/hello\.wav: expected <word>/<sp"),
        ("hi/bad_nohash_0.wav", sound_file(tone(9)), r"hi/bad.*: expected .* 35 words"),
    ],
)
@pytest.mark.parametrize("put", [unpacked, packed])
def test_a_bad_clip_is_named_and_no_cache_is_left(
    tmp_path: Path,
    files: Files,
    own_cache: Path,
    put: Put,
    name: str,
    content: bytes,
    complaint: str,
) -> None:
    root = put(tmp_path, {**files, name: content})
    with pytest.raises(DataError, match=complaint) as caught:
        speech.load(root)
    assert "\n" not in str(caught.value)
    assert not own_cache.exists()


@pytest.mark.parametrize("put", [unpacked, packed])
def test_a_missing_word_is_named(tmp_path: Path, files: Files, put: Put) -> None:
    del files["visual/0a1b2c3d_nohash_0.wav"]
    with pytest.raises(DataError, match=r"1 of the 35 words .*\(visual\).* version 2"):
        speech.load(put(tmp_path, files))


@pytest.mark.parametrize("kept", [0, 10, 1000, -4])
def test_a_truncated_archive_is_refused(
    tmp_path: Path, files: Files, own_cache: Path, kept: int
) -> None:
    root = packed(tmp_path, files)
    archive = root / "speech_commands_v0.02.tar.gz"
    archive.write_bytes(archive.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"0\.02\.tar\.gz: damaged .*Download"):
        speech.load(root)
    assert not own_cache.exists()


def test_a_clip_that_comes_twice_is_refused(tmp_path: Path, files: Files) -> None:
    name = next(iter(files))
    files[f"again/{name}"] = files[name]
    with pytest.raises(DataError, match=f"{name} is there twice; remove one"):
        speech.load(packed(tmp_path, files))


def test_a_clip_that_is_too_large_is_refused(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SOUND_FILE", 100)
    for put in (packed, unpacked):
        with pytest.raises(DataError, match=r"bytes[;,] expected at most 100"):
            speech.load(put(tmp_path, files))


def test_a_damaged_archive_is_refused(tmp_path: Path, files: Files) -> None:
    root = packed(tmp_path, files)
    archive = root / "speech_commands_v0.02.tar.gz"
    content = bytearray(archive.read_bytes())
    content[-6] ^= 1  # in the checksum at its end
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"0\.02\.tar\.gz: damaged .*Download"):
        speech.load(root)
