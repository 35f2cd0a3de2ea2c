"""Results of every workload that cannot be: one sentence each, and the rest is read. What is said of which value:
tests/golden/damaged_results.txt."""

import copy
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
from overlap_sweep.workloads import analyse
from tests.golden import damaged_results
from tests.golden.command_lines import answers
from tests.golden.damaged_results import write_whole
from tests.make_point import MEASURED, make_point, rewrite

TEXTS = {
    "": "Input data was truncated",
    "\0": "JSON is malformed",
    '{"schema": 1, "name": "x"': "truncated",
    '{"schema": NaN}': "JSON is malformed",
    "[" * 100_000: "recursion depth exceeded",
    '{"environment":' + '{"a":' * 100_000: "recursion depth exceeded",
    "{}": "missing required field",
    '{"name": "x", "status": "ok", "point": {"operator": "fc1"}}': "required field `workload` - at `$.point`",
}

ANSWERS = answers(damaged_results.FILE)


@pytest.mark.parametrize("typed", ANSWERS)
def test_a_result_that_cannot_be_is_one_sentence(tmp_path: Path, typed: str) -> None:
    """Where the answer has changed, and should have: `make golden`."""
    assert damaged_results.answer(typed, tmp_path) == ANSWERS[typed]
    assert ANSWERS[typed].count("\n") == 1


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("workload", MEASURED)
def test_one_unreadable_result_is_named_and_the_others_are_read(tmp_path: Path, workload: str, text: str) -> None:
    make_point("operator", tmp_path, name="good")
    path = write_whole(workload, tmp_path) / RESULT_FILE
    path.write_text(text)
    reading = read_points(tmp_path)
    assert [point.name for point in reading.points] == ["good"]
    (problem,) = reading.problems
    assert all(said in problem for said in (str(path), TEXTS[text], "measure that again with resume="))


@pytest.mark.parametrize("workload", MEASURED)
def test_what_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path, workload: str) -> None:
    directory = write_whole(workload, tmp_path)
    section = {"operator": "model", "kernel": "model"}.get(workload, workload)
    rewrite(directory, lambda r: r["point"][section].update(something_new={"a": 1}))
    rewrite(directory, lambda r: r.update(something_new=[1]))
    assert read_points(tmp_path).problems == []


def test_a_variant_that_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path) -> None:
    rewrite(
        write_whole("fsdp", tmp_path), lambda r: r["measured"]["step"].update(another=r["measured"]["step"]["none"])
    )
    assert read_points(tmp_path).problems == []


@pytest.mark.parametrize("workload", MEASURED)
def test_a_point_without_any_of_its_options_is_refused_or_reported(tmp_path: Path, workload: str) -> None:
    """What is missing gets its default, or is named in one line."""
    path = make_point(workload, tmp_path / "sweep") / RESULT_FILE
    whole = json.loads(path.read_text())

    def keys(found: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, below in found.items():
            yield (*above, name)
            if isinstance(below, dict):
                yield from keys(below, (*above, name))

    for *above, name in keys(whole["point"]):
        damaged = copy.deepcopy(whole)
        del functools.reduce(operator.getitem, above, damaged["point"])[name]
        path.write_text(json.dumps(damaged))
        analysis = analyse(tmp_path / "sweep", AnalysisConfig())
        assert all("\n" not in problem for problem in analysis.problems), (above, name)
