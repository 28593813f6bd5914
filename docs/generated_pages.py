"""Writes pages of the site that come from elsewhere: settings, and the root's files."""

import re
from pathlib import Path
from typing import Any

from fedspu.cli.settings import own_defaults
from fedspu.settings import known_fields

START = """# Every setting

A dotted name is the place in a TOML file: `train.lr` is `lr` in the table `[train]`.
On the command line, `--set train.lr=0.1` sets any of them, and common ones have a flag.
`fedspu settings` prints this list. The defaults here are the paper's. A data set may
have defaults of its own, which replace them: `fedspu run` without any settings uses
those of `digits`.

"""


def write_settings_page(file: Path) -> None:
    """Write the reference of every setting."""
    tables: dict[str, list[str]] = {}
    for name, field in known_fields():
        table = name.rpartition(".")[0]
        tables.setdefault(table, []).append(_row(name, field))
    parts = [START, "| data set | its own defaults |\n|---|---|\n"]
    parts += [f"| `{name}` | {values} |\n" for name, values in own_defaults().items()]
    parts.append("\n")
    for table, rows in tables.items():
        title = f"`[{table}]`" if table else "The run"
        parts.append(f"## {title}\n\n| setting | flag | default | meaning |\n")
        parts.append("|---|---|---|---|\n" + "".join(rows) + "\n")
    _write(file, "".join(parts))


ROOT = {"README": "tutorial", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
"""Files of the root -> their pages."""


def write_pages_of_the_root(folder: Path) -> None:
    """Copy what lies beside ``docs``, with links as they are from inside it."""
    for name, page in ROOT.items():
        text = (folder.parent / f"{name}.md").read_text(encoding="utf-8")
        text = text.replace("](docs/", "](")
        for other, there in ROOT.items():
            text = text.replace(f"]({other}.md", f"]({there}.md")
        _write(folder / f"{page}.md", text)


def without_links_outside(text: str) -> str:
    """Files that are not part of the site are named, without a link."""
    return OUTSIDE.sub(r"\1", text)


OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*|NOTICE|LICENSE|configs/[^)]*)\)")


def _write(file: Path, text: str) -> None:
    """Write a file, if it has changed."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def _row(name: str, field: Any) -> str:
    extra = field.json_schema_extra or {}
    flag = f"`{extra['flag']}`" if extra.get("flag") else ""
    meaning = str(field.description or "").replace("|", "\\|")
    return f"| `{name}` | {flag} | {_default(field)} | {meaning} |\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "of the data set"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return f"`{', '.join(map(str, value))}`" if value else "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
