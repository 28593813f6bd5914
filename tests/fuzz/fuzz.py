"""Coverage-guided fuzzing of one decoder.

    python -m tests.fuzz.fuzz TARGET FOLDER [options of libFuzzer]

New inputs are kept in FOLDER, so that a later run continues from there; a finding is
written to the working folder. `-runs=1000000` ends it after so many inputs. It needs
atheris, which is not installed with fedspu: `pip install --target ELSEWHERE atheris`,
and ELSEWHERE in PYTHONPATH. A fixed finding becomes a file in tests/fuzz/corpus/TARGET.
"""

import sys
from pathlib import Path

import atheris

WATCHED = [
    *("fedspu.data", "fedspu.federation", "fedspu.settings", "fedspu.resolve"),
    *("zipfile", "gzip", "pickletools", "tomllib", "numpy.lib.format"),
]

with atheris.instrument_imports(include=WATCHED):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"expected a target, then a folder: {', '.join(TARGETS)}")
    name = sys.argv.pop(1)
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    corpus = Path(__file__).parent / "corpus" / name
    atheris.Setup([*sys.argv, str(corpus)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
