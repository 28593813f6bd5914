"""``fedspu profile``: what a training step costs at each p."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedspu.cli import flags
from fedspu.cli.console import complain
from fedspu.cli.flags import Examples, Input, Json, Model, Task
from fedspu.cli.results import print_json
from fedspu.errors import SettingsError

if TYPE_CHECKING:
    from fedspu.profile.measure import Profile


def profile(
    model: Model,
    shape: Input = None,
    data: Examples = None,
    task: Task = "classification",
    batch_size: Annotated[int, typer.Option(help="Examples per step.")] = 16,
    p: Annotated[
        str, typer.Option(help="Shares of neurons to measure.")
    ] = "0.2,0.4,0.6,0.8,1",
    mode: Annotated[
        str,
        typer.Option(help="exact: the true gradient; truncated: cheaper; or both."),
    ] = "exact",
    saves: Annotated[
        str,
        typer.Option(help="fast: save time; lean: save memory; or both."),
    ] = "fast,lean",
    memory: Annotated[
        str | None, typer.Option(help="Find the largest p whose peak fits, like 4MB.")
    ] = None,
    seconds: Annotated[
        str | None,
        typer.Option(
            help="Find the largest p whose step takes at most this, like 0.01 or 10ms."
        ),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(help="Times are medians of this many; fewer if it takes long."),
    ] = 15,
    threads: Annotated[
        int, typer.Option(help="One: CPU time is measured; more: wall time.")
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure time and memory of a training step at each p, to choose a device's p.

    All settings take turns in one process, and so does plain PyTorch training the whole
    model. The optimizer is SGD without momentum: others need more memory for every
    active entry. Memory is that of tensors, without the batch and PyTorch itself. The
    exit code is 1 if --memory or --seconds is given and no p fits.

    [bold]Examples[/bold]

    fedspu profile cifar10 --batch-size 128

    fedspu profile emnist --memory 4MB --seconds 10ms

    fedspu profile mypackage.mymodule:build --input 3,32,32 --mode exact,truncated

    fedspu profile emnist --plot emnist.png --json > emnist.json

    fedspu profile mypackage.mymodule:build --data arrays:my.npz --task regression
    """
    flags.check_model(model, shape, task)
    listed = flags.shares(p, "--p")
    modes = flags.choices(mode, "--mode", ("exact", "truncated"))
    saved = flags.choices(saves, "--saves", ("fast", "lean"))
    for name, number in (("--batch-size", batch_size), ("--repetitions", repetitions)):
        if number < 1:
            raise SettingsError(f"{name} {number}: expected a whole number, at least 1")
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise SettingsError(
            f"--threads {threads}: expected 1 to {cores}, the cores of this machine"
        )
    num_bytes = flags.num_bytes(memory, "--memory")
    most_seconds = flags.seconds(seconds, "--seconds")

    from fedspu.cli.model_inputs import model_and_batch
    from fedspu.neurons.mapping import map_neurons
    from fedspu.profile import measure as profiling
    from fedspu.reports import plots
    from fedspu.reports import profile as report
    from fedspu.tasks import find_task
    from fedspu.tasks.task import checked_loss

    budget = None
    if num_bytes is not None or most_seconds is not None:
        budget = profiling.Budget(num_bytes, most_seconds)
    if plot is not None:
        plots.check_plot(plot)

    learned = find_task(task)
    with report.progress() as watch:
        watch("building the model …")
        net, x, y = model_and_batch(model, shape, data, batch_size, learned)
        watch("mapping its neurons …")
        table = map_neurons(net, x[:2])
        found = profiling.profile(
            net,
            table,
            x,
            y,
            shares=listed,
            modes=modes,
            saves=saved,
            loss=checked_loss(learned, learned.loss),
            budget=budget,
            repetitions=repetitions,
            threads=threads,
            watch=watch,
        )
    title = f"{model}, batch of {batch_size}"
    if plot is not None:
        plots.plot_profile(found, title, plot)
    if as_json:
        about = {"model": model, "batch_size": batch_size, "threads": threads}
        print_json({**about, **report.as_json(found, budget)})
        _refuse_no_fit(found)
        return
    console = Console(soft_wrap=True)
    console.print(f"{title}: {report.how_measured(found)}", markup=False)
    console.print(report.profile_table(found))
    for line in report.notes(found, table, budget):
        console.print(line, markup=False, highlight=False)
    if plot is not None:
        console.print(f"Plot: {plot}", markup=False)
    _refuse_no_fit(found)


def _refuse_no_fit(found: "Profile") -> None:
    """End with 1 if a budget was given that no p fits."""
    if found.choices and not any(choice.fits for choice in found.choices):
        complain(
            "no p fits; allow more with --memory or --seconds, use smaller batches "
            "(--batch-size), or a smaller model"
        )
        sys.exit(1)
