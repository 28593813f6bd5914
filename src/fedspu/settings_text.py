"""Settings as people write them: TOML files, ``key=value``, dotted names."""

import ast
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedspu.errors import SettingsError
from fedspu.ordinary_files import open_ordinary

SHORT_FORMS = {"method": "method.name", "early_stopping": "early_stopping.on"}
"""Tables that may be given by only their main value."""


# Files and overrides ------------------------------------------------------------------


MOST_BYTES = 2**20  # of a configuration file
MOST_TEXT = 2**16  # characters of one value on the command line
MOST_DOTS = 20  # in one name
MOST_NAME = 200  # characters of one name
QUOTED = re.compile(r""""(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?""")
LONG_NAME = re.compile(rf"(?:\.[ \t]*+[\w-]++[ \t]*+){{{MOST_DOTS}}}")


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a configuration file."""
    try:
        with open_ordinary(path) as opened:
            content = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_toml(content, str(path))


def parse_toml(content: bytes, name: str) -> dict[str, Any]:
    """The values in the content of the configuration file ``name``."""
    if len(content) > MOST_BYTES:
        raise SettingsError(
            f"{name}: more than {MOST_BYTES:,} bytes; expected a configuration file"
        )
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        return _parsed(text)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name}: cannot be read ({error})") from None
    # Besides TOML's own error: numbers of many digits, and values nested too deep.
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SettingsError(f"{name}: not valid TOML ({error})") from None


def _parsed(text: str) -> dict[str, Any]:
    # The time that the parser takes grows with the square of a name's parts. What is in
    # quotes may have dots of its own.
    if LONG_NAME.search(QUOTED.sub("_", text)):
        raise ValueError(f"a name of more than {MOST_DOTS} parts")
    return tomllib.loads(text)


def parse_override(text: str) -> tuple[str, Any]:
    """One ``key=value`` of the command line; the value as in TOML, or plain text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(
            f"--set {one_line(text)}: expected key=value, for example --set "
            "train.lr=0.05"
        )
    key = key.strip()
    return SHORT_FORMS.get(key, key), parse_value(value.strip())


def parse_value(text: str) -> Any:
    """A value as in TOML or Python; plain text if it is neither."""
    if len(text) > MOST_TEXT:
        raise SettingsError(
            f"a value of {len(text):,} characters; expected at most {MOST_TEXT:,}; "
            "use a configuration file"
        )
    try:
        return _parsed(f"value = {text}")["value"]
    except (ValueError, RecursionError, MemoryError, OverflowError):
        pass
    try:
        return ast.literal_eval(text)  # [.2, .4], which TOML does not allow
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


# Names --------------------------------------------------------------------------------


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names, with short forms in full and None left out."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name.count(".") > MOST_DOTS or len(name) > MOST_NAME:
            raise SettingsError(
                f"{name[:40]!r}…: no such setting; its name is too long"
            )
        if not name.isprintable():
            raise SettingsError(f"{name!r}: no such setting")
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif value is not None:
            yield SHORT_FORMS.get(name, name), value


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested tables."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        table = nested
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return nested


def one_line(value: Any) -> str:
    """A value as text on one line, whatever characters it has."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def with_article(noun: str) -> str:
    """``a list``, ``an int``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def nearest(name: str, known: list[str]) -> str:
    """`` (did you mean …?)`` for a name close to a known one, else nothing."""
    as_known = {k.casefold(): k for k in reversed(known)}  # also FedSPU for fedspu
    close = difflib.get_close_matches(name.casefold(), as_known, n=1)
    found = [as_known[k] for k in close]
    if not found:  # lr for train.lr
        found = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    return f" (did you mean {found[0]}?)" if found else ""
