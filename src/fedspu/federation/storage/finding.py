"""Which folders hold runs, and how to resume one; known without PyTorch."""

import difflib
from pathlib import Path

from fedspu.errors import StorageError
from fedspu.federation.storage.own_files import is_free
from fedspu.federation.storage.saved_index import (
    FOLDER,
    RECORDS,
    SETTINGS,
    SWEEP,
    listed,
    read_index,
    refuse_old_versions,
    saved_rounds,
)

MOST_LISTED = 8


def check_is_run(path: Path) -> None:
    """Refuse a folder without any save."""
    if saved_rounds(path):
        return
    if not path.exists():
        raise StorageError(f"{path}: no such folder{there_are(path)}")
    if (path / SWEEP).exists():
        runs = sorted(one.name for one in listed(path) if (one / FOLDER).is_dir())
        like = f", like {path / runs[0]}" if runs else ""
        raise StorageError(
            f"{path} is a comparison, not a run; name one of its runs{like}"
        )
    refuse_old_versions(path)
    rounds = path / RECORDS[0]
    if (path / FOLDER).is_dir() and rounds.is_file() and rounds.stat().st_size:
        raise StorageError(
            f"{path}: its {FOLDER} is empty, so the run cannot be resumed; "
            f"{RECORDS[0]} still has what was recorded. Play it again with another "
            "--out"
        )
    if (path / SETTINGS).exists() and (path / FOLDER).is_dir():
        raise StorageError(
            f"{path}: the run was ended before its first save, so there is nothing to "
            "resume; start it again with the same --out"
        )
    inside = runs_in(path)
    holds = f", but holds some: name {_few(inside)}" if inside else there_are(path)
    raise StorageError(f"{path} is not a run folder: it has no checkpoint{holds}")


def check_free(path: Path) -> None:
    """Refuse a folder in which no new run can be written."""
    if is_free(path):
        return
    if not saved_rounds(path):
        what = "holds something else" if path.is_dir() else "is no folder"
        raise StorageError(f"{path} is in use already: it {what}; choose another --out")
    raise StorageError(
        f"{path} is in use already; choose another --out, or resume the run in it with "
        f"`{resume_command(path)}`"
    )


def refuse_single_run(path: Path) -> None:
    """Refuse the folder of a run for a whole comparison, and what is no folder."""
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is no folder; choose another --out")
    if saved_rounds(path):
        raise StorageError(
            f"{path} is the folder of a single run; choose another --out"
        )


def resume_command(path: Path) -> str:
    """What to type to resume a run, also if it names code of its own."""
    rounds = saved_rounds(path)
    try:
        trust = " --trust" if rounds and read_index(path, rounds[0]).names_code else ""
    except StorageError:  # resuming will say what is wrong
        trust = ""
    return f"fedspu run --resume {path}{trust}"


def there_are(missing: Path) -> str:
    """The run folders beside one that is missing, and in runs/, in words."""
    beside = [] if missing.parent == Path("runs") else runs_in(missing.parent)
    found = list(dict.fromkeys([*beside, *runs_in(Path("runs"))]))
    if not found:
        return "; there is no run folder in runs/ either: `fedspu run` makes one"
    names = {Path(one).name: one for one in reversed(found)}
    close = difflib.get_close_matches(missing.name, names, n=1)
    if close:
        return f"; did you mean {names[close[0]]}?"
    return f"; there {'is' if len(found) == 1 else 'are'} {_few(found)}"


def runs_in(folder: Path) -> list[str]:
    """The runs and comparisons in a folder."""
    try:
        return sorted(
            str(path)
            for path in listed(folder)
            if any((path / mark).is_file() for mark in (SETTINGS, SWEEP))
        )
    except StorageError:
        return []


def _few(found: list[str]) -> str:
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return f"{', '.join(found[:MOST_LISTED])}{more}"
