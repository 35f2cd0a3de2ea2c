"""Which results that lie in a directory stand for measuring."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep import gpus
from overlap_sweep.results import identity
from overlap_sweep.results.run_directory import RESULT_FILE, Result, Status, clear, write_atomically, write_result
from overlap_sweep.runtime.group_config import machine_of
from overlap_sweep.runtime.kept import kept_result, remember, whole_result
from overlap_sweep.store import read_store
from tests.composed import configuration
from tests.make_point import made_result, operator_point

POINT = operator_point()


@pytest.fixture
def result() -> Result:
    return made_result("operator", POINT, environment=machine_of(POINT), wall_s=0.5)


def test_a_result_that_was_cut_short_or_has_a_hole_anywhere_is_none(tmp_path: Path, result: Result) -> None:
    """After power loss some file systems have the length but not the content."""
    path = write_result(tmp_path, result)
    whole = path.read_bytes().rstrip()
    lengths = [*range(0, len(whole) - 40, 16), *range(len(whole) - 40, len(whole))]
    holes = [whole[:start] + bytes(64) + whole[start + 64 :] for start in range(0, len(whole), 64)]
    for content in [whole[:length] for length in lengths] + holes:
        path.write_bytes(content)
        assert whole_result(tmp_path) is None, content
    path.write_bytes(whole)
    assert whole_result(tmp_path) == result


def test_something_else_of_that_name_and_a_result_of_no_point_are_none(tmp_path: Path) -> None:
    assert whole_result(tmp_path) is None
    for content in (b"null", b"[]", b"{}", b'{"schema": 1}', b"\xff", b"\0" * 100):
        (tmp_path / RESULT_FILE).write_bytes(content)
        assert whole_result(tmp_path) is None
    no_points: list[dict[str, Any]] = [{}, {"runtime": None}, {"runtime": "cpu"}]
    for point in no_points:
        write_result(tmp_path, Result(name="p", recorded=point, status="ok"))
        assert whole_result(tmp_path) is None


@pytest.mark.parametrize(("status", "kept"), [("ok", True), ("skipped", True), ("failed", False), ("timeout", False)])
def test_what_failed_is_tried_again(tmp_path: Path, result: Result, status: Status, kept: bool) -> None:
    write_result(tmp_path, msgspec.structs.replace(result, status=status))
    assert (kept_result(tmp_path, POINT) is not None) is kept


def test_what_was_given_up_is_measured_again(tmp_path: Path) -> None:
    point = made_result("job").point
    for gave_up in (True, False):
        write_result(tmp_path, made_result("job", point, environment=machine_of(point), gave_up=gave_up))
        assert (kept_result(tmp_path, point) is None) is gave_up


def test_only_what_was_measured_to_its_end_is_put_into_the_store(tmp_path: Path) -> None:
    config = configuration(f"store={tmp_path / 'store'}")
    for gave_up in (False, True):
        remember(config, made_result("job", name=f"gave_up={gave_up}", gave_up=gave_up), tmp_path)
    assert [kept.result.name for kept in read_store(tmp_path / "store").measurements] == ["gave_up=False"]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"runtime": {"timeout_s": 5.0, "retries": 7, "timeout_factor": 2.0, "isolate": True}}, True),
        ({"runtime": {"start_timeout_s": 5.0}}, True),
        ({"runtime": {"threads_per_rank": 2}}, False),
        # It says what the answer applies to; results of earlier versions lack it.
        ({"model": {"num_layers": 5}}, True),
        ({"num_sm": 5}, False),
        ({"workload": {"repeats": 5}}, False),
    ],
)
def test_another_configuration_is_measured_how_it_is_run_does_not_matter(
    tmp_path: Path, result: Result, changes: dict[str, Any], kept: bool
) -> None:
    write_result(tmp_path, result)
    assert (kept_result(tmp_path, operator_point(**changes)) is not None) is kept


def test_another_environment_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    """Where points run elsewhere only libraries are compared."""
    write_result(tmp_path, result)
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert kept_result(tmp_path, POINT)
    monkeypatch.setenv("NVTE_X", "1")
    assert kept_result(tmp_path, POINT) is None
    monkeypatch.setattr(gpus, "_elsewhere", True)
    assert kept_result(tmp_path, POINT)
    monkeypatch.setattr(identity, "packages", lambda: {"torch": "1.0"})
    assert kept_result(tmp_path, POINT) is None


def test_before_measuring_leftovers_are_removed(tmp_path: Path) -> None:
    names = ["result.json", ".result.json.7.tmp", ".tp_comm_overlap_cfg.yaml.7.tmp", "trace_rank0.json.gz"]
    for name in (*names, ".tmp_trace_rank1.json.gz", "worker.log", "notes.txt"):
        (tmp_path / name).touch()
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "worker.log"]


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    path = tmp_path / "file"

    def flush(descriptor: int) -> None:
        flushed = Path(f"/proc/self/fd/{descriptor}").resolve()
        done.append(f"{'directory' if flushed == tmp_path.resolve() else 'content'}, named: {path.exists()}")

    monkeypatch.setattr("os.fsync", flush)
    write_atomically(path, b"content")
    assert done == ["content, named: False", "directory, named: True"]
