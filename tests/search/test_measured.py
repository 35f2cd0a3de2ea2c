"""Values as Hydra reads them, results that are there already, and when a search has to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.run_directory import RESULT_FILE, Result, Status, write_result
from overlap_sweep.runtime.group import machine_of
from overlap_sweep.search.budget import Budget
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.measured import CHUNK, Job, Measurements, batched, override_value
from overlap_sweep.search.rounds import Request, Task
from tests.points import operator_point

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


def test_what_is_shown_stays_readable() -> None:
    phases = {"fprop": {"method": "ring_exchange", "num_sm": 4, "use_ce": False}}
    assert override_value(phases) == "{fprop:{method:ring_exchange,num_sm:4,use_ce:false}}"


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (8, [8]), (9, [8, 1])])
def test_batches(count: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in batched(range(count), 8)] == sizes


def request(num_sm: int = 4, repetition: int = 0) -> Request:
    task = Task({**operator_point(), "repetition": 0}, ["tp_size=2"], {}, None)  # type: ignore[arg-type]
    candidate = Candidate.of({"fc1_fprop": {"method": "ring_exchange", "num_sm": num_sm}})
    return Request(task, {"fwd": candidate}, repetition)


def test_a_job_is_what_the_launcher_composes_it_from_and_what_will_come_of_it() -> None:
    job = Job.of(request(repetition=2))
    phases = "phases={fprop:{method:ring_exchange,num_sm:4}}"
    assert job.overrides == ["tp_size=2", phases, "repetition=2"]
    assert job.point["phases"] == {"fprop": {"method": "ring_exchange", "num_sm": 4}}
    assert job.point["repetition"] == 2
    assert Job.of(request()).overrides == ["tp_size=2", phases]
    # No overlap is a point, too.
    assert Job.of(Request(request().task, {})).point["phases"] == {"fprop": {"method": "none"}}


class Launcher:
    """Answers every job with a failure, and keeps how many there were at once."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        assert initial_job_idx == sum(self.batches)
        self.batches.append(len(job_overrides))
        return [JobReturn(status=JobStatus.FAILED, _return_value=RuntimeError("no luck")) for _ in job_overrides]


def measurements(directory: Path, max_points: int | None = None, max_minutes: float | None = None) -> Measurements:
    return Measurements(Launcher(), directory, Budget(max_points, max_minutes))  # type: ignore[arg-type]


def leave_result(directory: Path, status: Status, num_sm: int = 4) -> Result:
    (directory / f"sm{num_sm}").mkdir(parents=True)
    point = dict(Job.of(request(num_sm)).point)
    result = Result(name=f"sm{num_sm}", point=point, status=status, error="as before", environment=machine_of(point))
    write_result(directory / f"sm{num_sm}", result)
    return result


@pytest.mark.parametrize(("status", "lasts"), [("ok", True), ("skipped", True), ("failed", False), ("timeout", False)])
def test_results_that_are_there_are_taken_unless_they_may_have_been_an_accident(
    tmp_path: Path, status: Status, lasts: bool
) -> None:
    leave_result(tmp_path, status)
    found = measurements(tmp_path)
    (((_, result)),) = found.measure([request()])
    assert (found.reused, found.budget.points) == (int(lasts), 1)
    assert (result.status, result.error) == ((status, "as before") if lasts else ("failed", "no luck"))


def test_only_the_very_same_point_is_taken(tmp_path: Path) -> None:
    leave_result(tmp_path, "ok")
    found = measurements(tmp_path)
    statuses = [result.status for _, result in found.measure([request(8), request(), request(repetition=1)])]
    assert statuses == ["failed", "ok", "failed"]
    assert found.reused == 1


@pytest.mark.parametrize("content", ["", "{", '{"schema": 99, "name": "", "point": {}, "status": "ok"}', "[]", None])
def test_a_result_that_cannot_be_read_or_was_cut_off_is_measured_again(tmp_path: Path, content: str | None) -> None:
    result = leave_result(tmp_path, "ok")
    (tmp_path / "sm4" / ".hydra").mkdir()
    (tmp_path / "sm4" / ".hydra" / "config.yaml").write_text(json.dumps(result.point))
    (tmp_path / "sm4" / RESULT_FILE).unlink()
    if content is not None:
        (tmp_path / "sm4" / RESULT_FILE).write_text(content)
    assert [result.error for _, result in measurements(tmp_path).measure([request()])] == ["no luck"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("most", "measured"), [(None, 19), (20, 19), (19, 19), (3, 3)])
def test_the_number_of_points_is_kept_to(tmp_path: Path, most: int | None, measured: int, before: bool) -> None:
    """What was measured before counts as well: a limit that is as high as before leads to the same answer."""
    if before:
        leave_result(tmp_path, "ok", num_sm=1)
    found = measurements(tmp_path, max_points=most)
    assert len(list(found.measure([request(n) for n in range(1, 20)]))) == found.budget.points == measured
    # Without a time limit a round is one launch.
    assert found._launcher.batches == [measured - before]  # type: ignore[attr-defined]


def test_a_time_limit_is_looked_at_between_launches(tmp_path: Path) -> None:
    found = measurements(tmp_path, max_minutes=60.0)
    answers = found.measure([request(n) for n in range(1, 20)])
    for _ in range(CHUNK):
        next(answers)
    found.budget.max_minutes = 0.0
    assert list(answers) == []
    assert found._launcher.batches == [CHUNK]  # type: ignore[attr-defined]
    assert found.budget.points == CHUNK


def test_a_layer_is_measured_whatever_the_budget(tmp_path: Path) -> None:
    leave_result(tmp_path, "ok")
    found = measurements(tmp_path, max_points=1)
    assert [result.status for result in found.run([Job.of(request()), Job.of(request(5))])] == ["ok", "failed"]
    # It is none of the search's points, old or new.
    assert (found.reused, found.budget.points) == (0, 0)


def test_without_limits_it_is_never_spent() -> None:
    found = Budget(None, None, points=10**6)
    found.began_s -= 10**9
    assert not found.spent
    assert (found.points_left, found.why_spent) == (None, "")


@pytest.mark.parametrize(("points", "left"), [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_points_are_counted_down(points: int, left: int) -> None:
    found = Budget(3, None, points=points)
    assert found.points_left == left
    assert found.spent == (left == 0)
    assert found.why_spent == ("search.max_points=3 is used up" if left == 0 else "")


@pytest.mark.parametrize(
    ("minutes", "elapsed_s", "spent"), [(60.0, 90.0, False), (1.5, 90.0, True), (0.0, 90.0, True), (0.0, 0.0, True)]
)
def test_minutes_run_from_the_start(minutes: float, elapsed_s: float, spent: bool) -> None:
    found = Budget(None, minutes)
    found.began_s -= elapsed_s
    assert found.elapsed_s >= elapsed_s
    assert found.spent is spent
    assert found.why_spent == (f"search.max_minutes={minutes:g} is used up" if spent else "")


def test_a_pause_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Budget(None, 1.0)
    now = found.began_s
    monkeypatch.setattr("overlap_sweep.search.budget.time.monotonic", lambda: now)
    now += 50.0
    with found.paused():
        now += 1000.0
    assert found.elapsed_s == pytest.approx(50.0)
    assert not found.spent
    now += 15.0
    assert found.spent
