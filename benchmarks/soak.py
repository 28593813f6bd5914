"""A long run with faults: does it end, and does anything leak?

    python benchmarks/soak.py --out FOLDER [--rounds 2000] [--clients 10000]

Two workers, ten clients a round. In 1 % of turns something goes wrong, each kind in a
fifth of them: the client's code raises, its worker is killed, its worker hangs, its
reply has a NaN, its reply has the wrong length. Clients with even numbers are killed or
hang only at the first try. Every outcome is compared with what was injected. Printed
are RAM, descriptors, processes and files over the rounds.
"""

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import fedspu
from fedspu.engines.workers import WorkersEngine
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import TrainRequest
from fedspu.methods import make_method
from fedspu.methods.method import Trained, Turn
from fedspu.settings import MethodSettings
from fedspu.training.epochs import LocalTraining

KINDS = ("raises", "killed", "hangs", "nan", "length")
SHARE = 0.01
TRIED = Path(tempfile.mkdtemp(prefix="soak-"))


def fault(t: int, client: int) -> str | None:
    """What goes wrong in a turn; None in most."""
    rng = fedspu.stream(0, "soak", t, client)
    if rng.random() >= SHARE:
        return None
    return KINDS[int(rng.integers(len(KINDS)))]


def build() -> nn.Module:
    """A small MLP."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(turn: Turn, local: LocalTraining) -> Trained:
    """The usual local epochs, with faults of the client's own."""
    t, client = turn.now.round, turn.now.client
    kind = fault(t, client)
    if kind == "raises":
        raise RuntimeError("this device is out of battery")
    if kind in ("killed", "hangs"):
        mark = TRIED / f"{t}-{client}"
        is_first = not mark.exists()
        mark.touch()
        if is_first or client % 2:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10**6)
    return usual(turn, local)


base = make_method(MethodSettings(name="fedspu"))
usual = base.train


class Tampered(WorkersEngine):
    """Workers whose replies are changed on the way."""

    def exchange(
        self, requests: Mapping[int, Any], broadcast: Any = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """As usual, but for some replies."""
        for client, answer in super().exchange(requests, broadcast):
            request = requests[client]
            if isinstance(answer, Answer) and isinstance(request, TrainRequest):
                kind = fault(request.round, client)
                values = answer.up.values
                if kind == "nan":
                    values = np.float32("nan").tobytes() + values[4:]
                elif kind == "length":
                    values = values[:-4]
                answer = replace(answer, up=replace(answer.up, values=values))
            yield client, answer


EXPECTED = {
    "raises": ("missing", "RuntimeError: this device is out of battery"),
    "killed": ("missing", "worker died"),
    "hangs": ("missing", "no answer within"),
    "nan": ("refused", "not finite"),
    "length": ("refused", "bytes of values"),
}


def check(played: Any, found: Counter[str]) -> None:
    """Compare what came of each turn with what was injected into it."""
    t = played.federation.round
    outcomes = {"missing": played.missing, "refused": played.refused}
    for client in (*played.answers, *played.missing, *played.refused):
        kind = fault(t, client)
        if kind is None:
            assert client in played.answers, (t, client)
            continue
        recovers = kind in ("killed", "hangs") and client % 2 == 0
        if recovers:
            assert played.answers[client].retried, (t, client, kind)
        else:
            where, why = EXPECTED[kind]
            assert why in outcomes[where][client], (t, client, kind, outcomes)
        found[kind + (", asked again" if recovers else "")] += 1


def state() -> dict[str, float]:
    """RAM of all processes, descriptors, processes."""
    own = os.getpid()
    children = [
        int(p)
        for task in Path(f"/proc/{own}/task").iterdir()
        for p in (task / "children").read_text().split()
    ]
    pages = [
        int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        for pid in (own, *children)
    ]
    return {
        "server_mb": pages[0] * 4096 / 1e6,
        "workers_mb": sum(pages[1:]) * 4096 / 1e6,
        "descriptors": len(os.listdir(f"/proc/{own}/fd")),
        "processes": 1 + len(children),
    }


def main() -> None:
    """Play, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=10_000)
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12 * given.clients, 16)).astype(np.float32)
    y = rng.integers(4, size=len(x))
    found: Counter[str] = Counter()
    began = time.time()
    journal = given.out / "checkpoint/clients.jsonl"
    every = max(1, given.rounds // 10)
    columns = ("round", "server MB", "workers MB", "descriptors", "processes", "files")
    columns += ("bytes of the journal per turn", "seconds")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def watch(plan: Any, played: Any) -> None:
        check(played, found)
        t = played.federation.round
        if t % every and t != 1:
            return
        now, files = state(), sum(1 for _ in given.out.rglob("*"))
        per_turn = journal.stat().st_size / (10 * t)
        print(
            f"| {t} | {now['server_mb']:.0f} | {now['workers_mb']:.0f} | "
            f"{now['descriptors']} | {now['processes']} | {files} | {per_turn:.0f} | "
            f"{time.time() - began:.0f} |",
            flush=True,
        )

    import fedspu.engines.choose as choose

    choose.WorkersEngine = Tampered  # type: ignore[misc]  # to inject faults
    run = fedspu.simulate(
        {
            "out": str(given.out),
            "rounds": given.rounds,
            "clients.number": given.clients,
            "clients.per_round": 10,
            "clients.deadline": 1.0,
            "workers": 2,
            "data.partition": "iid",
            "data.min_examples": 10,
            "train.epochs": 1,
            "train.batch_size": 8,
            "judge.every": every,
            "judge.clients": 100,
            "store.cache": 20,
        },
        model=build,
        data=(x, y),
        method=replace(base, name="soak", train=train),
        watch=watch,
    )
    shutil.rmtree(TRIED)
    print("\nInjected and accounted for:", dict(sorted(found.items())))
    missing, refused = run.summary["missing_turns"], run.summary["refused_turns"]
    print(f"Missing turns {missing}, refused {refused}, of {10 * given.rounds}.")
    left = state()
    print(
        f"After the end: {left['processes']} process, {left['descriptors']} descriptors"
    )


if __name__ == "__main__":
    main()
