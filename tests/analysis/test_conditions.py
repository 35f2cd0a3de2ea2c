from __future__ import annotations

from pathlib import Path
from typing import Any

from overlap_sweep.analysis.conditions import gpu_conditions
from tests.analysis.reading import only_case
from tests.make_point import make_point


def conditions(*gpus: tuple[float, float, int]) -> dict[str, Any]:
    listed = [
        {"temperature_c": temperature, "sm_clock_mhz": clock, "throttle_reasons": reasons}
        for temperature, clock, reasons in gpus
    ]
    return {"before": {"load_1min": 0.5, "gpus": listed[:1]}, "after": {"load_1min": 0.5, "gpus": listed[1:]}}


def test_ranges_over_all_gpus_and_who_was_slowed_down(tmp_path: Path) -> None:
    make_point("operator", tmp_path, name="cool", conditions=conditions((30, 1980, 0), (41, 1700, 0x04)))
    make_point("operator", tmp_path, name="hot", conditions=conditions((45, 1500, 0x01), (88, 1200, 0x44)))
    found = gpu_conditions(only_case(tmp_path))
    assert found is not None
    assert (found.temperature_c, found.sm_clock_mhz) == ((30, 88), (1200, 1980))
    # The power cap, 0x04, and idling, 0x01, are no news.
    assert found.slowed == {"hardware thermal slowdown": ["hot"]}


def test_a_gpu_may_tell_less(tmp_path: Path) -> None:
    make_point("operator", tmp_path, name="mute", conditions={"before": {"gpus": [{"temperature_c": 30}]}})
    assert gpu_conditions(only_case(tmp_path)) is None
    make_point("operator", tmp_path, name="some", conditions={"before": {"gpus": [{"sm_clock_mhz": 1500}]}})
    found = gpu_conditions(only_case(tmp_path))
    assert found is not None
    assert (found.temperature_c, found.sm_clock_mhz, found.slowed) == ((30, 30), (1500, 1500), {})


def test_nothing_is_known_of_a_cpu(tmp_path: Path) -> None:
    make_point("operator", tmp_path, conditions={"before": {"load_1min": 0.5}, "after": {"load_1min": 0.5}})
    assert gpu_conditions(only_case(tmp_path)) is None
