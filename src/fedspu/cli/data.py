"""The ``fedspu data`` commands: which data there is, how to get it, what is in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.flags import Json, Task
from fedspu.cli.results import print_json
from fedspu.errors import DataError, SettingsError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Data sets: list them, fetch their files, check what is in them.",
)

Name = Annotated[str, typer.Argument(help="A data set: see fedspu data list.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Where the data files are; default: $FEDSPU_DATA, or fedspu in the user's "
        "data folder."
    ),
]


@app.command("list")
def list_(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: what each is, and whether its files are here.

    [bold]Examples[/bold]

    fedspu data list

    fedspu data list --data-dir ~/data
    """
    from fedspu.data import DATASETS, usage
    from fedspu.reports.tables import rich_table

    _refuse_no_folder(data_dir)
    rows: list[dict[str, Any]] = []
    for name, source in DATASETS.items():
        is_here, where = _whereabouts(name, data_dir)
        rows.append(
            {
                "name": usage(name),
                "what": source.about,
                "examples": source.num_examples,
                "classes": source.num_classes,
                "here": is_here,
                "where": where,
            }
        )
    if as_json:
        print_json(rows)
        return
    answers = {True: "yes", False: "no", None: ""}
    shown = [
        {
            **row,
            "examples": f"{row['examples']:,}" if row["examples"] else "-",
            "classes": str(row["classes"] or "-"),
            "here": answers[row["here"]],
            "where": (row["where"] or "").replace("[", "\\["),
        }
        for row in rows
    ]
    console = Console(soft_wrap=True)
    table = rich_table(shown)
    table.columns[-1].overflow = "fold"  # a path that is cut is of no use
    console.print(table)
    console.print("To get what is not here: fedspu data fetch NAME", markup=False)


def _whereabouts(name: str, folder: Path | None) -> tuple[bool | None, str | None]:
    """Whether a data set is here, None if it is the user's own; and where."""
    from fedspu.data import DATASETS
    from fedspu.data.files import data_folder

    source = DATASETS[name]
    if source.file:
        return None, None
    try:
        files = source.find(folder)
    except DataError:  # some files are missing; `check` says which
        files = []
    if files is None:
        return True, "in fedspu itself"
    if not files:
        return False, str(data_folder(folder) / name)
    return True, str(files[0] if len(files) == 1 else files[0].parent)


@app.command()
def fetch(name: Name, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Get the official files of a data set, and verify their checksums.

    An interrupted download resumes where it stopped. Files that are here already are
    not fetched again.

    [bold]Examples[/bold]

    fedspu data fetch cifar10

    fedspu data fetch emnist --data-dir ~/data
    """
    from fedspu.data import find_source
    from fedspu.data.files import data_folder
    from fedspu.data.files import fetch as fetch_file

    source, _ = find_source(name)
    if source.file or not source.downloads:
        why = "is your own" if source.file else "ships with fedspu"
        raise SettingsError(f"{name} {why}; there is nothing to fetch")
    folder = data_folder(data_dir) / name
    is_here, where = _whereabouts(name, data_dir)
    has_own = any((folder / download.name).exists() for download in source.downloads)
    files: list[dict[str, Any]] = []
    if not is_here or has_own:
        for download in source.downloads:
            with _progress(download.name, is_quiet=as_json) as watch:
                is_new = fetch_file(download, folder, watch)
            files.append(
                {
                    "file": str(folder / download.name),
                    "bytes": download.size,
                    "checksum": download.checksum,
                    "verified": bool(download.checksum),
                    "fetched": is_new,
                }
            )
    if as_json:
        print_json({"name": name, "where": where, "files": files})
        return
    console = Console(soft_wrap=True)
    if not files:
        console.print(f"{name} is here already: {where}", markup=False)
    for file in files:
        kind = file["checksum"].partition(":")[0]
        how = f"{kind} verified" if kind else "size verified, no checksum is known"
        was_here = "" if file["fetched"] else "here already, "
        console.print(f"{file['file']}: {was_here}{how}", markup=False)
    console.print(f"Next: `fedspu data check {name}{_again(data_dir)}`", markup=False)


@contextmanager
def _progress(label: str, is_quiet: bool) -> Iterator[Any]:
    """A function to call with bytes so far and in all; only terminals show a bar."""
    from rich import progress as bars

    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield None
        return
    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=20),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda here, total: bar.update(task, completed=here, total=total)


def _again(data_dir: Path | None) -> str:
    return "" if data_dir is None else f" --data-dir {data_dir}"


@app.command()
def check(
    name: Annotated[
        str, typer.Argument(help="A data set, or your own, like arrays:FILE.npz.")
    ],
    task: Task = "classification",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read all of a data set, and say what is in it.

    [bold]Examples[/bold]

    fedspu data check digits

    fedspu data check cifar10 --data-dir ~/data

    fedspu data check arrays:mine.npz --task regression --json
    """
    from fedspu.data import find_source, load
    from fedspu.tasks import check_name, find_task

    source, _ = find_source(name)
    check_name(task)
    _refuse_no_folder(data_dir)

    from fedspu.reports.data import class_table, describe, facts

    learned = find_task(task)
    found = describe(load(name, data_dir, learned), source, learned)
    if as_json:
        print_json(found)
        return
    console = Console(soft_wrap=True)
    for title, text in facts(found):
        console.print(f"{title:<16}{text}", markup=False, highlight=False)
    if found["examples_by_class"] or found["targets_by_class"]:
        console.print(class_table(found))


def _refuse_no_folder(data_dir: Path | None) -> None:
    if data_dir is not None and not data_dir.expanduser().is_dir():
        why = "is a file" if data_dir.expanduser().exists() else "no such folder"
        raise SettingsError(
            f"--data-dir {data_dir}: {why}; expected the folder with the data files"
        )


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A data set, or your own, like arrays:FILE.npz.")
    ],
    alpha: Annotated[
        float | None, typer.Option(help="Lower values make clients differ more.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients.")] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="dirichlet: each class spread over the clients; dirichlet-client: a "
            "mix of classes drawn for each client; iid: all alike; shards: a few "
            "classes for each client; quantity: sizes by a power law; natural: by "
            "speaker, writer or client array."
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Shards per client; only used by shards.")
    ] = None,
    min_examples: Annotated[
        int | None, typer.Option(help="Every client gets at least this many examples.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="As in fedspu run.")] = None,
    task: Task = "classification",
    data_dir: DataDir = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how many examples of each class each client has in a run.

    Numbers to predict are shown by ten equally full bins, maps by the class of most of
    their pixels; texts have no classes, and only the sizes of clients are shown.

    Defaults are those of [bold]fedspu run[/bold]: the data set's own, or the paper's.

    [bold]Examples[/bold]

    fedspu data show digits

    fedspu data show cifar10 --alpha 0.1 --clients 100 --plot cifar10.png

    fedspu data show digits --partition shards --shards 3

    fedspu data show arrays:mine.npz --partition natural --clients 12 --json

    fedspu data show arrays:mine.npz --task regression --clients 20
    """
    from fedspu.data import find_source, load
    from fedspu.tasks import find_task

    find_source(name)
    _refuse_no_folder(data_dir)

    from fedspu.reports import label_counts as report
    from fedspu.reports import plots
    from fedspu.tasks.choices import check_partition

    if plot is not None:
        plots.check_plot(plot)
    given = {
        "data.name": name,
        "task": task,
        "data.alpha": alpha,
        "data.partition": partition,
        "data.shards": shards,
        "data.min_examples": min_examples,
        "clients.number": clients,
        "seed": seed,
    }
    settings = report.settings_for(given)
    learned = find_task(task)
    check_partition(settings.data.partition, learned)
    data = load(name, data_dir, learned)
    found, names = report.count(settings, data, learned)
    classes = report.classes_in_words(learned, found.counts.shape[1])
    title = report.title(settings, data, classes)
    if plot is not None:
        plots.plot_label_counts(found, names, title, plot)
    if as_json:
        about = {
            "task": task,
            "data": settings.data.model_dump(mode="json"),
            "seed": settings.seed,
        }
        print_json({**about, **report.as_json(found)})
        return
    console = Console(soft_wrap=True)
    console.print(title, markup=False, highlight=False)
    console.print()
    for line in report.picture(found, names, console.width):
        console.print(line, soft_wrap=False)
    console.print(report.label_table(found))
    for note in report.label_lines(found):
        console.print(note, markup=False, highlight=False)
    if plot is not None:
        console.print(f"Plot: {plot}", markup=False)
