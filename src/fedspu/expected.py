"""What a setting takes, in plain words, for the message about a wrong value."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

NOUNS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
LIMITS = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def plain_type(annotation: Any) -> Any:
    """The plain type in an annotation, without None, limits and what a list holds."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) or annotation


def wanted(entry: Any, problem: Any) -> str:
    """What a setting takes, in plain words: ``a whole number, 1 or more``.

    ``entry`` is pydantic's description of the setting, ``problem`` of what is wrong.
    """
    kind = plain_type(entry.annotation)
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"])
    if kind is tuple:
        return _list_wanted(get_args(entry.annotation)[0])
    noun = NOUNS.get(kind, problem["msg"].removeprefix("Input should be "))
    if problem["type"] == "finite_number":
        noun = "a finite number"
    limits = " and ".join(_limits(entry.annotation, entry.metadata))
    comma = "," if limits[:1].isdigit() else ""  # a number, 0 or more; a number above 0
    return f"{noun}{comma} {limits}".rstrip()


def _list_wanted(inside: Any) -> str:
    """What a list of numbers or of words takes."""
    if plain_type(inside) is Literal:
        return f"a list of {' or '.join(map(repr, get_args(inside)))}"
    return f"a list of numbers, at least one, each {' and '.join(_limits(inside))}"


def _limits(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    """The limits of a number in words, wherever its annotation has them."""
    for part in metadata:
        yield from _limits(None, getattr(part, "metadata", ()))
        for name, words in LIMITS.items():
            if hasattr(part, name):
                yield words.format(getattr(part, name))
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        yield from _limits(annotation, metadata)
    else:
        for part in get_args(annotation):
            yield from _limits(part)
