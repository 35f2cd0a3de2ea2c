"""Asserts how a point's times changed over the versions that measured it. The printed tables: history among the golden
files."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from overlap_sweep.compare.history import ROWS, History, describe_change, history
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.run_directory import Result
from overlap_sweep.store import Measurement
from overlap_sweep.workloads.kernel.result import KernelTimes
from overlap_sweep.workloads.layer.result import LayerTimes
from tests.make_point import (
    baselines,
    copy_config,
    copy_times,
    implementation,
    job_config,
    job_run,
    kernel_config,
    layer_config,
    resolved,
    stack_config,
    tp_training_run,
    training_run,
    variant,
)
from tests.store.measured import environment, result

OLD, NEW = environment(), environment(packages={"torch": "2.13.0"}, driver="580.2")
NEWEST = environment(packages={"torch": "2.14.0"}, driver="580.2")
H100 = environment(gpus=["NVIDIA H100"], gpu="NVIDIA H100")


def of(*results: Result) -> History:
    return history(Measurement(result, "/results/p", "node7", "") for result in results)


def measured(on: Mapping[str, Any] = OLD, **fields: Any) -> Result:
    """Returns a result of some other workload than operator, whose objective is 100 us."""
    started = "2026-11-20T21:00:00+00:00" if on is OLD else "2026-11-20T21:01:00+00:00"
    return Result(name="p", status="ok", objective_us=100.0, environment=dict(on), started=started, **fields)


def verdicts(found: History) -> list[list[str | None]]:
    return [[times.verdict for times in series] for series in found.series]


def test_a_point_by_environment_in_time_order() -> None:
    found = of(
        result(time_us=100.0, minute=1, none_us=200.0, on=OLD),
        result(time_us=110.0, minute=2, none_us=200.0, on=NEW),
        result(time_us=99.0, minute=3, none_us=190.0, on=NEWEST),
    )
    (series,) = found.series
    assert series[0].setting == "dgrad bulk_sm4 + wgrad bulk_sm4"
    assert [times.time.time_us for times in series] == [100.0, 110.0, 99.0]
    assert verdicts(found) == [[None, "slower", "faster"]]
    assert [times.ratio for times in series[1:]] == pytest.approx([1.1, 0.9])
    assert ROWS.records(series)[2]["none_ratio"] == pytest.approx(0.95)
    assert [times.changed for times in series] == [
        None,
        "torch 2.12.0 -> 2.13.0, driver 570.1 -> 580.2",
        "torch 2.13.0 -> 2.14.0",
    ]
    assert found.left_out == {}


def test_measurements_in_one_environment_are_put_together() -> None:
    found = of(
        *(result(time_us=time_us, minute=i, on=OLD) for i, time_us in enumerate((98.0, 100.0, 103.0))),
        result(time_us=104.0, minute=5, on=NEW),
        result(time_us=90.0, minute=7, on=OLD, point={"repetition": 1}),
    )
    (series,) = found.series
    before, after = series
    assert (len(before.measured), before.time.time_us) == (4, 99.0)
    assert (before.started[0], before.started[-1]) == ("2026-11-20T21:00:00+00:00", "2026-11-20T21:07:00+00:00")
    # What they differ by from each other is noise, of which four measurements say little.
    assert before.time.noise_us == pytest.approx(estimate([98.0, 100.0, 103.0, 90.0]).noise_us)
    assert after.time.noise_us == 0
    assert (before.time.noise_us > 5.0, after.verdict) == (True, "same")


@pytest.mark.parametrize(
    ("time_us", "spread_us", "expected"),
    [(104.0, 0.2, "slower"), (104.0, 5.0, "same"), (100.4, 0.0, "same"), (96.0, 0.2, "faster")],
)
def test_what_the_noise_explains_is_the_same(time_us: float, spread_us: float, expected: str) -> None:
    found = of(result(spread_us=spread_us, on=OLD), result(time_us=time_us, minute=1, spread_us=spread_us, on=NEW))
    assert verdicts(found) == [[None, expected]]


def test_other_hardware_is_no_history() -> None:
    found = of(
        result(time_us=100.0, minute=1, on=OLD),
        result(time_us=200.0, minute=2, on=H100),
        result(time_us=100.0, minute=3, on=NEW),
        result(time_us=50.0, minute=4, on={**H100, "driver": "580.2"}),
    )
    assert verdicts(found) == [[None, "faster"], [None, "same"]]
    assert {series[0].key for series in found.series} == {found.series[0][0].key}


def test_what_moved_most_comes_first() -> None:
    found = of(
        *(result(num_sm=num_sm, on=OLD) for num_sm in (1, 2, 4, 8)),
        *(result(num_sm=n, time_us=t, minute=1, on=NEW) for n, t in ((1, 100.0), (2, 110.0), (4, 50.0), (8, 100.0))),
    )
    assert [series[0].point["num_sm"] for series in found.series] == [4, 2, 1, 8]


def test_points_that_differ_in_anything_are_apart() -> None:
    found = of(result(on=OLD), result(minute=1, on=NEW, point={"workload": {"tokens": 64}}))
    assert verdicts(found) == [[None], [None]]
    assert len({series[0].key for series in found.series}) == 2


def test_what_has_no_time_is_counted() -> None:
    failed = {"status": "failed", "measured": None, "objective_us": None}
    found = of(
        *(result(on=OLD), result(minute=1, on=NEW, launch_bound=True)),
        *(result(minute=2, on=NEW, **failed), result(minute=3, on={}, **failed)),
    )
    assert verdicts(found) == [[None]]
    assert found.left_out == {"launch-bound": 1, "failed": 2}


def layer(factor: float) -> dict[str, Any]:
    whole_us = {"none": 1000.0, "floor": 800.0, "default": 900.0 * factor}
    variants = {name: variant([time_us, time_us + 1, time_us - 1]) for name, time_us in whole_us.items()}
    return {"recorded": layer_config(), "measured": LayerTimes(variants=variants)}


def kernel(factor: float, connections: int | None = None, launch_bound: bool = False) -> dict[str, Any]:
    times = {"ring": implementation(150.0 * factor), "bulk": implementation(90.0, launch_bound=launch_bound)}
    point = kernel_config(runtime={"max_connections": connections})
    return {
        "recorded": point,
        "measured": KernelTimes(implementations={**baselines(), **times}),
        "launch_bound": launch_bound,
    }


def training(factor: float) -> dict[str, Any]:
    # How often clocks are looked at, and how long the recorded run is, changes nothing.
    recorded = {"training.max_steps": round(30 * factor), "training.log_interval": round(10 * factor)}
    telemetry = {"telemetry": {"sample_interval_s": factor}}
    point = resolved("fsdp", **{"fsdp.forward_prefetch": 1, **recorded, **telemetry})
    # A step takes what it takes, also where the host is what limits it.
    return {"recorded": point, "measured": training_run(point, 1500.0 * factor), "launch_bound": factor < 1}


def copies(factor: float) -> dict[str, Any]:
    return {"recorded": copy_config(), "measured": copy_times({}, 1100.0 * factor)}


def stack(factor: float, **options: Any) -> dict[str, Any]:
    options = {"log_interval": round(10 * factor), **options}
    point = stack_config("autotp", 2, 2, **{f"tp_training.{name}": value for name, value in options.items()})
    # A stack that waits for the device by itself is launch-bound, and has a history no less.
    return {"recorded": point, "measured": tp_training_run(point, step_us=1e4 * factor), "launch_bound": True}


def job(factor: float) -> dict[str, Any]:
    # How many steps are looked at changes nothing.
    point = job_config({"bucket": 25}, **{"job.steps": round(20 * factor)})
    return {"recorded": point, "measured": job_run(point, 1e5 * factor, tokens_per_step=8192.0)}


@pytest.mark.parametrize(
    ("workload", "settings", "row"),
    [
        (layer, ["default", "none"], ("transformer_layer", "all", 720.0, 1000.0, 8192)),
        (kernel, ["ring", "sequential", "bulk"], ("ag_gemm 1024x57344x8192", "fwd", 120.0, 200.0, 1024)),
        (training, ["4 ranks, forward_prefetch=1"], ("fsdp2 step", "step", 1200.0, 2000.0, 37120)),
        # A matrix's rows are no tokens.
        (copies, ["overlapped"], ("4096 GEMM, 64 MiB host_to_device", "all", 880.0, 1400.0, None)),
        (stack, ["dp2"], ("autotp TP=2 DP=2 step", "step", 8000.0, None, 2048)),
        (job, ["2 ranks, bucket=25"], ("job", "step", 80_000.0, None, 8192)),
    ],
)
def test_every_workload_has_a_history(
    workload: Callable[[float], dict[str, Any]], settings: list[str], row: tuple[Any, ...]
) -> None:
    found = of(measured(on=OLD, **workload(1.0)), measured(on=NEW, **workload(0.8)))
    assert found.left_out == {}
    assert sorted(series[0].setting for series in found.series) == sorted(settings)
    assert verdicts(found) == [[None, "faster"], *([None, "same"] for _ in settings[1:])]
    faster = ROWS.records(found.rows)[1]
    assert (faster["setting"], faster["ratio"]) == (settings[0], pytest.approx(0.8))
    assert tuple(faster[name] for name in ("operator", "pass", "time_us", "none_us", "tokens")) == pytest.approx(row)


def test_what_of_a_kernel_was_launch_bound_has_no_time() -> None:
    found = of(measured(on=OLD, **kernel(1.0)), measured(on=NEW, **kernel(0.8, launch_bound=True)))
    assert {series[0].setting: len(series) for series in found.series} == {"ring": 2, "sequential": 2, "bulk": 1}


def test_other_knobs_make_another_series() -> None:
    kernels = of(measured(**kernel(1.0)), measured(**kernel(1.0, connections=8)))
    assert {series[0].setting for series in kernels.series} == {
        "ring",
        "bulk",
        "ring_conn8",
        "bulk_conn8",
        "sequential",
    }
    stacks = of(measured(**stack(1.0)), measured(**stack(1.0, zero_stage=2)))
    assert {series[0].setting for series in stacks.series} == {"dp2", "dp2 zero_stage=2"}


def test_both_passes_add_up() -> None:
    given = result(time_us=100.0)
    given.recorded["phases"] = {"fprop": {"method": "ring_exchange"}, "dgrad": {"method": "bulk", "num_sm": 4}}
    (row,) = ROWS.records(of(given).rows)
    assert (row["time_us"], row["none_us"], row["pass"]) == (150.0, 200.0, "fwd+bwd")


def test_changes_in_words() -> None:
    after = environment(variables={"NCCL_NVLS_ENABLE": "1"})
    assert describe_change(OLD, after) == "UB_SKIPMC 1 -> None, NCCL_NVLS_ENABLE None -> 1"
    assert describe_change(OLD, OLD) == ""
