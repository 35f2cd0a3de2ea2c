"""Points of backend=symm_mem, whose methods have no knobs: each setting is measured once, whatever num_sm is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import backends, space, workloads
from overlap_sweep.identity import key_of, point_identity
from overlap_sweep.search.candidates import candidates
from overlap_sweep.search.choices import Choices
from tests.points import gpu_point
from tests.search.tiny import QUICK, SIZES
from tests.sweeps import ROOT, Launch

ON_GLOO = ROOT / "tests" / "backends" / "symm_mem_on_gloo"
SWEEP = ("-m", "backend=symm_mem", "tp_size=2", *QUICK, *SIZES)


def completed(**changes: Any) -> dict[str, Any]:
    point = {**gpu_point(backend="symm_mem"), **changes}
    whole: dict[str, Any] = workloads.load("operator").complete(point)
    return whole


@pytest.mark.parametrize("method", ["none", "bulk", "ring_exchange"])
def test_points_differ_in_no_knob_that_they_are_given_unasked(method: str) -> None:
    points = [completed(method=method, num_sm=n, aggregate=joined) for n in (1, 32) for joined in (None, False)]
    assert len({key_of(point_identity(point)) for point in points}) == 1
    assert len({space.point_name(point, [f"num_sm={point['num_sm']}"]) for point in points}) == 1
    assert all(set(setting) == {"method"} for setting in space.settings(points[0]).values())


def test_the_same_holds_phase_by_phase() -> None:
    one = completed(phases={"fprop": {"method": "ring_exchange", "num_sm": 8, "aggregate": False}})
    other = completed(phases={"fprop": {"method": "ring_exchange"}})
    assert space.settings(one) == space.settings(other) == {"fc1_fprop": {"method": "ring_exchange"}}
    assert point_identity(one) == point_identity(other)


def test_a_knob_that_was_asked_for_is_refused_under_a_name_of_its_own() -> None:
    point = completed(method="ring_exchange", aggregate=True)
    assert "has no aggregate" in str(workloads.load("operator").refusal(point))
    assert space.point_name(point, []) != space.point_name(completed(method="ring_exchange"), [])


def test_a_name_has_its_num_sm_in_every_other_backend() -> None:
    names = {space.point_name(gpu_point(backend=backend, num_sm=8), []) for backend in backends.BACKENDS}
    assert names == {"m_tp2_fc1_bulk", "m_tp2_fc1_bulk_sm8"}


def test_a_search_tries_each_method_once() -> None:
    point = completed()
    module = backends.load("symm_mem")
    choices = Choices(space.METHODS[1:], {"num_sm": (1, 4, 16), "aggregate": (False, True), "num_splits": (2, 4)})

    def refusal(phases: Any) -> str | None:
        reason: str | None = workloads.load("operator").refusal({**point, "phases": phases})
        return reason

    found, refused = candidates("fc1", choices, module.default_knobs, module.knobs(point), refusal)
    assert [str(candidate) for candidate in found["fwd"]] == ["ring"]
    assert [str(candidate) for candidate in found["bwd"]] == [
        "dgrad bulk + wgrad bulk",
        "dgrad bulk",
        "ring",
        "wgrad bulk",
    ]
    assert list(refused) == [
        "backend=symm_mem has no pipeline, which fc1_dgrad is given; it has ring_exchange and bulk"
    ]


@pytest.mark.end_to_end
def test_a_grid_over_num_sm_measures_once(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "grid", {"PYTHONPATH": f"{ON_GLOO}:{ROOT}"})
    done = launch.run(*SWEEP, "operator=fc1", "method=ring_exchange,none", "num_sm=1,4,16")
    assert done.returncode == 0, done.stderr
    results = launch.results().values()
    assert sorted(result.point["method"] for result in results) == ["none", "ring_exchange"]
    for result in results:
        assert result.status == "ok", result.error
        assert max(result.relative_error.values()) < 1e-4
        assert all(result.times[name].default is not None for name in ("fwd", "bwd"))
        assert result.point["num_sm"] is None


@pytest.mark.end_to_end
def test_the_tuner_proves_against_async_tp(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "tuned", {"PYTHONPATH": f"{ON_GLOO}:{ROOT}"})
    done = launch.run("-m", "+experiment=tp_overlap_tuner", *SWEEP[1:], "operator=fc2")
    assert done.returncode == 0, done.stderr
    (proof,) = json.loads((launch.directory / "proof.json").read_text())["proofs"]
    assert {"none", "default", "tuned"} <= set(proof["variants"])
    said = " ".join(done.stdout.split())
    assert "Async TP is one switch for the whole model" in said
    assert "_micro_pipeline_tp = True" in said
    # Methods have no knobs: 2 passes with one setting each, measured together and up to three times.
    operators = [result for result in launch.results().values() if result.point["workload"]["name"] == "operator"]
    assert all(set(setting) == {"method"} for result in operators for setting in result.settings.values())
    assert len(operators) <= 4


def test_without_gpus_every_point_is_skipped_with_the_reason(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "skipped")
    done = launch.run(*SWEEP, "operator=fc1", "method=ring_exchange", "num_sm=1,4")
    (result,) = launch.results().values()
    assert result.status == "skipped"
    assert str(result.error) in done.stderr
    assert result.error == "backend=symm_mem copies from GPU to GPU, and runtime.device is cpu"
