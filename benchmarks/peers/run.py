r"""Ours and the peers in turns, on a machine that does nothing else; a table of ratios.

    python benchmarks/peers/run.py --work WORK.npz --net cifar10 --rounds 6 \
        --python flower=PATH --python fluke=PATH --python pfl-research=PATH \
        --python released=PATH

PATH is the python of a peer's own environment; README.md says how to make them. In each
repetition every peer runs right after ours on the same clients in the same rounds, each
in a process of its own; the ratio is of their seconds in all rounds but the first, and
the table has the median of the repetitions. Ours plays federated averaging beside the
peers that do, and FedSPU beside the released code. Above 1, ours is faster.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).parent
TORCHRUN = "-m torch.distributed.run --standalone --local-addr 127.0.0.1"

Line = dict[str, Any]  # what a program prints


@dataclass(frozen=True)
class Peer:
    """A program, how it is started, and what ours does beside it."""

    python: str  # whose environment
    command: str
    says: str
    ours: str = "fedavg"


PEERS = {
    "bare": Peer("bare", "bare.py", "bare PyTorch, DataLoader, all cores"),
    "bare-1": Peer(
        "bare", "bare.py --threads 1", "bare PyTorch, DataLoader, one thread"
    ),
    "bare-whole": Peer(
        "bare", "bare.py --batches whole", "bare PyTorch, whole batches, all cores"
    ),
    "bare-whole-1": Peer(
        "bare",
        "bare.py --batches whole --threads 1",
        "bare PyTorch, whole batches, one thread",
    ),
    "flower": Peer("flower", "flower.py", "Flower on Ray, an actor for each core"),
    "flower-whole": Peer(
        "flower", "flower.py --batches whole", "Flower on Ray, whole batches"
    ),
    "pfl-research": Peer(
        "pfl-research", "pfl_research.py", "pfl-research, one process, all cores"
    ),
    "pfl-research-1": Peer(
        "pfl-research", "pfl_research.py --threads 1", "pfl-research, one thread"
    ),
    # Its rendezvous listens on all interfaces of the machine, which is not ours to set.
    "pfl-research-2": Peer(
        "pfl-research",
        f"{TORCHRUN} --nproc-per-node 2 pfl_research.py --threads 1",
        "pfl-research, two processes of one thread",
    ),
    "fluke": Peer("fluke", "fluke_fl.py", "fluke, all cores"),
    "fluke-1": Peer("fluke", "fluke_fl.py --threads 1", "fluke, one thread"),
    "released": Peer("released", "released.py", "the released FedSPU way", "fedspu"),
    "released-numbers": Peer(
        *("released", "released.py --columns numbers"),
        *("the released FedSPU way, numbered columns", "fedspu"),
    ),
}
DEFAULT = "bare,flower,pfl-research,fluke,released"


def main() -> None:
    """Measure, and print the table."""
    given = _options()
    _refuse_if_busy(given)
    pairs: dict[str, list[tuple[Line, Line]]] = {name: [] for name in given.peers}
    for repetition in range(1, 1 + given.repetitions):
        for name in given.peers:
            peer = PEERS[name]
            rounds = given.rounds_of.get(name, given.rounds)
            method = given.method or peer.ours
            ours = f"ours.py --method {method} {given.ours}"
            pair = (
                run("ours", ours, rounds, given),
                run(peer.python, peer.command, rounds, given),
            )
            _check_alike(name, pair, given)
            pairs[name].append(pair)
            _note(f"{repetition} of {given.repetitions}, {name}: {ratio(pair):.2f}")
    print(table(pairs, given))


def run(python: str, command: str, rounds: int, given: argparse.Namespace) -> Line:
    """Run a program to its end; what it printed."""
    wait_until_quiet(given)
    words = [
        str(HERE / word) if word.endswith(".py") else word
        for word in shlex.split(command)
    ]
    words = [given.python[python], *words]
    words += ["--work", given.work, "--rounds", str(rounds)]
    words += ["--net", given.net, "--steps", given.steps]
    # A limit on threads here would be one on peers that are to use all cores.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=given.timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    lines = [text for text in out.splitlines() if text.startswith("{")]
    if process.returncode or not lines:
        raise SystemExit(f"{shlex.join(words)} failed:\n{errors[-4000:]}")
    line: Line = json.loads(lines[-1])
    if given.out:
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line


def _check_alike(name: str, pair: tuple[Line, Line], given: argparse.Namespace) -> None:
    """After single steps both must have the same weights, if both average alike."""
    moved, peer_moved = (line["moved"] for line in pair)
    if given.steps != "one" or {pair[0]["method"], PEERS[name].ours} != {"fedavg"}:
        return
    if abs(moved - peer_moved) > 0.01 * moved:
        raise SystemExit(f"{name}: weights moved by {peer_moved}, ours by {moved}")


# Is anybody else there? ---------------------------------------------------------------


def wait_until_quiet(given: argparse.Namespace) -> None:
    """Wait while other processes keep the cores busy; give up after a while."""
    until = time.monotonic() + given.patience
    while (busy := busy_share()) > given.busy and not given.anyway:
        if time.monotonic() > until:
            raise SystemExit(
                f"the cores are {busy:.0%} busy with something else; end it, wait "
                "longer (--patience), or measure --anyway"
            )
        time.sleep(2)


def busy_share(seconds: float = 1.0) -> float:
    """Which share of all cores is in use, while nothing of ours runs."""
    idle, total = _ticks()
    time.sleep(seconds)
    idle_then, total_then = _ticks()
    return 1 - (idle_then - idle) / (total_then - total)


def _ticks() -> tuple[int, int]:
    """Of all cores since the machine started: idle ones, and all."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    counts = [int(count) for count in first.split()[1:9]]
    return counts[3] + counts[4], sum(counts)


def _refuse_if_busy(given: argparse.Namespace) -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > given.busy * cores and not given.anyway:
        raise SystemExit(
            f"the load average is {load:.2f}; expected at most "
            f"{given.busy * cores:.2f} on {cores} cores. End what is running and wait "
            "a minute, or measure --anyway"
        )


# The table ----------------------------------------------------------------------------


def timed(line: Line) -> list[float]:
    """The seconds of the rounds that count: not the first, if there are others."""
    seconds: list[float] = line["seconds"]
    return seconds[1:] or seconds


def ratio(pair: tuple[Line, Line]) -> float:
    """How much longer the peer took than ours."""
    ours, peer = pair
    return sum(timed(peer)) / sum(timed(ours))


def table(pairs: dict[str, list[tuple[Line, Line]]], given: argparse.Namespace) -> str:
    """Ratios, medians of the repetitions, in Markdown."""
    some = next(iter(pairs.values()))[0][0]
    local = "one local step" if given.steps == "one" else "five local epochs"
    rows = [
        f"{given.net}, {local}; {os.cpu_count()} cores; medians of "
        f"{given.repetitions} repetitions in turns; fedspu "
        f"{some['versions']['fedspu']}, PyTorch {some['versions']['torch']}",
        "",
        "| peer | ours plays | peer ÷ ours | lowest to highest | peer, s a round "
        "| ours, s a round | peer, start-up s | ours, start-up s | rounds |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows += [_row(PEERS[name], measured) for name, measured in pairs.items()]
    return "\n".join(rows)


def _row(peer: Peer, pairs: list[tuple[Line, Line]]) -> str:
    ratios = [ratio(pair) for pair in pairs]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    first = theirs[0]
    known = {"python", "torch", "numpy"}
    versions = [f"{k} {v}" for k, v in first["versions"].items() if k not in known]
    cells = [
        ", ".join([peer.says, *versions]),
        ours[0]["method"],
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{median(mean(timed(line)) for line in theirs):.3f}",
        f"{median(mean(timed(line)) for line in ours):.3f}",
        f"{median(line['startup_seconds'] for line in theirs):.1f}",
        f"{median(line['startup_seconds'] for line in ours):.1f}",
        str(len(timed(first))),
    ]
    return f"| {' | '.join(cells)} |"


# The command --------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--work", required=True, help="the file that common.py made")
    options.add_argument("--net", default="cifar10", help="cifar10 or speech")
    options.add_argument("--steps", choices=("all", "one"), default="all")
    options.add_argument("--rounds", type=int, default=6, help="the first is not timed")
    options.add_argument(
        "--rounds-of",
        action="append",
        default=[],
        metavar="PEER=N",
        help="fewer for a slow one, and for ours beside it",
    )
    options.add_argument("--repetitions", type=int, default=5)
    options.add_argument("--peers", default=DEFAULT, help=f"of {', '.join(PEERS)}")
    options.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    options.add_argument("--method", help="what ours plays beside every peer")
    options.add_argument("--ours", default="", help="more options for ours.py")
    options.add_argument("--out", type=Path, help="add each run's JSON line to a file")
    options.add_argument("--timeout", type=float, default=3600, help="s, for one run")
    options.add_argument("--patience", type=float, default=120, help="s, for quiet")
    options.add_argument("--busy", type=float, default=0.15, help="share of the cores")
    options.add_argument("--anyway", action="store_true", help="on a busy machine too")
    given = options.parse_args()

    given.peers = given.peers.split(",")
    unknown = [name for name in given.peers if name not in PEERS]
    if unknown:
        options.error(f"--peers {unknown[0]}: expected some of {', '.join(PEERS)}")
    given.rounds_of = {k: int(v) for k, v in _pairs(options, given.rounds_of)}
    here = {"ours": sys.executable, "bare": sys.executable}
    given.python = {**here, **dict(_pairs(options, given.python))}
    for name in given.peers:
        if PEERS[name].python not in given.python:
            options.error(f"{name}: give --python {PEERS[name].python}=PATH")
    return given


def _pairs(options: argparse.ArgumentParser, texts: list[str]) -> list[tuple[str, str]]:
    for text in texts:
        if "=" not in text:
            options.error(f"{text}: expected PEER=value")
    return [(text.partition("=")[0], text.partition("=")[2]) for text in texts]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
