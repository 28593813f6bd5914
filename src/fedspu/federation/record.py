"""A round as lines of the run's records, and a whole run as its summary.

Records hold the task's metric under its own name, as in ``personal_accuracy``. A client
that could not be judged (``unjudged_clients``) is in the personal means with its score
from before, or not at all if it never had one; the global mean is without it, or null
if nobody could judge the global model.
"""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from fedspu.federation.engine import Facts
from fedspu.federation.environment import environment
from fedspu.federation.guards.guard import find_guard
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round, Scores
from fedspu.federation.server import Federation
from fedspu.federation.values import Values
from fedspu.methods import suggested_by
from fedspu.settings import MethodSettings, Settings
from fedspu.settings_text import flatten

COSTS = ("bytes_initial", "bytes_down", "bytes_up", "index_bytes")
TIMES = ("train_seconds", "train_cpu_seconds", "critical_seconds", "wall_seconds")


class Clock:
    """Where the time of each round goes."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._began = perf_counter()

    def round(self, played: Round) -> dict[str, float]:
        """The seconds of a round that ends now, in all and by what they were spent on.

        ``clients`` is the time the server waited for replies; ``training`` is the part
        of it spent on turns, per worker; ``other`` is the time for records, files and
        display of the round before.
        """
        now = perf_counter()
        wall, self._began = now - self._began, now
        costs = [answer.cost.train_seconds for answer in played.answers.values()]
        known = played.seconds
        return {
            "wall_seconds": wall,
            "server": known["server"],
            "clients": known["clients"],
            "training": sum(costs) / self.num_workers,
            "judging": known["judging"],
            "other": wall - sum(known.values()),
        }


def record_round(
    plan: Plan, played: Round, seconds: Mapping[str, float]
) -> dict[str, list[dict[str, Any]]]:
    """The lines that one round adds to each record; times have their own."""
    costs = [answer.cost for answer in played.answers.values()]
    losses = [reply.train_loss for _, reply in played.replies()]
    turns = [cost.train_seconds for cost in costs]
    metric, scores = plan.task.metric.name, played.scores
    round_line = {
        "round": played.federation.round,
        "clients": sorted(played.answers),
        "missing_clients": _by_client(played.missing),
        "refused_clients": _by_client(played.refused),
        "ignored_replies": _by_client(played.ignored),
        "unjudged_clients": _by_client(played.unjudged),
        "train_loss": sum(losses) / len(losses) if losses else None,
        **_named("personal_", metric, scores.personal_mean),
        **_named("participating_", metric, scores.participating_mean),
        **_named(
            "global_", metric, scores.global_ if played.is_global_judged else None
        ),
        "stopped_clients": len(played.federation.stopped),
        **{name: sum(getattr(cost, name) for cost in costs) for name in COSTS},
        **({"is_finish": True} if played.federation.is_finished else {}),
    }
    return {
        "rounds.jsonl": [round_line],
        "clients.jsonl": _client_lines(plan, played),
        "times.jsonl": [
            {
                "round": played.federation.round,
                "train_seconds": sum(turns),
                "train_cpu_seconds": sum(cost.train_cpu_seconds for cost in costs),
                "critical_seconds": max(turns, default=0.0),
                **seconds,
                "turn_cpu_seconds": _by_client(
                    {k: a.cost.train_cpu_seconds for k, a in played.answers.items()}
                ),
                "retried_clients": [
                    k for k, answer in played.answers.items() if answer.retried
                ],
            }
        ],
    }


def _named(whose: str, metric: str, found: Values | None) -> dict[str, float | None]:
    """Both values by name: on test examples, and on validation examples."""
    return {
        f"{whose}{metric}": None if found is None else found.test,
        f"{whose}val_{metric}": None if found is None else found.val,
    }


def _by_client(found: Mapping[int, Any]) -> dict[str, Any]:
    """What was found about clients, in client order, as JSON has it."""
    return {str(client): value for client, value in sorted(found.items())}


def _client_lines(plan: Plan, played: Round) -> list[dict[str, Any]]:
    return [
        {
            "round": reply.round,
            "client": client,
            "capacity": float(plan.capacity(client)),
            "num_examples": reply.num_examples,
            "train_loss": reply.train_loss,
            "val_loss": reply.val_loss,
            **_named("", plan.task.metric.name, played.judged.get(client)),
            "has_stopped": reply.has_stopped,
            **{name: getattr(played.answers[client].cost, name) for name in COSTS},
        }
        for client, reply in sorted(played.replies())
    ]


def summarise(
    plan: Plan,
    dataset: str,
    federation: Federation,
    scores: Scores,
    rounds: Sequence[Mapping[str, Any]],
    times: Sequence[Mapping[str, Any]],
    facts: Facts,
) -> dict[str, Any]:
    """The summary of a whole run, from its last state and its records.

    ``facts`` says how much memory the largest of the run's processes has held.
    """
    by_capacity: dict[str, list[float]] = {}
    for client, score in sorted(scores.personal.items()):
        by_capacity.setdefault(str(float(plan.capacity(client))), []).append(score.test)
    settings, metric = plan.settings, plan.task.metric
    costs, of_finish = _costs(rounds, times)
    played = federation.rounds_played
    worst = sorted(
        (score.test for score in scores.personal.values()),
        reverse=not metric.is_higher_better,
    )[: max(1, len(scores.personal) // 10)]
    return {
        "method": plan.method.name,
        "reading": plan.method.reading,
        "label": label(settings.method),
        "dataset": dataset,
        "model": settings.model,
        "task": plan.task.name,
        "metric": metric.name,
        "higher_is_better": metric.is_higher_better,
        "is_share": metric.is_share,
        "alpha": settings.data.alpha,
        "split": settings.data.split,
        "early_stopping": settings.early_stopping.on,
        "beyond_paper": beyond_paper(settings),
        "seed": settings.seed,
        "rounds_played": played,
        "stopped_clients": len(federation.stopped),
        **_named("personal_", metric.name, scores.personal_mean),
        f"personal_{metric.name}_by_capacity": {
            p: sum(values) / len(values) for p, values in sorted(by_capacity.items())
        },
        # The mean of the tenth of clients that fare worst.
        f"worst_tenth_{metric.name}": sum(worst) / len(worst) if worst else None,
        "participating_clients": len(federation.last),
        **_named("participating_", metric.name, scores.participating_mean),
        **_named("global_", metric.name, scores.global_),
        **costs,
        **{f"finish_{name}": n for name, n in of_finish.items() if plan.finishes},
        "workers": facts.num_workers,
        "kernels": settings.train.kernels,
        "missing_turns": sum(len(line["missing_clients"]) for line in rounds),
        "refused_turns": sum(len(line["refused_clients"]) for line in rounds),
        "ignored_replies": sum(
            sum(line.get("ignored_replies", {}).values()) for line in rounds
        ),
        "unjudged_turns": sum(len(line.get("unjudged_clients", {})) for line in rounds),
        "peak_rss_bytes": facts.peak_bytes,
        "environment": environment(),
        **find_guard(settings.guard).facts(plan, played),
    }


def _costs(
    rounds: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, float], dict[str, float]]:
    """What all rounds cost, and apart from them the last models of clients."""
    last = {line["round"] for line in rounds if line.get("is_finish")}
    sums: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for found, is_finish in zip(sums, (False, True), strict=True):
        for names, lines in ((COSTS, rounds), (TIMES, times)):
            these = [line for line in lines if (line["round"] in last) == is_finish]
            found.update({name: sum(line[name] for line in these) for name in names})
    return sums


def what_was_lost(
    summary: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A line for each kind of loss in a run, for the user."""
    where = "rounds.jsonl says why"
    if lost := summary["missing_turns"]:
        yield f"{lost} of clients' turns were lost{_why(rounds, 'missing')}; {where}"
    if lost := summary["refused_turns"]:
        why = _why(rounds, "refused")
        yield f"{lost} of clients' replies could not be used{why}; {where}"
    if lost := summary["ignored_replies"]:
        yield f"{lost} replies came that nobody had asked for"
    if lost := summary["unjudged_turns"]:
        yield (
            f"{lost} times a client could not be judged, and its score is an older "
            f"one, or none; {where}"
        )


BEYOND_PAPER = {
    "method.finish": 0,
    "method.finish_last": 0,
    "method.context": "own",
    "early_stopping.patience": 1,
    "guard.noise": 0.0,
    "guard.rule": "none",
    "norm.policy": "aggregate",
    "server.average": "last",
    "server.optimizer": "none",
    "train.adjust_logits": False,
    "train.augment": [],
    "train.class_weights": "none",
    "train.clip": 0.0,
    "train.gradient": "exact",
    "train.momentum": 0.0,
    "train.optimizer": "sgd",
    "train.schedule": "constant",
    "train.weight_decay": 0.0,
    "wire.down": None,
    "wire.values": "float32",
}
"""Settings that change what a method learns, and their values in the paper."""


def beyond_paper(settings: Settings) -> dict[str, Any]:
    """The settings with which a run departs from the paper, by name."""
    given = dict(flatten(settings.model_dump(mode="json")))
    return {
        name: given[name]
        for name, of_paper in BEYOND_PAPER.items()
        if given.get(name, of_paper) != of_paper
    }


def _why(rounds: Sequence[Mapping[str, Any]], what: str) -> str:
    """The first reason for which clients were ``what``."""
    for line in rounds:
        for client, reason in line[f"{what}_clients"].items():
            return f" (round {line['round']}, client {client}: {reason})"
    return ""


def label(chosen: MethodSettings) -> str:
    """A method's name, with its reading and options: ``fedavg@finetune=5``."""
    given = dict(chosen.options)
    for name in ("finish", "finish_last"):
        epochs = getattr(chosen, name)
        if epochs != suggested_by(chosen.name).get(f"method.{name}", 0):
            given[name] = epochs
    options = [f"{name}={str(value).lower()}" for name, value in given.items()]
    reading = [] if chosen.reading is None else [chosen.reading]
    return "@".join([chosen.name, *reading, *options])
