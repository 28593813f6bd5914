"""The page as a file: what is in it, and what must never be."""

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from typing import Any

import pytest

from fedspu.reports.page.chart import Chart
from fedspu.reports.page.costs import front, seconds_by_capacity
from fedspu.reports.page.curves import steps
from fedspu.reports.page.facts import PageFacts, Unfinished
from fedspu.reports.page.html import page
from fedspu.reports.page.sections import case_sections, pictures
from fedspu.reports.page.settings import written
from fedspu.reports.page.verdict import headline, sentences, tiles
from tests.reports.page.made import a_case, a_page, a_run, some_labels, two_methods

VOID = {"meta", "link", "br", "path", "use"}


class Reader(HTMLParser):
    """Reads a page, and complains if elements are not closed as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_a_page_is_whole_and_every_picture_has_words_and_a_table() -> None:
    text = page(two_methods(stops={1: 2}))
    read = Reader(text)
    charts = [a for a in read.all("svg") if a.get("role") == "img"]
    assert len(charts) == len(list(pictures(two_methods(stops={1: 2}))))
    assert all(len(a["aria-label"]) > 20 for a in charts)
    parts = re.findall(r"<section aria-labelledby.*?</section>", text, re.S)
    assert len(parts) == 6  # curves, clients, stops, costs, trade-offs, labels
    assert all(part.count("<details>") == part.count("<table>") == 1 for part in parts)
    ids = [a["id"] for _, a in read.found if "id" in a]
    assert len(ids) == len(set(ids))
    marks = {a["href"] for a in read.all("use")}
    assert marks <= {f"#{name}" for name in ids}
    assert read.all("html")[0]["lang"] == "en"
    assert [tag for tag, _ in read.found].count("h1") == 1


def test_every_number_of_the_table_is_in_the_page() -> None:
    text = " ".join(Reader(page(two_methods())).text)
    for number in (
        *("92.0 ± 12.7", "72.0 ± 12.7", "-20.0 ± 0.0", "46.0", "91.0"),
        *("1.00 MB", "8.0 s", "1.00 kB / 4.00 kB", "3.11.7", "runs/x/ours-seed-1"),
    ):
        assert number in text


def test_nothing_comes_from_elsewhere_and_only_our_own_script_may_run() -> None:
    text = page(two_methods())
    assert not re.search(r"https?://|src=|@import|url\(", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_names_cannot_become_markup() -> None:
    odd = '<script>alert("1")</script>&amp;\'"'
    facts = a_page(
        a_case([a_run(odd, 0, 0.5), a_run("b<b>", 0, 0.4)], **{"x<i>": "<u>"}),
    )
    labels = replace(some_labels(), names=("<a>", "&b", "'c"))
    facts = replace(facts, cases=(replace(facts.cases[0], labels=labels),))
    facts = replace(facts, unreadable=("<em>runs</em>: gone",))
    text = page(facts)
    for raw in (odd, "b<b>", "x<i>", "<u>", "<a>", "<em>"):
        assert raw not in text
    assert escape(odd) in text
    assert [tag for tag, _ in Reader(text).found].count("script") == 1


def test_a_hundred_runs_stay_under_two_megabytes() -> None:
    cases = [
        a_case(
            [
                a_run(
                    f"method-{m}",
                    seed,
                    0.5 + m / 20 + seed / 100,
                    rounds=500,
                    clients=100,
                    stops={k: 4 * k + 1 for k in range(90)},
                )
                for m in range(4)
                for seed in range(3)
            ],
            some_labels(100, 10),
            **{"data.alpha": float(i)},
        )
        for i in range(9)
    ]  # 108 runs
    text = page(a_page(*cases))
    assert 200_000 < len(text.encode()) < 2_000_000


def test_the_verdict_says_best_even_or_too_few() -> None:
    def said(*scores: tuple[str, list[float]]) -> tuple[str, str]:
        runs = [a_run(m, i, s) for m, listed in scores for i, s in enumerate(listed)]
        case = a_case(runs).case
        return headline([case]), " ".join(sentences(case))

    clear = said(("a", [0.9, 0.92]), ("b", [0.5, 0.52]))
    assert clear[0] == "a does best: 91.0 % personal accuracy"
    assert "Clearly behind a, on the same clients: b by 40.0 ± 0.0 points." in clear[1]
    even = said(("a", [0.9, 0.5]), ("b", [0.5, 0.8]))
    assert even[0] == "a is ahead, but b cannot be told from it"
    assert "More seeds might tell." in even[1]
    one = said(("a", [0.9]), ("b", [0.5]))
    assert one[0] == "a is ahead with 90.0 % personal accuracy, of one seed"
    assert "One seed cannot tell" in one[1]
    alone = said(("a", [0.9]))
    assert alone[0] == "a reaches 90.0 % personal accuracy"
    assert "one seed cannot tell whether clients' own models are better" in alone[1]


def test_the_server_s_model_is_only_worse_where_intervals_are_apart() -> None:
    def said(far: float) -> str:
        runs = [a_run("a", seed, 0.9 + seed / 100) for seed in range(3)]
        for run in runs:
            score = dict(run.summary)["personal_accuracy"] - far
            run.summary.update(global_accuracy=score)  # type: ignore[attr-defined]  # a dict
        return " ".join(sentences(a_case(runs).case))

    even = said(0.01)
    assert "has 90.0 ± 2.5 % on the same examples: with 3 seeds, no clear" in even
    assert "Clients' own models do better than the server's" in said(0.2)
    assert "The server's single model does better than clients' own" in said(-0.2)


def test_a_difference_is_shown_with_its_interval() -> None:
    runs = [
        a_run(m, i, s)
        for m, scores in (("a", (0.9, 0.5)), ("b", (0.5, 0.8)))
        for i, s in enumerate(scores)
    ]
    (tile,) = (t for t in tiles(a_case(runs).case) if t.what == "against b")
    assert tile.value == "+5.0 points"
    assert re.match(r"± \d+\.\d; the next best", tile.more)


def test_commands_in_a_page_s_text_are_code() -> None:
    text = page(two_methods())
    assert "`" not in text.split("<script>")[0]
    assert "<code>fedspu profile</code>" in text


def test_a_page_of_runs_that_are_not_finished_says_how_far_they_are() -> None:
    begun = Unfinished(
        "runs/y", "fedspu", 0, 20, ((1, 0.2), (2, 0.4)), "accuracy", True
    )
    text = page(PageFacts((), (begun,), ("runs/z: no round yet",)))
    Reader(text)
    assert "No run has finished yet" in text
    assert "2 of 20" in text
    assert "40.0 %" in text
    assert "runs/z: no round yet" in text
    assert "numbers above" not in text
    assert "<code>fedspu run --resume runs/y</code>" in text
    trusting = page(PageFacts((), (replace(begun, names_code=True),), ()))
    assert "<code>fedspu run --resume runs/y --trust</code>" in trusting


def test_a_run_that_ended_early_stays_where_it_ended() -> None:
    short, long = a_run("a", 0, 0.8, rounds=2), a_run("a", 1, 0.4, rounds=4)
    found = steps([short, long], "accuracy")
    assert [s.round for s in found] == [1, 2, 3, 4]
    assert found[-1].score == pytest.approx(0.6)  # 0.8 stays
    assert (found[-1].low, found[-1].high) == (0.4, 0.8)
    assert found[-1].num_bytes == 1_000_000


def test_a_score_that_is_no_number_is_left_out() -> None:
    run = a_run("a", 0, 0.8)
    lines = [dict(line) for line in run.rounds]
    lines[0]["personal_accuracy"], lines[1]["personal_accuracy"] = None, float("nan")
    found = steps([replace(run, rounds=lines)], "accuracy")
    assert [s.round for s in found] == [3, 4]


def test_time_by_capacity_is_that_of_an_example_passed() -> None:
    found = seconds_by_capacity([a_run("a", 0, 0.5)])
    assert found == pytest.approx({p: p / (2 * 50) for p in (0.2, 0.6, 1.0)})


def test_the_front_has_what_no_other_beats_on_both() -> None:
    points = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.4), (3.0, 0.8)]
    assert front(points, True) == [(1.0, 0.5), (3.0, 0.9)]
    assert front(points, False) == [(1.0, 0.5), (2.0, 0.4)]


def test_many_clients_are_drawn_of_one_seed_and_it_says_so() -> None:
    runs = [a_run("a", seed, 0.5, clients=3000) for seed in (0, 1)]
    facts = a_page(a_case(runs))
    everyone = next(
        s for s in case_sections(facts.cases[0], facts) if "Every" in s.title
    )
    assert "Drawn are clients of seed 0." in everyone.about
    chart = everyone.pictures[0]
    assert isinstance(chart, Chart)
    assert len(chart.series[0].marks) == 3000
    assert everyone.table is not None
    assert len(everyone.table.rows) == 600
    assert "of 6,000" in everyone.table.note


def test_a_dotted_line_is_explained_where_there_is_one() -> None:
    silent = a_case([a_run("a", 0, 0.9), a_run("local", 0, 0.8, num_bytes=0)])
    said = "A dotted line from edge to edge is the last score of a method that sends"
    assert said in page(a_page(silent))
    assert said not in page(two_methods())


def test_a_number_in_the_headline_keeps_its_percent() -> None:
    assert "90.0&nbsp;% personal" in page(a_page(a_case([a_run("a", 0, 0.9)])))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("arrays:/data/f.npz", "arrays:/data/f.npz"),
        (f"arrays:/{'long/' * 9}data/f.npz", "arrays:…/data/f.npz"),
        (f"/{'long/' * 9}data/f", "…/data/f"),
        (0.1, "0.1"),
    ],
)
def test_long_paths_are_shown_by_their_ends(value: object, shown: str) -> None:
    assert written(value) == shown
