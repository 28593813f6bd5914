"""What a run folder says of itself: the index of a save, and the lines of its journal.

Both are checked strictly, because a folder may be damaged, or come from someone else.
An index names no file: names follow from the round and the client.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
)

from fedspu.data import names_code
from fedspu.errors import DamagedError, StorageError
from fedspu.federation.values import Values
from fedspu.files import Mark, not_a_link, read_file
from fedspu.imports import is_place
from fedspu.settings_text import flatten, one_line

VERSION = 4
"""The version of the folder's format; others are refused."""

FOLDER, PERSONAL = "checkpoint", "personal"
INITIAL = f"{FOLDER}/initial.safetensors"
JOURNAL = f"{FOLDER}/clients.jsonl"
PLAN = f"{FOLDER}/plan.json"
SETTINGS = "settings.toml"
SUMMARY = "summary.json"
RECORDS = ("rounds.jsonl", "clients.jsonl", "times.jsonl", JOURNAL)
OF_A_ROUND = re.compile(
    r"(?:save-round-(0|[1-9][0-9]{0,9})\.json"
    r"|(?:global|extra)-round-(0|[1-9][0-9]{0,9})\.safetensors)"
)
"""Files of a round; the first group is the round of an index, the second of others."""

SWEEP = "sweep.json"
"""What the folder of a comparison has; see ``sweeps/progress.py``."""

OLD_INDEX = f"{FOLDER}/federation.json"
"""Where versions 1 and 2 had their index."""

LARGEST_INDEX = 2**24

MAY_NAME_CODE = ("model", "method.name", "task", "data.name")

Whole = Annotated[int, Field(ge=0, lt=2**32)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False
    )


class Index(_Strict):
    """One save of a run: where it stands, and the mark of every file of it.

    ``data`` tells data sets apart; in a run on devices, which have their own data, it
    says which devices they are.
    """

    version: Whole
    round: Whole
    settings: dict[str, JsonValue]
    data: str
    files: dict[str, Mark]  # settings, plan, w0, and the summary of a finished run
    records: dict[str, Mark]  # of their first bytes, up to this save
    global_state: Mark
    extra: Mark | None
    global_score: Values | None
    are_clients_finished: bool = False  # by method.finish

    @property
    def names_code(self) -> dict[str, str]:
        """The settings that name code outside of fedspu, and what they name."""
        flat = dict(flatten(self.settings))
        named = {name: str(flat.get(name)) for name in MAY_NAME_CODE}
        return {
            name: place
            for name, place in named.items()
            if (names_code(place) if name == "data.name" else is_place(place))
        }


class JournalLine(_Strict):
    """What one round changed about clients."""

    round: Whole
    # The file of each client that took part; None if it is on the client's own device.
    memories: dict[Whole, Mark | None]
    num_examples: dict[Whole, Whole]  # of those that took part for the first time
    stopped: list[Whole]
    scores: dict[Whole, Values]
    kept: dict[Whole, dict[str, list[Whole]]]


_LINES = TypeAdapter(list[JournalLine])
_BEFORE, _BETWEEN, _AFTER = b'{"index": ', b', "sha256": "', b'"}\n'
_TAIL = len(_BETWEEN) + 64 + len(_AFTER)


def index_path(path: Path, t: int) -> Path:
    """The index of the save after round t."""
    return path / FOLDER / f"save-round-{t}.json"


def global_path(path: Path, t: int) -> Path:
    """The server's model after round t."""
    return path / FOLDER / f"global-round-{t}.safetensors"


def extra_path(path: Path, t: int) -> Path:
    """The server's memory after round t."""
    return path / FOLDER / f"extra-round-{t}.safetensors"


def dump_index(index: Index) -> bytes:
    """An index with its own hash: all versions have this form."""
    text = index.model_dump_json().encode()
    return _BEFORE + text + _BETWEEN + sha256(text).hexdigest().encode() + _AFTER


def load_index(content: bytes, name: str) -> Index:
    """The index that ``dump_index`` made this of; ``name`` is its file."""
    text, tail = content[len(_BEFORE) : -_TAIL], content[-_TAIL:]
    expected = _BETWEEN + sha256(text).hexdigest().encode() + _AFTER
    if not content.startswith(_BEFORE) or tail != expected:
        raise DamagedError(f"{name} is damaged: it is not what was saved")
    try:
        _check_version(_JSON.validate_json(text).get("version"), name)
        return Index.model_validate_json(text)
    except ValidationError as error:
        raise DamagedError(f"{name} is damaged ({_first(error)})") from None


_JSON = TypeAdapter(dict[str, Any])


def _check_version(version: Any, path: str | Path) -> None:
    if version != VERSION:
        raise StorageError(
            f"{path}: a run folder of version {version}, and this fedspu reads version "
            f"{VERSION}; finish it with the fedspu that wrote it, or play it again, "
            "with another --out"
        )


def saved_rounds(path: Path) -> list[int]:
    """The rounds after which this folder was saved and still says so, newest first."""
    found = (OF_A_ROUND.fullmatch(file.name) for file in listed(path / FOLDER))
    rounds = [int(m[1]) for m in found if m is not None and m[1] is not None]
    return sorted(rounds, reverse=True)


def read_index(path: Path, t: int) -> Index:
    """The index of the save after round t."""
    file = index_path(path, t)
    index = load_index(read_file(file, LARGEST_INDEX), str(file))
    if index.round != t:
        raise DamagedError(f"{file} is damaged: it is about round {index.round}")
    if index.records.keys() != set(RECORDS):
        raise DamagedError(f"{file} is damaged: it has other records")
    if not {SETTINGS, PLAN, INITIAL} <= index.files.keys() <= OWN_FILES:
        raise DamagedError(f"{file} is damaged: it has other files")
    return index


OWN_FILES = {SETTINGS, PLAN, INITIAL, SUMMARY}


def load_journal(content: bytes, name: str) -> list[JournalLine]:
    """The lines of a journal; ``name`` is its file."""
    joined = b"[" + b",".join(content.splitlines()) + b"]"
    try:
        lines = _LINES.validate_json(joined)
    except ValidationError as error:
        raise DamagedError(f"{name} is damaged ({_first(error)})") from None
    if [line.round for line in lines] != list(range(len(lines))):
        raise DamagedError(f"{name} is damaged: its rounds do not follow each other")
    return lines


def listed(folder: Path) -> Iterator[Path]:
    """The entries of a folder that is no link; nothing if there is none."""
    try:
        yield from not_a_link(folder).iterdir()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(f"{folder} cannot be read ({error.strerror})") from None


def refuse_old_versions(path: Path) -> None:
    """Refuse the folder of a run that an old fedspu wrote."""
    file = path / OLD_INDEX
    if not file.exists():
        return
    try:
        version = _JSON.validate_json(read_file(file, LARGEST_INDEX)).get("version", 1)
    except (DamagedError, ValidationError):
        version = "2 or older (it is damaged)"
    _check_version(version, path)


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in a few words."""
    found = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in found["loc"])
    return one_line(f"{place}: {found['msg']}" if place else found["msg"])
