"""``fedspu run``: one federated run."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.console import INTERRUPTED, complain
from fedspu.cli.flags import Json, with_settings
from fedspu.errors import SettingsError
from fedspu.settings import Settings


@with_settings()
def run(
    given: dict[str, Any],
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume an interrupted run. It keeps its settings; only --workers, "
            "--engine, --ray-address, and --rounds for more rounds, may be given."
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="With --resume: run code that the run's settings name."
        ),
    ] = False,
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

    fedspu run --resume runs/digits-fedspu-seed-0 --rounds 1000
    """
    from fedspu.resolve import resolve

    changes: dict[str, Any] = {}
    if resume is not None:
        may_change = ("workers", "engine", "ray_address", "rounds")
        changes = {name: given.pop(name, None) for name in may_change}
        _refuse_changes(resume, given)
        path = resume
    else:
        if trust:
            raise SettingsError("--trust: has no effect without --resume; leave it out")
        settings = resolve(given)
        if settings.out is None:
            settings = settings.model_copy(update={"out": _new_folder(settings)})
        path = settings.out or Path()

    from fedspu import runs
    from fedspu.reports.display import Display
    from fedspu.reports.tables import run_table, time_table

    with Display("", is_quiet=as_json) as display, _saying_how_to_resume(path):
        if resume is not None:
            result = runs.resume(resume, watch=display.watch, trust=trust, **changes)
        else:
            result = runs.simulate(settings, watch=display.watch)
    if as_json:
        typer.echo(json.dumps(result.summary, indent=2))
        return
    console = Console(soft_wrap=True)
    console.print(run_table(result.summary))
    if profile:
        console.print(time_table(result.times, result.summary["workers"]))
    console.print(f"Results and models: {path}", markup=False)
    console.print(f"Next: {_suggest(result.summary, path)}", markup=False)


def _refuse_changes(path: Path, given: dict[str, Any]) -> None:
    if given:
        raise SettingsError(
            f"--resume takes the settings in {path}/settings.toml; "
            f"{next(iter(given))} cannot be changed; leave it out"
        )


def _new_folder(settings: Settings) -> Path:
    """A folder in runs/ that does not exist yet, named by data, method and seed."""
    data = Path(settings.data.name.replace(":", "-")).stem
    method = settings.method.name.replace(":", "-")
    name = f"{data}-{method}-seed-{settings.seed}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


@contextmanager
def _saying_how_to_resume(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        from fedspu.federation.storage.own_files import is_free
        from fedspu.federation.storage.saved_run import SavedRun

        if not is_free(path):
            saved = SavedRun(path)
            trust = " --trust" if saved.names_code else ""
            complain(
                f"interrupted; rounds up to {saved.round} are saved. Resume with "
                f"`fedspu run --resume {path}{trust}`"
            )
            sys.exit(INTERRUPTED)
        raise


def _suggest(summary: dict[str, Any], path: Path) -> str:
    """The same experiment with another method, for a comparison."""
    other, why = ("local", "every client on its own")
    if summary["method"] != "fedspu":
        other, why = ("fedspu", "the same clients with FedSPU")
    again = f"fedspu run {path}/settings.toml --method {other} --out {path}-{other}"
    return f"`{again}`: {why}"
