"""What hostile clients do to honest ones, without and with each rule of guard.rule.

A fifth of the clients is hostile, chosen by the seed. An attack alters what such a
client replies (or, for flipped labels, what it trains on). Scores are means over the
honest clients: of their own models, and of the server's model on their test examples. A
run that ends with an error, because models are no longer finite, scores 0.

    python benchmarks/hostile.py
    python benchmarks/hostile.py --rules none,krum --methods fedavg,heterofl,hermes
    python benchmarks/hostile.py --seeds 0,1,2,3,4,5,6,7 --set data.alpha=0.1

Results are kept in --results, a file with one line per run; runs that are there are not
played again.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedspu.engines.local import LocalEngine
from fedspu.errors import FedSPUError
from fedspu.federation.client import Examples
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import (
    Request,
    TrainReply,
    TrainRequest,
    pack_reply,
    unpack_reply,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Scores, judge, play
from fedspu.federation.server import Federation
from fedspu.neurons.blocks import extract, merge
from fedspu.neurons.table import Payload, State
from fedspu.prepare import prepare
from fedspu.random_streams import stream
from fedspu.settings_text import parse_override
from fedspu.units import percent

SHARE = 0.2
MOST_EXAMPLES = 10_000_000  # as many as a reply can claim: clients.max_examples

Poison = Callable[[TrainReply, Payload], TrainReply]
"""A hostile reply, from the honest one and what the server had in its blocks."""


def sign_flip(factor: float) -> Poison:
    """The step in the opposite direction, so many times as long."""

    def poison(reply: TrainReply, sent: Payload) -> TrainReply:
        payload = {
            name: sent[name] - factor * (values - sent[name])
            for name, values in reply.payload.items()
        }
        return replace(reply, payload=payload)

    return poison


def noise(reply: TrainReply, sent: Payload) -> TrainReply:
    """What the server sent, plus Gaussian noise with standard deviation 1."""
    rng = stream(0, "hostile", reply.round, reply.client)
    payload = {
        name: values + torch.from_numpy(rng.standard_normal(values.shape)).to(values)
        for name, values in sent.items()
    }
    return replace(reply, payload=payload)


def inflated(reply: TrainReply, sent: Payload) -> TrainReply:
    """A flipped step that claims to come from very many examples."""
    return replace(sign_flip(1)(reply, sent), num_examples=MOST_EXAMPLES)


def nothing(reply: TrainReply, sent: Payload) -> TrainReply:
    """The honest reply."""
    return reply


ATTACKS: dict[str, Poison] = {
    "nobody": nothing,
    "sign flip": sign_flip(1),
    "sign flip x10": sign_flip(10),
    "noise": noise,
    "flipped labels": nothing,  # it trains on wrong labels: see FlippedLabels
    "inflated count": inflated,
}


@dataclass(frozen=True)
class HostileEngine:
    """An engine some of whose clients are hostile."""

    inner: LocalEngine
    plan: Plan
    hostile: frozenset[int]
    poison: Poison

    @property
    def facts(self) -> Any:
        """What the engine inside tells."""
        return self.inner.facts

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Carry messages; alter the replies of hostile clients that trained."""
        for client, answer in self.inner.exchange(requests, broadcast):
            request = requests[client]
            if client not in self.hostile or isinstance(answer, Missing):
                yield client, answer
                continue
            reply = unpack_reply(self.plan, request, answer.up)
            if (
                isinstance(request, TrainRequest)
                and isinstance(reply, TrainReply)
                and request.offer
                and reply.active
            ):
                where = self.plan.travelling(reply.active)
                offered = self.plan.travelling(request.offer.active)
                full = merge(self.plan.initial, offered, request.payload)
                hostile = self.poison(reply, extract(full, where))
                up = pack_reply(self.plan, request, hostile)
                answer = replace(answer, up=up)
            yield client, answer

    def close(self) -> None:
        """Close the engine inside."""
        self.inner.close()


@dataclass(frozen=True)
class FlippedLabels:
    """Examples of which hostile clients have wrong labels to train on."""

    inner: Examples
    hostile: frozenset[int]
    num_classes: int

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        """A client's examples."""
        x, y = self.inner.part(client, name)
        is_wrong = client in self.hostile and name != "test"
        return x, self.num_classes - 1 - y if is_wrong else y


def score(attack: str, given: Mapping[str, Any]) -> tuple[float, float | None]:
    """The honest clients' personal and global score after a run."""
    ready = prepare({"workers": 1, **given})
    plan = ready.plan
    rng = stream(plan.settings.seed, "hostile clients")
    number = round(SHARE * plan.num_clients)
    chosen = rng.choice(plan.num_clients, number, replace=False).tolist()
    hostile = frozenset(chosen)
    honest = [k for k in range(plan.num_clients) if k not in hostile]
    examples: Examples = ready.examples
    if attack == "flipped labels":
        examples = FlippedLabels(examples, hostile, ready.sample.num_outputs)
    inner = LocalEngine(plan, examples)
    engine = HostileEngine(inner, plan, hostile, ATTACKS[attack])
    try:
        *_, last = play(plan, engine, Federation(0, plan.initial), Scores())
        whole = None
        if plan.has_global:
            found = judge(plan, engine, last.federation, honest, "global")
            whole = mean(each.test for each in found.scores.values())
    except FedSPUError:
        return 0.0, 0.0
    return mean(last.scores.personal[k].test for k in honest), whole


def measured(results: Path, key: dict[str, Any]) -> dict[str, Any]:
    """The result of one run; played only if it is not in the file."""
    lines = results.read_text().splitlines() if results.exists() else []
    for line in map(json.loads, lines):
        if line["key"] == key:
            return dict(line)
    given = {name: value for name, value in key.items() if name != "attack"}
    personal, whole = score(key["attack"], given)
    found = {"key": key, "personal": personal, "global": whole}
    with results.open("a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def shown(runs: list[dict[str, Any]], normal: list[dict[str, Any]]) -> str:
    """Personal and global scores, and the share of the undisturbed personal score."""
    personal = mean(run["personal"] for run in runs)
    wholes = [run["global"] for run in runs if run["global"] is not None]
    whole = percent(mean(wholes)) if wholes else "-"
    kept = personal / mean(run["personal"] for run in normal)
    return f"{percent(personal)} / {whole} ({100 * kept:.0f})"


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(r.values()) for r in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def main() -> None:
    """Play all runs, and print one table per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", default="none,clip,trimmed-mean,median,krum")
    parser.add_argument("--methods", default="fedspu")
    parser.add_argument("--seeds", default="0,1,2,3")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--results", type=Path, default=Path("runs/hostile.jsonl"))
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    more = dict(map(parse_override, args.set))
    for method in args.methods.split(","):
        rows: list[dict[str, str]] = []
        normal: list[dict[str, Any]] = []
        for rule in args.rules.split(","):
            cells = {}
            for attack in ATTACKS:
                runs = []
                for seed in map(int, args.seeds.split(",")):
                    key = {"method.name": method, "rounds": args.rounds, "seed": seed}
                    key |= {"attack": attack, "guard.rule": rule, **more}
                    runs.append(measured(args.results, key))
                normal = normal or runs
                cells[attack] = shown(runs, normal)
            rows.append({"guard.rule": rule, **cells})
        print(
            f"\n{method}, honest clients: personal / global score (personal score in % "
            "of that without hostile clients and guard)\n"
        )
        print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
