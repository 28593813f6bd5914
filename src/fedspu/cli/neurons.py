"""``fedspu neurons``: a model's neuron groups."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from fedspu.cli.flags import Examples, Input, Json, Model, Task, check_model, shares
from fedspu.cli.results import print_json
from fedspu.errors import ModelError


def neurons(
    model: Model,
    shape: Input = None,
    data: Examples = None,
    task: Task = "classification",
    p: Annotated[
        str, typer.Option(help="Shares of neurons to count the active entries for.")
    ] = "0.2,0.4,0.6,0.8,1",
    as_json: Json = False,
) -> None:
    """Print a model's neuron groups, and how much of it is active at each p.

    Every group is proved: permuting its neurons leaves the model's output unchanged.
    Whatever cannot be proved is always active, and is named.

    [bold]Examples[/bold]

    fedspu neurons cifar10

    fedspu neurons mypackage.mymodule:build --input 1,16000

    fedspu neurons mypackage.mymodule:build --data arrays:my.npz --task regression
    """
    check_model(model, shape, task)
    listed = shares(p, "--p")

    from fedspu.cli.model_inputs import model_and_example
    from fedspu.neurons.mapping import map_neurons
    from fedspu.reports.neurons import active_counts, neuron_tables
    from fedspu.tasks import find_task

    built, example = model_and_example(model, shape, data, find_task(task))
    try:
        table = map_neurons(built, example)
    except ModelError as error:
        if shape is None:
            raise
        raise ModelError(
            f"--input {shape}: two examples of this shape were tried: {error}; for "
            "tokens, give a data set instead, like --data arrays:FILE.npz"
        ) from None
    counts = active_counts(table, listed)
    if as_json:
        found = {"groups": [asdict(group) for group in table.groups]}
        print_json({**found, "active": counts})
        return
    console = Console()
    for part in neuron_tables(table, counts):
        console.print(part, soft_wrap=isinstance(part, str))
