"""The examples of a device, loaded as the app will load them."""

from typing import TYPE_CHECKING

from fedspu.data import DATASETS, load
from fedspu.errors import DataError
from fedspu.imports import call, find_object, is_place
from fedspu.tasks import find_task

if TYPE_CHECKING:
    from fedspu.data.dataset import Dataset


def load_examples(data: str, task: str) -> "Dataset":
    """The data set that ``data`` names, or what the function package.module:load gives.

    Such a function returns arrays x and y, or a ``Dataset``.
    """
    learned = find_task(task)
    if data.partition(":")[0] in DATASETS or not is_place(data):
        return load(data, None, learned)
    from fedspu.data.dataset import Dataset, with_targets
    from fedspu.data.own.arrays import from_arrays

    given = call(find_object(data, "data", DataError), f"data = {data!r}", DataError)
    if not isinstance(given, Dataset):
        try:
            x, y = given
        except (TypeError, ValueError):
            raise DataError(
                f"data = {data!r}: it returned a {type(given).__name__}; expected "
                "arrays x and y"
            ) from None
        given = from_arrays(x, y, name=data)
    return with_targets(given, learned)
