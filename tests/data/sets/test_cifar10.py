import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspu import data
from fedspu.data.formats import cifar_pickle as batches
from fedspu.data.sets import cifar10
from fedspu.errors import DataError
from tests.data import files as formats

LABELS = [6, 9, 0, 4]
KINDS = ["bin", "py2", "py3"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "BATCH", len(LABELS))


def expected_pixels() -> Any:
    return formats.records(LABELS * 5)[:, 1:].reshape(20, 3, 32, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unpacked_folder_gives_the_training_images(
    tmp_path: Path, kind: str
) -> None:
    place = formats.write_cifar(tmp_path, kind, LABELS)
    for folder in (tmp_path, place):  # its parent, or the very folder
        dataset = data.load("cifar10", folder)
        assert dataset.y.tolist() == LABELS * 5
        assert np.array_equal(dataset.x.numpy(), expected_pixels())


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_gives_the_same_whatever_its_order(
    tmp_path: Path, kind: str
) -> None:
    formats.write_cifar_archive(tmp_path / "cifar10", kind, LABELS)
    dataset = data.load("cifar10", tmp_path)
    assert dataset.y.tolist() == LABELS * 5
    assert np.array_equal(dataset.x.numpy(), expected_pixels())


def test_nothing_is_unpacked_to_disk(tmp_path: Path) -> None:
    archive = formats.write_cifar_archive(tmp_path, "bin", LABELS)
    data.load("cifar10", tmp_path)
    assert list(tmp_path.rglob("*")) == [archive]


def test_pixels_are_scaled_as_in_the_papers_code(tmp_path: Path) -> None:
    formats.write_cifar(tmp_path, "bin", LABELS)
    x, _ = data.load("cifar10", tmp_path).take(slice(1))
    assert x[0, 0, 0, 0] == -1
    torch.testing.assert_close(x[0, 0, 1, 0], torch.tensor((32 / 255 - 0.5) / 0.5))
    assert x[0, 0, 7, 31] == 1


def test_the_papers_settings_are_suggested() -> None:
    assert data.DATASETS["cifar10"].defaults == {
        "model": "cifar10",
        "train.lr": 0.1,
        "train.batch_size": 128,
    }


def test_classes_have_the_names_of_the_official_files(tmp_path: Path) -> None:
    formats.write_cifar(tmp_path, "bin", LABELS)
    dataset = data.load("cifar10", tmp_path)
    assert [dataset.classes[y] for y in LABELS] == ["frog", "truck", "airplane", "deer"]


def test_the_official_batches_have_ten_thousand_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    place = formats.write_cifar(tmp_path, "bin", LABELS)
    with pytest.raises(DataError) as caught:
        cifar10.load(tmp_path)
    assert str(caught.value) == (
        f"{place}/data_batch_1.bin: 12,292 bytes; expected 30,730,000: 10,000 records "
        "of 3,073. Download the file again"
    )


def test_what_is_not_here_says_which_file_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"cifar-10-binary\.tar\.gz \(170,052,171 bytes, sha256:c4a38.*/cifar10$",
    ):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes; expected 12,292"),
        (formats.records(LABELS).tobytes()[:-1], "12,291 bytes; expected 12,292"),
        (formats.records(LABELS[:3]).tobytes(), "9,219 bytes; expected 12,292"),
        (
            formats.records([*LABELS, 1]).tobytes(),
            "15,365 bytes; expected at most 12,292",
        ),
        (formats.records([6, 9, 10, 4]).tobytes(), "the label 10; expected labels fr"),
    ],
)
def test_a_bad_binary_file_gives_an_error_and_no_cache(
    tmp_path: Path, own_folders: Path, content: bytes, says: str
) -> None:
    file = formats.write_cifar(tmp_path, "bin", LABELS) / "data_batch_3.bin"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        data.load("cifar10", tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    assert not (own_folders / "cache").exists()


def batch(**changes: object) -> bytes:
    pixels = np.ascontiguousarray(formats.records(LABELS)[:, 1:])
    return pickle.dumps({"labels": LABELS, "data": pixels} | changes, protocol=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (batch()[:-400], "."),
        (b"<html>", "opcode b'<' unknown"),
        (pickle.dumps([1, 2]), "it holds no data and labels"),
        (pickle.dumps({}), "it holds no data and labels"),
        (batch(data=[1, 2]), "its data is no array"),
        (batch(data=np.zeros((4, 300))), "data of kind f8"),
        (batch(labels=["a", "b", "c", "d"]), "its labels are no list of whole numbers"),
        (batch(labels=[1, 2]), r"pixels \(4, 3072\) and labels \(2,\); expected"),
        (batch(labels=[1, 2, 3, -1]), "the label -1; expected labels from 0 to 9"),
        (batch(data=np.zeros((4, 3071), np.uint8)), r"pixels \(4, 3071\)"),
    ],
)
def test_a_bad_python_batch_gives_an_error_and_no_cache(
    tmp_path: Path, own_folders: Path, content: bytes, says: str
) -> None:
    file = formats.write_cifar(tmp_path, "py3", LABELS) / "data_batch_3"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        data.load("cifar10", tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert not (own_folders / "cache").exists()


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    file = formats.write_cifar(tmp_path, "py3", LABELS) / "data_batch_1"
    trace = tmp_path / "trace"
    bomb = Hostile(os.mkdir, str(trace))
    file.write_bytes(pickle.dumps({"labels": LABELS, "data": bomb}, protocol))
    with pytest.raises(DataError, match=r"asks for (posix|nt)\.mkdir"):
        data.load("cifar10", tmp_path)
    assert not trace.exists()

    pickle.loads(file.read_bytes())  # the bomb is a real one
    assert trace.exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "numpy.load", "os.system", "numpy.core.multiarray.fromfile"],
)
def test_no_other_name_is_looked_up(tmp_path: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    content = f"c{module}\n{function}\n.".encode()
    with pytest.raises(DataError, match=f"asks for {name}"):
        batches.read_batch(content, tmp_path / "b", 4)


@pytest.mark.parametrize("name", batches.KNOWN)
def test_a_pickle_cannot_change_the_records_it_may_name(
    tmp_path: Path, name: str
) -> None:
    module, _, function = name.rpartition(".")
    # The class itself, then a dictionary to build it with.
    content = f"c{module}\n{function}\n(dS'evil'\nI1\nsb.".encode()
    with pytest.raises(DataError, match="it changes what is no array"):
        batches.read_batch(content, tmp_path / "b", 4)


def test_a_missing_batch_is_told_by_name(tmp_path: Path) -> None:
    place = formats.write_cifar(tmp_path, "bin", LABELS)
    (place / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.bin is missing"):
        data.load("cifar10", tmp_path)


def test_an_archive_without_a_batch_is_told(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"tar\.gz holds no data_batch_1; download it"):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda whole: whole[: len(whole) // 2], id="cut"),
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: b"<html>not found</html>", id="page"),
        pytest.param(lambda w: w[:60] + b"\xff" * 40 + w[100:], id="garbled"),
    ],
)
def test_a_bad_archive_gives_an_error_and_no_cache(
    tmp_path: Path, own_folders: Path, content: Any
) -> None:
    archive = formats.write_cifar_archive(tmp_path, "bin", LABELS)
    archive.write_bytes(content(archive.read_bytes()))
    with pytest.raises(DataError, match=r"binary\.tar\.gz: damaged \(") as caught:
        data.load("cifar10", tmp_path)
    assert "\n" not in str(caught.value)
    assert not (own_folders / "cache").exists()


def test_a_batch_that_comes_twice_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for folder in ("a", "b"):
            member = tarfile.TarInfo(f"{folder}/data_batch_1.bin")
            content = formats.records(LABELS).tobytes()
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match="it holds data_batch_1 twice"):
        data.load("cifar10", tmp_path)


def test_one_wrong_bit_in_an_archive_is_seen(tmp_path: Path) -> None:
    archive = formats.write_cifar_archive(tmp_path, "bin", LABELS)
    plain = gzip.decompress(archive.read_bytes())
    content = bytearray(gzip.compress(plain, compresslevel=0))  # only wrapped
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"binary\.tar\.gz: damaged \(CRC"):
        data.load("cifar10", tmp_path)


def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = formats.write_cifar(tmp_path, "bin", LABELS) / "data_batch_2.bin"
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) == str(file):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=r"_2\.bin cannot be read \(Permission denied"):
        data.load("cifar10", tmp_path)
