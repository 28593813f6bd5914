"""The ``fedspu`` command: settings in, a run played, a report out.

Exit codes: 0 done; 2 the user's mistake, one clear line; 1 ours, with its traceback;
130 interrupted.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console

from fedspu import cli_data
from fedspu import settings as setting
from fedspu.errors import FedSPUError, SettingsError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Personalized federated learning for devices of unequal strength.\n\n"
    "Start with [bold]fedspu run[/bold]: FedSPU on handwritten digits, under a minute.",
)
app.add_typer(cli_data.app, name="data")


INTERRUPTED = 130
"""The exit code of a command ended by Ctrl-C."""


def main() -> None:
    """Run the command, and end with the right exit code."""
    try:
        with _plain_warnings():
            code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except FedSPUError as error:
        _complain(str(error))
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        sys.exit(INTERRUPTED)


def _complain(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(text)}")


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show a warning as one line, without the place in the code."""

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[yellow]warning:[/] {_plain(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# Flags that several commands share --------------------------------------------------

_FLAGS = {
    "data": "data.name",
    "alpha": "data.alpha",
    "data_dir": "data.dir",
    "model": "model",
    "clients": "clients.number",
    "per_round": "clients.per_round",
    "capacities": "clients.capacities",
    "rounds": "rounds",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "train.lr",
    "early_stopping": "early_stopping.on",
    "seed": "seed",
    "device": "device",
    "method": "method.name",
    "out": "out",
}
"""Flag -> the setting it stands for."""

_OTHERS = ", ".join(n for n in setting.known_names() if n not in _FLAGS.values())

Config = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG.toml]", help="A whole experiment, as TOML."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting by its dotted name, as in --set train.momentum=0.9; may be "
        f"repeated. Those without a flag: {_OTHERS}.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Processes that play clients; default: as many as cores. The same bits "
        "whatever their number."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _numbers(text: str | None, name: str) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(
            f"{name} {text}: expected numbers separated by commas, like 0.2,0.4,1"
        ) from None


def _whole_numbers(text: str, name: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(
            f"{name} {text}: expected whole numbers, like 0,1,2"
        ) from None


def _share(p: float) -> float:
    if not 0 < p <= 1:
        raise SettingsError(f"--p {p:g}: expected numbers in (0, 1], like 0.2,0.4,1")
    return p


def _choices(text: str, name: str, known: tuple[Any, ...]) -> list[Any]:
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if part not in known:
            raise SettingsError(
                f"{name} {text}: expected {' or '.join(known)}, or both as "
                f"{','.join(known)}"
            )
    return list(dict.fromkeys(found))


_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def _bytes(text: str | None) -> float | None:
    wanted = "expected a size with its unit, like 500kB, 4MB or 2GiB"
    return None if text is None else _measure(text, "--memory", _BYTES, wanted)


def _seconds(text: str | None) -> float | None:
    wanted = "expected a time above 0, like 0.01 or 10ms"
    return None if text is None else _measure(text, "--seconds", _SECONDS, wanted)


def _measure(text: str, name: str, units: dict[str, float], wanted: str) -> float:
    """A number with a unit, such as 4MB."""
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", text.lower())
    try:
        value = float(found[1]) * units[found[2]] if found else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"{name} {text}: {wanted}")
    return value


def _given(config: Path | None, overrides: list[str] | None, **flags: Any) -> Any:
    """Settings by name: the file's, then --set, then the flags."""
    given = dict(setting.flatten(setting.read_toml(config) if config else {}))
    pairs = (setting.parse_override(text) for text in overrides or [])
    given.update({setting.SHORT_FORMS.get(key, key): value for key, value in pairs})
    flags = {_FLAGS[name]: v for name, v in flags.items() if v is not None}
    return {**given, **flags}


# Commands ---------------------------------------------------------------------------


@app.command()
def run(
    config: Config = None,
    set_: Set = None,
    method: Annotated[
        str | None, typer.Option(help="fedspu, hermes, local …: see fedspu methods.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="digits, or your own: arrays:FILE.npz (x, y).")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Lower: clients' labels differ more.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data files lie.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A built-in name, or package.module:build of your own."),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many there are.")] = None,
    per_round: Annotated[int | None, typer.Option(help="How many a round.")] = None,
    capacities: Annotated[
        str | None,
        typer.Option(help="Each cluster's share p of neurons, like 0.2,0.6,1."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="At most so many.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    early_stopping: Annotated[
        bool | None,
        typer.Option(help="A client leaves once it no longer gains (Algorithm 2)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="One seed, the same bits.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, mps.")] = None,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; default: a new one in runs/.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with an interrupted run; no other flag is needed but, if you "
            "like, --workers."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say at the end where the time went.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Play one federated run: live progress, a run folder, a short table.

    [bold]Examples[/bold]

    fedspu run

    fedspu run --method local --seed 1 --rounds 20

    fedspu run --early-stopping --capacities 0.2,0.5,1

    fedspu run --model mypackage.mymodule:build --data arrays:my.npz --lr 0.01

    fedspu run experiment.toml --set train.momentum=0.9

    fedspu run --resume runs/digits-fedspu-seed-0
    """
    from fedspu import runs
    from fedspu.reports.display import Display
    from fedspu.reports.tables import run_table, time_table

    flags = {
        "method": method,
        "data": data,
        "alpha": alpha,
        "data_dir": data_dir,
        "model": model,
        "clients": clients,
        "per_round": per_round,
        "capacities": _numbers(capacities, "--capacities"),
        "rounds": rounds,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "early_stopping": early_stopping,
        "seed": seed,
        "device": device,
        "out": out,
    }
    given = _given(config, set_, **flags)
    if resume is None and workers is not None:
        given["workers"] = workers
    if resume is not None and given:
        raise SettingsError(
            f"--resume goes on with the settings in {resume}/settings.toml; "
            f"{next(iter(given))} cannot be changed on the way"
        )
    if resume is None and "out" not in given:
        given["out"] = str(_new_folder(given))
    path = resume if resume is not None else Path(given["out"])
    with Display("", is_quiet=as_json) as display, _saying_how_to_go_on(path):
        if resume is not None:
            result = runs.resume(resume, watch=display.watch, workers=workers)
        else:
            result = runs.simulate(given, watch=display.watch)
    if as_json:
        typer.echo(json.dumps(result.summary, indent=2))
        return
    console = Console(soft_wrap=True)
    console.print(run_table(result.summary))
    if profile:
        console.print(time_table(result.times, result.summary["workers"]))
    console.print(f"Results and models: {path}", markup=False)
    console.print(f"Next: {_suggest(result.summary, path)}", markup=False)


def _new_folder(given: dict[str, Any]) -> Path:
    """A folder in runs/ that is not there yet, named by what makes a run its own."""
    data = Path(str(given.get("data.name", "digits")).replace(":", "-")).stem
    name = "-".join(
        (
            data,
            str(given.get("method.name", "fedspu")),
            f"seed-{given.get('seed', 0)}",
        )
    )
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


@contextmanager
def _saying_how_to_go_on(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if (path / "checkpoint" / "federation.json").exists():
            from fedspu.federation.folder import read_index

            saved = read_index(path)["round"]
            _complain(
                f"interrupted; rounds up to {saved} are saved. Go on with "
                f"`fedspu run --resume {path}`"
            )
            sys.exit(INTERRUPTED)
        raise


def _suggest(summary: dict[str, Any], path: Path) -> str:
    """The same experiment with another method, for a comparison."""
    other, why = ("local", "every client alone")
    if summary["method"] != "fedspu":
        other, why = ("fedspu", "the same clients with FedSPU")
    again = f"fedspu run {path}/settings.toml --method {other} --out {path}-{other}"
    return f"`{again}`: {why}"


@app.command()
def compare(
    config: Config = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names separated by commas: see fedspu methods. A reading or option "
            "goes behind an @: fjord@original, fedavg@finetune=5."
        ),
    ] = "fedspu,local",
    alphas: Annotated[
        str | None, typer.Option(help="Like 0.1,0.5,1; default: the experiment's own.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Like 0,1,2.")] = "0,1,2",
    workers: Workers = None,
    out: Annotated[Path, typer.Option(help="A folder for all the runs.")] = Path(
        "runs/compare"
    ),
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Play several methods on the same clients, and print one table.

    Every run has its folder in --out. Called again, only what is missing is played.

    [bold]Examples[/bold]

    fedspu compare --methods fedspu,local --seeds 0,1,2 --out runs/first

    fedspu compare experiment.toml --methods fedspu,hermes,local --alphas 0.1,1

    fedspu compare --methods fjord,fjord@original,fedavg,fedavg@finetune=1
    """
    from fedspu import runs, sweeps
    from fedspu.reports.display import Display
    from fedspu.reports.tables import compare_rows, rich_table

    given = _given(config, set_)
    if workers is not None:
        given["workers"] = workers
    listed = _numbers(alphas, "--alphas")
    if listed is None:
        listed = [runs.lay_out(given).settings.data.alpha]
    displays: list[Display] = []

    def begin(cell: sweeps.Cell, is_done: bool) -> runs.Watch | None:
        for before in displays:
            before.__exit__(None, None, None)
        display = Display(cell.name, is_quiet=as_json or is_done)
        displays[:] = [display.__enter__()]
        return display.watch

    try:
        summaries = sweeps.compare(
            given,
            methods=[name.strip() for name in methods.split(",")],
            alphas=listed,
            seeds=_whole_numbers(seeds, "--seeds"),
            out=out,
            begin=begin,
        )
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on where it was")
        sys.exit(INTERRUPTED)
    finally:
        for last in displays:
            last.__exit__(None, None, None)
    if as_json:
        typer.echo(json.dumps(summaries, indent=2))
        return
    # A pipe has no width: whoever reads it wants whole names.
    width = None if sys.stdout.isatty() else 160
    console = Console(soft_wrap=True, width=width)
    console.print(rich_table(compare_rows(summaries)))
    console.print(
        "± is the 95 % interval of the mean over seeds (Student's t); differences are "
        "taken seed by seed, on the same clients."
    )
    console.print(f"Runs, comparison.md and comparison.json: {out}", markup=False)


Model = Annotated[str, typer.Argument(help="A built-in name, or package.module:build.")]
Input = Annotated[
    str | None, typer.Option("--input", help="Shape of one example, like 3,32,32.")
]
Examples = Annotated[
    str | None,
    typer.Option("--data", help="Take examples from this data set instead."),
]


@app.command()
def neurons(
    model: Model,
    shape: Input = None,
    data: Examples = None,
    p: Annotated[
        str, typer.Option(help="Shares of neurons to count for.")
    ] = "0.2,0.4,0.6,0.8,1",
    as_json: Json = False,
) -> None:
    """Print a model's neuron groups, and how much of it is active at each p.

    Every group was proved: permuting its neurons leaves the model's output unchanged.
    What could not be proved is always active, and named.

    [bold]Examples[/bold]

    fedspu neurons cifar10

    fedspu neurons mypackage.mymodule:build --input 1,16000
    """
    from fedspu.neurons.mapping import map_neurons
    from fedspu.reports.examples import model_and_example
    from fedspu.reports.neurons import active_counts, neuron_tables

    shares = _numbers(p, "--p") or []
    table = map_neurons(*model_and_example(model, shape, data))
    counts = active_counts(table, shares)
    if as_json:
        found = {"groups": [asdict(group) for group in table.groups]}
        typer.echo(json.dumps({**found, "active": counts}, indent=2))
        return
    console = Console(soft_wrap=True)
    for part in neuron_tables(table, counts):
        console.print(part)


@app.command()
def profile(
    model: Model,
    shape: Input = None,
    data: Examples = None,
    batch_size: Annotated[int, typer.Option(help="Examples a step.")] = 16,
    p: Annotated[
        str, typer.Option(help="Shares of neurons to measure.")
    ] = "0.2,0.4,0.6,0.8,1",
    mode: Annotated[
        str,
        typer.Option(help="exact, the true gradient; truncated, cheaper; or both."),
    ] = "exact",
    saves: Annotated[
        str,
        typer.Option(help="fast, in time; lean, in memory; or both."),
    ] = "fast,lean",
    memory: Annotated[
        str | None, typer.Option(help="Find the largest p whose peak fits, like 4MB.")
    ] = None,
    seconds: Annotated[
        str | None,
        typer.Option(
            help="Find the largest p whose step is so quick, like 0.01, 10ms."
        ),
    ] = None,
    repetitions: Annotated[
        int, typer.Option(help="Times are medians of so many; fewer if it takes long.")
    ] = 15,
    threads: Annotated[
        int, typer.Option(help="One: CPU time is measured; more: wall time.")
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it too: a .png, .svg or .pdf file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a training step at each p: what it takes on a device, to choose its p by.

    Each setting takes its turn in one process, beside plain PyTorch training all of the
    model. The optimizer is plain SGD without momentum: others hold more for every
    active entry. Memory is counted in tensors, the batch and PyTorch itself left out.

    [bold]Examples[/bold]

    fedspu profile cifar10 --batch-size 128

    fedspu profile emnist --memory 4MB --seconds 10ms

    fedspu profile mypackage.mymodule:build --input 3,32,32 --mode exact,truncated

    fedspu profile emnist --plot emnist.png --json > emnist.json
    """
    from fedspu.neurons.mapping import map_neurons
    from fedspu.profile import measure as profiling
    from fedspu.reports import plots
    from fedspu.reports import profile as report
    from fedspu.reports.examples import model_and_batch

    shares = [_share(part) for part in _numbers(p, "--p") or []]
    modes = _choices(mode, "--mode", ("exact", "truncated"))
    saved = _choices(saves, "--saves", ("fast", "lean"))
    for name, number in (("--batch-size", batch_size), ("--repetitions", repetitions)):
        if number < 1:
            raise SettingsError(f"{name} {number}: expected a whole number from 1 on")
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise SettingsError(
            f"--threads {threads}: expected 1 to {cores}, the cores of this machine"
        )
    budget = None
    if memory is not None or seconds is not None:
        budget = profiling.Budget(_bytes(memory), _seconds(seconds))
    if plot is not None:
        plots.check_plot(plot)

    net, x, y = model_and_batch(model, shape, data, batch_size)
    table = map_neurons(net, x[:2])
    with report.progress(is_quiet=as_json) as watch:
        found = profiling.profile(
            net,
            table,
            x,
            y,
            shares=shares,
            modes=modes,
            saves=saved,
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
        typer.echo(json.dumps({**about, **report.as_json(found, budget)}, indent=2))
        return
    console = Console(soft_wrap=True)
    console.print(f"{title}: {report.how_measured(found)}", markup=False)
    console.print(report.profile_table(found))
    for line in report.notes(found, table, budget):
        console.print(line, markup=False, highlight=False)
    if plot is not None:
        console.print(f"Plot: {plot}", markup=False)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods: what each sends, trains, keeps and is judged by.

    A reading is what the FedSPU paper compares with (paper), or what the method's own
    paper says (original): --set method.reading=original.
    """
    from fedspu.methods import READINGS
    from fedspu.reports.methods import method_rows, method_table

    rows = method_rows(READINGS)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    Console().print(method_table(rows))


if __name__ == "__main__":
    main()
