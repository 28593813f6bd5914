"""The page in a real browser, where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedspu.reports.page.html import page
from tests.browser import CHROMIUM, DRIVER, Browser, browser
from tests.reports.page.made import two_methods

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)",
)

KEYS = {"right": "\ue014", "escape": "\ue00c"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(two_methods(stops={1: 2})), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def test_it_opens_without_an_error_or_a_request(window: Browser, file: Path) -> None:
    window.open(file)
    assert window.run("return document.querySelectorAll('figure svg').length") >= 12
    assert window.console() == []
    assert window.requested() == [file.as_uri()]


@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_never_wider_than_the_window(
    window: Browser, file: Path, width: int
) -> None:
    window.resize(width)
    window.open(file)
    assert window.run("return document.documentElement.scrollWidth") <= width
    sizes = window.run(
        "return [...document.querySelectorAll('.plot text')].map(e => "
        "e.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 10  # letters that can be read


def test_a_table_that_is_cut_off_says_so(window: Browser, file: Path) -> None:
    def cut() -> list[list[object]]:
        found: list[list[object]] = window.run(
            "return [...document.querySelectorAll('main > section > .scroll')].map("
            "e => [e.scrollWidth > e.clientWidth, "
            "getComputedStyle(e, '::before').content])"
        )
        return found

    window.resize(500)
    window.open(file)
    assert any(is_cut for is_cut, _ in cut())
    assert all(is_cut == ("scroll" in str(said)) for is_cut, said in cut())
    window.resize(1280)
    window.open(file)
    assert not any("scroll" in str(said) for _, said in cut())


def test_the_pointer_shows_the_nearest_value(window: Browser, file: Path) -> None:
    window.resize(1280)
    window.open(file)
    x, y = window.run(
        "const mark = document.querySelector('.plot .dot');"
        "mark.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const box = mark.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]"
    )
    window.point_at(x, y)
    said = window.run(
        "return [...document.querySelectorAll('.tip')].map(e => e.textContent).join('')"
    )
    assert said.startswith("ours, client ")
    assert said.endswith(" %")


def test_arrow_keys_read_the_values(window: Browser, file: Path) -> None:
    window.open(file)
    window.run("document.querySelector('.plot').focus()")
    tip = "return document.querySelector('.plot .tip').textContent"
    window.press(KEYS["right"])
    assert window.run(tip) == "ours, round 1: 23.0 %"
    window.press(KEYS["right"])
    assert window.run(tip) == "ours, round 2: 46.0 %"
    window.press(KEYS["escape"])
    assert window.run(tip) == ""


def test_a_cell_of_the_map_says_what_it_counts(window: Browser, file: Path) -> None:
    window.open(file)
    window.run("document.querySelector('svg[data-cells]').parentNode.focus()")
    window.press(KEYS["right"])
    said = window.run(
        "return document.querySelector('svg[data-cells] + .tip').textContent"
    )
    assert said == "client 0, class a: 1 of 3 examples"


def test_it_is_dark_where_the_system_is_dark(file: Path, window: Browser) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    window.open(file)
    light = window.run(colour)
    with browser(dark=True) as dark:
        dark.open(file)
        assert dark.run(colour) != light


def test_without_scripts_all_pictures_and_tables_are_there(file: Path) -> None:
    with browser(scripts=False) as plain:
        plain.open(file)
        source = plain.run("return document.documentElement.outerHTML")
    assert source.count("<figure>") >= 12
    assert "<title>ours, round 1: 23.0 %</title>" in source
    assert 'class="tip"' not in source
