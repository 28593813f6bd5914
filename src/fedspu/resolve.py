"""Complete settings from what a user gives, checked before any file is opened.

A value that is given takes precedence over what the method suggests, then comes what
the data set suggests, then the task, then the paper's value.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedspu import models, tasks
from fedspu.data import FROM_MEMORY, find_source
from fedspu.errors import SettingsError
from fedspu.expected import wanted
from fedspu.imports import is_place
from fedspu.methods import check_options, suggested_by
from fedspu.settings import (
    PARTITIONS,
    DataSettings,
    Settings,
    known_fields,
    known_names,
)
from fedspu.settings_text import flatten, nearest, nest

if TYPE_CHECKING:
    from fedspu.tasks.task import Task

TASKS_WITHOUT_CLASSES = frozenset({"language-model"})
"""Our tasks whose record has no strata, known here without PyTorch."""

TASKS_WITH_LOG_SHARES = frozenset({"classification"})
"""Our tasks whose record has log_shares, known here without PyTorch."""


def resolve(
    given: Mapping[str, Any],
    in_python: Collection[str] = (),
    task: "Task | None" = None,
) -> Settings:
    """Complete settings from values by (dotted or nested) name.

    ``in_python`` says which of model, method and task were given as Python objects:
    their names are then only labels. ``task`` is the one that was given.
    """
    flat = dict(flatten(given))
    wrong = _wrong_names(flat)
    data = str(flat.get("data.name", DataSettings().name))
    task_name = str(flat.get("task", Settings.model_fields["task"].default))
    if task is None and "task" not in in_python and is_place(task_name):
        task = tasks.find_task(task_name)
    suggested = _suggested_by_task(task_name, task)
    if data != FROM_MEMORY:
        suggested |= find_source(data)[0].defaults
    if "method" not in in_python:
        suggested |= suggested_by(str(flat.get("method.name")))
        if not _has_log_shares(task_name, task):
            suggested.pop("train.adjust_logits", None)
    try:
        settings = validated(
            {**suggested, **{n: v for n, v in flat.items() if n not in wrong}}
        )
    except SettingsError as error:
        raise SettingsError("; ".join([*_said(wrong), str(error)])) from None
    if wrong:
        raise SettingsError("; ".join([*_said(wrong), LISTED]))
    _check_choices(settings, in_python)
    if "method" in in_python:
        return settings
    return settings.model_copy(update={"method": check_options(settings.method)})


def _has_log_shares(name: str, task: "Task | None") -> bool:
    """Whether a task says how frequent classes are; so logits can be adjusted."""
    if task is None:
        return name in TASKS_WITH_LOG_SHARES
    return task.log_shares is not None


def _suggested_by_task(name: str, task: "Task | None") -> dict[str, Any]:
    """Examples without classes cannot be divided by them."""
    has_none = name in TASKS_WITHOUT_CLASSES if task is None else task.strata is None
    return {"data.partition": "iid"} if has_none else {}


LISTED = "`fedspu settings` lists them"
MOST_WRONG = 5
"""So many wrong names are told at once."""


def _said(wrong: Mapping[str, str]) -> list[str]:
    said = [text for text in wrong.values() if text]
    more = len(wrong) - len(said)
    return [*said, f"and {more} more names"] if more else said


def _wrong_names(flat: Mapping[str, Any]) -> dict[str, str]:
    """Names that no setting has, and what is wrong with each."""
    known = list(known_names())
    wrong: dict[str, str] = {}
    tables: dict[str, str] = {}  # a table that some name is in -> that name
    for name in reversed(list(flat)):
        parts = name.split(".")
        tables |= {".".join(parts[:n]): name for n in range(1, len(parts))}
    for name in flat:
        # Other names in the table [method] are options; the method checks those.
        if name.startswith("sweep."):
            raise SettingsError(
                f"{name}: the table [sweep] is for `fedspu compare`; leave it out here"
            )
        if name not in known and not name.startswith("method."):
            wrong[name] = ""
            if len(wrong) <= MOST_WRONG:  # looking for what was meant takes time
                meant = _meant(name, flat[name], known)
                wrong[name] = f"{name}: no such setting{meant}"
        elif name in tables:
            raise SettingsError(
                f"{name}, {tables[name]}: a table and a value have the same name"
            )
    return wrong


def _meant(name: str, value: Any, known: list[str]) -> str:
    """What was probably meant; a table's name may stand for its first setting."""
    inside = [one for one in known if one.startswith(f"{name}.")]
    if inside:
        main = f"{name}.name" if f"{name}.name" in inside else inside[0]
        return f", but a table of settings (did you mean {main} = {value!r}?)"
    return nearest(name, known)


def validated(flat: Mapping[str, Any]) -> Settings:
    """Settings from values by dotted name, each of a kind and size that it may have."""
    try:
        return Settings.model_validate(nest(flat))
    except ValidationError as error:
        first: dict[str, str] = {}  # the first problem of each setting
        for problem in error.errors():
            first.setdefault(_name_of(problem), _in_words(problem, flat))
        raise SettingsError("; ".join(dict.fromkeys(first.values()))) from None


def _name_of(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"] if not isinstance(part, int))


def _in_words(problem: Any, flat: Mapping[str, Any]) -> str:
    name = _name_of(problem)
    if problem["type"] == "value_error":  # one of our own checks: a whole sentence
        return str(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return (
            f"{name}: not given, and this data set suggests none; give your own as "
            f"--{name} package.module:build, or one of {', '.join(models.MODELS)}"
        )
    expected = wanted(dict(known_fields())[name], problem)
    return f"{name} = {flat.get(name, problem['input'])!r}: expected {expected}"


def _check_choices(settings: Settings, in_python: Collection[str]) -> None:
    """Refuse models, tasks and partitions that do not exist."""
    kind = settings.data.partition
    if "model" not in in_python:
        models.check_name(settings.model)
    if "task" not in in_python:
        tasks.check_name(settings.task)
    if kind not in PARTITIONS:
        raise SettingsError(
            f"data.partition = {kind!r}: expected one of {', '.join(PARTITIONS)}"
            f"{nearest(kind, list(PARTITIONS))}"
        )
