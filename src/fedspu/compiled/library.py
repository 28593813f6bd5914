"""The compiled library: prebuilt in the wheel, or compiled at first use and kept.

In the user's cache, its name holds a hash of the sources, the compiler, the flags and
the processor, and a file beside it holds the hash of its bytes: a library that is
stale, damaged or made for another machine is never loaded.
"""

import ctypes
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-Wno-psabi", "-shared", "-fPIC"),
)
PREBUILT = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}
"""The processors that a wheel can bring the library for, by machine."""

NEEDED = {"x86_64": {"avx2", "bmi2", "fma"}, "aarch64": set[str]()}
"""What a processor must be able to do for that."""
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120
"""A compiler that takes longer is given up."""


@dataclass(frozen=True)
class Found:
    """The library, or why there is none; and how it came about."""

    library: ctypes.CDLL | None
    how: str
    path: Path | None = None


@cache
def find() -> Found:
    """The library of this process: loaded at most once; says so if there is none."""
    found = _find()
    if found.library is not None:
        _LOADED.append(found.library)
    elif os.environ.get("FEDSPU_NATIVE") != "0":
        _say(f"small networks will run by PyTorch, more slowly: {found.how}")
    return found


def loaded() -> ctypes.CDLL | None:
    """The library if this process has it already: nothing is compiled for this."""
    return _LOADED[0] if _LOADED else None


_LOADED: list[ctypes.CDLL] = []


def _find() -> Found:
    if os.environ.get("FEDSPU_NATIVE") == "0":
        return Found(None, "switched off by FEDSPU_NATIVE=0")
    if sys.byteorder != "little" or sys.maxsize < 2**32 or os.name != "posix":
        return Found(None, f"{platform.machine()} on {sys.platform} is not supported")
    if (ready := prebuilt_path()).exists() and _runs_prebuilt() and _is_whole(ready):
        with suppress(OSError, AttributeError):  # it was made for another system
            return Found(_opened(ready), "prebuilt", ready)
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX") or ", ".join(COMPILERS)
        return Found(None, f"no C++ compiler was found (looked for {named})")
    try:
        path = cache_folder() / f"chain-{_key(compiler)}.so"
        if not _is_whole(path):
            _compile(compiler, path)
        return Found(_opened(path), f"compiled by {compiler}", path)
    except subprocess.TimeoutExpired:
        return Found(None, f"{compiler}: took more than {SECONDS} seconds")
    except (OSError, RuntimeError, AttributeError, _CompilerError) as error:
        return Found(None, f"{compiler}: {_first_line(str(error))}")


def find_compiler() -> str | None:
    """The path of a C++ compiler: the one that CXX names, or the first of the usual."""
    named = shlex.split(os.environ.get("CXX", ""))
    tried = [named[0]] if named else COMPILERS
    found = next(filter(None, map(shutil.which, tried)), None)
    return found and shlex.join([found, *named[1:]])


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedspu" / "native"


def sources() -> list[Path]:
    """The library's source files."""
    folder = Path(__file__).parent / "cpp"
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def processor() -> str:
    """What the processor is and can do."""
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    found = [platform.machine()]
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                if (
                    not line.strip()
                ):  # all processors of a machine are taken to be alike
                    break
                if line.startswith(wanted):
                    found.append(line.partition(":")[2].strip())
    except OSError:
        found.append(platform.processor())
    return "\n".join(found)


def _key(compiler: str) -> str:
    program, *rest = shlex.split(compiler)
    file = Path(program).resolve()
    state = file.stat()
    return _short_hash(
        f"{file} {state.st_size} {state.st_mtime_ns}",
        " ".join([*rest, *FLAGS]),
        processor(),
    )


def _short_hash(*texts: str) -> str:
    """A hash of the sources and of some texts."""
    parts = [path.read_bytes() for path in sources()]
    parts += [text.encode() for text in texts]
    return sha256(b"\0".join(parts)).hexdigest()[:20]


def prebuilt_path() -> Path:
    """Where a wheel has the library for this machine and these sources, if at all."""
    name = f"chain-{_short_hash()}-{platform.machine()}.so"
    return Path(__file__).parent / "prebuilt" / name


def _runs_prebuilt() -> bool:
    """Whether this processor can run the library that a wheel brings."""
    needed = NEEDED.get(platform.machine())
    return needed is not None and needed <= set(processor().split())


class _CompilerError(Exception):
    """The compiler failed."""


def _compile(compiler: str, path: Path) -> None:
    """Compile the library into the cache; another process may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _say("compiling its code for small networks, once on this machine (about 10 s)")
    build(compiler, path)


def _say(text: str) -> None:
    sys.stderr.write(f"fedspu: {text}\n")
    sys.stderr.flush()


def build(compiler: str, path: Path, processor: str = "native") -> None:
    """Compile the library for a processor; it appears as a whole, with its seal."""
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        (main,) = (file for file in sources() if file.suffix == ".cpp")
        flags = [flag.replace("native", processor) for flag in FLAGS]
        command = [*shlex.split(compiler), *flags, str(main), "-o", str(made)]
        _run(command)
        seal = Path(folder) / "seal"
        seal.write_text(_hash(made))
        # The library is whole once its seal fits; two processes make the same bytes.
        made.replace(path)
        seal.replace(_seal(path))


def _run(command: list[str]) -> None:
    """Run a compiler; one that fails, or takes too long, is an error."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
            raise
    if process.returncode != 0:
        reason = _first_line(said.decode(errors="replace"))
        raise _CompilerError(reason or f"ended with {process.returncode}")


def _seal(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        return _seal(path).read_text() == _hash(path)
    except (OSError, UnicodeDecodeError):
        return False


def _first_line(text: str) -> str:
    """The first line that tells of an error, or the first of all; "" if none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line or "No space" in line]
    return next(iter(wrong or lines), "")


# The interface of chain.cpp -----------------------------------------------------------


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, result, arguments in _signatures():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _signatures() -> Iterator[tuple[str, Any, list[Any]]]:
    pointer, long = ctypes.c_void_p, ctypes.c_long
    integer, key = ctypes.c_int, ctypes.c_uint64
    yield "chain_new", pointer, [pointer, integer, integer, integer, integer]
    yield "chain_free", None, [pointer]
    yield "chain_work_size", long, [pointer, integer, integer]
    yield "chain_work_new", pointer, [pointer, integer, integer, pointer]
    yield "chain_work_free", None, [pointer]
    numbers = [ctypes.c_float] * 2
    yield (
        "map_norm_forward",
        integer,
        [long, long, *[pointer] * 5, *numbers, *numbers, pointer, pointer],
    )
    yield (
        "map_norm_backward",
        integer,
        [long, long, pointer, pointer, *numbers, *[pointer] * 4],
    )
    yield "gate_backward", None, [integer, long, *[pointer] * 5]
    yield "rms_backward", integer, [long, long, *[pointer] * 6]
    yield "clamp_forward", None, [long, pointer, *numbers, pointer, pointer]
    yield "clamp_backward", None, [long, *[pointer] * 3]
    yield "chain_forward", None, [*[pointer] * 4, long, key, pointer]
    yield "chain_backward", None, [*[pointer] * 4, long, key]
    yield (
        "chain_epoch",
        ctypes.c_double,
        [*[pointer] * 8, long, pointer, key, pointer],
    )
    yield "chain_judge", None, [*[pointer] * 4, long, pointer]
    yield "scale_rows", None, [pointer, pointer, long, long, long, *[pointer] * 3]
    yield "add_blocks", integer, [pointer, long, ctypes.c_double, *[pointer] * 3]
