"""Which pictures a case has, and how much of each a page has room for."""

from collections.abc import Iterator

from fedspu.reports.page.chart import Picture, Section
from fedspu.reports.page.clients import MOST_ROWS, clients, stops
from fedspu.reports.page.costs import by_capacity, trade_offs
from fedspu.reports.page.curves import curves
from fedspu.reports.page.facts import CaseFacts, PageFacts
from fedspu.reports.page.labels import labels

MOST_DOTS = 3000
MOST_CELLS = 12_000
"""Of a whole page, however many cases it has."""


def case_sections(found: CaseFacts, facts: PageFacts) -> Iterator[Section]:
    """All pictures of one case."""
    number, slots = len(facts.cases), facts.slots
    yield curves(found, slots, sum(len(each.methods) for each in facts.cases))
    yield clients(
        found, slots, MOST_DOTS // number, max(MOST_ROWS // number, len(found.runs))
    )
    for section in (
        stops(found, slots, MOST_DOTS // number // 2),
        by_capacity(found, slots),
        trade_offs(found, slots),
    ):
        if section is not None:
            yield section
    yield labels(found.labels, MOST_CELLS // number)


def pictures(facts: PageFacts) -> Iterator[tuple[str, Picture]]:
    """Every picture of a report, with a name for its file."""
    for i, found in enumerate(facts.cases, 1):
        case = f"case-{i}-" if len(facts.cases) > 1 else ""
        for section in case_sections(found, facts):
            for picture in section.pictures:
                yield f"{case}{picture.name}", picture
