"""``fedspu device``: which capacity p this device has."""

from typing import Annotated, Any

import click
import typer
from rich.console import Console

from fedspu.cli import flags
from fedspu.cli.flags import Json, with_settings
from fedspu.cli.results import print_json
from fedspu.errors import SettingsError
from fedspu.resolve import resolve
from fedspu.units import size

SHARE_OF_RAM = 0.25
"""The part of the free RAM that a step may use, if --memory does not say."""

OTHERS = ("--capacities", "--per-round", "--rounds", "--early-stopping")
ELSEWHERE = ("--workers", "--engine", "--ray-address", "--out", "--device")


@with_settings(*OTHERS, *ELSEWHERE)
def device(
    given: dict[str, Any],
    memory: Annotated[
        str | None,
        typer.Option(
            help="The most that a training step may use, like 64MB; default: a quarter "
            "of the RAM that is free now."
        ),
    ] = None,
    round_seconds: Annotated[
        str | None,
        typer.Option(
            help="How long one turn may take, all its epochs together, like 30; "
            "default: no limit."
        ),
    ] = None,
    p: Annotated[
        str | None,
        typer.Option(help="Choose from these, like 0.2,0.5,1; default: steps of 0.05."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            help="Take this client's share of the data, as in a simulation; default: "
            "all examples of --data are this device's own."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how much of a model this device can train, and propose its capacity p.

    Training steps are taken at several p, as FedSPU takes them, with the model, data,
    batch size and epochs of the settings. The exit code is 2 if no p fits.

    [bold]Examples[/bold]

    fedspu device

    fedspu device experiment.toml --data arrays:mine.npz --round-seconds 30

    fedspu device --model emnist --data emnist --client 3 --memory 4MB

    fedspu device experiment.toml --p 0.25,0.5,1 --json
    """
    shares = None if p is None else flags.shares(p, "--p")
    num_bytes = flags.num_bytes(memory, "--memory")
    seconds = flags.seconds(round_seconds, "--round-seconds")
    _refuse_without_client(client)
    settings = resolve(_for_one_client(given, client))
    if settings.device != "cpu":
        raise SettingsError(
            f"device = {settings.device!r}: fedspu device measures training on the CPU "
            "only; leave the setting out, or --set device=cpu"
        )

    from fedspu.engines.machine import forget_peak, memory_here, peak_rss_bytes
    from fedspu.neurons.blocks import load_state
    from fedspu.prepare import prepare
    from fedspu.profile.device import Limits, propose
    from fedspu.reports import device as report
    from fedspu.reports.profile import progress
    from fedspu.runs import check_client

    free = memory_here(None).ram
    if num_bytes is None and free < float("inf"):
        num_bytes = SHARE_OF_RAM * free
    limits = Limits(num_bytes, seconds)
    with progress() as watch:
        watch("reading the data, and mapping the model's neurons …")
        prepared = prepare(settings)
        plan = prepared.plan
        check_client(client or 0, plan)
        x, y = prepared.examples.part(client or 0, "train")
        model = plan.build()
        load_state(model, plan.initial)
        forget_peak()
        found = propose(
            model,
            plan.neurons,
            x,
            y,
            plan.task,
            plan.settings.train,
            limits=limits,
            shares=shares,
            watch=watch,
        )
    process = peak_rss_bytes()
    if as_json:
        about = {"model": plan.settings.model, "kernels": plan.settings.train.kernels}
        facts = {**about, **report.as_json(found, limits), "process_bytes": process}
        print_json(facts)
    else:
        console = Console(soft_wrap=True, highlight=False)
        train = plan.settings.train
        console.print(
            f"{plan.settings.model} on {len(x)} training examples: {train.epochs} "
            f"epochs in batches of {train.batch_size}, {found.num_steps} steps a turn, "
            f"run by {_runner(train.kernels)}.",
            markup=False,
        )
        console.print(report.device_table(found, limits))
        for line in (
            *_limits_in_words(limits, memory is None),
            "Times are CPU times of one core: a busy device takes longer, and so do "
            "sending and judging.",
            f"Besides the step, this process held up to {size(process)}: Python, "
            "PyTorch and the data.",
            *_about_method(plan.method.name),
            report.what_limits(found, limits),
        ):
            console.print(line, markup=False)
        if found.capacity is not None:
            console.print("Put this into the device's config:", markup=False)
            console.print(f"capacity = {found.capacity:g}", markup=False)
    if found.capacity is None:
        raise SettingsError(
            "no p fits this device; give it more with --memory or --round-seconds, or "
            "use a smaller model, smaller batches or fewer epochs"
        )


def _refuse_without_client(client: int | None) -> None:
    """Refuse flags that say how the data is divided, if it is not divided."""
    flags_given = click.get_current_context().params
    for name in ("clients", "alpha"):
        if client is None and flags_given.get(name) is not None:
            raise SettingsError(
                f"--{name} {flags_given[name]}: has no effect, as all examples are "
                "this device's own; add --client NUMBER to take one client's share"
            )


def _for_one_client(given: dict[str, Any], client: int | None) -> dict[str, Any]:
    """The settings, with what other devices do left out: it does not matter here."""
    alone = {"clients.per_round": 1, "clients.capacities": [1.0]}
    if client is None:
        alone |= {"clients.number": 1, "data.partition": "iid"}
    return {**given, **alone}


def _runner(kernels: str) -> str:
    return "compiled code" if kernels == "native" else "PyTorch"


def _limits_in_words(limits: Any, is_default: bool) -> list[str]:
    memory = "no limit, as the free RAM is not known here; give --memory"
    if limits.num_bytes is not None:
        why = ", a quarter of the RAM that is free now" if is_default else ""
        memory = f"at most {size(limits.num_bytes)}{why}"
    time = "no limit; --round-seconds sets one"
    if limits.seconds is not None:
        time = f"at most {limits.seconds:g} s"
    return [f"Memory of a step: {memory}.", f"Time of a turn: {time}."]


def _about_method(name: str) -> list[str]:
    if name == "fedspu":
        return []
    return [f"Measured as fedspu trains; {name} may need more or less at the same p."]
