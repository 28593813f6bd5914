"""``fedspu run``: one federated run."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.console import INTERRUPTED, complain, saying_where
from fedspu.cli.flags import Json, with_settings
from fedspu.cli.results import print_json
from fedspu.errors import SettingsError
from fedspu.methods import suggested_by
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
    log: Annotated[
        str | None,
        typer.Option(
            metavar="TRACKER",
            help="Also send each round's numbers to tensorboard, mlflow or wandb, "
            "which are extras.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but warnings.")
    ] = False,
) -> None:
    """Play one federated run: live progress, a run folder, a short table.

    [bold]Examples[/bold]

    fedspu run

    fedspu run --method local --seed 1 --rounds 20

    fedspu run --early-stopping --capacities 0.2,0.5,1

    fedspu run --model mypackage.mymodule:build --data arrays:my.npz --rounds 20

    fedspu run experiment.toml --set train.momentum=0.9

    fedspu run --resume runs/digits-fedspu-seed-0

    fedspu run --resume runs/digits-fedspu-seed-0 --rounds 1000
    """
    from fedspu.federation.storage.finding import check_free, check_is_run
    from fedspu.reports.trackers import Tracking, check_tracker, how_to_look
    from fedspu.resolve import resolve

    if log is not None:
        check_tracker(log)
    if "@" in str(given.get("method.name")):  # as in fedspu compare --methods
        from fedspu.sweeps.cells import method_settings

        given |= method_settings(given["method.name"])
    changes: dict[str, Any] = {}
    if resume is not None:
        may_change = ("workers", "engine", "ray_address", "rounds")
        changes = {name: given.pop(name, None) for name in may_change}
        _refuse_changes(resume, given)
        check_is_run(resume)
        path = resume
    else:
        if trust:
            raise SettingsError("--trust: has no effect without --resume; leave it out")
        settings = resolve(given)
        if settings.out is None:
            settings = settings.model_copy(update={"out": _new_folder(settings)})
        path = settings.out or Path()
        check_free(path)
        for doubt in _doubts(settings):
            warnings.warn(doubt, stacklevel=2)

    was_finished = False

    from fedspu import runs
    from fedspu.reports.display import Display
    from fedspu.reports.tables import run_table, time_table

    is_quiet = as_json or quiet
    tracking = None if log is None else Tracking(log, path)
    with _saying_how_to_resume(path), Display("", is_quiet=is_quiet) as display:

        def watch(plan: Any, played: Any) -> None:
            display.watch(plan, played)
            if tracking is not None:
                tracking.watch(plan, played)

        if resume is not None:
            was_finished = _look_at(resume, display)
            result = runs.resume(resume, watch=watch, trust=trust, **changes)
        else:
            if "rounds" not in given:
                display.note(default_rounds(settings))
            result = runs.simulate(settings, watch=watch)
    if tracking is not None:
        tracking.close(result.summary)
    with saying_where(f"the results are in {path}"):
        if as_json:
            print_json(result.summary)
        if is_quiet:
            return
        console = Console(soft_wrap=True)
        console.print(run_table(result.summary))
        if profile:
            console.print(time_table(result.times, result.summary["workers"]))
        if was_finished and not changes["rounds"]:
            console.print(
                f"{path} was finished already, and nothing was played; --rounds plays "
                "more",
                markup=False,
            )
        console.print(f"Results and models: {path}", markup=False)
        console.print(f"Curves and clients: `fedspu report {path}`", markup=False)
        if look := how_to_look(log, path):
            console.print(look, markup=False)
        console.print(f"Next: {_suggest(result.summary, path)}", markup=False)


def default_rounds(settings: Settings) -> str:
    """How many rounds will be played, where nobody said how many."""
    return f"{settings.rounds} rounds (the default); --rounds plays fewer or more"


TINY_ALPHA = 1e-3


def _doubts(settings: Settings) -> Iterator[str]:
    """What can be played and is probably a mistake, a line each."""
    train, data = settings.train, settings.data
    if train.lr == 0:
        yield "train.lr = 0: nothing will be learned; set it to more than 0"
    if train.optimizer != "sgd" and train.momentum:
        yield (
            f"train.momentum = {train.momentum:g}: has no effect with train.optimizer "
            f"= {train.optimizer!r}; leave it out, or use sgd"
        )
    if data.partition.startswith("dirichlet") and data.alpha < TINY_ALPHA:
        yield (
            f"data.alpha = {data.alpha:g}: almost every class goes to a single client; "
            "usual values are from 0.1 to 1"
        )


def _look_at(path: Path, display: Any) -> bool:
    """Whether a run is finished; the display begins with what it has exchanged."""
    from fedspu.federation.storage.saved_run import SavedRun, last_whole

    def read(saved: SavedRun) -> tuple[list[dict[str, Any]], bool]:
        return saved.lines("rounds.jsonl"), saved.is_finished

    with warnings.catch_warnings(action="ignore"):  # resuming warns of damage itself
        lines, is_finished = last_whole(path, read)
    display.exchanged = sum(line["bytes_down"] + line["bytes_up"] for line in lines)
    return is_finished


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
        from fedspu.federation.storage.finding import resume_command
        from fedspu.federation.storage.saved_index import saved_rounds

        if saved := saved_rounds(path):
            complain(
                f"interrupted; rounds up to {saved[0]} are saved. Resume with",
                resume_command(path),
            )
            sys.exit(INTERRUPTED)
        raise


def _suggest(summary: dict[str, Any], path: Path) -> str:
    """The same experiment with another method, for a comparison."""
    if suggested_by(summary["method"]):  # its settings.toml has more than its name
        both = f"fedspu compare --methods {summary['method']},fedspu"
        return f"`{both}`, with the same flags: both on the same clients"
    other, why = ("local", "every client on its own")
    if summary["method"] != "fedspu":
        other, why = ("fedspu", "the same clients with FedSPU")
    again = f"fedspu run {path}/settings.toml --method {other} --out {path}-{other}"
    return f"`{again}`: {why}"
