"""docs/paper.md names files and what is in them: all of it is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/fedspu"
PAIR = re.compile(r"`([\w/]+\.py)`((?:,? (?:and )?`[\w.]+(?:\(.*?\))?`)*)")


def named() -> list[tuple[str, str]]:
    """Each file the page names, with each name that follows it."""
    found = []
    for file, rest in PAIR.findall((ROOT / "docs/paper.md").read_text("utf-8")):
        names = re.findall(r"`([\w.]+)", rest)
        found += [(file, name) for name in names or [""]]
    return sorted(set(found))


@pytest.mark.parametrize(("file", "name"), named())
def test_what_the_page_names_is_there(file: str, name: str) -> None:
    text = (PACKAGE / file).read_text("utf-8")
    for part in filter(None, name.split(".")):
        assert re.search(rf"\b{part}\b *[=:(]", text), f"{file} has no {name}"


def test_the_page_names_a_good_part_of_the_package() -> None:
    assert len(named()) > 40
