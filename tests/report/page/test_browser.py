"""The page in a real browser: headless Chromium, from a file, without a network. One page about everything."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlap_sweep.results.run_directory import Status, trace_file
from tests.golden.made_report import BEST_TRACE, NONE_TRACE
from tests.made_sweeps import write_every_workload
from tests.make_point import implementation, kernel_config, make_point, operator_config, pass_times
from tests.report.page.reports import page_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.end_to_end

READY = "html[data-ready=yes]"
ALL_DRAWN = "html[data-drawn=all]"
ROWS = "#operators-table tbody tr"
BAR = "#operators_1_hidden_tp4 svg path[aria-roledescription=bar]"


def write_grid(directory: Path) -> None:
    """Operators of two TP sizes over num_sm, a tenth of the points not ok in one way or another."""
    not_ok: dict[int, tuple[Status, str]] = {
        7: ("failed", "an illegal memory access was encountered </script><b>"),
        14: ("timeout", "no answer in 300 s"),
        21: ("skipped", "bulk does not fit"),
    }
    operators = (("fc1", "all", "bulk", None, 12_000.0), ("proj", "fprop", "pipeline", 4, 2_800.0))
    for tp_size, (operator, phase, method, splits, tp1_us), num_sm in product((4, 8), operators, range(1, 31)):
        point = operator_config(tp_size, operator, phase, method, num_sm=num_sm, num_splits=splits)
        if num_sm in not_ok:
            status, error = not_ok[num_sm]
            make_point("operator", directory, point, status=status, error=error)
            continue
        none_us = tp1_us / tp_size
        times = pass_times(none_us * (0.7 + abs(num_sm - 12) / 40), none_us, 0.6 * none_us, spread_us=2.0)
        traces = {trace_file(0): BEST_TRACE, trace_file(0, "none"): NONE_TRACE} if num_sm == 12 else {}
        measured = {"fwd": times, "bwd": times, "traces": list(traces), "launch_bound": num_sm == 28}
        written = make_point("operator", directory, point, **measured)
        for name, path in traces.items():
            shutil.copy(path, written / name)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One case of operators with timelines, and every other workload; kernels on linear and logarithmic axes."""
    directory = tmp_path_factory.mktemp("sweep")
    write_grid(directory / "grid")
    write_every_workload(directory / "every")
    for n, slowest_us in ((4096, 210.0), (8192, 1500.0)):
        slow = {"a": implementation(slowest_us, 1.0)}
        make_point("kernel", directory, kernel_config(n=n), implementations=slow)
        for m in (1024, 2048):
            make_point("kernel", directory, kernel_config(m, n=n * 4), implementations=slow)
    path = directory / "report.html"
    path.write_text(page_of(directory))
    assert path.stat().st_size < 5e6
    return path


class Visit:
    """One page, and what it said and asked for."""

    def __init__(self, browser: Browser, path: Path, **context: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        options = {"viewport": {"width": 1280, "height": 900}, **context}
        self.page: Page = browser.new_context(**options).new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(READY, timeout=30_000)
        self.page.evaluate("document.querySelectorAll('#points details').forEach(one => one.open = true)")

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def column(self, name: str) -> list[str]:
        headers = self.page.locator("#operators-table thead tr:first-child th").all_inner_texts()
        at = [text.strip() for text in headers].index(name) + 1
        return self.page.locator(f"{ROWS} td:nth-child({at})").all_inner_texts()

    def sort(self, name: str, said: str) -> None:
        """One click on the header sorts the column that way."""
        from playwright.sync_api import expect

        header = self.page.locator("#operators-table thead th", has_text=name).first
        header.click()
        expect(header).to_have_attribute("aria-sort", said)


@pytest.fixture(scope="module")
def visit(chromium: Browser, report: Path) -> Visit:
    return Visit(chromium, report)


@pytest.fixture(scope="module")
def narrow(chromium: Browser, report: Path) -> Visit:
    """In the dark."""
    return Visit(chromium, report, viewport={"width": 400, "height": 900}, color_scheme="dark")


def test_the_page_opens_with_what_to_do(visit: Visit) -> None:
    assert "on " in visit.page.title()
    box = visit.page.locator("main > section#answers").bounding_box()
    assert box
    assert box["y"] < 300
    cards = visit.page.locator("#answers .card")
    assert cards.count() >= 6
    assert all(cards.locator(".headline, tbody td, dd").all_inner_texts())
    lines = cards.locator(".use pre").first.inner_text()
    assert "--tp-comm-overlap-cfg optimal_tp_comm_overlap_cfg_tp2.yaml" in lines
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = cards.get_by_role("button", name="Copy").first
    button.click()
    visit.page.get_by_role("button", name="Copied").wait_for()
    assert visit.page.evaluate("navigator.clipboard.readText()") == lines
    assert not visit.page.locator("details.caveats[open]").count()


def test_tables_fit_and_show_all_columns_when_asked(visit: Visit) -> None:
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    visit.page.wait_for_timeout(300)
    wider = """[...document.querySelectorAll('.dt-layout-table, .card')]
        .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.querySelector('table').id)"""
    assert visit.page.evaluate(wider) == []
    button = visit.page.locator("#points .all-columns").first
    hidden = (
        "[...document.querySelectorAll('#operators-table thead tr:first-child th')].filter(e => !e.offsetWidth).length"
    )
    assert visit.page.evaluate(hidden) > 0
    button.click()
    assert visit.page.evaluate(hidden) == 0
    button.click()
    assert visit.page.evaluate(hidden) > 0
    visit.page.evaluate("document.querySelectorAll('main details').forEach(one => one.open = !!one.closest('#points'))")


@pytest.mark.parametrize(
    "words", ["#operators-table thead th:has-text('speedup')", "#training > .explained span.term:has-text('noise')"]
)
def test_columns_and_terms_are_explained_by_mouse_and_keyboard(visit: Visit, words: str) -> None:
    tip, explained = visit.page.locator("#tip"), visit.page.locator(words).first
    explained.hover()
    assert len(tip.inner_text()) > 15
    visit.page.keyboard.press("Escape")
    assert tip.is_hidden()
    explained.evaluate("one => (one.querySelector('[tabindex]') ?? one).focus()")
    assert len(tip.inner_text()) > 15
    described = visit.page.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert visit.page.locator(f"#{described}").text_content() == tip.inner_text()
    visit.page.evaluate("document.activeElement.blur()")
    assert tip.is_hidden()


def test_charts_are_legible_on_a_phone(narrow: Visit) -> None:
    narrow.page.wait_for_selector(ALL_DRAWN, timeout=60_000)
    smallest = """Math.min(...[...document.querySelectorAll('figure.chart svg')].flatMap(svg => {
        const scale = svg.viewBox.baseVal.width ? svg.clientWidth / svg.viewBox.baseVal.width : 1;
        return [...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize) * scale);
    }))"""
    assert 10 <= narrow.page.evaluate(smallest) < 100


def test_charts_keep_their_numbers_on_a_phone(narrow: Visit) -> None:
    narrow.page.wait_for_selector(ALL_DRAWN, timeout=60_000)
    narrow.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    outside = """[...document.querySelectorAll('figure.chart:not(.scrolls)')].filter(figure => {
        const edge = figure.getBoundingClientRect().right + 2;
        return [...figure.querySelectorAll('svg text')].some(text => text.getBoundingClientRect().right > edge);
    }).map(figure => figure.id)"""
    assert narrow.page.evaluate(outside) == []
    shown = "document.querySelector('#training figure.chart').textContent"
    assert "time us" in narrow.page.evaluate(shown)


@pytest.mark.parametrize("name", ["visit", "narrow"])
def test_no_text_of_a_chart_covers_another(request: pytest.FixtureRequest, name: str) -> None:
    """By less than the spaces between letters and lines."""
    page: Page = request.getfixturevalue(name).page
    page.wait_for_selector(ALL_DRAWN, timeout=60_000)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    covered = """[...document.querySelectorAll('figure.chart:not(.scrolls) svg')].flatMap(svg => {
        const shown = text => text.textContent.trim() && text.getAttribute('opacity') !== '0';
        const texts = [...svg.querySelectorAll('text')].filter(shown);
        const boxes = texts.map(text => text.getBoundingClientRect());
        return texts.flatMap((text, i) => texts.slice(i + 1).flatMap((other, j) => {
            const [a, b] = [boxes[i], boxes[i + 1 + j]];
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            const both = `${svg.closest('figure').id}: ${text.textContent} | ${other.textContent}`;
            return wide > 0 && high > 4 ? [both] : [];
        }));
    })"""
    assert page.evaluate(covered) == []


@pytest.mark.parametrize("name", ["visit", "narrow"])
def test_the_contents_lead_to_every_section_by_keyboard_and_back(request: pytest.FixtureRequest, name: str) -> None:
    page: Page = request.getfixturevalue(name).page
    addresses = page.locator("nav a").evaluate_all("links => links.map(link => link.hash)")
    sections = page.locator("main > section[id]").evaluate_all("all => all.map(one => `#${one.id}`)")
    assert set(sections) <= set(addresses)
    assert len(addresses) > 15
    bottom_of_nav = "document.querySelector('nav').getBoundingClientRect().bottom"
    for address in ("#training", "#points"):
        page.locator(f'nav a[href="{address}"]').focus()
        page.keyboard.press("Enter")
        page.wait_for_function(f"location.hash === '{address}'")
        heading = page.locator(f"{address} h2").bounding_box()
        assert heading
        assert max(0, page.evaluate(bottom_of_nav)) <= heading["y"] < 300
    page.locator("#points a.to-top").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("scrollY === 0")


@pytest.mark.parametrize(("name", "width"), [("visit", 1280), ("narrow", 400)])
def test_every_chart_is_drawn_whole_and_in_silence(request: pytest.FixtureRequest, name: str, width: int) -> None:
    visit: Visit = request.getfixturevalue(name)
    visit.page.wait_for_selector(ALL_DRAWN, timeout=60_000)
    assert visit.count("figure.chart") == visit.count("figure.chart svg") > 18
    for section, charts in {"kernels": 5, "training": 1, "copies": 2, "tp_training": 2, "jobs": 1}.items():
        assert visit.count(f"#{section} figure.chart svg") == charts
    said = visit.page.locator("#kernels svg text").all_text_contents()
    assert sum("logarithmic" in text for text in said) == 10
    assert visit.count("#training path[aria-roledescription=bar]") > 20
    assert visit.count("#tp_training path[aria-roledescription=bar]") == 36
    assert visit.count("#tp_training_1_losses .mark-line path") == 9
    widths = "[...document.querySelectorAll('main .panels svg')].map(e => e.clientWidth)"
    assert width < 1000 or min(visit.page.evaluate(widths)) > 300
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.said == []
    assert {address.partition(":")[0] for address in visit.asked} <= {"file", "blob", "data"}


def test_a_click_on_a_header_sorts_and_what_was_not_measured_is_last(visit: Visit) -> None:
    for name, said in (("speedup", "descending"), ("speedup", "ascending"), ("time us", "ascending")):
        visit.sort(name, said)
        texts = visit.column(name)
        numbers = [float(text.replace(",", "")) for text in texts if text]
        assert len(numbers) > 100
        assert numbers == sorted(numbers, reverse=said == "descending")
    assert (bool(texts[0]), bool(texts[-1])) == (True, False)


def test_typing_filters(visit: Visit) -> None:
    everything = visit.count(ROWS)
    find = visit.page.locator("#points input[type=search]").first
    find.fill("illegal memory")
    rows = visit.page.locator(ROWS).all_inner_texts()
    assert 0 < len(rows) < everything
    assert all("an illegal memory access was encountered </script><b>" in row for row in rows)
    find.fill("")
    for name, typed in (("operator", "proj"), ("setting", "pipeline_sm8_split4")):
        box = visit.page.locator("#points").get_by_label(f"filter by {name}", exact=True).first
        box.fill(typed)
        assert set(visit.column(name)) == {typed}
        box.fill("")
    assert visit.count(ROWS) == everything
    names = visit.page.evaluate("[...document.querySelectorAll('input')].map(e => e.getAttribute('aria-label'))")
    assert all(names)


@pytest.mark.parametrize(
    ("name", "typed", "found"),
    [
        ("time us", "<700", lambda time: time < 700),
        ("time us", ">= 1,000", lambda time: time >= 1000),
        ("speedup", ">1.2", lambda speedup: speedup > 1.2),
        ("speedup", "1.1", lambda speedup: abs(speedup - 1.1) <= 0.05 + 1e-9),
        ("TP", "8", lambda tp_size: tp_size == 8),
    ],
)
def test_numbers_are_filtered_as_numbers(visit: Visit, name: str, typed: str, found: Callable[[float], bool]) -> None:
    everything = [float(text.replace(",", "")) for text in visit.column(name) if text]
    box = visit.page.locator("#points").get_by_label(f"filter by {name}", exact=True).first
    box.fill(typed)
    shown = [float(text.replace(",", "")) for text in visit.column(name)]
    box.fill("")
    assert 0 < len(shown) < len(everything)
    assert sorted(shown) == sorted(filter(found, everything))


def test_headers_stay_while_the_table_scrolls(visit: Visit) -> None:
    moved = visit.page.evaluate(
        """() => {
          const frame = document.querySelector("#points .dt-layout-table");
          frame.scrollTop = 1500;
          return [frame.scrollTop, frame.getBoundingClientRect().top];
        }"""
    )
    header = visit.page.locator("#operators-table thead").bounding_box()
    assert header
    assert moved[0] == 1500
    assert 0 <= header["y"] - moved[1] < 5
    visit.page.evaluate("document.querySelector('#points .dt-layout-table').scrollTop = 0")


def test_what_is_not_ok_says_why_in_sight(visit: Visit) -> None:
    reasons = dict(zip(visit.column("status"), visit.column("note"), strict=True))
    starts = {"timeout": "no answer in 300 s", "skipped": "bulk does not fit", "ok, launch-bound": "the host was too"}
    assert all(reasons[status].startswith(start) for status, start in starts.items())
    note = visit.page.locator("#operators-table tbody td.failed ~ td.reason").first.bounding_box()
    frame = visit.page.locator("#points .dt-layout-table").first.bounding_box()
    assert note
    assert frame
    assert note["width"] >= 230
    assert note["x"] + note["width"] <= frame["x"] + frame["width"]


def test_rows_are_saved_as_csv(visit: Visit) -> None:
    with visit.page.expect_download() as download:
        visit.page.locator("#points").get_by_role("button", name="CSV of these rows").first.click()
    header, *rows = csv.reader(download.value.path().read_text().strip().splitlines())
    assert header[:2] == ["TP", "operator"]
    assert {len(row) for row in rows} == {len(header)}
    assert len(rows) >= visit.count(ROWS) > 100
    # In one piece, although the page may break it where it is joined.
    assert "pipeline_sm8_split4" in {row[header.index("setting")] for row in rows}


def test_a_tooltip_has_the_numbers(visit: Visit) -> None:
    visit.page.locator(BAR).first.hover()
    tooltip = visit.page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert "floor" in tooltip.inner_text()


@pytest.mark.parametrize(("name", "width", "headers"), [("visit", 1280, 7), ("narrow", 400, 3)])
def test_causes_fit_the_page_and_their_sentences_are_as_wide(
    request: pytest.FixtureRequest, name: str, width: int, headers: int
) -> None:
    page = request.getfixturevalue(name).page
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    table = page.locator(".with-texts table").first
    whole, words = table.bounding_box(), table.locator("tr.words > td").first.bounding_box()
    assert whole["width"] <= width - 48
    assert words["width"] == pytest.approx(whole["width"], abs=2)
    shown = [one for one in table.locator("thead th").all() if one.is_visible()]
    assert len(shown) >= headers
    assert shown[0].inner_text() == "cause"
    page.evaluate("document.querySelectorAll('main details').forEach(one => one.open = !!one.closest('#points'))")


def test_light_and_dark_differ_in_page_and_charts(visit: Visit, narrow: Visit) -> None:
    def colours(shown: Page) -> list[str]:
        fill = "element => getComputedStyle(element).fill"
        return [
            shown.evaluate("getComputedStyle(document.body).backgroundColor"),
            shown.locator(BAR).first.evaluate(fill),
            shown.locator("#operators_1_hidden_tp4 svg text").first.evaluate(fill),
        ]

    light, dark = colours(visit.page), colours(narrow.page)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    switch = narrow.page.get_by_role("button", name="switch between light and dark")
    switch.click()
    assert colours(narrow.page) == light
    switch.click()
    narrow.page.emulate_media(media="print")
    assert colours(narrow.page) == light


def test_prints_everything_opened(visit: Visit) -> None:
    visit.page.evaluate(
        "window.addEventListener('beforeprint', () => { window.closed_when_printed = "
        "document.querySelectorAll('details:not([open])').length; })"
    )
    closed = visit.count("details:not([open])")
    assert closed > 5
    content = visit.page.pdf(format="A4")
    assert content.startswith(b"%PDF")
    assert len(content) > 100_000
    assert visit.page.evaluate("window.closed_when_printed") == 0
    assert visit.count("details:not([open])") == closed
    assert visit.said == []


def test_the_page_runs_no_other_scripts_and_asks_no_network(report: Path, chromium: Browser) -> None:
    visit = Visit(chromium, report)
    visit.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.attacked = 'inline'";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.attacked = 1'>");
        }"""
    )
    fetched = visit.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'fetched', (error) => String(error))")
    assert "Failed to fetch" in fetched
    assert visit.page.evaluate("window.attacked") is None
    refused = [line for line in visit.said if "Content Security Policy" in line]
    assert any("connect-src" in line for line in refused)
    assert any("inline script" in line for line in refused)
    assert not [address for address in visit.asked if address.startswith("http")]
