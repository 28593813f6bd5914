"""A round as lines of the run's records, and a whole run as its summary."""

import resource
import sys
from collections.abc import Sequence
from typing import Any

from fedspu.federation.plan import Plan
from fedspu.federation.run import Accuracies, RoundReport
from fedspu.federation.server import Federation

COSTS = ("bytes_initial", "bytes_down", "bytes_up", "index_bytes")


def record_round(
    plan: Plan, report: RoundReport, wall_seconds: float
) -> dict[str, list[dict[str, Any]]]:
    """The lines that one round adds, by record; times are kept apart."""
    costs = [answer.cost for answer in report.answers.values()]
    losses = [answer.reply.train_loss for answer in report.answers.values()]
    seconds = [cost.train_seconds for cost in costs]
    round_line = {
        "round": report.federation.round,
        "clients": sorted(report.answers),
        "train_loss": sum(losses) / len(losses),
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
                "train_seconds": sum(seconds),
                "critical_seconds": max(seconds),
                "wall_seconds": wall_seconds,
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
) -> dict[str, Any]:
    """The summary of a whole run, from where it stands and its records."""
    by_capacity: dict[str, list[float]] = {}
    for client, accuracy in sorted(accuracies.personal.items()):
        by_capacity.setdefault(str(float(plan.capacity(client))), []).append(accuracy)
    settings = plan.settings
    return {
        "method": plan.method.name,
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
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
