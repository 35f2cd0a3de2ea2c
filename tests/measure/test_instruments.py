"""What a debugged point prints, and what its passes are named."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overlap_sweep.config import Runtime
from overlap_sweep.measure import Ranks
from overlap_sweep.measure import instruments as instruments_module
from overlap_sweep.measure.instruments import _Instruments, instruments, named, nsys_records
from overlap_sweep.measure.profile import capture_each, profile_steps
from overlap_sweep.measure.timing import Variant, relative_error, time_variants

ALONE = Ranks(0, 1, torch.device("cpu"))
RIGHT = Variant(lambda turn: torch.ones(8, 4), lambda turn, output: {"x_grad": torch.full((8, 4), 2.0)})


def wrong_chunk(turn: int) -> torch.Tensor:
    output = torch.ones(8, 4)
    output[4:6] = 0.0
    output[5, 1] = torch.nan
    return output


def test_every_pass_and_what_differs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = replace(RIGHT, forward=wrong_chunk)
    with instruments(Runtime(debug=True), ALONE):
        assert relative_error(wrong, RIGHT, ALONE, "bulk") == {"output": torch.inf, "x_grad": 0.0}
        printed = capsys.readouterr().out.splitlines()
        time_variants({"bulk": wrong}, ALONE, 0, 1)
        passes = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert all(re.match(r"\[rank 0, \d+\.\d{3} s\] ", line) for line in printed)
    output, gradient = (
        line.partition("check: ")[2] for line in printed if "largest difference" in line and "n 0," in line
    )
    assert output.startswith(
        "bulk output, turn 0, [8, 4] float32: norm nan, reference 5.65685, largest difference nan at [5, 1]"
    )
    assert output.endswith("1 NaN or infinite; rows 4 to 5 differ (2 of 8)")
    assert gradient.endswith("largest difference 0 at [0, 0]")
    assert passes == [
        "bulk fwd, turn 0: begins",
        "bulk fwd: enqueued with output [8, 4] float32",
        "bulk fwd: ends",
        "bulk bwd, turn 0: begins",
        "bulk bwd: enqueued with 1 gradients",
        "bulk bwd: ends",
    ]


def test_a_named_variant_keeps_its_name() -> None:
    """A clock may know it by its identity."""
    with instruments(Runtime(debug=True), ALONE):
        once = named("point", RIGHT)
        assert once != RIGHT
        assert named("again", once) is once
    assert named("point", RIGHT) is RIGHT


def test_a_usual_point_prints_nothing_and_runs_its_own_functions(capsys: pytest.CaptureFixture[str]) -> None:
    with instruments(Runtime(nvtx=True, nsys=True), ALONE):
        # NVTX and Nsight Systems are for GPUs.
        assert not nsys_records()
        time_variants({"bulk": RIGHT}, ALONE, 0, 1)
    with instruments(Runtime(), ALONE):
        relative_error(RIGHT, RIGHT, ALONE)
    assert capsys.readouterr().out == ""


def test_where_nsys_records_torchs_profiler_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with stand-ins for the calls by which CUDA tells Nsight Systems to start and stop."""
    calls: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(instruments_module, "_current", _Instruments(ALONE, debug=False, nvtx=False, nsys=True))
    noted = {name: Variant(lambda turn, name=name: calls.append(name)) for name in ("point", "none")}
    assert capture_each(noted, ALONE, 2, tmp_path) == []
    assert calls == ["start", "point", "point", "none", "none", "stop"]
    calls.clear()
    options = {"wait": 1, "warmup": 0, "active": 2, "repeat": 2, "chrome_trace": True, "tensorboard": True}
    profiled = profile_steps(lambda: calls.append("step"), ALONE, options, tmp_path)
    assert calls == ["step", "start", "step", "step", "stop"] * 2
    assert (profiled.active, profiled.traces) == ([1, 2, 4, 5], [])
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu(count=1)
def test_a_debugged_point_on_a_gpu_takes_no_longer_from_turn_to_turn(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Ranks(0, 1, torch.device("cuda", 0))
    matrix = torch.ones(64, 64, device="cuda")
    began_s = time.perf_counter()
    with instruments(Runtime(debug=True), gpu):
        time_variants({"none": Variant(lambda _turn: matrix @ matrix)}, gpu, 2, 40)
    assert capsys.readouterr().out.count("none fwd: ends") == 42
    assert time.perf_counter() - began_s < 20


@pytest.mark.gpu(count=1)
def test_passes_are_nvtx_ranges_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("pop"))
    gpu = Ranks(0, 1, torch.device("cuda"))
    with instruments(Runtime(nvtx=True), gpu):
        time_variants({"bulk": RIGHT}, gpu, 0, 1)
    assert ranges == ["bulk fwd", "pop", "bulk bwd", "pop"]
