"""Methods over seeds on the same clients: the table, and the report as a page."""

import sys
from pathlib import Path

import fedspu

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
found = fedspu.compare(
    ["fedspu", "local"],
    {"data.name": "digits", "rounds": 6},
    seeds=[0, 1],
    out=out,
)
print(found)
print(f"Report: {out / 'report.html'}")
