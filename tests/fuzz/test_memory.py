import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only on Linux")
def test_files_that_ask_for_gigabytes_are_refused_where_there_are_none() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.hostile"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 12
