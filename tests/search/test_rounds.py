"""Searches that share points: who is asked what, how points are measured, and who is told what came of it."""

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.config import Search
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.run_directory import Result, Status, write_result
from overlap_sweep.runtime.group_config import machine_of
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import limits
from overlap_sweep.search import Failure
from overlap_sweep.search.cell import Candidate, Cell, together
from overlap_sweep.search.measured import CHUNK, Budget, Job, Measurements
from overlap_sweep.search.tasks import Request, Task
from overlap_sweep.workloads.operator.result import OperatorTimes, PassTimes
from tests.make_point import made_result, operator_point, pass_times
from tests.search.surfaces import one_slot, pairs, settings, two_methods

RINGS = one_slot(settings("ring_exchange", num_sm=(1, 16)), "fc1_fprop")
BULKS = [c for c in pairs(settings("bulk", num_sm=(1, 16))) if len(c.settings) == 2]
NONE_US = {"fwd": 100.0, "bwd": 200.0}


def result(
    times_us: Mapping[str, float] | None = None, status: Status = "ok", spread_us: float = 0.0, **fields: Any
) -> Result:
    """A point whose passes take this long; those that are not given as long as none."""
    times: dict[str, PassTimes] = {
        name: pass_times((times_us or {}).get(name, none_us), none_us, 0.5 * none_us, spread_us=spread_us)
        for name, none_us in NONE_US.items()
    }
    return Result(
        name="point",
        recorded=operator_point(),
        status=status,
        measured=OperatorTimes(times=times) if status == "ok" else None,
        **fields,
    )


def task(forward: list[Candidate] = RINGS, backward: list[Candidate] = BULKS, **fields: Any) -> Task:
    cells = {"fwd": Cell(tuple(forward)), "bwd": Cell(tuple(backward))}
    cells = {name: one for name, one in cells.items() if one.candidates}
    return Task(operator_point(**fields), [], cells, Counter())


def begun(one: Task | None = None, **fields: Any) -> Task:
    one = one or task(**fields)
    one.baseline = result()
    one.begin(Search())
    return one


def asked(**fields: Any) -> tuple[Task, Request]:
    """A task and the only point of its first round."""
    one = begun(**fields)
    (request,) = one.requests()
    return one, request


def told(one: Task, request: Request, found: Result) -> list[Request]:
    """Has the searches go on with the answer; returns what they want measured again."""
    again = one.answer(request, found)
    for running in one.running.values():
        running.advance("")
    return again


def test_forward_and_backward_candidates_share_a_point_and_what_one_pass_has_more_goes_alone() -> None:
    _, request = asked()
    assert request.job.point["phases"] == {
        "fprop": {"method": "ring_exchange", "num_sm": 16},
        "dgrad": {"method": "bulk", "num_sm": 16},
        "wgrad": {"method": "bulk", "num_sm": 16},
    }
    backward = one_slot(settings("ring_exchange", num_sm=(16,)), "fc2_dgrad")
    requests = begun(forward=two_methods((16,)), backward=backward, operator="fc2").requests()
    assert [set(request.job.point["phases"]) for request in requests] == [{"fprop", "dgrad"}, {"fprop"}]


def test_each_search_hears_of_its_own_pass_relative_to_none_beside_it() -> None:
    one, request = asked()
    # The machine was slower: none took 10 % longer than at first.
    slower = result()
    slower.measured.times = {"fwd": pass_times(88.0, 110.0, 55.0), "bwd": pass_times(210.0, 220.0, 110.0)}
    assert told(one, request, slower) == []
    assert one.running["fwd"].trail.time_us(request.of_pass["fwd"]) == pytest.approx(80.0)
    assert one.running["bwd"].trail.time_us(request.of_pass["bwd"]) == pytest.approx(210.0 / 1.1)


def test_baselines_come_from_the_point_without_overlap() -> None:
    one = task()
    one.baseline = result({"fwd": 102.0}, spread_us=1.0)
    one.begin(Search())
    trail = one.running["fwd"].trail
    # Both of its variants are the operator without overlap.
    assert (trail.none.time_us, trail.none.repeats) == (101.0, 10)
    assert trail.none.noise_us > 0.0
    assert trail.floor_us == 50.0


def test_a_point_that_is_asked_for_again_is_another_repetition() -> None:
    one = begun(forward=RINGS[:1], backward=[])
    repetitions = []
    while requests := one.requests():
        (request,) = requests
        repetitions.append(request.repetition)
        told(one, request, result({"fwd": 99.9}, spread_us=2.0))
    assert repetitions == [0, 1, 2]


@pytest.mark.parametrize(
    ("errors", "wrong", "right"),
    [
        ({"output": 0.5}, "fwd", "bwd"),
        *(({"output": 0.0, f"{tensor}_grad": None}, "bwd", "fwd") for tensor in ("input", "weight", "bias")),
    ],
)
def test_wrong_numbers_are_the_fault_of_their_pass(errors: dict[str, Any], wrong: str, right: str) -> None:
    one, request = asked()
    (again,) = one.answer(request, result(status="failed", error="wrong numbers: 0.5\nlog", relative_error=errors))
    assert again.of_pass == {right: request.of_pass[right]}
    told(one, again, result({right: 90.0}))
    to_blame = {request.of_pass[wrong]: Failure("wrong numbers: 0.5", wrong_numbers=True)}
    assert one.running[wrong].trail.failed == to_blame
    assert one.running[right].trail.failed == {}
    assert one.running[right].trail.time_us(request.of_pass[right]) == 90.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"status": "failed", "error": "rank 1 died\nlog"}, "rank 1 died"),
        ({"status": "failed", "error": "died", "relative_error": {"output": 1e-6}}, "died"),
        ({"status": "timeout"}, "timeout"),
        ({"status": "skipped", "error": "num_sm=40 is more than the GPU's 32"}, "num_sm=40 is more than the GPU's 32"),
        ({"status": "failed", "error": "wrong", "relative_error": {"output": 0.5, "input_grad": 0.5}}, "wrong"),
    ],
)
def test_where_nobody_can_be_blamed_each_is_measured_alone(fields: dict[str, Any], reason: str) -> None:
    one, request = asked()
    alone = one.answer(request, result(**fields))
    assert [dict(again.of_pass) for again in alone] == [{name: c} for name, c in request.of_pass.items()]
    assert [again.repetition for again in alone] == [0, 0]
    one.answer(alone[0], result(**fields), final=True)
    told(one, alone[1], result({"bwd": 120.0}))
    forward, backward = (running.trail for running in one.running.values())
    assert forward.failed == {request.of_pass["fwd"]: Failure(reason, wrong_numbers=reason == "wrong")}
    assert backward.failed == {}
    assert backward.time_us(request.of_pass["bwd"]) == 120.0


def test_launch_bound_times_say_nothing_and_are_taken_once_more() -> None:
    one, request = asked()
    late = result({"fwd": 1.0, "bwd": 1.0}, launch_bound=True)
    alone = one.answer(request, late)
    assert [set(again.of_pass) for again in alone] == [{"fwd"}, {"bwd"}]
    # What stays launch-bound has no time.
    assert one.answer(alone[0], late, final=True) == []
    told(one, alone[1], result({"bwd": 120.0}))
    assert one.running["bwd"].trail.best == request.of_pass["bwd"]
    (failure,) = one.running["fwd"].trail.failed.values()
    assert failure.reason.startswith("launch-bound")


def test_what_was_answered_of_a_round_counts_when_it_ends_too_early() -> None:
    one = begun(forward=two_methods((16,)), backward=[], operator="fc2")
    first, second = one.requests()
    one.answer(first, result({"fwd": 80.0}))
    (running,) = one.running.values()
    running.advance("search.max_points=2 is used up")
    assert (running.trail.best, running.trail.stopped) == (first.of_pass["fwd"], "search.max_points=2 is used up")
    assert second.of_pass["fwd"] not in running.trail.samples
    assert one.requests() == []


def test_tasks_of_one_case_differ_in_their_operator_only() -> None:
    assert task().case == task(operator="fc2").case
    assert len({task(**fields).case for fields in ({}, {"tp_size": 4}, {"precision": "bf16"}, {"method": "none"})}) == 4
    assert (task().label, task().case_label) == ("m TP=2 fc1", "m TP=2")


def test_samples_of_one_setting_together() -> None:
    one, two = Estimate(100.0, 3.0, 7), Estimate(102.0, 4.0, 7)
    assert together([one]) == one
    assert together([one, two]) == Estimate(101.0, 2.5, 14)
    # Where they differ by more than they say, that is the noise.
    far = together([one, Estimate(120.0, 4.0, 7)])
    assert far.noise_us == pytest.approx(10.0 / 2**0.5)


LIKELY = [
    *("bulk", "none", "null", "True", "nan", "inf", "1", "1e3", "", " ", "a b", "{tp}", "$", "a=b", "a:b", "a,b"),
    *("/data/my models (v2)/config.json", "Qwen/Qwen3-0.6B", "/tmp/é/配置.yaml", "it's", 'say "so"', "C:\\a\\b", "\\"),
    *('\\"', "ends with \\", "[1, 2]", "#", "~", "+x", "file:/a b/c_tp{tp}.yaml"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(LIKELY),
    st.text(st.characters(min_codepoint=32, exclude_characters="$", exclude_categories=("Cs",))),
)
NAMES = st.sampled_from(["fprop", "dgrad", "method", "num_sm"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


@given(VALUES)
def test_hydra_reads_back_what_was_given(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={override_value(value)}")
    assert not override.is_sweep_override()
    found = override.value()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", LIKELY)
def test_hydra_reads_back_likely_texts_also_from_its_own_spelling(value: str) -> None:
    """As a sweep passes on what was typed."""
    parser = OverridesParser.create()
    override = parser.parse_override(f"key={override_value([value])}")
    assert parser.parse_override(f"key={override.get_value_element_as_str()}").value() == [value]


def request(num_sm: int = 4, repetition: int = 0) -> Request:
    candidate = Candidate.of({"fc1_fprop": {"method": "ring_exchange", "num_sm": num_sm}})
    return Request(replace(task(repetition=0), overrides=["tp_size=2"]), {"fwd": candidate}, repetition)


def test_a_job_is_what_the_launcher_composes_it_from_and_what_will_come_of_it() -> None:
    job = request(repetition=2).job
    phases = 'phases={fprop:{method:"ring_exchange",num_sm:4}}'
    assert job.overrides == ["tp_size=2", phases, "repetition=2"]
    assert (job.point["phases"], job.point["repetition"]) == ({"fprop": {"method": "ring_exchange", "num_sm": 4}}, 2)
    assert request().job.overrides == ["tp_size=2", phases]
    # No overlap is a point, too.
    assert Request(task(), {}).job.point["phases"] == {"fprop": {"method": "none"}}


def test_launchers_that_do_not_look_at_a_time_limit_have_it_looked_at_between_launches(tmp_path: Path) -> None:
    launcher, lost = Mock(), JobReturn(status=JobStatus.FAILED, _return_value=RuntimeError("no luck"))
    found = Measurements(launcher, tmp_path, Budget(None, 60.0))

    def launch_until_the_time_is_over(job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        found.budget.max_minutes = 0.0
        return [lost] * len(job_overrides)

    launcher.launch.side_effect = launch_until_the_time_is_over
    results = found.measure([request(n).job for n in range(1, 20)])
    seen = [result and (result.status, result.error) for result in results]
    assert seen == [*[("failed", "no luck")] * CHUNK, *[None] * (19 - CHUNK)]
    assert found.budget.points == CHUNK
    assert [len(call.args[0]) for call in launcher.launch.call_args_list] == [CHUNK]


def test_what_was_given_up_counts_where_it_would_be_given_up_again(tmp_path: Path) -> None:
    slow = made_result("job", name="slow", gave_up=True, step_us=500.0)
    slow.environment = machine_of(slow.point)
    (tmp_path / slow.name).mkdir()
    write_result(tmp_path / slow.name, slow)
    for limit_us, launches in ((400.0, 0), (600.0, 1), (None, 1)):
        launcher = Mock()
        launcher.launch.return_value = [JobReturn(status=JobStatus.FAILED, _return_value=RuntimeError("again"))]
        measurements = Measurements(launcher, tmp_path, Budget(None, None))
        with limits.giving_up(limit_us) if limit_us else nullcontext():
            (result,) = measurements.measure([Job([], slow.point)])
        assert result
        assert (launcher.launch.call_count, result.gave_up) == (launches, not launches)


@pytest.mark.parametrize(
    ("most", "points", "minutes", "elapsed_s", "left", "why"),
    [
        (None, 10**6, None, 1e9, None, ""),
        (3, 2, None, 0.0, 1, ""),
        (3, 3, None, 0.0, 0, "search.max_points=3 is used up"),
        (3, 4, 60.0, 90.0, 0, "search.max_points=3 is used up"),
        (None, 0, 60.0, 90.0, None, ""),
        (None, 0, 1.5, 90.0, None, "search.max_minutes=1.5 is used up"),
        (4, 3, 0.0, 0.0, 1, "search.max_minutes=0 is used up"),
    ],
)
def test_points_are_counted_down_and_minutes_run_from_the_start(
    most: int | None, points: int, minutes: float | None, elapsed_s: float, left: int | None, why: str
) -> None:
    found = Budget(most, minutes, points)
    found.began_s -= elapsed_s
    assert (found.points_left, found.why_spent) == (left, why)


def test_limits_are_named_as_the_user_typed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "options", {"search.max_minutes": "--minutes", "search.max_points": "--runs"})
    assert Budget(None, 0.0).why_spent == "--minutes 0 is used up"
    assert Budget(3, None, 3).why_spent == "--runs 3 is used up"
