"""What is learned: tasks by name; each has a file of its own, imported when needed.

A task of your own is another ``Task`` record, named as ``package.module:task``.
"""

from typing import TYPE_CHECKING

from fedspu.errors import SettingsError
from fedspu.imports import find_object, is_place
from fedspu.settings_text import nearest

if TYPE_CHECKING:
    from fedspu.tasks.task import Task

TASKS = {
    "classification": "fedspu.tasks.classification:classification",
    "regression": "fedspu.tasks.regression:regression",
    "language-model": "fedspu.tasks.language_model:language_model",
    "segmentation": "fedspu.tasks.segmentation:segmentation",
}
"""Name -> where its record is."""


def check_name(name: str) -> None:
    """Refuse a name that no task can have."""
    if name not in TASKS and not is_place(name):
        raise SettingsError(
            f"task = {name!r}: expected one of {', '.join(TASKS)}, or your own as "
            f"package.module:task{nearest(name, list(TASKS))}"
        )


def find_task(name: str) -> "Task":
    """The task of this name, or at ``package.module:name``."""
    from fedspu.tasks.task import Task

    check_name(name)
    found = find_object(TASKS.get(name, name), "task")
    if not isinstance(found, Task):
        raise SettingsError(
            f"task = {name!r}: is a {type(found).__name__}; expected a "
            "fedspu.tasks.task.Task"
        )
    return found
