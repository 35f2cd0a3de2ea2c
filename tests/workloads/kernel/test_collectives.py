"""Collectives beside a GEMM: what is timed on real processes, what is said of it, and what `predict` learns from it."""

import gzip
import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_sweep.backends.communicator import communicator
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.models import COLLECTIVES, GEMM_ONLY
from overlap_sweep.predict.calibration import calibrations, chosen, kept_folder
from overlap_sweep.predict.contention import COMM_SLOWDOWN, GEMM_SLOWDOWN, usual_contention
from overlap_sweep.report.files import write_reports
from overlap_sweep.results.measured import summarise
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads import analyse, kernel
from overlap_sweep.workloads.kernel import beside
from overlap_sweep.workloads.kernel import run as kernel_run
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes
from tests.make_point import kernel_config, kernel_point, make_point
from tests.processes import run_ranks

ALONE: dict[str, Any] = {"operator": "fc1", "n": None, "k": None, "size_mb": 0.05, "workload": {"tokens": 32}}


def completed(**changes: Any) -> Resolved:
    point = decoded_point(kernel.complete(kernel_point(**{**ALONE, "kernel": "all_reduce", **changes})))
    assert isinstance(point, Resolved)
    return point


def test_the_gemm_beside_is_square_and_of_no_model() -> None:
    point = completed()

    assert (point.m, point.n, point.k, point.operator, point.model.name) == (32, 32, 32, None, "custom")
    assert {name: setting["num_sm"] for name, setting in point.implementations.items()} == {
        "bulk_sm1": 1,
        "bulk_sm2": 2,
    }
    assert list(completed(num_sm=8).implementations) == ["bulk_sm8"]
    assert list(completed(implementations=["bulk_sm3"]).implementations) == ["bulk_sm3"]
    on_gpus = completed(runtime={"device": "cuda"}, backend="auto", size_mb=None)
    assert [setting["num_sm"] for setting in on_gpus.implementations.values()] == [1, 2, 4, 8, 16, 32]
    assert (on_gpus.backend, on_gpus.size_mb) == ("torch", 64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": "ag_gemm", "n": 48, "k": 32}, "size_mb is of collectives alone: kernel=all_gather,"),
        ({"num_sm": 4, "implementations": ["bulk_sm4"]}, "num_sm and implementations both name thread blocks"),
        ({"implementations": ["ring"]}, "backend=torch has no ring for all_reduce"),
    ],
)
def test_wrong_options_are_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        completed(**changes)


def test_what_cannot_be_measured_is_refused() -> None:
    assert (
        kernel.refusal(completed(backend="symm_mem")) == "backend=symm_mem has no kernel=all_reduce; use backend=torch"
    )
    assert "cannot sum FP8" in (kernel.refusal(completed(precision=None, dtype="float8_e4m3fn")) or "")
    assert "at most 64 channels" in (kernel.refusal(completed(num_sm=65)) or "")
    assert kernel.refusal(completed()) is None


def test_calls_count_by_the_part_of_them_beside_the_other() -> None:
    # The GEMMs end after 400 ns; until then one collective and a half have run.
    assert beside.time_of_each({"gemm": [100, 200, 300, 400], "comm": [200, 600]}) == {
        "gemm": pytest.approx(0.1),
        "comm": pytest.approx(0.4 / 1.5),
    }
    assert beside.time_of_each({"comm": [100, 300]}) == {"comm": pytest.approx(0.15)}


def _measured(ranks: Ranks, directory: Path, points: list[Resolved]) -> list[dict[str, Any]]:
    return [dict(kernel_run.run(point, directory, ranks)) for point in points]


def _exchanged(ranks: Ranks) -> list[float]:
    full = torch.arange(4.0).view(4, 1) + 10 * ranks.rank
    return communicator(ranks, 2).all_to_all(full).wait().flatten().tolist()


def test_real_processes_time_each_alone_and_both_at_once(tmp_path: Path) -> None:
    points = [completed(kernel=name, profile="best" if name == "all_to_all" else "none") for name in COLLECTIVES]
    for found in run_ranks(2, _measured, tmp_path, points, keep="cpu")[0]:
        times: KernelTimes = found["measured"]
        assert list(times.implementations) == [GEMM_ONLY, "bulk_sm1", "bulk_sm2"]
        for name, one in times.implementations.items():
            assert (one.beside is None, one.gemm_beside is None) == (name == GEMM_ONLY,) * 2
            for time in filter(None, (one.time, one.beside, one.gemm_beside)):
                assert len(time.samples_us) == 3
                assert min(time.samples_us) > 0
    assert len(found["traces"]) == 6
    assert run_ranks(2, _exchanged, keep="cpu") == [[0, 1, 10, 11], [2, 3, 12, 13]]


def sweep(root: Path, device: str = "cuda") -> None:
    """Eight points of H100s: 16 and 64 MiB take 15 us and what 20 GB/s a block need; GEMMs lose 1 % a block."""
    for name in COLLECTIVES:
        for size_mb in (16.0, 64.0):
            settings = {f"bulk_sm{n}": {"method": "bulk", "num_sm": n} for n in (1, 4, 16)}
            sizes = {"size_mb": size_mb, "n": 1024, "k": 1024, "operator": None, "tp_size": 2}
            point = kernel_config(kernel=name, implementations=settings, device=device, **sizes)
            times = {GEMM_ONLY: ImplementationTimes(time=_timing(200.0))}
            for label, setting in settings.items():
                blocks = setting["num_sm"]
                assert isinstance(blocks, int)
                bus_bytes = size_mb * 2**20 / 2 * (2 if name == "all_reduce" else 1)
                alone_us = 15 + bus_bytes / (blocks * 20e3)
                times[label] = ImplementationTimes(
                    time=_timing(alone_us),
                    setting=setting,
                    independent=True,
                    beside=_timing(1.25 * alone_us),
                    gemm_beside=_timing(200 * (1 + 0.01 * blocks)),
                )
            measured = KernelTimes(implementations=times)
            environment = {"gpu": "NVIDIA H100" if device == "cuda" else None, "nccl": "2.30.1"}
            make_point("kernel", root, point, measured=measured, environment=environment)


def _timing(time_us: float) -> Any:
    return summarise([time_us * (1 + 0.001 * step) for step in (-1, 0, 1)])


def test_what_is_measured_is_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "sweep"
    sweep(root)
    monkeypatch.setenv("OVERLAP_SWEEP_CALIBRATIONS", str(tmp_path / "kept"))
    analysis = analyse(root, AnalysisConfig())
    (answer,) = analysis.answers
    first, *_, offer = answer.sentences
    assert first == ("all_gather of 64 MiB: 16 CTAs move 280 GB/s alone, 224 beside GEMMs, and slow them by 16%.")
    name = "calibration_NVIDIA_H100_x2_1024x1024x1024_bf16.yaml"
    assert offer.endswith(f"mkdir -p {kept_folder()} && cp {root / name} {kept_folder()}/")
    write_reports(analysis, root)
    shipped = calibrations()
    assert usual_contention("NVIDIA H100", 2)[:2] == (GEMM_SLOWDOWN, COMM_SLOWDOWN)

    kept_folder().mkdir()
    (kept_folder() / name).write_bytes((root / name).read_bytes())

    own, *others = calibrations()
    assert others == shipped
    assert chosen(calibrations(), "NVIDIA H100", 8) is chosen(calibrations(), "NVIDIA H100", 2)
    assert chosen(calibrations(), "NVIDIA H200", 2).device == "NVIDIA H200"
    assert (own.gpus, own.nccl, sorted(own.rates)) == ("2 NVIDIA H100", "2.30.1", sorted(COLLECTIVES))
    for seen in own.rates.values():
        assert [one.blocks for one in seen] == [1, 4, 16]
        assert [one.gb_per_s for one in seen] == pytest.approx([20, 80, 320], rel=0.01)
    assert own.exponent == pytest.approx(1, rel=0.01)
    assert usual_contention("NVIDIA H100", 2, 8) == (pytest.approx(0.08, rel=0.01), 0.25, "2 NVIDIA H100")


def test_a_cpu_is_no_calibration(tmp_path: Path) -> None:
    sweep(tmp_path, device="cpu")

    (section,) = analyse(tmp_path, AnalysisConfig()).sections

    assert section.files == []
    assert len(section.answers[0].sentences) == len(COLLECTIVES)
    assert section.frame["gemm_slowdown"].notna().all()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("point", "size_mb"), None),
        (("measured", "implementations", "bulk_sm4", "setting", "num_sm"), None),
        (("measured", "implementations", "bulk_sm4", "gemm_beside"), None),
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, path: tuple[str, ...], value: None) -> None:
    sweep(tmp_path)
    file = sorted(tmp_path.glob("*/result.json"))[0]
    content = json.loads(file.read_text())
    *parents, last = path
    reduce(dict.__getitem__, parents, content)[last] = value
    file.write_text(json.dumps(content))

    analysis = analyse(tmp_path, AnalysisConfig())

    assert [file.parent.name in problem for problem in analysis.problems] == [True]
    assert analysis.answers[0].sentences[0].startswith("all_gather of 64 MiB")


def test_a_broken_calibration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_SWEEP_CALIBRATIONS", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("- device: 3\n")

    with pytest.raises(UserError, match=r"mine.yaml cannot be read as a calibration \(Expected `str`"):
        calibrations()


@pytest.mark.gpu(count=2)
def test_nccls_kernels_have_the_thread_blocks_that_are_asked_for(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"size_mb": 4.0, "workload": {"tokens": 1024}, "runtime": {"device": "cuda"}}
    point = completed(**sizes, precision="bf16", num_sm=4, profile="all")

    found = run_ranks(2, _measured, tmp_path, [point], device="cuda", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})

    one = found[0][0]["measured"].implementations["bulk_sm4"]
    assert one.beside
    assert one.gemm_beside
    for timing in (one.time, one.beside, one.gemm_beside):
        assert min(timing.samples_us) > 0
    with gzip.open(tmp_path / trace_file(0, "bulk_sm4")) as file:
        events = json.load(file)["traceEvents"]
    grids = [each["args"]["grid"][0] for each in events if each.get("cat") == "kernel" and "nccl" in each["name"]]
    # Besides those of the point there are the all-reduces of a number that make the ranks meet.
    assert grids.count(4) >= beside.FEWEST
