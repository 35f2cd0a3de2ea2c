"""Each field of a recorded result, in turn replaced by what it cannot be: an answer, or a sentence about the file."""

import copy
import io
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.config import analysis_config
from overlap_sweep.errors import UserError
from overlap_sweep.report.console import console_for, print_answers
from overlap_sweep.report.files import write_reports
from overlap_sweep.results.points import HYDRA_CONFIG
from overlap_sweep.results.run_directory import RESULT_FILE, decoded_result, find_points, read_result
from overlap_sweep.workloads import analyse
from tests.golden.archives import unpack

RECORDED = ("operators", "layer", "kernel", "fsdp", "copy_engine", "tp_training", "job")
MISSING = object()
VALUES: tuple[Any, ...] = (
    *(MISSING, None, "", "unknown", "\x1b[31m\u202ex", "x" * 5000, -1, 0, 1, 0.5, 1e300, 1e-300, 2**62, 10**30, True),
    *(float("nan"), float("inf"), [], {}, ["x"], {"x": 1}),
)
SAMPLED = 60
"""Changes that are tried where time is short; most are in the configuration and the environment."""

PARTS = 60
"""One in so many fields of a result is changed, since each change is analysed anew: all of them take half an hour."""

Path_ = tuple[str | int, ...]


def fields_of(content: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yields the places of all values, of lists only of the first."""
    if path:
        yield path
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content[:1])
        for key, value in items:
            yield from fields_of(value, (*path, key))


def changed(content: Any, path: Path_, value: Any) -> Any:
    whole = found = copy.deepcopy(content)
    for key in path[:-1]:
        found = found[key]
    if value is MISSING:
        del found[path[-1]]
    else:
        found[path[-1]] = value
    return whole


def assert_answered(directory: Path, output: Path, what: str) -> None:
    """Analyses as `analyze.py` does. What is no UserError is raised."""
    try:
        analysis = analyse(directory, analysis_config([]), "analyze.py sweep")
        write_reports(analysis, output)
        print_answers(analysis, console_for(io.StringIO()))
        problems = analysis.problems
    except UserError as error:
        problems = [str(error)]
    except Exception as error:
        error.add_note(what)
        raise
    assert all(str(directory) in problem and "\n" not in problem for problem in problems), (what, problems)


@pytest.fixture(scope="module", params=RECORDED)
def point(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ok point alone in its sweep, without traces."""
    root = tmp_path_factory.mktemp(request.param)
    unpack(request.param, root / "whole")
    points = [path for path in find_points(root / "whole") if (path / RESULT_FILE).exists()]
    first = next(path for path in points if read_result(path / RESULT_FILE).status == "ok")
    shutil.copytree(first, root / "sweep" / first.name, ignore=shutil.ignore_patterns("trace*"))
    shutil.rmtree(root / "whole")
    return root / "sweep" / first.name


def refusal(content: dict[str, Any]) -> str | None:
    """Why reading refuses the result; None if it takes it."""
    try:
        decoded_result(json.dumps(content), "result.json", "measure again")
    except UserError as error:
        return str(error)
    return None


def accepted(content: dict[str, Any], part: int) -> list[tuple[Path_, Any]]:
    """The changes of a part of the fields after which reading still takes the result. Of the others it says what is
    wrong."""
    found = []
    for path in list(fields_of(content))[part::PARTS]:
        for value in VALUES:
            refused = refusal(changed(content, path, value))
            assert refused is None or re.match(r"result\.json .+\Z", refused), (path, value, refused)
            found += [] if refused else [(path, value)]
    return found


def answer_all(point: Path, changes: list[tuple[Path_, Any]], output: Path) -> None:
    content = json.loads((point / RESULT_FILE).read_text())
    for path, value in changes:
        (point / RESULT_FILE).write_text(json.dumps(changed(content, path, value)))
        assert_answered(point.parent, output, f"{path} = {value!r}")
    (point / RESULT_FILE).write_text(json.dumps(content))


def test_a_field_that_cannot_be_is_an_answer_or_a_sentence(point: Path, tmp_path: Path, no_page: None) -> None:
    content = json.loads((point / RESULT_FILE).read_text())
    changes = [(path, value) for path in fields_of(content) for value in VALUES if path[0] != "measured"]
    answer_all(point, random.Random(41).sample(changes, SAMPLED), tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("part", [7, 41])
def test_all_fields_that_cannot_be_are_answers_or_sentences(
    point: Path, tmp_path: Path, no_page: None, part: int
) -> None:
    answer_all(point, accepted(json.loads((point / RESULT_FILE).read_text()), part), tmp_path)


@pytest.mark.faults
def test_a_page_shows_whatever_the_environment_was(point: Path, tmp_path: Path) -> None:
    content = json.loads((point / RESULT_FILE).read_text())
    paths = [path for path in fields_of(content) if path[0] in ("environment", "conditions", "started")]
    changes = [(path, value) for path in paths for value in VALUES if not refusal(changed(content, path, value))]
    answer_all(point, random.Random(41).sample(changes, 15), tmp_path)


@pytest.mark.parametrize("device", ["", "unknown", "auto", None, MISSING])
def test_an_unknown_device_is_named(point: Path, device: Any) -> None:
    content = json.loads((point / RESULT_FILE).read_text())
    with pytest.raises(UserError, match=r"^result\.json cannot be read .*- at `\$\.point\.runtime"):
        decoded_result(json.dumps(changed(content, ("point", "runtime", "device"), device)), "result.json", "x")


@pytest.mark.faults
@pytest.mark.parametrize("part", [7, 41])
def test_a_point_without_a_result_may_have_any_configuration(
    point: Path, tmp_path: Path, no_page: None, part: int
) -> None:
    other = tmp_path / "sweep" / "other"
    shutil.copytree(point / ".hydra", other / ".hydra")
    content = yaml.safe_load((other / HYDRA_CONFIG).read_text())
    for path in list(fields_of(content))[part::PARTS]:
        for value in VALUES:
            (other / HYDRA_CONFIG).write_text(yaml.safe_dump(changed(content, path, value)))
            assert_answered(tmp_path / "sweep", tmp_path / "out", f"{path} = {value!r}")
