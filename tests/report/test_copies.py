from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from overlap_sweep.analysis.points import read_points
from overlap_sweep.report.console import console_for
from overlap_sweep.report.copies import print_copies
from overlap_sweep.run_directory import read_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from tests.analyze import analyze
from tests.made_sweeps import write_sweep_of_copies
from tests.make_point import make_point
from tests.sweeps import Launch


def shown(directory: Path, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width, highlight=False, markup=False)
    print_copies(read_points(directory).points, console)
    return stream.getvalue()


def test_the_answers_stand_before_the_table(tmp_path: Path) -> None:
    lines = [line for line in shown(write_sweep_of_copies(tmp_path)).splitlines() if line.strip()]
    assert lines[0] == "GEMMs beside copies on NVIDIA H200"
    assert lines[1].startswith("  device_to_device: copies hide behind no GEMM")
    assert lines[2].startswith("  device_to_host: overlap saves time at 4 of 4 sizes")
    assert lines[3].split()[:2] == ["direction", "size"]
    hidden = next(line for line in lines if "2,200.0" in line)
    assert hidden.split() == [
        *("device_to_host", "4", "GEMMs", "of", "4096,", "4", "x", "64", "MiB", "1,000.0", "1,200.0", "2,200.0"),
        *("1,300.0", "902.0", "4.2", "41%", "90%", "+8%", "550", "to", "423", "224", "to", "206"),
    ]
    assert sum(line.endswith("hides nothing") for line in lines) == 2
    assert sum(line.endswith("cannot tell") for line in lines[2:]) == 2


@pytest.mark.parametrize("width", [40, 70, 120])
def test_a_narrow_terminal_shows_all_of_it(tmp_path: Path, width: int) -> None:
    text = shown(write_sweep_of_copies(tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "902.0" in joined
    assert "90%" in joined


def test_analyze_writes_a_table_and_the_report(tmp_path: Path) -> None:
    process = analyze(write_sweep_of_copies(tmp_path), "--format", "json")
    assert process.returncode == 0
    assert len(json.loads(process.stdout)) == 9
    names = {path.name for path in tmp_path.rglob("*.*")} - {"result.json"}
    assert names == {
        *("summary.txt", "tuning_report.json", "copies.csv", "copies.parquet", "report.html"),
        *("copies_1.png", "copies_2.png"),
    }
    report = json.loads((tmp_path / "tuning_report.json").read_text())
    assert [case["direction"] for case in report["copies"]] == ["device_to_device", "device_to_host"]
    assert report["copies"][1]["answer"].startswith("device_to_host: overlap saves time")
    assert report["counts"]["skipped"] == 1


def test_progress_compares_with_one_after_the_other(tmp_path: Path) -> None:
    directory = make_point("copy_engine", tmp_path, overlapped_us=1000.0, name="to_host")
    outcomes = Outcomes()
    outcome = Outcome.of(read_result(directory / "result.json"), directory)
    outcomes.keep(outcome)
    assert str(outcome) == "ok      to_host  1.000 ms  1.400x sequential"
    assert outcomes.best() is None


@pytest.mark.end_to_end
def test_real_copies_from_launch_to_report(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "sweep")
    sizes = ("copy_engine.matrix_size=64", "copy_engine.copy_mb=0.1,0.2")
    process = launch.run("-m", "workload=copy_engine", *sizes, "runtime.device=cpu")
    assert (process.returncode, process.stderr) == (0, "")
    assert "GEMMs beside copies on cpu" in process.stdout
    assert "4 GEMMs of 64, 4 x 0.2 MiB" in process.stdout
    process = analyze(launch.directory)
    assert (process.returncode, process.stderr) == (0, "")
    assert (launch.directory / "plots" / "copies_1.png").exists()
