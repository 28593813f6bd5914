"""``fedspu settings``: every setting, its meaning, its default, its flag."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from rich.console import Console
from rich.table import Table

from fedspu.cli.flags import Json
from fedspu.cli.results import print_json
from fedspu.data import DATASETS, usage
from fedspu.methods import CATALOGUE
from fedspu.settings import Settings, known_fields


def settings(as_json: Json = False) -> None:
    """List every setting: its meaning, its default (mostly the paper's) and its flag.

    In a TOML file, the part before the dot is a table. Data sets have defaults of their
    own, which are listed last; the default data set, digits, is one of them.
    """
    rows = list(setting_rows())
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    group = ""
    for row in rows:
        before = row["name"].rpartition(".")[0]
        if before != group:
            table.add_row("", "")
            group = before
        flag = f"  [dim]{row['flag']}[/]" if row["flag"] else ""
        default = (
            "" if row["default"] is None else f" [dim](default {row['default']})[/]"
        )
        who = f" [dim]{row['method']}:[/]" if row["method"] else ""
        values = f"{' | '.join(row['values'])}. " if row["values"] else ""
        about = f"{values}{row['about']}".replace("[", "\\[")
        table.add_row(
            f"[bold]{row['name']}[/]{flag}", f"{who} {about}{default}".lstrip()
        )
    console = Console()
    console.print(table)
    console.print("\nDefaults of data sets, which replace those above:", style="bold")
    for name, values in own_defaults().items():
        console.print(f"  {name}: {values}", markup=False, highlight=False)


def own_defaults() -> dict[str, str]:
    """The default settings of each data set that has any, in words."""
    return {
        usage(name): ", ".join(f"{key} = {v}" for key, v in source.defaults.items())
        for name, source in DATASETS.items()
        if source.defaults
    }


def setting_rows() -> Iterator[dict[str, Any]]:
    """Each setting by its dotted name; then the options of methods."""
    for name, entry in known_fields(Settings):
        yield _row(name, entry, "")
    for method in CATALOGUE:
        for name, entry in method.options.model_fields.items():
            yield _row(f"method.{name}", entry, f"{method.name} ({method.reading})")


def _values(annotation: Any) -> list[str]:
    """The words that a setting accepts, if there are only a few."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for part in get_args(annotation) for value in _values(part)]


def _row(name: str, entry: Any, method: str) -> dict[str, Any]:
    default = None if entry.is_required() else entry.default
    if isinstance(default, tuple):
        default = list(default)
    return {
        "name": name,
        "about": entry.description,
        "values": _values(entry.annotation),
        "default": default,
        "flag": (entry.json_schema_extra or {}).get("flag"),
        "method": method or None,
    }
