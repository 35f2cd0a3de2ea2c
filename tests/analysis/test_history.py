from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from overlap_sweep.analysis.history import HISTORY_COLUMNS, History, describe_change, every_time, history, history_rows
from overlap_sweep.identity import environment_identity
from overlap_sweep.report.history import print_history
from overlap_sweep.run_directory import Result
from tests.make_point import copy_config, copy_times, layer_config, resolved, training_run, variant
from tests.store.measured import environment, result

OLD, NEW = environment(), environment(packages={"torch": "2.13.0"}, driver="580.2")
NEWEST = environment(packages={"torch": "2.14.0"}, driver="580.2")


@dataclass
class Kept:
    result: Result
    directory: str = "/results/p"
    host: str = "node7"


def of(*results: Result) -> History:
    return history(map(Kept, results))


def verdicts(found: History) -> list[list[str | None]]:
    return [[times.verdict for times in series.times] for series in found.series]


def test_a_point_by_environment_in_time_order() -> None:
    found = of(
        result(time_us=100.0, minute=1, none_us=200.0, on=OLD),
        result(time_us=110.0, minute=2, none_us=200.0, on=NEW),
        result(time_us=99.0, minute=3, none_us=190.0, on=NEWEST),
    )
    (series,) = found.series
    assert series.setting == "dgrad bulk_sm4 + wgrad bulk_sm4"
    assert [times.time.time_us for times in series.times] == [100.0, 110.0, 99.0]
    assert [times.verdict for times in series.times] == [None, "slower", "faster"]
    assert series.times[1].ratio == pytest.approx(1.1)
    assert series.times[2].ratio == pytest.approx(0.9)
    assert series.times[2].none_ratio == pytest.approx(0.95)
    assert [times.changed for times in series.times] == [
        None,
        "torch 2.12.0 -> 2.13.0, driver 570.1 -> 580.2",
        "torch 2.13.0 -> 2.14.0",
    ]
    assert (found.problems, found.left_out) == ([], {})


def test_measurements_in_one_environment_are_put_together() -> None:
    found = of(
        *(result(time_us=time_us, minute=i, on=OLD) for i, time_us in enumerate((98.0, 100.0, 103.0))),
        result(time_us=104.0, minute=5, on=NEW),
        result(time_us=90.0, minute=7, on=OLD, point={"repetition": 1}),
    )
    (series,) = found.series
    before, after = series.times
    assert (before.measurements, before.time.time_us) == (4, 99.0)
    assert (before.first, before.last) == ("2026-11-20T21:00:00+00:00", "2026-11-20T21:07:00+00:00")
    # 1.57 x IQR / sqrt(4) of 90, 98, 100, 103, whose quartiles are 96 and 100.75.
    assert before.time.noise_us == pytest.approx(1.57 * 4.75 / 2)
    assert after.time.noise_us == 0
    # 5 us are more than the noise of 3.7.
    assert after.verdict == "slower"


@pytest.mark.parametrize(
    ("time_us", "spread_us", "expected"),
    [(104.0, 1.0, "slower"), (104.0, 5.0, "same"), (100.4, 0.0, "same"), (96.0, 1.0, "faster")],
)
def test_what_the_noise_explains_is_the_same(time_us: float, spread_us: float, expected: str) -> None:
    found = of(result(spread_us=spread_us, on=OLD), result(time_us=time_us, minute=1, spread_us=spread_us, on=NEW))
    assert verdicts(found) == [[None, expected]]


def test_other_hardware_is_no_history() -> None:
    h100 = environment(gpus=["NVIDIA H100"], gpu="NVIDIA H100")
    found = of(
        result(time_us=100.0, minute=1, on=OLD),
        result(time_us=200.0, minute=2, on=h100),
        result(time_us=100.0, minute=3, on=NEW),
        result(time_us=50.0, minute=4, on={**h100, "driver": "580.2"}),
    )
    assert verdicts(found) == [[None, "faster"], [None, "same"]]
    assert {series.key for series in found.series} == {found.series[0].key}


def test_what_moved_most_comes_first() -> None:
    found = of(
        *(result(num_sm=num_sm, on=OLD) for num_sm in (1, 2, 4, 8)),
        *(result(num_sm=n, time_us=t, minute=1, on=NEW) for n, t in ((1, 100.0), (2, 110.0), (4, 50.0), (8, 100.0))),
    )
    assert [series.point["num_sm"] for series in found.series] == [4, 2, 1, 8]


def test_points_that_differ_in_anything_are_apart() -> None:
    found = of(result(on=OLD), result(minute=1, on=NEW, point={"workload": {"tokens": 64}}))
    assert verdicts(found) == [[None], [None]]
    assert len({series.key for series in found.series}) == 2


def test_what_has_no_time_is_counted() -> None:
    found = of(
        result(on=OLD),
        result(minute=1, on=NEW, launch_bound=True),
        result(minute=2, on=NEW, status="failed", times={}, objective_us=None),
        result(minute=3, on={}, status="failed", times={}, objective_us=None),
    )
    assert verdicts(found) == [[None]]
    assert found.left_out == {"launch-bound": 1, "failed": 2}


@pytest.mark.parametrize(
    "broken",
    [
        {"times": {}},
        {"settings": {"fc1_dgrad": {"method": 7}}},
        {"point": {"tp_size": "two"}},
        {"on": {**OLD, "packages": ["torch"]}},
    ],
)
def test_what_is_no_measurement_is_named(broken: dict[str, Any]) -> None:
    found = history([Kept(result(on=OLD)), Kept(result(minute=1, **broken), "/results/broken")])
    assert verdicts(found) == [[None]]
    assert len(found.problems) == 1
    assert "/results/broken" in found.problems[0]


def test_a_layer_has_a_row_for_each_variant() -> None:
    def layer(ratio: float, on: dict[str, Any]) -> Result:
        whole_us = [1000.0, 1001.0, 999.0]
        variants = {
            "none": variant(whole_us),
            "floor": variant([800.0] * 3),
            "default": variant([ratio * time_us for time_us in whole_us]),
        }
        point = layer_config()
        return Result(name="layer", point=point, status="ok", variants=variants, objective_us=900.0, environment=on)

    found = of(layer(0.9, OLD), layer(0.8, NEW))
    assert [series.setting for series in found.series] == ["default", "none"]
    assert verdicts(found) == [[None, "faster"], [None, "same"]]
    (_, row, *_) = history_rows(found.series)
    assert (row["operator"], row["pass"], row["none_us"]) == ("transformer_layer", "all", 1000.0)
    assert row["time_us"] == pytest.approx(800.0)


def test_both_passes_add_up() -> None:
    both = {"fprop": {"method": "ring_exchange"}, "dgrad": {"method": "bulk", "num_sm": 4}}
    given = result(time_us=100.0)
    given.point["phases"] = both
    (series,) = of(given).series
    (times,) = series.times
    assert (times.time.time_us, times.none_us) == (150.0, 200.0)
    assert history_rows([series])[0]["pass"] == "fwd+bwd"


def test_rows_have_every_column() -> None:
    found = of(result(on=OLD), result(time_us=90.0, minute=1, on=NEW))
    first, second = history_rows(found.series)
    assert first.keys() == second.keys() == HISTORY_COLUMNS.keys()
    assert second["torch"] == "2.13.0"
    assert (second["driver"], second["device"], second["nccl"]) == ("580.2", "NVIDIA H200", "2.27.3")
    assert first["verdict"] is None
    assert math.isnan(first["ratio"])


def test_changes_in_words() -> None:
    before, after = environment_identity(OLD), environment_identity(environment(variables={"NCCL_NVLS_ENABLE": "1"}))
    assert describe_change(before, after) == "UB_SKIPMC 1 -> none, NCCL_NVLS_ENABLE none -> 1"
    assert describe_change(before, before) == ""


def test_training_steps_and_copies_have_a_row_each() -> None:
    def step(step_us: float, minute: int, on: dict[str, Any], **changed: Any) -> Result:
        # How often clocks are looked at, and how long the recorded run is, changes nothing.
        recorded = {"training.max_steps": 30 + minute, "training.log_interval": 1 + minute}
        telemetry = {"telemetry": {"sample_interval_s": minute}}
        point = resolved("fsdp", **{"fsdp.forward_prefetch": 1, **recorded, **telemetry})
        run = training_run(step_us, point=point)
        return result(minute=minute, on=on, times={}, training=run, resolved=point, **changed)

    # A step takes what it takes, also where the host is what limits it.
    new = environment({"torch": "2.13.0"})
    both = {"times": {}, "copies": copy_times(1100.0)}
    copies = result(minute=2, on=environment(), resolved=copy_config(), **both)
    found = of(step(1500.0, 0, environment()), step(1200.0, 1, new, launch_bound=True), copies)
    assert found.left_out == {}
    rows = {(row["operator"], row["time_us"]): row for row in history_rows(found.series)}
    assert rows.keys() == {
        *(("fsdp2 step", 1500.0), ("fsdp2 step", 1200.0), ("4096 GEMM, 64 MiB host_to_device", 1100.0)),
    }
    faster = rows["fsdp2 step", 1200.0]
    assert (faster["pass"], faster["none_us"], faster["ratio"], faster["verdict"]) == ("step", 2000.0, 0.8, "faster")
    assert faster["setting"] == "4 ranks, forward_prefetch=1"
    beside = rows["4096 GEMM, 64 MiB host_to_device", 1100.0]
    assert (beside["pass"], beside["setting"], beside["none_us"]) == ("all", "overlapped", 1400.0)
    # A matrix's rows are none.
    assert (beside["tokens"], faster["tokens"] > 0) == (None, True)


def test_a_training_step_is_not_named_twice() -> None:
    found = []
    for strategy in ("fsdp2", "ddp"):
        point = resolved("fsdp", **{"distributed.strategy": strategy})
        run = training_run(1500.0, point=point)
        found.append(result(minute=0, on=environment(), times={}, training=run, resolved=point))
    stream = io.StringIO()
    print_history(every_time(of(*found).series), {}, Console(file=stream, width=300))
    assert "fsdp2 step 4 ranks, defaults" in stream.getvalue()
    assert "ddp step 4 ranks, strategy=ddp" in stream.getvalue()
    assert "step step" not in stream.getvalue()
    assert "fsdp2 fsdp2" not in stream.getvalue()
