"""A report as one HTML file that needs nothing else: no network, no other file."""

import base64
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import count

from fedspu.reports.comparison.blocks import blocks, heading, notes, value
from fedspu.reports.comparison.statistics import Case, Row
from fedspu.reports.page.chart import Picture, Section, Table
from fedspu.reports.page.curves import unfinished_section
from fedspu.reports.page.draw import colour, shape, shapes, svg
from fedspu.reports.page.facts import CaseFacts, PageFacts
from fedspu.reports.page.sections import case_sections
from fedspu.reports.page.settings import environment_table, run_table, settings_table
from fedspu.reports.page.verdict import headline, sentences, tiles, title


def page(facts: PageFacts) -> str:
    """The whole file."""
    style, script = _file("page.css"), _file("page.js")
    cases = [found.case for found in facts.cases]
    # Whatever got into the text cannot load or run anything: only these two may.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; img-src data:"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="generator" content="fedspu">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title(cases))}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#results">Skip to the results</a>',
            shapes(),
            *_head(facts),
            '<main id="results">',
            *_body(facts),
            "</main>",
            "<footer><p>Written by <strong>fedspu report</strong>. Numbers are from "
            "the run folders; the table behind each picture has what is drawn."
            "</p></footer>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _file(name: str) -> str:
    text = files("fedspu.reports.page").joinpath(name).read_text(encoding="utf-8")
    return f"\n{text}"


def _hash(text: str) -> str:
    digest = sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _prose(text: str) -> str:
    """Text with `commands` in it."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _head(facts: PageFacts) -> Iterator[str]:
    cases = [found.case for found in facts.cases]
    yield "<header>"
    yield f'<p class="brand">{escape(title(cases))}</p>'
    # A number and its % stay on one line.
    yield f"<h1>{escape(headline(cases)).replace(' %', '&nbsp;%')}</h1>"
    if len(cases) == 1:
        yield from _lead(cases[0])
        yield '<ul class="tiles">'
        for tile in tiles(cases[0]):
            yield (
                f"<li><strong>{escape(tile.value)}</strong> <span>{escape(tile.what)}"
                f"</span> <small>{escape(tile.more)}</small></li>"
            )
        yield "</ul>"
    elif not cases:
        number = len(facts.unfinished)
        yield (
            f'<p class="lead">{number} run{"s are" if number != 1 else " is"} being '
            "played, or interrupted; below is how far.</p>"
        )
    yield "</header>"
    if len(cases) > 1:
        yield '<nav aria-label="Cases"><ul>'
        for i, found in enumerate(facts.cases, 1):
            yield f'<li><a href="#case-{i}">{escape(heading(found.case))}</a></li>'
        yield '<li><a href="#settings">Settings</a></li></ul></nav>'


def _lead(case: Case) -> Iterator[str]:
    yield '<ul class="lead">'
    yield from (f"<li>{_prose(sentence)}</li>" for sentence in sentences(case))
    yield "</ul>"


def _body(facts: PageFacts) -> Iterator[str]:
    ids = count(1)
    if len(facts.cases) > 1:
        yield '<section class="case"><h2>All cases</h2>'
        yield from _table(_overview(facts), "All cases")
        yield "</section>"
    for i, found in enumerate(facts.cases, 1):
        yield f'<section class="case" id="case-{i}">'
        yield f"<h2>{escape(heading(found.case))}</h2>"
        if len(facts.cases) > 1:
            yield f'<p class="said">{escape(headline([found.case]))}.</p>'
            yield from _lead(found.case)
        yield from _results(found)
        yield from _legend(found, facts.slots)
        for section in case_sections(found, facts):
            yield from _section(section, ids)
        yield "</section>"
    if facts.unfinished:
        yield '<section class="case">'
        section = unfinished_section(facts.unfinished, bool(facts.cases))
        yield from _section(section, ids, level=2)
        yield "</section>"
    if facts.unreadable:
        yield '<section class="case"><h2>Left out</h2><ul>'
        yield from (f"<li>{_prose(why)}</li>" for why in facts.unreadable)
        yield "</ul></section>"
    if facts.cases:
        yield '<section class="case" id="settings"><h2>Settings and environment</h2>'
        yield "<h3>Settings</h3>"
        yield from _pairs(settings_table(facts))
        yield "<h3>Environment</h3>"
        yield from _pairs(environment_table(facts))
        yield "<h3>Runs</h3>"
        yield from _table(run_table(facts), "Runs")
        yield "</section>"


def _results(found: CaseFacts) -> Iterator[str]:
    """The same tables as in a terminal."""
    best = found.case.best.method
    for block in blocks(found.case):
        titles = tuple(" ".join(text.split()) for text in block.titles)
        name, _, first = titles[1].rpartition(" p = ")
        if name:  # the same by capacity: its first title holds what all have
            titles = (titles[0], f"p = {first}", *titles[2:])
            yield f'<h3 class="table">{escape(name.capitalize())}, by capacity</h3>'
        yield from _table(Table(titles, block.rows), name or titles[1], best)
    yield '<ul class="notes">'
    yield from (f"<li>{_prose(note)}</li>" for note in notes([found.case]))
    yield "</ul>"


def _legend(found: CaseFacts, slots: dict[str, int]) -> Iterator[str]:
    if len(found.methods) < 2:
        return
    yield '<ul class="legend" aria-label="Methods">'
    for method in found.methods:
        slot = slots[method]
        yield (
            f'<li><svg class="{colour(slot)}" viewBox="-7 -7 14 14" aria-hidden="true">'
            f'<use class="dot" href="#{shape(slot)}"/></svg> {escape(method)}</li>'
        )
    yield "</ul>"


def _section(section: Section, ids: Iterator[int], level: int = 3) -> Iterator[str]:
    number = next(ids)
    yield f'<section aria-labelledby="part-{number}">'
    yield f'<h{level} id="part-{number}">{escape(section.title)}</h{level}>'
    yield f"<p>{_prose(section.about)}</p>"
    if section.pictures:
        is_small = any(getattr(picture, "is_small", 0) for picture in section.pictures)
        yield f'<div class="plots{" small" if is_small else ""}">'
        yield from (_figure(picture) for picture in section.pictures)
        yield "</div>"
    if section.table is not None:
        yield f"<details><summary>The numbers: {escape(section.title)}</summary>"
        yield from _table(section.table, section.title)
        yield "</details>"
    yield "</section>"


def _figure(picture: Picture) -> str:
    return (
        f"<figure><figcaption>{escape(picture.title)}</figcaption>"
        f'<div class="plot">{svg(picture)}</div></figure>'
    )


def _table(table: Table, name: str, best: str | None = None) -> Iterator[str]:
    yield f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">'
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.titles)
    yield f"<table><thead><tr>{heads}</tr></thead><tbody>"
    for row in table.rows:
        kind = ' class="best"' if best is not None and row[0] == best else ""
        first, *rest = row
        cells = "".join(f"<td>{escape(text)}</td>" for text in rest)
        yield f'<tr{kind}><th scope="row">{escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{_prose(table.note)}</p>'


def _pairs(table: Table) -> Iterator[str]:
    yield '<dl class="pairs">'
    for name, text in table.rows:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
    yield "</dl>"


def _overview(facts: PageFacts) -> Table:
    rows = []
    for method in facts.slots:
        cells: list[str] = []
        for found in facts.cases:
            row = next((r for r in found.case.rows if r.method == method), None)
            cells.append("-" if row is None else _overview_cell(found, row))
        rows.append((method, *cells))
    titles: Sequence[str] = [heading(found.case) for found in facts.cases]
    note = "Personal scores; the best of each case is marked with a star."
    return Table(("method", *titles), tuple(rows), note)


def _overview_cell(found: CaseFacts, row: Row) -> str:
    mark = " ★" if row.gap is None else ""
    return f"{value(row.personal, found.case.is_share)}{mark}"
