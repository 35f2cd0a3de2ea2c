"""Pages of sweeps, as files and as parsed HTML."""

from html.parser import HTMLParser
from pathlib import Path

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.page import page_files
from overlap_sweep.report.section import Analysis
from overlap_sweep.workloads import analyse

ADDRESSES = ("src", "href", "action", "data", "poster", "srcset")


def analysis_of(directory: Path) -> Analysis:
    return analyse(directory, AnalysisConfig(), "python analyze.py there")


def files_of(directory: Path) -> dict[str, bytes]:
    return dict(page_files(analysis_of(directory), ["summary.txt"], with_plots=True))


def page_of(directory: Path) -> str:
    return files_of(directory)["report.html"].decode()


class Parsed(HTMLParser):
    """What a browser would take a page for: elements, addresses, scripts, styles, and the text outside of both."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._within = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        {"script": self.scripts, "style": self.styles}.get(self._within, self.text).append(data)

    @property
    def addresses(self) -> list[str]:
        return [value for _, attrs in self.tags for name, value in attrs.items() if name in ADDRESSES and value]
