"""The page in a real browser: headless Chromium, from a file, without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.made_sweeps import write_sweep_of_copies, write_sweep_of_stacks, write_sweep_of_training
from tests.make_point import implementation, kernel_config, make_point
from tests.report.page.reports import files_of
from tests.report.page.sweep_of_300 import write_tuned_of_300

pytestmark = pytest.mark.end_to_end

READY = "document.documentElement.dataset.ready === 'yes'"
ALL_DRAWN = "document.documentElement.dataset.drawn === 'all'"
ROWS = "#points-table tbody tr"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if not found:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed; run `apt-get install chromium`")
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 300 points with failed, skipped and launch-bound ones, traces, and a proof."""
    directory = tmp_path_factory.mktemp("sweep")
    write_tuned_of_300(directory)
    path = directory / "report.html"
    path.write_bytes(files_of(directory)["report.html"])
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
        self.page.wait_for_function(READY, timeout=30_000)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def column(self, name: str) -> list[str]:
        headers = [text.strip() for text in self.texts("#points-table thead tr:first-child th")]
        return self.texts(f"{ROWS} td:nth-child({headers.index(name) + 1})")


@pytest.fixture(scope="module")
def visit(chromium: Browser, report: Path) -> Visit:
    return Visit(chromium, report)


def test_opens_soon_and_says_nothing(chromium: Browser, report: Path) -> None:
    opened = Visit(chromium, report)
    # How fast it is, benchmarks/report_of_300_points.py says; here anything may run beside it.
    assert opened.page.evaluate("performance.getEntriesByName('ready')[0].startTime") < 10_000
    opened.page.wait_for_function(ALL_DRAWN)
    assert opened.said == []
    assert {address.partition(":")[0] for address in opened.asked} <= {"file", "blob", "data"}
    opened.page.context.close()
    assert report.stat().st_size < 5e6


@pytest.mark.parametrize("width", [1280, 400])
def test_charts_of_kernels_are_drawn_in_silence(chromium: Browser, tmp_path: Path, width: int) -> None:
    """Over m, and of one m, linear and logarithmic each."""
    for n, slowest_us in ((4096, 210.0), (8192, 1500.0)):
        make_point("kernel", tmp_path, kernel_config(n=n), implementations={"a": implementation(slowest_us, 1.0)})
        for m in (1024, 2048):
            make_point(
                "kernel", tmp_path, kernel_config(m, n=n * 4), implementations={"a": implementation(slowest_us, 1.0)}
            )
    path = tmp_path / "report.html"
    path.write_bytes(files_of(tmp_path)["report.html"])
    opened = Visit(chromium, path, viewport={"width": width, "height": 900})
    opened.page.wait_for_function(ALL_DRAWN)
    assert opened.page.locator("#kernels figure.chart svg").count() == 4
    said = opened.page.locator("#kernels svg text").all_text_contents()
    assert sum("logarithmic" in text for text in said) == 2
    assert opened.said == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.context.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_charts_of_training_steps_and_copies_are_drawn_in_silence(
    chromium: Browser, tmp_path: Path, width: int
) -> None:
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    path = tmp_path / "report.html"
    path.write_bytes(files_of(tmp_path)["report.html"])
    opened = Visit(chromium, path, viewport={"width": width, "height": 900})
    opened.page.wait_for_function(ALL_DRAWN)
    assert opened.page.locator("#training figure.chart svg").count() == 2
    assert opened.page.locator("#copies figure.chart svg").count() == 2
    assert opened.page.locator("#training path[aria-roledescription=bar]").count() > 20
    assert opened.said == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.context.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_charts_of_tensor_parallel_stacks_are_drawn_in_silence(chromium: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(files_of(write_sweep_of_stacks(tmp_path / "sweep"))["report.html"])
    opened = Visit(chromium, path, viewport={"width": width, "height": 900})
    opened.page.wait_for_function(ALL_DRAWN)
    assert opened.page.locator("#stacks figure.chart svg").count() == 2
    assert opened.page.locator("#stacks path[aria-roledescription=bar]").count() == 36
    assert opened.page.locator("#tp_training_1_losses .mark-line path").count() == 9
    assert opened.said == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.context.close()


def test_every_chart_is_drawn_whole(visit: Visit) -> None:
    visit.page.wait_for_function(ALL_DRAWN)
    figures = visit.page.locator("figure.chart")
    assert figures.count() == visit.page.locator("figure.chart svg").count() > 30
    for box in visit.page.evaluate(
        "[...document.querySelectorAll('main > section > .panels svg')].map(e => e.clientWidth)"
    ):
        assert box > 300
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_click_on_a_header_sorts(visit: Visit) -> None:
    header = visit.page.locator("#points-table thead th", has_text="speedup").first
    for descending, said in ((True, "descending"), (False, "ascending")):
        header.click()
        expect(header).to_have_attribute("aria-sort", said)
        speedups = [float(text) for text in visit.column("speedup") if text]
        assert len(speedups) > 250
        assert speedups == sorted(speedups, reverse=descending)
    header.click()
    expect(header).not_to_have_attribute("aria-sort", "ascending")


def test_what_was_not_measured_sorts_last(visit: Visit) -> None:
    header = visit.page.locator("#points-table thead th", has_text="time us").first
    header.click()
    expect(header).to_have_attribute("aria-sort", "ascending")
    times = visit.column("time us")
    assert times[0]
    assert not times[-1]
    header.click()
    header.click()
    expect(header).not_to_have_attribute("aria-sort", "descending")


def test_typing_filters(visit: Visit) -> None:
    everything = visit.page.locator(ROWS).count()
    assert everything > 290
    find = visit.page.locator("input[type=search]").first
    find.fill("illegal memory")
    rows = visit.texts(ROWS)
    assert 0 < len(rows) < everything
    assert all("an illegal memory access was encountered </script><b>" in row for row in rows)
    find.fill("")
    of_operator = visit.page.locator("#points-table thead input").nth(1)
    of_operator.fill("proj")
    assert set(visit.column("operator")) == {"proj"}
    of_operator.fill("")
    assert visit.page.locator(ROWS).count() == everything


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
    box = visit.page.get_by_label(f"filter by {name}", exact=True).first
    box.fill(typed)
    shown = [float(text.replace(",", "")) for text in visit.column(name)]
    box.fill("")
    assert 0 < len(shown) < len(everything)
    assert sorted(shown) == sorted(filter(found, everything))


def test_every_input_has_a_name(visit: Visit) -> None:
    names = visit.page.evaluate("[...document.querySelectorAll('input')].map(e => e.getAttribute('aria-label'))")
    assert all(names)
    assert "find in all columns" in names


def test_headers_stay_while_the_table_scrolls(visit: Visit) -> None:
    top = visit.page.locator("#points-table thead").bounding_box()
    moved = visit.page.evaluate(
        """() => {
          const frame = document.querySelector("#points .dt-layout-table");
          frame.scrollTop = 2500;
          return [frame.scrollTop, frame.getBoundingClientRect().top];
        }"""
    )
    header = visit.page.locator("#points-table thead").bounding_box()
    assert top
    assert header
    assert moved[0] == 2500
    assert 0 <= header["y"] - moved[1] < 5
    visit.page.evaluate("document.querySelector('#points .dt-layout-table').scrollTop = 0")


def test_reasons_are_in_sight(visit: Visit) -> None:
    note = visit.page.locator("#points-table tbody td.failed ~ td.reason").first.bounding_box()
    frame = visit.page.locator("#points .dt-layout-table").first.bounding_box()
    assert note
    assert frame
    assert note["width"] >= 230
    assert note["x"] + note["width"] <= frame["x"] + frame["width"]


def test_settings_break_only_where_they_are_joined(visit: Visit) -> None:
    with visit.page.expect_download() as download:
        visit.page.get_by_role("button", name="CSV of these rows").first.click()
    csv = download.value.path().read_text()
    assert "pipeline_sm8_split4" in csv
    header, first, *_ = csv.splitlines()
    assert header.startswith('"TP","operator"')
    assert first.startswith('"4","qkv"')
    visit.page.get_by_label("filter by setting").fill("pipeline_sm8_split4")
    assert set(visit.column("setting")) == {"pipeline_sm8_split4"}
    visit.page.get_by_label("filter by setting").fill("")


def test_what_is_not_ok_says_why(visit: Visit) -> None:
    reasons = dict(zip(visit.column("status"), visit.column("note"), strict=True))
    assert reasons["timeout"] == "no answer in 300 s"
    assert reasons["skipped"].startswith("bulk does not fit fc2")
    assert reasons["failed"].startswith("rank 3 died")
    assert reasons["ok, launch-bound"].startswith("the host was too slow")


def test_a_tooltip_has_the_numbers(visit: Visit) -> None:
    visit.page.locator("#hidden_fraction_tp4 svg path[aria-roledescription=bar]").first.hover()
    told = visit.page.locator("#vg-tooltip-element.visible")
    told.wait_for()
    assert "GEMMs alone" in told.inner_text()


def test_light_and_dark_differ_in_page_and_charts(chromium: Browser, report: Path) -> None:
    def colours(shown: Page) -> list[str]:
        return [
            shown.evaluate("getComputedStyle(document.body).backgroundColor"),
            shown.locator("#hidden_fraction_tp4 svg path[aria-roledescription=bar]").first.evaluate(
                "element => getComputedStyle(element).fill"
            ),
            shown.locator("#hidden_fraction_tp4 svg text").first.evaluate("element => getComputedStyle(element).fill"),
        ]

    light = Visit(chromium, report, color_scheme="light").page
    dark = Visit(chromium, report, color_scheme="dark").page
    in_light, in_dark = colours(light), colours(dark)
    assert all(one != other for one, other in zip(in_light, in_dark, strict=True))
    dark.get_by_role("button", name="switch between light and dark").click()
    assert colours(dark) == in_light
    dark.get_by_role("button", name="switch between light and dark").click()
    dark.emulate_media(media="print")
    assert colours(dark) == in_light


@pytest.mark.parametrize("width", [800, 390])
def test_a_narrow_window_needs_no_scrolling_sideways(chromium: Browser, report: Path, width: int) -> None:
    narrow = Visit(chromium, report, viewport={"width": width, "height": 900}).page
    assert narrow.evaluate("document.documentElement.scrollWidth") <= width


def test_prints_everything_opened(chromium: Browser, report: Path) -> None:
    opened = Visit(chromium, report)
    opened.page.wait_for_function(ALL_DRAWN)
    opened.page.evaluate(
        "window.addEventListener('beforeprint', () => { window.closed_when_printed = "
        "document.querySelectorAll('details:not([open])').length; })"
    )
    assert opened.page.locator("details:not([open])").count() > 5
    content = opened.page.pdf(format="A4")
    assert content.startswith(b"%PDF")
    assert len(content) > 100_000
    assert opened.page.evaluate("window.closed_when_printed") == 0
    assert opened.page.locator("details:not([open])").count() > 5
    assert opened.said == []
