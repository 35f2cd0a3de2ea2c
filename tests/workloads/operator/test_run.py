"""Points of operators, completed, and those of backend=symm_mem, whose methods have no knobs, from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.runtime.resolvers import point_name
from overlap_sweep.search.tasks import candidates
from overlap_sweep.workloads import operator
from tests.composed import QUICK, SIZES
from tests.make_point import gpu_point, operator_point
from tests.sweeps import ROOT, Launch

ON_GLOO = ROOT / "tests" / "backends" / "symm_mem_on_gloo"
SWEEP = ("-m", "backend=symm_mem", "tp_size=2", *QUICK, *SIZES)


def test_the_settings_are_the_whole_points() -> None:
    settings = {"method": "bulk", "num_sm": 4}
    config = OverlapConfig({"fc1_dgrad": settings, "fc1_wgrad": settings}, switches={})
    assert operator.WORKLOAD.overlap_configs(operator_point()) == {"": config}


def test_knobs_left_null_get_their_meaning_and_others_stay() -> None:
    asked = gpu_point(method="pipeline", cga_size=1)
    done = operator.complete(asked)
    assert (done["cga_size"], done["set_sm_margin"], done["num_splits"], done["use_ce"]) == (1, True, 4, None)
    assert "layer" not in done
    assert asked.num_splits is None


def on_symm_mem(**changes: Any) -> Any:
    return decoded_point(operator.complete(replace(gpu_point(backend="symm_mem"), **changes)))


@pytest.mark.parametrize("method", ["none", "bulk", "ring_exchange"])
def test_points_differ_in_no_knob_that_they_are_given_unasked(method: str) -> None:
    points = [on_symm_mem(method=method, num_sm=n, aggregate=joined) for n in (1, 32) for joined in (None, False)]
    knobs = ({}, {"num_sm": 8, "aggregate": False})
    by_phase = [on_symm_mem(phases={"fprop": {"method": method, **given}}) for given in knobs]
    assert [len({key_of(point_identity(point)) for point in alike}) for alike in (points, by_phase)] == [1, 1]
    assert len({point_name(point, [f"num_sm={point['num_sm']}"]) for point in points}) == 1
    assert all(set(setting) == {"method"} for setting in space.settings(points[0]).values())


def test_a_search_tries_each_method_once() -> None:
    point = on_symm_mem()
    choices = {"num_sm": (1, 4, 16), "aggregate": (False, True), "num_splits": (2, 4)}
    found, refused = candidates(point, {**choices, "method": space.METHODS[1:], "phase": ("all",)})
    assert [str(candidate) for candidate in found["fwd"]] == ["ring"]
    bwd = ["dgrad bulk + wgrad bulk", "dgrad bulk", "ring", "wgrad bulk"]
    assert [str(candidate) for candidate in found["bwd"]] == bwd
    pipeline = "fc1_dgrad: backend=symm_mem has no pipeline; it has ring_exchange and bulk"
    assert list(refused) == [pipeline]


@pytest.mark.end_to_end
def test_a_grid_over_num_sm_measures_once(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "grid", {"PYTHONPATH": f"{ON_GLOO}:{ROOT}"})
    done = launch.run(*SWEEP, "operator=fc1", "method=ring_exchange,none", "num_sm=1,4,16")
    assert done.returncode == 0, done.stderr
    results = launch.results().values()
    assert sorted(result.recorded["method"] for result in results) == ["none", "ring_exchange"]
    for result in results:
        assert result.status == "ok", result.error
        assert max(result.relative_error.values()) < 1e-4
        assert all(result.measured.times[name].default is not None for name in ("fwd", "bwd"))
        assert result.recorded["num_sm"] is None


@pytest.mark.end_to_end
def test_the_tuner_proves_against_async_tp(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "tuned", {"PYTHONPATH": f"{ON_GLOO}:{ROOT}"})
    done = launch.run("-m", "+experiment=tp_overlap_tuner", *SWEEP[1:], "operator=fc2")
    assert done.returncode == 0, done.stderr
    (proof,) = json.loads((launch.directory / "tuning_report.json").read_text())["proof"]
    assert {"none", "default", "tuned"} <= set(proof["variants"])
    said = " ".join(done.stdout.split())
    assert "Async TP is one switch for the whole model" in said
    assert "_micro_pipeline_tp = True" in said
    # Methods have no knobs: 2 passes with one setting each, measured together and up to three times.
    operators = [result for result in launch.results().values() if result.recorded["workload"]["name"] == "operator"]
    assert all(set(setting) == {"method"} for result in operators for setting in result.settings.values())
    assert len(operators) <= 4
