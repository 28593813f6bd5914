"""Where data files are, and how to fetch the official ones.

The files of a data set are in a folder of its name in the data folder, or where other
libraries put them. ``fetch`` puts them there; users may also do so themselves.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedspu.errors import DataError
from fedspu.ordinary_files import open_ordinary, size_of


@dataclass(frozen=True)
class Download:
    """An official file: its address, its size in bytes, and its checksum.

    A checksum is written as kind:value, like sha256:0a1b…; it is empty if none is known
    for certain, and then only the size is compared.
    """

    url: str
    size: int
    checksum: str = ""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        known = f"{self.size:,} bytes"
        return f"{self.name} ({known}, {self.checksum or 'checksum not known'})"


def data_folder(folder: Path | None = None) -> Path:
    """The data folder: ``folder``, FEDSPU_DATA, or fedspu in the user's data folder."""
    if folder is not None:
        return folder.expanduser()
    own = os.environ.get("FEDSPU_DATA")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "fedspu"


def places(
    name: str, folder: Path | None, others: Iterable[str] = ()
) -> Iterator[Path]:
    """The folders in which the files of ``name`` may be, most likely first.

    ``others`` are further folders, relative to the data folder or absolute.
    """
    root = data_folder(folder)
    yield root / name
    for other in others:
        yield root / other
    if folder is not None:  # the user may give the folder of the files itself
        yield root


def not_here(
    name: str, folder: Path | None, downloads: Iterable[Download]
) -> DataError:
    """The error that says which file to put where."""
    root = data_folder(folder)
    files = ", ".join(str(download) for download in downloads)
    return DataError(
        f"{name}: its files are not in {root}; get them with `fedspu data fetch {name}"
        f"{f' --data-dir {folder}' if folder else ''}`, or put {files} into "
        f"{root / name}"
    )


try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]  # checked where it is used

Watch = Callable[[int, int], None]
"""Called with the number of bytes received so far, and with the total."""

CHUNK = 2**18
LINE = 200  # characters of an error that is shown
TIMEOUT = 30.0  # seconds without a byte
NOT_SATISFIABLE = 416  # HTTP: the part asked for lies beyond the end
PARTIAL = 206  # HTTP: the part asked for follows


def fetch(download: Download, folder: Path, watch: Watch | None = None) -> bool:
    """Fetch an official file into ``folder``; False if it was there already."""
    file = folder / download.name
    if file.exists():
        problem = compare(file, download)
        if problem:
            raise DataError(f"{file}: {problem}; remove it and fetch again")
        return False

    part = folder / f"{download.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as opened:
            _lock(opened, part)
            try:
                _complete(download, opened, folder, watch or (lambda here, total: None))
                opened.flush()
                _keep_if_right(part, file, download)
            finally:
                opened.flush()
                if part.exists() and part.stat().st_size == 0:
                    part.unlink()
    except OSError as error:
        raise DataError(
            f"{part}: cannot be written ({error.strerror or error}); once that is "
            "fixed, the same command resumes"
        ) from None
    return True


def _keep_if_right(part: Path, file: Path, download: Download) -> None:
    problem = compare(part, download)
    if problem:
        part.unlink()
        raise DataError(
            f"{download.url}: {problem}; what was received was deleted. Fetch again, "
            f"or {_by_hand(download, file.parent)}"
        )
    part.replace(file)


def compare(file: Path, download: Download) -> str:
    """How a file differs from the official one; empty if it does not."""
    size = file.stat().st_size
    if size != download.size:
        return f"{size:,} bytes, expected {download.size:,}"
    if not download.checksum:
        return ""
    kind, _, expected = download.checksum.partition(":")
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, kind).hexdigest()
    return "" if found == expected else f"{kind} {found}, expected {expected}"


def _lock(part: BinaryIO, name: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"{name}: another process is fetching it; wait until it is done"
        ) from None


def _complete(download: Download, part: BinaryIO, folder: Path, watch: Watch) -> None:
    """Append to ``part`` what is missing."""
    here = part.tell()
    if here > download.size:
        here = _empty(part)
    if here == download.size:
        return
    response = _open(download, here, folder)
    with response:
        if here and not _goes_on(response, here):
            here = _empty(part)
        watch(here, download.size)
        while chunk := _read(response, here, download):
            here += len(chunk)
            if here > download.size:
                _empty(part)
                raise DataError(
                    f"{download.url}: more than the {download.size:,} bytes expected; "
                    "what was received was deleted. "
                    f"{_by_hand(download, folder).capitalize()}"
                )
            part.write(chunk)
            watch(here, download.size)
    if here < download.size:
        raise _cut(download, here, "the server sent no more")


def _empty(part: BinaryIO) -> int:
    part.truncate(0)
    return 0


def _open(download: Download, here: int, folder: Path) -> HTTPResponse:
    """The server's response, starting at the byte ``here`` if the server can."""
    headers = {"User-Agent": "fedspu"} | ({"Range": f"bytes={here}-"} if here else {})
    try:
        response: HTTPResponse = urlopen(
            Request(download.url, headers=headers), timeout=TIMEOUT
        )
    except HTTPError as error:
        with error:
            if error.code == NOT_SATISFIABLE and here:
                return _open(download, 0, folder)
            reason = f"the server answered {error.code} {error.reason}"
    except (OSError, HTTPException) as error:
        reason = f"cannot be reached ({getattr(error, 'reason', error)})"
    else:
        return response
    raise DataError(f"{download.url}: {reason}; {_by_hand(download, folder)}")


def _goes_on(response: HTTPResponse, here: int) -> bool:
    """Whether the response is the rest of the file, and not all of it."""
    starts = f"bytes {here}-"
    return response.status == PARTIAL and response.headers.get(
        "Content-Range", ""
    ).startswith(starts)


def _read(response: HTTPResponse, here: int, download: Download) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, HTTPException) as error:
        raise _cut(download, here, str(error) or type(error).__name__) from None


def _cut(download: Download, here: int, reason: str) -> DataError:
    return DataError(
        f"{download.url}: interrupted after {here:,} of {download.size:,} bytes "
        f"({reason}); the same command resumes from there"
    )


def _by_hand(download: Download, folder: Path) -> str:
    return f"get {download} in another way and put it into {folder}"


# What is in them ---------------------------------------------------------------------


@contextmanager
def opened(file: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """An ordinary file, open to read, of at most ``most`` bytes.

    Whatever cannot be read, then or later, is a DataError.
    """
    try:
        with open_ordinary(file) as stream:
            if most is not None and size_of(stream) > most:
                raise DataError(
                    f"{shown(file)}: {size_of(stream):,} bytes; expected at most "
                    f"{most:,}; fix or remove it"
                )
            yield stream
    except OSError as error:
        raise DataError(
            f"{shown(file)} cannot be read ({reason(error)}); fix or remove it"
        ) from None


def read(file: Path, most: int) -> bytes:
    """The bytes of an ordinary file that has at most ``most`` of them."""
    with opened(file, most) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise DataError(
            f"{shown(file)}: grew beyond {most:,} bytes while it was read; try again"
        )
    return content


def shown(name: Path | str) -> str:
    """A file's name on one line, whatever characters it has."""
    return str(name) if str(name).isprintable() else repr(str(name))


def reason(error: Exception) -> str:
    """Why something failed, on one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= LINE else f"{line[:LINE]}…"
