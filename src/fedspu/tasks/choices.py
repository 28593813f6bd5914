"""Settings that a task cannot follow: refused before any data is loaded."""

import torch

from fedspu.errors import SettingsError
from fedspu.imports import call
from fedspu.settings import Settings
from fedspu.tasks.task import Task

WITHOUT_CLASSES = ("iid", "natural", "quantity")
"""Ways to divide examples that have no classes."""


def check_settings(settings: Settings, task: Task) -> None:
    """Refuse settings that the task cannot follow; no data is needed."""
    check_partition(settings.data.partition, task)
    if settings.train.augment and not task.can_augment:
        raise SettingsError(
            f"train.augment = {', '.join(settings.train.augment)}: would change images "
            f"but not the targets of the task {task.name}; leave it out"
        )
    if settings.train.class_weights != "none":
        _check_weights(settings.train.class_weights, task)
    if settings.train.adjust_logits and task.log_shares is None:
        raise SettingsError(
            f"train.adjust_logits = true: the task {task.name} does not say how "
            "frequent classes are (log_shares); leave it out"
        )


def check_partition(kind: str, task: Task) -> None:
    """Refuse to divide examples by classes if they have none."""
    if task.strata is None and kind not in WITHOUT_CLASSES:
        raise SettingsError(
            f"data.partition = {kind!r}: examples of the task {task.name} have no "
            f"classes to divide by; use one of {', '.join(WITHOUT_CLASSES)}"
        )


def _check_weights(kind: str, task: Task) -> None:
    given = f"train.class_weights = {kind!r}"
    if task.weigh_classes is None:
        raise SettingsError(
            f"{given}: the task {task.name} has no classes; leave it out"
        )
    one_target = torch.zeros(1, dtype=torch.int64)
    try:
        call(task.weigh_classes, "weigh_classes", SettingsError, task.loss, one_target)
    except SettingsError as error:
        raise SettingsError(f"{given}: task {task.name}: {error}") from None
