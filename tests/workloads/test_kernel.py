"""Kernels: what a point is completed to and refused for, and what real processes compute and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from overlap_sweep import backends, space
from overlap_sweep.backends import Outputs, transformer_engine
from overlap_sweep.backends.torch import kernels as torch_kernels
from overlap_sweep.errors import Refused, UserError, WrongNumbers
from overlap_sweep.kernel_shape import BASELINES, KERNELS, KernelShape
from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import trace_file
from overlap_sweep.workloads import kernel, kernel_bench
from tests.points import kernel_point
from tests.processes import run_ranks

LLAMA = {
    "name": "llama3_8b",
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}


def completed(**changes: Any) -> dict[str, Any]:
    return kernel.complete(kernel_point(**changes))


ON_GPUS: dict[str, Any] = {
    **{"backend": "transformer_engine", "precision": "bf16", "runtime": {"device": "cuda"}, "tp_size": 4},
    **{"n": 8192, "k": 4096, "workload": {"tokens": 2048, "warmup": None}},
}


def implementations_on_gpus(*names: str, **changes: Any) -> dict[str, space.Setting]:
    """Transformer Engine's; without names all."""
    found: dict[str, space.Setting] = completed(**{**ON_GPUS, "implementations": list(names) or None, **changes})[
        "implementations"
    ]
    return found


@pytest.mark.parametrize(
    ("operator", "asked", "expected"),
    [
        ("qkv", None, ("ag_gemm", 6144, 4096)),
        ("fc1", None, ("ag_gemm", 28672, 4096)),
        ("proj", None, ("gemm_rs", 4096, 4096)),
        ("fc2", None, ("gemm_rs", 4096, 14336)),
        ("fc2", "gemm_ar", ("gemm_ar", 4096, 14336)),
        ("fc2", "ag_gemm", ("ag_gemm", 14336, 4096)),
        ("qkv", "gemm_rs", ("gemm_rs", 4096, 6144)),
    ],
)
def test_a_models_operator_gives_the_shape(operator: str, asked: str | None, expected: tuple[str, int, int]) -> None:
    point = completed(model=LLAMA, operator=operator, kernel=asked, n=None, k=None)
    assert (point["kernel"], point["n"], point["k"]) == expected
    assert (point["m"], point["operator"], point["model"]["name"]) == (24, operator, "llama3_8b")


def test_given_sizes_need_no_model() -> None:
    point = completed(kernel="gemm_rs", operator="fc1")
    assert (point["m"], point["n"], point["k"]) == (24, 48, 32)
    assert point["model"] == {"name": "custom"}
    assert point["operator"] is None
    assert not {"method", "num_sm", "phases", "layer", "dtype"} & set(point)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": None}, "n=48 is given without k; give both, or neither for the model's sizes."),
        ({"n": None}, "k=32 is given without n; give both, or neither for the model's sizes."),
        ({"kernel": None}, "n and k are given without a kernel; give kernel=ag_gemm or gemm_rs or gemm_ar."),
        ({"dtype": "float16"}, "dtype=float16 and precision=fp32: give only one."),
        ({"m": 48}, "m=48 and workload.tokens=24: give only m."),
        ({"iters": 5}, "iters=5 and workload.repeats=3: give only iters."),
        ({"implementations": []}, "implementations=[] names none; leave it out for all."),
        ({"implementations": ["ring_sm513"]}, "implementations: backend=torch has no ring_sm513 of ag_gemm"),
        ({"implementations": ["warp"]}, "implementations: backend=torch has no warp of ag_gemm; it has ring,"),
        ({"implementations": ["ring_ce0"]}, "implementations: backend=torch has no ring_ce0 of ag_gemm; it has ring"),
        ({"backend": "megatron"}, "backend=megatron has no kernels; choose one of auto, torch, transformer_engine,"),
    ],
)
def test_what_cannot_be_understood_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        completed(**changes)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"), ("float8_e4m3fn", "fp8")],
)
def test_torchs_names_of_types_are_known(dtype: str, precision: str) -> None:
    assert completed(dtype=dtype, precision=None)["precision"] == precision


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tp_size": 1}, "tp_size=1 communicates nothing that a GEMM could overlap"),
        ({"precision": "fp8_delayed"}, "a kernel knows no recipe such as precision=fp8_delayed; for FP8 give dtype="),
        ({"tp_size": 5}, "ag_gemm: m=24 does not divide by tp_size=5"),
        ({"n": 47}, "ag_gemm: n=47 does not divide by tp_size=2"),
        ({"kernel": "gemm_rs", "k": 33}, "gemm_rs: k=33 does not divide by tp_size=2"),
        ({"kernel": "gemm_rs", "workload": {"tokens": 23}}, "gemm_rs: m=23 does not divide by tp_size=2"),
        # An all-reduce needs no rows that divide.
        ({"kernel": "gemm_ar", "workload": {"tokens": 23}}, None),
        ({"backend": "symm_mem"}, "backend=symm_mem needs GPUs; backend=torch runs on cpu"),
        (ON_GPUS, None),
        ({**ON_GPUS, "kernel": "gemm_ar"}, "Transformer Engine's userbuffers have no all-reduce"),
        ({**ON_GPUS, "kernel": "gemm_rs", "precision": "fp16"}, "userbuffers add in bf16, not in fp16"),
        ({**ON_GPUS, "precision": "fp32"}, "kernels have no precision=fp32; they have fp16, bf16, fp8"),
        *(
            (
                {**ON_GPUS, "backend": backend, "precision": None, "dtype": "float8_e4m3fn", "n": 8200},
                "FP8 GEMMs need dimensions that divide by 16, and a rank's are 2048 x 2050 x 4096",
            )
            for backend in ("torch", "symm_mem", "flux", "transformer_engine")
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr("overlap_sweep.backends.transformer_engine.kernels.missing", lambda: None)
    refused = kernel.refusal(completed(**changes))
    assert refused is None if reason is None else reason in str(refused)


def test_without_transformer_engine_its_points_say_how_to_install_it() -> None:
    transformer_engine.missing.cache_clear()
    assert "pip install" in str(kernel.refusal(completed(**ON_GPUS)))


def test_every_knob_of_transformer_engine_is_given() -> None:
    gathers = implementations_on_gpus()
    assert list(gathers) == ["ring", "ring_agg1", "ring_sm1_ce0", "bulk_sm4", "bulk_sm8", "bulk_sm16"]
    assert gathers["ring_agg1"] == {
        **{"method": "ring_exchange", "aggregate": True, "use_ce": True},
        **{"num_sm": 1, "cga_size": 1, "set_sm_margin": False},
    }
    scatters = implementations_on_gpus("pipeline_sm12_split8_margin0", kernel="gemm_rs")
    assert scatters["pipeline_sm12_split8_margin0"] == {
        **{"method": "pipeline", "num_splits": 8, "num_sm": 12, "cga_size": 2, "set_sm_margin": False},
    }
    # Of a ring by copy engines SMs make nothing, and two ranks have one pair.
    assert list(implementations_on_gpus("ring", "ring_sm4")) == ["ring"]
    assert "ring_agg1" not in implementations_on_gpus(tp_size=2)
    # Its kernels count their blocks up to 32, and three splits would need columns that divide by them.
    for name, asked in (("bulk_sm33", "ag_gemm"), ("pipeline_split3", "gemm_rs")):
        with pytest.raises(UserError, match=f"has no {name}"):
            implementations_on_gpus(name, kernel=asked)


@pytest.mark.parametrize(
    "name", ["ring", "ring_agg1", "bulk_sm4", "pipeline_sm8_split4", "ring_ce0", "bulk_cga1_margin0"]
)
def test_settings_are_found_by_their_names(name: str) -> None:
    setting = space.setting_of(name)
    assert setting
    assert sorted(space.setting_name(setting).split("_")) == sorted(name.split("_"))
    assert space.setting_of("pipeline_fp8buf1_sm4") == {"method": "pipeline", "fp8_buf": True, "num_sm": 4}


@pytest.mark.parametrize(
    "name",
    [
        *("", "none", "ringing", "ring_", "ring__sm4", "bulk_sm", "bulk_sm0", "bulk_sm04", "bulk_sm513", "bulk_cga17"),
        *("ring_agg2", "bulk_sm4_sm8", "x_sm4", "pipeline_split99999", "ring_sm4_"),
    ],
)
def test_other_names_are_no_settings(name: str) -> None:
    assert space.setting_of(name) is None


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


def _errors_on(ranks: Ranks, points: list[dict[str, Any]]) -> dict[str, tuple[float, bool]]:
    """By kernel and implementation what `check` says of it, on this rank."""
    found = {}
    for point in points:
        problem = kernel_bench.draw_problem(point, ranks)
        calls, left_out = kernel_bench.build_all(point, problem, ranks)
        assert not left_out
        calls |= {
            name: call for name, call in torch_kernels.baselines_of(problem, ranks).items() if name == "sequential"
        }
        for name, call in calls.items():
            found[f"{point['kernel']} {point['precision']} {name}"] = tuple(kernel_bench.check(call, problem, ranks))
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
    found, *of_few = run_ranks(tp_size, _errors_of_each, [points, *([point] for point in few)], keep="cpu")[0]
    assert len(found) > 40
    for name, (error, independent) in found.items():
        assert error < (1e-5 if "fp32" in name else 1e-2), name
        assert independent == ("bulk" in name), name
    assert ("ag_gemm fp32 ring_agg1" in found) == (tp_size == 4)
    assert {name.split()[0] for name in found if " fp8 " in name} == set(KERNELS)
    assert max(error for one in of_few for error, _ in one.values()) < 1e-5


def _errors_of_each(ranks: Ranks, points: list[list[dict[str, Any]]]) -> list[dict[str, tuple[float, bool]]]:
    return [_errors_on(ranks, each) for each in points]


def _inputs(ranks: Ranks, repetitions: list[int]) -> list[float]:
    points = [completed(repetition=repetition) for repetition in repetitions]
    return [float(kernel_bench.draw_problem(point, ranks).inputs[0].data[0, 0]) for point in points]


def test_every_point_draws_anew_and_every_rank_something_else() -> None:
    one, other = run_ranks(2, _inputs, [0, 1, 0], keep="cpu")
    assert one[0] == one[2] != one[1]
    assert one[0] != other[0]


def _run(ranks: Ranks, directory: Path, spoiled: str | None, names: list[str], profile: str = "none") -> Any:
    """What `run` returns, or the exception's name and message, where one implementation is spoiled."""
    point = completed(implementations=names, profile=profile, workload={"warmup": 1})
    build = torch_kernels.build

    def spoiling(asked: Any, setting: Any, problem: Any, of_ranks: Any) -> Any:
        call = build(asked, setting, problem, of_ranks)
        if space.setting_name(setting) != spoiled:
            return call
        if ranks.rank == 0:
            return call
        # Only one rank is wrong, and only of every second input.
        return lambda at: Outputs(call(at).output + at)

    with patch.object(torch_kernels, "build", spoiling):
        try:
            return kernel.run(point, directory, ranks)
        except (WrongNumbers, Refused) as error:
            return type(error).__name__, str(error)


def test_a_run_times_all_in_turns_and_says_what_is_fastest(tmp_path: Path) -> None:
    found, other = run_ranks(2, _run, tmp_path, None, ["ring", "pipeline_split2", "bulk_sm1"], "best", keep="cpu")
    times = {name: one.time for name, one in found["implementations"].items()}
    assert list(times) == [*BASELINES, "ring", "pipeline_split2", "bulk_sm1"]
    assert all(len(time.samples_us) == 3 for time in times.values())
    assert times == {name: one.time for name, one in other["implementations"].items()}
    own = min(times[name].median_us for name in ("ring", "pipeline_split2"))
    assert found["objective_us"] == own
    assert [name for name, one in found["implementations"].items() if one.independent] == ["bulk_sm1"]
    assert found["implementations"]["gemm_only"].relative_error is None
    assert found["implementations"]["sequential"].relative_error < 1e-5
    fastest = min(("ring", "pipeline_split2"), key=lambda name: times[name].median_us)
    assert sorted(found["traces"]) == sorted(trace_file(r, n) for n in ("sequential", fastest) for r in (0, 1))
    assert all((tmp_path / name).stat().st_size > 500 for name in found["traces"])


def test_wrong_numbers_of_one_rank_leave_the_implementation_out(tmp_path: Path) -> None:
    for found in run_ranks(2, _run, tmp_path, "ring", ["ring", "pipeline_split2"], keep="cpu"):
        assert "ring" not in found["implementations"]
        assert found["left_out"]["ring"].startswith("wrong numbers: relative error ")
        assert found["relative_error"]["ring"] > 0.1
        assert found["objective_us"] == found["implementations"]["pipeline_split2"].time.median_us


def test_a_point_of_nothing_but_wrong_numbers_fails(tmp_path: Path) -> None:
    for kind, said in run_ranks(2, _run, tmp_path, "ring", ["ring"], keep="cpu"):
        assert kind == "WrongNumbers"
        assert said.startswith("ring: wrong numbers: relative error ")


def _refusing(ranks: Ranks) -> tuple[list[str], dict[str, str]]:
    """What is left where one rank alone is refused one of two implementations."""
    point = completed(implementations=["ring", "pipeline_split2"])
    build = torch_kernels.build

    def refusing(asked: Any, setting: Any, problem: Any, of_ranks: Any) -> Any:
        if ranks.rank == 1 and setting["method"] == "ring_exchange":
            raise Refused("no room")
        return build(asked, setting, problem, of_ranks)

    with patch.object(torch_kernels, "build", refusing):
        calls, left_out = kernel_bench.build_all(point, kernel_bench.draw_problem(point, ranks), ranks)
    return list(calls), left_out


def test_what_one_rank_is_refused_all_leave_out() -> None:
    first, second = run_ranks(2, _refusing, keep="cpu")
    assert first == (["pipeline_split2"], {"ring": "another rank was refused it"})
    assert second == (["pipeline_split2"], {"ring": "no room"})


def test_an_implementation_must_not_be_called_like_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "implementations", lambda point: {"sequential": {"method": "x"}})
    with pytest.raises(UserError, match="calls an implementation sequential, like a baseline; rename it"):
        completed()


def test_who_provides_the_kernels_is_part_of_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "version", lambda package: {"byte-flux": "1.1.1"}[package])
    assert completed(backend="flux")["provider"] == "byte-flux 1.1.1"
    assert completed()["provider"] is None
