import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from fedspu import data
from fedspu.data import bounds
from fedspu.data.dataset import with_targets
from fedspu.data.own import hf
from fedspu.errors import DataError
from fedspu.tasks import find_task
from fedspu.tasks.language_model import language_model
from fedspu.tasks.task import IGNORED

datasets: Any = pytest.importorskip("datasets")
datasets.disable_progress_bars()

NAMES = datasets.ClassLabel(names=["cat", "dog"])
PICTURES = [Image.new("RGB", (5, 4), (shade, 0, 0)) for shade in (10, 20, 30)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for each test, not the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSPU_CACHE", str(folder))
    return folder


def table(**columns: tuple[Any, Any]) -> Any:
    """A data set of columns, each as its values and their feature."""
    values = {name: column[0] for name, column in columns.items()}
    features = {name: column[1] for name, column in columns.items()}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def saved(root: Path, rows: Any) -> Path:
    folder = root / "mine"
    rows.save_to_disk(str(folder))
    return folder


def images(pictures: Any = PICTURES, labels: Any = (0, 1, 1)) -> Any:
    return table(image=(pictures, datasets.Image()), label=(list(labels), NAMES))


def numbers(kind: str, values: Any, labels: Any = (0, 1, 2)) -> Any:
    feature = datasets.List(datasets.Value(kind))
    return table(x=(values, feature), label=(list(labels), datasets.Value("int64")))


def refuse(*_: object) -> NoReturn:
    raise AssertionError("decoded again")


def test_images_are_bytes_with_named_classes(tmp_path: Path) -> None:
    dataset = hf.load(saved(tmp_path, images()))
    assert dataset.x.shape == (3, 3, 4, 5)
    assert dataset.x.dtype == torch.uint8
    assert dataset.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert dataset.y.tolist() == [0, 1, 1]
    assert dataset.classes == ("cat", "dog")


def test_splits_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=images(), test=images(PICTURES[:1], [1]))
    dataset = hf.load(saved(tmp_path, both))
    assert dataset.y.tolist() == [1, 0, 1, 1]


def test_a_class_without_rows_counts(tmp_path: Path) -> None:
    assert hf.load(saved(tmp_path, images(labels=(0, 0, 0)))).num_classes == 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("int32", torch.int64), ("float64", torch.float32), ("uint8", torch.uint8)],
)
def test_arrays_keep_their_kind(tmp_path: Path, kind: str, expected: Any) -> None:
    folder = saved(tmp_path, numbers(kind, [[1, 2], [3, 4], [5, 6]]))
    dataset = data.load(f"hf:{folder}")
    assert dataset.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert dataset.x.dtype == expected
    assert dataset.num_outputs == 3


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_labels_may_be_numbers_to_predict(tmp_path: Path, kind: str) -> None:
    rows = table(
        x=([[1, 2], [3, 4]], datasets.List(datasets.Value("float32"))),
        y=([0.5, -1], datasets.Value(kind)),
    )
    dataset = data.load(f"hf:{saved(tmp_path, rows)}", None, find_task("regression"))
    assert dataset.y.tolist() == [0.5, -1]
    assert dataset.y.dtype == torch.float32
    assert dataset.num_outputs == 1


def test_labels_may_be_a_target_for_each_token(tmp_path: Path) -> None:
    whole = datasets.List(datasets.Value("int32"))
    rows = table(
        labels=([[6, 9], [IGNORED, 2]], whole), input_ids=([[5, 6], [7, 8]], whole)
    )
    dataset = data.load(
        f"hf:{saved(tmp_path, rows)}", None, find_task("language-model")
    )
    assert dataset.x.tolist() == [[5, 6], [7, 8]]
    assert dataset.y.tolist() == [[6, 9], [IGNORED, 2]]
    assert dataset.num_outputs == 10


def test_labels_may_be_a_class_for_each_pixel(tmp_path: Path) -> None:
    rows = table(
        image=(PICTURES[:2], datasets.Image()),
        label=(np.full((2, 4, 5), 3, np.uint8), datasets.Array2D((4, 5), "uint8")),
    )
    dataset = data.load(f"hf:{saved(tmp_path, rows)}", None, find_task("segmentation"))
    assert dataset.y.shape == (2, 4, 5)
    assert dataset.y.dtype == torch.int64
    assert dataset.num_outputs == 4


def test_grey_arrays_get_a_channel(tmp_path: Path) -> None:
    grey = np.full((3, 4, 5), 7, dtype=np.uint8)
    rows = table(x=(grey, datasets.Array2D((4, 5), "uint8")), label=([0, 1, 1], NAMES))
    assert hf.load(saved(tmp_path, rows)).x.shape == (3, 1, 4, 5)


def test_tokens_are_found_among_other_columns(tmp_path: Path) -> None:
    whole = datasets.List(datasets.Value("int32"))
    rows = table(
        text=(["a b", "c d"], datasets.Value("string")),
        attention_mask=([[1, 1], [1, 1]], whole),
        input_ids=([[5, 6], [7, 8]], whole),
        label=([0, 1], NAMES),
    )
    assert hf.load(saved(tmp_path, rows)).x.tolist() == [[5, 6], [7, 8]]


def test_a_column_of_clients_says_whose_each_row_is(tmp_path: Path) -> None:
    rows = images().add_column("client", ["zoe", "adam", "zoe"])
    owners = hf.load(saved(tmp_path, rows)).owners
    assert owners is not None
    assert owners.tolist() == [1, 0, 1]


def test_rows_of_tokens_are_filled_up(tmp_path: Path) -> None:
    rows = numbers("int64", [[5, 6, 7], [8], [9, 9]])
    found = hf.load(saved(tmp_path, rows))
    assert found.x.tolist() == [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    assert found.padding == 0
    even = hf.load(saved(tmp_path / "even", numbers("int64", [[5], [6], [7]])))
    assert even.padding is None


def test_texts_need_no_label(tmp_path: Path) -> None:
    rows = numbers("int64", [[5, 6, 7], [8, 8], [9, 9]]).remove_columns("label")
    found = hf.load(saved(tmp_path, rows))
    assert found.x.tolist() == [[5, 6, 7], [8, 8, -1], [9, 9, -1]]
    learned = with_targets(found, language_model)
    assert learned.y.tolist() == [[6, 7, -100], [8, -100, -100], [9, -100, -100]]


def test_images_of_unequal_sizes_need_a_size(tmp_path: Path) -> None:
    unequal = [*PICTURES[:2], Image.new("RGB", (7, 9))]
    folder = saved(tmp_path, images(unequal))
    with pytest.raises(DataError, match=r"image\[0\] is 5x4, .*image\[2\] is 7x9 "):
        hf.load(folder)
    assert hf.load(Path(f"{folder}@3x2")).x.shape == (3, 3, 2, 3)


def test_a_second_load_decodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, images())
    one = hf.load(folder)
    monkeypatch.setattr(hf, "_decode", refuse)
    assert torch.equal(one.x, hf.load(folder).x)


TWO_LABELS = table(
    x=([[1], [2]], datasets.List(datasets.Value("int64"))),
    fine=([0, 1], NAMES),
    coarse=([0, 0], NAMES),
)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (TWO_LABELS, r"fine \(ClassLabel.*expected one label column; .*called label"),
        (
            images().remove_columns("label"),
            r"holds image .*; expected one label column",
        ),
        (images().remove_columns("image"), "expected one image or array column"),
        (images([PICTURES[0], None, PICTURES[0]]), r"image\[1\] is empty; expected"),
        (images(labels=(0, None, 1)), "label has missing values"),
        (numbers("float32", [[1, 2], [3], [4]]), r"unequal shapes, \(1,\), \(2,\);"),
        (numbers("int64", [[1, 2], [3, None], [4, 5]]), "x has missing values"),
    ],
)
def test_bad_rows_are_named_and_no_cache_is_left(
    tmp_path: Path, own_cache: Path, rows: Any, complaint: str
) -> None:
    folder = saved(tmp_path, rows)
    with pytest.raises(DataError, match=complaint) as caught:
        hf.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (images(labels=(0, -1, 1)), r"y\[1\] = -1; expected class numbers from 0"),
        (numbers("int64", [[1], [2], [3]], (0, -1, 1)), r"y\[1\] = -1; expected class"),
        (numbers("float32", [[1, 2], [3, np.nan], [4, 5]]), r"1 of 3 .* NaN .* x\[1\]"),
    ],
)
def test_rows_that_no_task_could_learn_are_named(
    tmp_path: Path, rows: Any, complaint: str
) -> None:
    folder = saved(tmp_path, rows)
    for _ in range(2):  # from the files, and from the cache
        with pytest.raises(DataError, match=complaint) as caught:
            data.load(f"hf:{folder}")
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    rows = images([{"bytes": b"no image", "path": None}], [0])
    with pytest.raises(DataError, match=r"image\[0\] cannot be read"):
        hf.load(saved(tmp_path, rows))


def test_a_size_is_for_images_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path, numbers("int64", [[1], [2], [3]]))
    with pytest.raises(DataError, match="column x holds no images; a size"):
        hf.load(Path(f"{folder}@3x2"))


def test_a_truncated_file_is_refused(tmp_path: Path, own_cache: Path) -> None:
    folder = saved(tmp_path, numbers("int64", [[1] * 50] * 3))
    (arrow,) = folder.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:700])
    with pytest.raises(
        DataError, match=r"mine cannot be read .*save it again"
    ) as caught:
        hf.load(folder)
    assert "\n" not in str(caught.value)
    assert not own_cache.exists()


def test_a_description_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, images())
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"mine cannot be read .*save it again"):
        hf.load(folder)


def test_a_pipe_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, images())
    os.mkfifo(folder / "data-00001-of-00002.arrow")
    with pytest.raises(DataError, match="not an ordinary file; expected a folder"):
        hf.load(folder)


def test_a_table_takes_at_most_half_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "half_of_memory", lambda: 30)
    with pytest.raises(DataError, match=r"holds .* bytes; expected at most 30"):
        hf.load(saved(tmp_path, images()))


def test_any_other_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no saved data set; expected a folder"):
        hf.load(tmp_path)


def test_a_missing_library_comes_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, images())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"pip install .* '\.\[hf\]' in the folder of fedspu$"
    ):
        hf.load(folder)
