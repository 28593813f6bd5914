"""The page docs/reproduction.md: play its runs, keep their summaries, write its tables.

    python -m benchmarks.reproduction play FOLDER DATA    # what results/ lacks
    python -m benchmarks.reproduction collect FOLDER      # finished runs, into results/
    python -m benchmarks.reproduction times FOLDER DATA   # on a quiet machine
    python -m benchmarks.reproduction page

``FOLDER`` gets one folder for each series; ``play`` resumes what was interrupted there,
and ``collect`` may run beside it. ``DATA`` has CIFAR-10 as its authors distribute it,
``femnist.npz`` and ``speech23.npz``.
"""

import sys
from pathlib import Path

from benchmarks.reproduction.page import PAGE, page
from benchmarks.reproduction.playing import collect, measure_times, play, read

match sys.argv[1:]:
    case ["play", folder, data]:
        play(Path(folder), Path(data))
    case ["times", folder, data]:
        measure_times(Path(folder), Path(data))
    case ["collect", folder]:
        collect(Path(folder))
    case ["page"]:
        PAGE.write_text(page(read()), encoding="utf-8")
    case _:
        sys.exit(__doc__)
