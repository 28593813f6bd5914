"""A round as lines of the run's records, and a whole run as its summary."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Accuracies, RoundReport
from fedspu.federation.server import Federation
from fedspu.settings import MethodSettings

COSTS = ("bytes_initial", "bytes_down", "bytes_up", "index_bytes")


class Clock:
    """Where the time of each round goes."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._began = perf_counter()

    def round(self, report: RoundReport) -> dict[str, float]:
        """Seconds of a round, ended now: its own, and what was done for it.

        ``clients`` is the time the server waited for replies, of which ``training`` was
        spent on turns (by each worker); ``other`` are records, files and display of
        the round before.
        """
        now = perf_counter()
        wall, self._began = now - self._began, now
        costs = [answer.cost.train_seconds for answer in report.answers.values()]
        known = report.seconds
        return {
            "wall_seconds": wall,
            "server": known["server"],
            "clients": known["clients"],
            "training": sum(costs) / self.num_workers,
            "judging": known["judging"],
            "other": wall - sum(known.values()),
        }


def record_round(
    plan: Plan, report: RoundReport, seconds: Mapping[str, float]
) -> dict[str, list[dict[str, Any]]]:
    """The lines that one round adds, by record; times are kept apart."""
    costs = [answer.cost for answer in report.answers.values()]
    losses = [answer.reply.train_loss for answer in report.answers.values()]
    turns = [cost.train_seconds for cost in costs]
    round_line = {
        "round": report.federation.round,
        "clients": sorted(report.answers),
        "missing_clients": list(report.missing),
        "train_loss": sum(losses) / len(losses) if losses else None,
        "personal_accuracy": report.accuracies.personal_mean,
        "participating_accuracy": report.accuracies.participating_mean,
        "global_accuracy": (
            report.accuracies.global_ if report.is_global_judged else None
        ),
        "stopped_clients": len(report.federation.stopped),
        **{name: sum(getattr(cost, name) for cost in costs) for name in COSTS},
    }
    return {
        "rounds.jsonl": [round_line],
        "clients.jsonl": [
            _client_line(plan, report, client) for client in sorted(report.answers)
        ],
        "times.jsonl": [
            {
                "round": report.federation.round,
                "train_seconds": sum(turns),
                "critical_seconds": max(turns, default=0.0),
                **seconds,
                "retried_clients": [
                    k for k, answer in report.answers.items() if answer.retried
                ],
            }
        ],
    }


def _client_line(plan: Plan, report: RoundReport, client: int) -> dict[str, Any]:
    answer = report.answers[client]
    return {
        "round": report.federation.round,
        "client": client,
        "capacity": float(plan.capacity(client)),
        "num_examples": answer.reply.num_examples,
        "train_loss": answer.reply.train_loss,
        "val_loss": answer.reply.val_loss,
        "accuracy": report.judged.get(client),
        "has_stopped": answer.reply.has_stopped,
        **{name: getattr(answer.cost, name) for name in COSTS},
    }


def summarise(
    plan: Plan,
    federation: Federation,
    accuracies: Accuracies,
    rounds: Sequence[dict[str, Any]],
    times: Sequence[dict[str, Any]],
    num_workers: int = 1,
    peak: int = 0,
) -> dict[str, Any]:
    """The summary of a whole run, from where it stands and its records.

    ``peak`` is the most memory that one of its processes has held.
    """
    by_capacity: dict[str, list[float]] = {}
    for client, accuracy in sorted(accuracies.personal.items()):
        by_capacity.setdefault(str(float(plan.capacity(client))), []).append(accuracy)
    settings = plan.settings
    return {
        "method": plan.method.name,
        "reading": plan.method.reading,
        "label": label(settings.method),
        "dataset": plan.data.name,
        "model": settings.model,
        "alpha": settings.data.alpha,
        "split": settings.data.split,
        "early_stopping": settings.early_stopping.on,
        "seed": settings.seed,
        "rounds_played": federation.round,
        "stopped_clients": len(federation.stopped),
        "personal_accuracy": accuracies.personal_mean,
        "personal_accuracy_by_capacity": {
            p: sum(values) / len(values) for p, values in sorted(by_capacity.items())
        },
        "participating_clients": len(federation.met),
        "participating_accuracy": accuracies.participating_mean,
        "global_accuracy": accuracies.global_,
        **{name: sum(line[name] for line in rounds) for name in COSTS},
        **{
            name: sum(line[name] for line in times)
            for name in ("train_seconds", "critical_seconds", "wall_seconds")
        },
        "workers": num_workers,
        "missing_turns": sum(len(line["missing_clients"]) for line in rounds),
        "peak_rss_bytes": peak,
    }


def label(chosen: MethodSettings) -> str:
    """A method's name, with what was set beside it: ``fedavg@finetune=5``."""
    default = MethodSettings()
    options = [
        str(value) if name == "reading" else f"{name}={str(value).lower()}"
        for name, value in chosen
        if name != "name" and value != getattr(default, name)
    ]
    return "@".join([chosen.name, *options])
