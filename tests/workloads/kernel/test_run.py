"""Kernels: what a point is completed to, and what real processes compute and time.

What is refused, and what each backend measures unasked, is in tests/golden/expected/refusals.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from overlap_sweep import backends
from overlap_sweep.backends import Outputs
from overlap_sweep.backends.torch import kernels as torch_kernels
from overlap_sweep.config import ResolvedModel
from overlap_sweep.errors import Refused, UserError, WrongNumbers
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import BASELINES, KERNELS, KernelShape
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads import kernel
from overlap_sweep.workloads.kernel import run as kernel_run
from overlap_sweep.workloads.kernel.config import Resolved
from tests.make_point import kernel_point
from tests.processes import run_ranks


def completed(**changes: Any) -> Resolved:
    point = decoded_point(kernel.complete(kernel_point(**changes)))
    assert isinstance(point, Resolved)
    return point


ON_GPUS: dict[str, Any] = {
    **{"backend": "transformer_engine", "precision": "bf16", "runtime": {"device": "cuda"}, "tp_size": 4},
    **{"n": 8192, "k": 4096, "workload": {"tokens": 2048, "warmup": None}},
}


def test_given_sizes_need_no_model() -> None:
    point = completed(kernel="gemm_rs", operator="fc1")
    assert (point.m, point.n, point.k) == (24, 48, 32)
    assert point.model == ResolvedModel(name="custom")
    assert point.operator is None
    assert point.dtype is None
    by_model = completed(operator="fc2", kernel=None, n=None, k=None)
    assert (by_model.kernel, by_model.operator, by_model.model.name) == ("gemm_rs", "fc2", "m")


def test_every_knob_of_transformer_engine_is_given() -> None:
    gathers = completed(**ON_GPUS).implementations
    assert gathers["ring_agg1"] == {
        **{"method": "ring_exchange", "aggregate": True, "use_ce": True},
        **{"num_sm": 1, "cga_size": 1, "set_sm_margin": False},
    }
    name = "pipeline_sm12_split8_margin0"
    assert completed(**ON_GPUS, kernel="gemm_rs", implementations=[name]).implementations == {
        name: {"method": "pipeline", "num_splits": 8, "num_sm": 12, "cga_size": 2, "set_sm_margin": False},
    }


def test_bytes_and_operations_of_a_rank() -> None:
    shape = KernelShape("ag_gemm", 1024, 12288, 49152, 8)
    assert shape.gemm_shape == (1024, 1536, 49152)
    assert shape.flops == 2 * 1024 * 1536 * 49152
    assert shape.link_bytes("fp16") == 1024 * 49152 * 2 * 7 / 8
    assert shape.link_bytes("fp8") == 1024 * 49152 * 7 / 8
    scattered = KernelShape("gemm_rs", 1024, 12288, 49152, 8)
    assert scattered.gemm_shape == (1024, 12288, 6144)
    assert scattered.link_bytes("fp8") == 1024 * 12288 * 2 * 7 / 8
    assert KernelShape("gemm_ar", 1024, 12288, 49152, 8).link_bytes("fp8") == 2 * scattered.link_bytes("fp8")


def _errors(ranks: Ranks, groups: list[list[Resolved]]) -> list[dict[str, tuple[float, bool]]]:
    """What `check` says on this rank, for each group of points by kernel and implementation."""
    found: list[dict[str, tuple[float, bool]]] = []
    for points in groups:
        found.append({})
        for point in points:
            problem = kernel_run.draw_problem(point, ranks)
            calls, left_out = kernel_run.build_all(point, problem, ranks)
            assert not left_out
            calls["sequential"] = torch_kernels.baselines_of(problem, ranks)["sequential"]
            for name, call in calls.items():
                checked = tuple(kernel_run.check(call, problem, ranks))
                found[-1][f"{point.kernel} {point.precision} {name}"] = checked
    return found


FP8 = {"n": 64, "k": 64, "workload": {"tokens": 32}, "precision": None, "dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("tp_size", [2, 4])
def test_torchs_implementations_compute_what_float32_does(tp_size: int) -> None:
    points = [
        completed(kernel=name, tp_size=tp_size, precision=precision)
        for name in KERNELS
        for precision in ("fp32", "bf16")
    ]
    # Splits that don't divide the rows, FP8 by its own values, and fewer rows than splits.
    points.append(completed(tp_size=tp_size, implementations=["pipeline_split5", "bulk_sm3"]))
    points.append(completed(kernel="gemm_rs", tp_size=tp_size, implementations=["pipeline_split4_sm3", "ring_sm2"]))
    points += [completed(kernel=name, tp_size=tp_size, **FP8) for name in KERNELS]
    few = [completed(kernel="gemm_ar", tp_size=tp_size, workload={"tokens": rows}) for rows in (1, 3)]
    found, *with_few_rows = run_ranks(tp_size, _errors, [points, *([point] for point in few)], keep="cpu")[0]
    assert len(found) > 40
    for name, (error, independent) in found.items():
        assert error < (1e-5 if "fp32" in name else 1e-2), name
        assert independent == ("bulk" in name), name
    assert ("ag_gemm fp32 ring_agg1" in found) == (tp_size == 4)
    assert {name.split()[0] for name in found if " fp8 " in name} == set(KERNELS)
    assert max(error for one in with_few_rows for error, _ in one.values()) < 1e-5


def _inputs(ranks: Ranks, repetitions: list[int]) -> list[float]:
    points = [completed(repetition=repetition) for repetition in repetitions]
    return [float(kernel_run.draw_problem(point, ranks).inputs[0].data[0, 0]) for point in points]


def test_every_point_draws_anew_and_every_rank_something_else() -> None:
    one, other = run_ranks(2, _inputs, [0, 1, 0], keep="cpu")
    assert one[0] == one[2] != one[1]
    assert one[0] != other[0]


def _run(ranks: Ranks, directory: Path, spoiled: str | None, names: list[str], profile: str = "none") -> Any:
    """What `run` returns, or the exception's name and message, where one implementation is spoiled."""
    point = completed(implementations=names, profile=profile, workload={"warmup": 1})
    build = torch_kernels.build

    def spoiling(asked: Any, setting: Any, problem: Any, among: Any) -> Any:
        call = build(asked, setting, problem, among)
        if space.setting_name(setting) != spoiled:
            return call
        if ranks.rank == 0:
            return call
        # Only one rank is wrong, and only of every second input.
        return lambda at: Outputs(call(at).output + at)

    with patch.object(torch_kernels, "build", spoiling):
        try:
            return kernel_run.run(point, directory, ranks)
        except (WrongNumbers, Refused) as error:
            return type(error).__name__, str(error)


def test_a_run_times_all_in_turns_and_says_what_is_fastest(tmp_path: Path) -> None:
    found, other = run_ranks(2, _run, tmp_path, None, ["ring", "pipeline_split2", "bulk_sm1"], "best", keep="cpu")
    times = {name: one.time for name, one in found["measured"].implementations.items()}
    assert list(times) == [*BASELINES, "ring", "pipeline_split2", "bulk_sm1"]
    assert all(len(time.samples_us) == 3 for time in times.values())
    assert times == {name: one.time for name, one in other["measured"].implementations.items()}
    own = min(times[name].median_us for name in ("ring", "pipeline_split2"))
    assert found["objective_us"] == own
    assert [name for name, one in found["measured"].implementations.items() if one.independent] == ["bulk_sm1"]
    assert found["measured"].implementations["gemm_only"].relative_error is None
    assert found["measured"].implementations["sequential"].relative_error < 1e-5
    fastest = min(("ring", "pipeline_split2"), key=lambda name: times[name].median_us)
    assert sorted(found["traces"]) == sorted(trace_file(r, n) for n in ("sequential", fastest) for r in (0, 1))
    assert all((tmp_path / name).stat().st_size > 500 for name in found["traces"])


def test_wrong_numbers_of_one_rank_leave_the_implementation_out(tmp_path: Path) -> None:
    for kind, said in run_ranks(2, _run, tmp_path, "ring", ["ring"], keep="cpu"):
        assert kind == "WrongNumbers"
        assert said.startswith("ring: wrong numbers: relative error ")
    for found in run_ranks(2, _run, tmp_path, "ring", ["ring", "pipeline_split2"], keep="cpu"):
        assert "ring" not in found["measured"].implementations
        assert found["measured"].left_out["ring"].startswith("wrong numbers: relative error ")
        assert found["relative_error"]["ring"] > 0.1
        assert found["objective_us"] == found["measured"].implementations["pipeline_split2"].time.median_us


def _refusing(ranks: Ranks) -> tuple[list[str], dict[str, str]]:
    """What is left where one rank alone is refused one of two implementations."""
    point = completed(implementations=["ring", "pipeline_split2"])
    build = torch_kernels.build

    def refusing(asked: Any, setting: Any, problem: Any, among: Any) -> Any:
        if ranks.rank == 1 and setting["method"] == "ring_exchange":
            raise Refused("no room")
        return build(asked, setting, problem, among)

    with patch.object(torch_kernels, "build", refusing):
        calls, left_out = kernel_run.build_all(point, kernel_run.draw_problem(point, ranks), ranks)
    return list(calls), left_out


def test_what_one_rank_is_refused_all_leave_out() -> None:
    first, second = run_ranks(2, _refusing, keep="cpu")
    assert first == (["pipeline_split2"], {"ring": "refused on another rank"})
    assert second == (["pipeline_split2"], {"ring": "no room"})


def test_an_implementation_must_not_be_called_like_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "implementations", lambda point: {"sequential": {"method": "x"}})
    with pytest.raises(UserError, match="sequential is the name of a baseline; rename the implementation"):
        completed()


def test_who_provides_the_kernels_is_part_of_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "installed_version", {"byte-flux": "1.1.1"}.get)
    assert completed(backend="flux").provider == "byte-flux 1.1.1"
    assert completed().provider is None
