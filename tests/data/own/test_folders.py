import io
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from fedspu.data import DATASETS, bounds
from fedspu.data.formats import image as image_format
from fedspu.data.formats import log_mel
from fedspu.data.own.folders import load_images, load_sounds
from fedspu.errors import DataError
from tests.data.clips import sound_file, tone


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for each test, not the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSPU_CACHE", str(folder))
    return folder


def image(shade: Any = 0, size: tuple[int, int] = (5, 4), mode: str = "L") -> bytes:
    """A PNG file of one colour, 5 wide and 4 high."""
    file = io.BytesIO()
    Image.new(mode, size, shade).save(file, "PNG")
    return file.getvalue()


def put(root: Path, files: dict[str, bytes]) -> Path:
    folder = root / "mine"
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def refuse(*_: object) -> NoReturn:
    raise AssertionError("decoded again")


TWO = {"cat/1.png": image(10), "dog/1.png": image(20)}


def test_classes_and_files_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    files = {
        "dog/b.png": image(40),
        "cat/2.png": image(20),
        "dog/a.png": image(30),
        "cat/1.png": image(10),
    }
    dataset = load_images(put(tmp_path, files))
    assert dataset.classes == ("cat", "dog")
    assert dataset.y.tolist() == [0, 0, 1, 1]
    assert dataset.x[:, 0, 0, 0].tolist() == [10, 20, 30, 40]


def test_grey_images_have_one_channel_of_bytes(tmp_path: Path) -> None:
    dataset = load_images(put(tmp_path, TWO))
    assert dataset.x.shape == (2, 1, 4, 5)
    assert dataset.x.dtype == torch.uint8
    x, _ = dataset.take(slice(None))
    torch.testing.assert_close(x[:, 0, 0, 0], torch.tensor([10 / 255, 20 / 255]))


def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path) -> None:
    files = {**TWO, "cat/2.png": image((1, 2, 3), mode="RGB")}
    dataset = load_images(put(tmp_path, files))
    assert dataset.x[:, :, 0, 0].tolist() == [[10, 10, 10], [1, 2, 3], [20, 20, 20]]


@pytest.mark.parametrize("kind", ["JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])
def test_other_formats_are_read(tmp_path: Path, kind: str) -> None:
    file = io.BytesIO()
    Image.new("L", (5, 4), 100).save(file, kind)
    files = {**TWO, f"cat/2.{kind}": file.getvalue()}
    x = load_images(put(tmp_path, files)).x
    assert x.shape[0] == 3
    assert abs(int(x[1, 0, 2, 2]) - 100) <= 2


def test_a_palette_is_resolved_and_transparency_dropped(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (9, 8, 7)).convert("P").save(file, "PNG")
    files = {
        "cat/1.png": image((1, 2, 3, 0), mode="RGBA"),
        "dog/1.png": image((4, 0), mode="LA"),
    }
    x = load_images(put(tmp_path, files)).x
    assert x[:, :, 0, 0].tolist() == [[1, 2, 3], [4, 4, 4]]
    assert image_format.decode(file.getvalue(), "p.png").shape == (3, 4, 5)


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    sideways = Image.new("L", (4, 5), 7)
    exif = sideways.getexif()
    exif[0x0112] = 6  # the camera was held a quarter turn
    file = io.BytesIO()
    sideways.save(file, "JPEG", exif=exif)
    files = {**TWO, "dog/2.jpg": file.getvalue()}
    assert load_images(put(tmp_path, files)).x.shape == (3, 1, 4, 5)


def test_unequal_sizes_are_refused_with_the_first_two(tmp_path: Path) -> None:
    folder = put(tmp_path, {**TWO, "dog/2.png": image(size=(7, 9))})
    with pytest.raises(
        DataError, match=r"cat/1\.png is 5x4, .*dog/2\.png is 7x9 .*FOLDER@5x4$"
    ):
        load_images(folder)


def test_a_size_behind_the_folder_stretches_all_images(tmp_path: Path) -> None:
    folder = put(tmp_path, {**TWO, "dog/2.png": image(50, size=(7, 9))})
    dataset = load_images(Path(f"{folder}@3x2"))
    assert dataset.x.shape == (3, 1, 2, 3)
    assert dataset.x[2].unique().tolist() == [50]


def test_another_size_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    folder = put(tmp_path, TWO)
    shapes = [load_images(Path(f"{folder}{s}")).x.shape for s in ("", "@3x2", "@6x6")]
    assert [tuple(shape[2:]) for shape in shapes] == [(4, 5), (2, 3), (6, 6)]


def test_a_second_load_decodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, TWO)
    one = load_images(folder)
    monkeypatch.setattr(image_format, "decode", refuse)
    assert torch.equal(one.x, load_images(folder).x)


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    load_images(put(tmp_path, TWO))
    folder = put(tmp_path, {**TWO, "dog/1.png": image(99, mode="L") + b"\0"})
    assert int(load_images(folder).x[1, 0, 0, 0]) == 99


def test_a_file_moved_to_another_class_changes_its_label(tmp_path: Path) -> None:
    folder = put(tmp_path, {**TWO, "cat/2.png": image(15)})
    assert load_images(folder).y.tolist() == [0, 0, 1]
    (folder / "cat" / "2.png").rename(folder / "dog" / "2.png")
    assert load_images(folder).y.tolist() == [0, 1, 1]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    extra = {
        ".git/config": b"",
        "cat/.DS_Store": b"",
        "cat/._1.png": b"",
        "cat/notes.txt": b"",
        "README": b"",
    }
    dataset = load_images(put(tmp_path, {**TWO, **extra}))
    assert len(dataset.y) == 2
    hidden, others = dataset.notes
    assert hidden.startswith("left out, hidden: 3, the first is ")
    assert others.startswith("left out, not images by their names: 2, the first is ")


def test_links_are_followed(tmp_path: Path) -> None:
    folder = put(tmp_path, TWO)
    (folder / "cat" / "2.png").symlink_to(folder / "dog" / "1.png")
    (folder / "cow").symlink_to(folder / "dog")
    assert load_images(folder).x[:, 0, 0, 0].tolist() == [10, 20, 20, 20]


@pytest.mark.parametrize("name", ["a b.png", "é.png", "a\nb.png", "-x.png", "@2x2.png"])
def test_odd_names_are_names(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path, {**TWO, f"cat/{name}": image(30)})
    assert len(load_images(folder).y) == 3


def test_a_name_that_is_no_text_is_a_name(tmp_path: Path) -> None:
    folder = put(tmp_path, TWO)
    Path(os.fsdecode(os.fsencode(folder) + b"/cat/\xff.png")).write_bytes(b"bad")
    with pytest.raises(DataError, match=r"\\udcff\.png' cannot be read") as caught:
        load_images(folder)
    str(caught.value).encode()  # can be printed


def wide(bits: str) -> bytes:
    file = io.BytesIO()
    Image.new(bits, (5, 4), 1000).save(file, "TIFF")
    return file.getvalue()


def moving() -> bytes:
    file = io.BytesIO()
    first, second = Image.new("L", (5, 4), 0), Image.new("L", (5, 4), 255)
    first.save(file, "GIF", save_all=True, append_images=[second])
    return file.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
"""Pillow would start Ghostscript to read it."""


def bomb(size: int = 100_000) -> bytes:
    """The start of a PNG file that says it is so many pixels wide and high."""
    head = b"IHDR" + struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head
    return start + struct.pack(">I", zlib.crc32(head)) + b"\0\0\0\x09IDAT" + b"\0" * 13


NOISE = np.random.default_rng(0).integers(0, 255, (40, 50), dtype=np.uint8)
PNG = io.BytesIO()
Image.fromarray(NOISE).save(PNG, "PNG")
FLIPPED = bytearray(PNG.getvalue())
FLIPPED[500] ^= 255


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("bad.png", b"", r"cannot be read \(no known image format\)"),
        ("bad.png", b"hello" * 50, r"cannot be read \(no known image format\)"),
        ("bad.png", sound_file(tone(9)), r"cannot be read \(no known image format\)"),
        ("bad.png", PNG.getvalue()[:900], r"cannot be read \(.*truncated"),
        ("bad.png", PNG.getvalue()[:20], r"cannot be read \("),
        ("bad.png", bytes(FLIPPED), r"cannot be read \("),
        ("bad.png", bomb(), r"cannot be read \(.*decompression bomb"),
        ("bad.png", bomb(8193), r"cannot be read \(8193x8193 .*at most 67,108,864"),
        ("bad.png", EPS, r"cannot be read \(no known image format\)"),
        ("bad.tif", wide("I;16"), r"more than 8 bits \(I;16\); expected 8 bits"),
        ("bad.tif", wide("F"), r"more than 8 bits \(F\); expected 8 bits"),
        ("bad.gif", moving(), "holds 2 images; expected one"),
    ],
)
def test_a_bad_image_is_named_and_no_cache_is_left(
    tmp_path: Path, own_cache: Path, name: str, content: bytes, complaint: str
) -> None:
    folder = put(tmp_path, {**TWO, f"dog/{name}": content})
    with pytest.raises(DataError, match=rf"dog/{name} .*{complaint}") as caught:
        load_images(folder)
    assert "; expected" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not own_cache.exists()


def test_images_take_at_most_half_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "half_of_memory", lambda: 30)
    with pytest.raises(DataError, match=r"images like .* take .*; expected at most 30"):
        load_images(put(tmp_path, TWO))


def test_a_size_beyond_reason_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, TWO)
    with pytest.raises(DataError, match="100000x100000 is the size asked for"):
        load_images(Path(f"{folder}@100000x100000"))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = put(tmp_path, TWO)
    with (folder / "cat" / "big.png").open("wb") as opened:
        opened.truncate(2**40)  # it takes no room on the disk
    with pytest.raises(DataError, match=r"1,099,511,627,776 bytes; expected at most"):
        load_images(folder)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"1.png": image()}, "mine: class folders: none; expected a folder per class"),
        ({"cat/1.png": image()}, "mine: class folders: cat; .* at least two"),
        ({**TWO, "cow/x.txt": b""}, "mine/cow holds no images; .*remove it or fill it"),
        ({**TWO, "cow/.1.png": b""}, "mine/cow holds no images"),
        (
            {"train/cat/1.png": image(), "test/cat/1.png": image()},
            "mine/test/cat is a folder inside a class folder; .*give the folder that",
        ),
    ],
)
def test_a_folder_of_another_form_is_refused(
    tmp_path: Path, files: dict[str, bytes], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        load_images(put(tmp_path, files))


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: No such file .*; expected a folder"):
        load_images(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: Not a directory; expected a folder"):
        load_images(tmp_path / "file")


def test_what_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, TWO)
    (folder / "cat" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(
        DataError, match=r"gone\.png is a broken link, or not a regular"
    ):
        load_images(folder)
    (folder / "cat" / "gone.png").unlink()
    os.mkfifo(folder / "cat" / "pipe.png")
    with pytest.raises(
        DataError, match=r"pipe\.png is a broken link, or not a regular"
    ):
        load_images(folder)


def test_pillow_missing_comes_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        DataError, match=r"pip install .* '\.\[images\]' in the folder of fedspu$"
    ):
        load_images(put(tmp_path, TWO))


CLIPS = {
    "hum/1.wav": sound_file(tone(200, seconds=0.2)),
    "hum/2.flac": sound_file(tone(300, 44_100), 44_100, format="FLAC"),
    "beep/1.WAV": sound_file(tone(4000, seconds=2)),
}


def test_sounds_become_spectrograms(tmp_path: Path) -> None:
    dataset = load_sounds(put(tmp_path, CLIPS))
    assert dataset.classes == ("beep", "hum")
    assert dataset.y.tolist() == [0, 1, 1]
    assert dataset.x.shape == (3, 1, 32, 32)
    expected = log_mel.read_log_mel(CLIPS["hum/1.wav"], "1.wav")
    assert np.array_equal(dataset.x[1].numpy(), expected)


def test_sounds_suit_the_paper_s_network(tmp_path: Path) -> None:
    assert DATASETS["sounds"].defaults == DATASETS["speech"].defaults
    assert DATASETS["sounds"].defaults["model"] == "speech"
    x, _ = load_sounds(put(tmp_path, CLIPS)).take(slice(None))
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)


def test_a_second_load_hears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, CLIPS)
    one = load_sounds(folder)
    monkeypatch.setattr(log_mel, "read_log_mel", refuse)
    assert torch.equal(one.x, load_sounds(folder).x)


def test_a_clip_with_an_odd_name_is_heard_and_shown_on_one_line(tmp_path: Path) -> None:
    folder = put(tmp_path, {**CLIPS, "hum/a\nb.wav": CLIPS["hum/1.wav"]})
    assert len(load_sounds(folder).y) == 4
    put(tmp_path, {"hum/a\nb.wav": b""})
    with pytest.raises(DataError, match=r"hum/a\\nb\.wav' cannot be read"):
        load_sounds(folder)


def test_a_bad_clip_is_named_and_no_cache_is_left(
    tmp_path: Path, own_cache: Path
) -> None:
    folder = put(tmp_path, {**CLIPS, "hum/bad.wav": CLIPS["hum/1.wav"][:100]})
    with pytest.raises(DataError, match=r"hum/bad\.wav is cut off: 100 of 6444 bytes"):
        load_sounds(folder)
    assert not own_cache.exists()
