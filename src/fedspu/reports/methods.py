"""The methods as a table: what each sends, trains, keeps and is judged by."""

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from fedspu.methods import Entry
from fedspu.methods.method import Method

COLUMNS = ("the server sends", "a client trains", "it keeps", "it is judged by")


def method_rows(methods: Mapping[Entry, Method]) -> list[dict[str, str]]:
    """One row for each method and reading."""
    return [
        {
            "method": method.name,
            "reading": method.reading,
            **dict(zip(COLUMNS, method.in_words, strict=True)),
            "options": "; ".join(_options(entry)),
            "it sets": ", ".join(
                f"{name} = {str(value).lower()}"
                for name, value in entry.suggests.items()
            ),
            "from": method.reference,
        }
        for entry, method in methods.items()
    ]


def _options(entry: Entry) -> Iterator[str]:
    for name, field in entry.options.model_fields.items():
        default = "" if field.default is None else f" (default {field.default})"
        yield f"method.{name}{default}: {field.description}"


def method_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """A block for each method, which can be read in a narrow terminal too."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    names = [row["method"] for row in rows]
    for row in rows:
        is_apart = row["reading"] != "paper" or names.count(row["method"]) > 1
        reading = f", {row['reading']} reading" if is_apart else ""
        table.add_row(
            f"[not dim bold]{row['method']}[/]", f"[bold]{row['from']}{reading}[/]"
        )
        for title in (*COLUMNS, "options", "it sets"):
            if row[title]:
                table.add_row(f"  {title}", row[title])
        table.add_row("", "")
    return table
