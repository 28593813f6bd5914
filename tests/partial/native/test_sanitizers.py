"""The compiled code steps outside of nothing, and does nothing undefined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedspu.compiled import library


def test_no_sanitizer_has_anything_to_say(tmp_path: Path) -> None:
    compiler = library.find_compiler()
    assert compiler is not None
    preload = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    if not all(preload):
        pytest.skip("this compiler has no sanitizers")
    made = tmp_path / "chain.so"
    slow = [flag for flag in library.FLAGS if flag != "-O3"]
    checks = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    main = next(path for path in library.sources() if path.suffix == ".cpp")
    command = [compiler, *slow, *checks, "-DSEPARATE_BUFFERS", str(main)]
    subprocess.run([*command, "-o", str(made)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.partial.native.sanitized", str(made)],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(preload),
            "ASAN_OPTIONS": "detect_leaks=0",  # those of Python and PyTorch
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "fine"), done.stderr[-3000:]


def _runtime(compiler: str, name: str) -> str:
    """The path of a sanitizer's runtime library; empty if there is none."""
    asked = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return found.strip() if Path(found.strip()).is_absolute() else ""
