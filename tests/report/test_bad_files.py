"""Files in a sweep that are cut off, nested, huge, or something else: one sentence each, and the rest is analysed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
from tests.make_point import make_point, missing_point, operator_config, rewrite
from tests.report.hostile_sweeps import only_problem


def _yaml_bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    return "\n".join(lines) + "\n"


BAD_YAML = {
    "bomb": _yaml_bomb(),
    "itself": "&a\nmodel: *a\nphases: *a\n",
    "deep": "[" * 1_000,
    "no time": "model: 2001-13-45",
    "no number": 'model: !!int ""',
    "digits": "model: " + "9" * 5000,
    "object": "model: !!python/object/apply:os.abort []",
    "binary": "\0\1\2",
    "large": "model: " + "x" * 2_000_000,
}


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML)
def test_a_bad_yaml_is_one_sentence(tmp_path: Path, text: str) -> None:
    make_point("operator", tmp_path, **BULK)
    missing_point(tmp_path, {})
    (tmp_path / "missing" / ".hydra" / "config.yaml").write_text(text)
    (tmp_path / "multirun.yaml").write_text(text)
    assert "missing" in only_problem(tmp_path)
    with pytest.raises(UserError) as error:
        overlap_cfg.read(tmp_path / "multirun.yaml")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("template", ["fc1_fprop: {{num_sm: {}}}", "fc1_fprop: {{method: {}}}"])
def test_a_bomb_is_not_written_out(tmp_path: Path, template: str) -> None:
    assert yaml.safe_load(_yaml_bomb())["a29"]
    path = tmp_path / "cfg.yaml"
    path.write_text("fc1_dgrad: &z {num_sm: 1}\n" + _yaml_bomb() + template.format("*a29"))
    with pytest.raises(UserError) as error:
        overlap_cfg.read(path)
    assert len(str(error.value)) < 1000


BULK = {"point": operator_config(2, "fc1", "all", "bulk", num_sm=4)}

NO_JSON = ("[" * 100_000, '{"environment":' + '{"a":' * 100_000, '{"schema": NaN}', '{"schema": 1e999}', "\0", "")


@pytest.mark.parametrize("text", NO_JSON, ids=lambda text: text[:12])
@pytest.mark.parametrize("name", ["tuner.json", "search.json"])
def test_no_json_is_one_sentence(tmp_path: Path, text: str, name: str) -> None:
    make_point("operator", tmp_path, **BULK)
    (tmp_path / name).write_text(text)
    assert name in only_problem(tmp_path)


@pytest.mark.parametrize("name", ["bad/result.json", "tuner.json"])
def test_what_is_no_ordinary_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    make_point("operator", tmp_path, **BULK)
    (tmp_path / "bad").mkdir()
    os.mkfifo(tmp_path / name)
    assert "is not a regular file" in only_problem(tmp_path)


@contextmanager
def unprivileged(directory: Path) -> Iterator[None]:
    """Makes the process a user who may read the directory, but no closed files: none is closed to root."""
    user = os.geteuid()
    for folder in (directory, *directory.parents):
        if folder.stat().st_uid == user and folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o055)
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_directory_that_cannot_be_read_is_a_sentence_beside_the_rest(tmp_path: Path) -> None:
    for name in ("good", "no_entry", "unreadable", "earlier"):
        make_point("operator", tmp_path, **BULK, name=name)
    missing_point(tmp_path, {**BULK["point"], "num_sm": 0}, name="refused")
    rewrite(tmp_path / "earlier", lambda result: result.update(schema=1))
    (tmp_path / "no_entry").chmod(0)
    (tmp_path / "unreadable" / RESULT_FILE).chmod(0)
    with unprivileged(tmp_path):
        reading = read_points(tmp_path)
    (tmp_path / "no_entry").chmod(0o755)
    assert [point.name for point in reading.points] == ["good"]
    mends = {
        "no_entry": "make it readable",
        "unreadable": "make it readable",
        "earlier": "measure that again with resume=",
    }
    for name, mend in {**mends, "refused": f"move {tmp_path / 'refused'} elsewhere."}.items():
        (problem,) = [problem for problem in reading.problems if problem.startswith(str(tmp_path / name))]
        assert mend in problem
