"""Play runs in a Flower simulation; in a process of its own, as Ray has to be."""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedspu.federation.client_memory import pack_memory
from fedspu.runs import Run, simulate
from tests.flower.fleet import SETTINGS
from tests.oracles.federation import bits


def digest_of(run: Run) -> dict[str, Any]:
    """All that a run came to, in few characters."""
    state = run.last.federation.global_state
    return {
        "rounds": run.rounds,
        "global": _digest(state),
        "memories": [_digest(pack_memory(run.memory(k))) for k in range(3)],
    }


def _digest(state: Any) -> str:
    parts = (name.encode() + bits(state[name]) for name in sorted(state))
    return sha256(b"".join(parts)).hexdigest()


def main(out: Path, methods: list[str]) -> None:
    found = {}
    for method in methods:
        given = {**SETTINGS, "method.name": method, "workers": 2, "engine": "flower"}
        found[method] = digest_of(simulate(given))
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
