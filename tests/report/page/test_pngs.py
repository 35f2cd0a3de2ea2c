from __future__ import annotations

from pathlib import Path

from tests.made_sweeps import write_sweep
from tests.report.page.reports import files_of
from tests.report.page.sweep_of_300 import write_tuned_of_300


def dimensions(png: bytes) -> tuple[int, int]:
    """Width and height in pixels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_of_every_plot(tmp_path: Path) -> None:
    pngs = {name: content for name, content in files_of(write_sweep(tmp_path)).items() if name.endswith(".png")}
    assert pngs.keys() == {
        "plots/hidden_fraction_tp2.png",
        "plots/hidden_fraction_tp4.png",
        "plots/num_sm_tp2.png",
        "plots/num_sm_tp4.png",
        "plots/tp_scaling.png",
    }
    for content in pngs.values():
        width, height = dimensions(content)
        assert width >= 500
        assert height >= 120
        assert len(content) > 5000


def test_of_layers_and_timelines(tmp_path: Path) -> None:
    files = files_of(write_tuned_of_300(tmp_path))
    wanted = {"layer_tp4", "timeline_tp4_layer", *(f"timeline_tp{n}_{o}" for n in (4, 8) for o in ("qkv", "fc2"))}
    assert {f"plots/{name}.png" for name in wanted} <= files.keys()
    assert all(dimensions(files[f"plots/{name}.png"])[0] > 1300 for name in wanted)
