import gzip
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from fedspu import data
from fedspu.data.sets import emnist
from fedspu.errors import DataError
from tests.data import files as formats

TRAIN, TEST = [0, 10, 36, 61], [35, 9]


def unpack(archive: Path, folder: Path) -> None:
    with ZipFile(archive) as opened:
        opened.extractall(folder)


def test_the_official_archive_gives_upright_images_joined(tmp_path: Path) -> None:
    formats.write_emnist_zip(tmp_path / "emnist/gzip.zip", TRAIN, TEST)
    dataset = data.load("emnist", tmp_path)
    assert dataset.y.tolist() == [*TRAIN, *TEST]
    assert dataset.x.shape == (6, 1, 28, 28)
    assert np.array_equal(dataset.x[:, 0].numpy(), formats.images(6))


def test_classes_are_digits_then_capitals_then_small_letters(tmp_path: Path) -> None:
    formats.write_emnist_zip(tmp_path / "emnist/gzip.zip", TRAIN, TEST)
    dataset = data.load("emnist", tmp_path)
    assert [dataset.classes[y] for y in dataset.y] == ["0", "A", "a", "z", "Z", "9"]
    assert dataset.num_outputs == 62


def test_the_papers_settings_are_suggested() -> None:
    assert data.DATASETS["emnist"].defaults == {
        "model": "emnist",
        "train.lr": 2e-4,
        "train.batch_size": 16,
    }


@pytest.mark.parametrize("place", ["emnist", "emnist/gzip", "gzip", "EMNIST/raw"])
def test_the_unpacked_folder_gives_the_same(tmp_path: Path, place: str) -> None:
    archive = formats.write_emnist_zip(tmp_path / "elsewhere.zip", TRAIN, TEST)
    unpack(archive, tmp_path / "unpacked")
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / "unpacked/gzip").rename(tmp_path / place)
    for folder in (tmp_path, tmp_path / place):  # or the very folder
        dataset = data.load("emnist", folder)
        assert np.array_equal(dataset.x[:, 0].numpy(), formats.images(6))


def test_an_archive_without_its_inner_folder_will_do(tmp_path: Path) -> None:
    unpack(formats.write_emnist_zip(tmp_path / "a.zip", TRAIN, TEST), tmp_path / "a")
    with ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for file in (tmp_path / "a/gzip").iterdir():
            archive.write(file, file.name)
    assert len(data.load("emnist", tmp_path).y) == 6


def test_an_archive_under_torchvisions_name_is_found(tmp_path: Path) -> None:
    formats.write_emnist_zip(tmp_path / "EMNIST/raw/emnist.zip", TRAIN, TEST)
    assert len(data.load("emnist", tmp_path).y) == 6


def test_what_is_not_here_says_which_file_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"gzip\.zip \(561,753,746 bytes, sha256:fb9bb67e.*/emnist$"
    ):
        data.load("emnist", tmp_path)


def cut(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-30])


def garble(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[200] ^= 255
    archive.write_bytes(content)


def empty(archive: Path) -> None:
    archive.write_bytes(b"")


def without_byclass(archive: Path) -> None:
    with ZipFile(archive, "w") as opened:
        opened.writestr("gzip/emnist-letters-train-images-idx3-ubyte.gz", b"")


def with_wrong_label(archive: Path) -> None:
    formats.write_emnist_zip(archive, [0, 62, 1, 2], TEST)


def encrypt(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    for sign, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = content.find(sign)
        content[start + place] |= 1  # the flag alone
    archive.write_bytes(content)


def with_a_cut_member(archive: Path) -> None:
    whole = gzip.compress(formats.idx(formats.images(4)))
    with ZipFile(archive, "w") as opened:
        for stem in formats.EMNIST_STEMS:
            opened.writestr(f"gzip/{stem}.gz", whole[:-20])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, "damaged .*File is not a zip file.*expected gzip.zip .561,753,746"),
        (
            garble,
            "gzip.zip/gzip/emnist-byclass-train-images-idx3-ubyte.gz: cannot be read",
        ),
        (empty, "damaged .*File is not a zip file"),
        (encrypt, "cannot be read .*is encrypted, password required"),
        (without_byclass, "holds no emnist-byclass-train-images-idx3-ubyte.gz"),
        (with_wrong_label, "the label 62; expected labels from 0 to 61"),
        (with_a_cut_member, "cannot be read .*end-of-stream"),
    ],
)
def test_a_bad_archive_gives_an_error_and_no_cache(
    tmp_path: Path, own_folders: Path, damage: object, says: str
) -> None:
    assert callable(damage)
    archive = formats.write_emnist_zip(tmp_path / "emnist/gzip.zip", TRAIN, TEST)
    damage(archive)
    with pytest.raises(DataError, match=says) as caught:
        data.load("emnist", tmp_path)
    assert str(archive) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (own_folders / "cache").exists()


def test_an_archive_that_lacks_one_file_is_told(tmp_path: Path) -> None:
    whole = formats.write_emnist_zip(tmp_path / "a.zip", TRAIN, TEST)
    with ZipFile(whole) as old, ZipFile(tmp_path / "gzip.zip", "w") as new:
        for stem in formats.EMNIST_STEMS[:3]:
            new.writestr(f"gzip/{stem}.gz", old.read(f"gzip/{stem}.gz"))
    with pytest.raises(DataError, match=r"test-labels-idx1-ubyte\.gz is missing"):
        data.load("emnist", tmp_path)


def test_the_decoded_arrays_are_kept_once(tmp_path: Path, own_folders: Path) -> None:
    formats.write_emnist_zip(tmp_path / "emnist/gzip.zip", TRAIN, TEST)
    first, again = data.load("emnist", tmp_path), data.load("emnist", tmp_path)
    assert first.cache == again.cache
    assert [f.name for f in (own_folders / "cache").iterdir()] == [
        first.cache.name if first.cache else ""
    ]
    assert emnist.find(tmp_path) == list(first.sources)
