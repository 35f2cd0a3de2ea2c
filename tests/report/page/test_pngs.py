"""PNGs as they are drawn: everywhere else in these tests they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyze import analyze
from tests.golden.made_report import write_traced
from tests.made_sweeps import rounds, write_sweep
from tests.make_point import make_point
from tests.report.conftest import Made
from tests.report.page.reports import files_of

pytestmark = pytest.mark.usefixtures("images")


def dimensions(png: bytes) -> tuple[int, int]:
    """Width and height in pixels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chart, charts two by two, and timelines below each other."""
    write_sweep(tmp_path / "sweep")
    make_point("layer", tmp_path / "sweep" / "layer", variants={"none": rounds(1.0), "default": rounds(0.97)})
    pngs = {name: png for name, png in files_of(tmp_path / "sweep").items() if name != "report.html"}
    one_by_tp_size = {f"plots/{plot}_tp{tp_size}.png" for plot in ("hidden_fraction", "num_sm") for tp_size in (2, 4)}
    assert pngs.keys() == {*one_by_tp_size, "plots/tp_scaling.png", "plots/layer_1.png"}
    for content in pngs.values():
        width, height = dimensions(content)
        assert (width >= 500, height >= 120, len(content) > 5000) == (True, True, True)
    monkeypatch.setattr("overlap_sweep.report.page.page.png", lambda _: b"")
    write_traced(tmp_path / "traced")
    timelines = [content for name, content in files_of(tmp_path / "traced").items() if "/timeline_" in name]
    assert len(timelines) > 4
    assert dimensions(timelines[0])[0] > 1300


def test_of_a_comparison(made: Made, tmp_path: Path) -> None:
    for one, two, least in (("old", "new", 500), ("cuda", "rocm", 1200)):
        output = tmp_path / one
        analyze("compare", made("compared") / one, made("compared") / two, "--output", output)
        sizes = [dimensions(path.read_bytes()) for path in output.glob("*.png")]
        assert len(sizes) == 3
        assert all(width > least and height > 200 for width, height in sizes)
