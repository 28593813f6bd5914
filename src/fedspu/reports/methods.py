"""The methods as a table: what each sends, trains, keeps and is judged by."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from fedspu.methods.method import Method

COLUMNS = ("the server sends", "a client trains", "it keeps", "it is judged by")


def method_rows(methods: Iterable[Method]) -> list[dict[str, str]]:
    """One row for each method and reading."""
    return [
        {
            "method": method.name,
            "reading": method.reading,
            **dict(zip(COLUMNS, method.in_words, strict=True)),
            "options": ", ".join(f"method.{name}" for name in sorted(method.options)),
            "from": method.reference,
        }
        for method in methods
    ]


def method_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """A block for each method: it reads well in a narrow terminal too."""
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
        for title in (*COLUMNS, "options"):
            if row[title]:
                table.add_row(f"  {title}", row[title])
        table.add_row("", "")
    return table
