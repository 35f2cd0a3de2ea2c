"""Which results that lie in a directory stand for measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep import machine
from overlap_sweep.run_directory import (
    RESULT_FILE,
    PassTimes,
    Result,
    Status,
    Timing,
    clear,
    write_atomically,
    write_result,
)
from overlap_sweep.runtime import attempts, devices
from overlap_sweep.runtime.group import machine_of
from overlap_sweep.runtime.kept import kept_result, whole_result
from tests.points import operator_point

TIMING = Timing(10.0, 9.0, 11.0, [9.0, 10.0, 11.0])


def result_of(point: dict[str, Any], status: Status = "ok") -> Result:
    times = {name: PassTimes(TIMING, TIMING, TIMING) for name in ("fwd", "bwd", "all")}
    return Result(name="p", point=point, status=status, times=times, environment=machine_of(point), wall_s=0.5)


def test_a_result_that_was_cut_short_anywhere_is_none(tmp_path: Path) -> None:
    path = write_result(tmp_path, result_of(operator_point()))
    whole = path.read_bytes()
    for length in range(len(whole.rstrip())):
        path.write_bytes(whole[:length])
        assert whole_result(tmp_path) is None, length
    path.write_bytes(whole.rstrip())
    assert whole_result(tmp_path) == result_of(operator_point())


def test_a_result_with_a_hole_is_none(tmp_path: Path) -> None:
    """After power loss some file systems have the length but not the content."""
    path = write_result(tmp_path, result_of(operator_point()))
    whole = path.read_bytes()
    for start in range(0, len(whole) - 64, 64):
        path.write_bytes(whole[:start] + bytes(64) + whole[start + 64 :])
        assert whole_result(tmp_path) is None, start


def test_something_else_of_that_name_and_a_result_of_no_point_are_none(tmp_path: Path) -> None:
    assert whole_result(tmp_path) is None
    for content in (b"null", b"[]", b"{}", b'{"schema": 1}', b"\xff", b"\0" * 100):
        (tmp_path / RESULT_FILE).write_bytes(content)
        assert whole_result(tmp_path) is None
    no_points: list[dict[str, Any]] = [{}, {"runtime": None}, {"runtime": "cpu"}]
    for point in no_points:
        write_result(tmp_path, Result(name="p", point=point, status="ok"))
        assert whole_result(tmp_path) is None


@pytest.mark.parametrize(
    ("status", "launch", "kept"),
    [
        *(("ok", None, True), ("skipped", None, True), ("failed", None, False), ("timeout", None, False)),
        *(("failed", "first", True), ("timeout", "first", True), ("failed", "second", False), ("ok", "second", True)),
    ],
)
def test_what_failed_is_tried_again_but_not_in_the_launch_in_which_it_had_its_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status, launch: str | None, kept: bool
) -> None:
    write_result(tmp_path, msgspec.structs.replace(result_of(operator_point(), status), launch="first"))
    monkeypatch.setattr(attempts, "_launch", launch)
    assert (kept_result(tmp_path, operator_point()) is not None) is kept


def test_where_points_run_elsewhere_only_libraries_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_result(tmp_path, result_of(operator_point()))
    monkeypatch.setattr(devices, "_elsewhere", True)
    monkeypatch.setenv("NCCL_MAX_CTAS", "1")
    assert kept_result(tmp_path, operator_point())
    monkeypatch.setattr(machine, "_packages", lambda: {"torch": "1.0"})
    assert kept_result(tmp_path, operator_point()) is None


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"runtime": {"timeout_s": 5.0, "retries": 7, "timeout_factor": 2.0, "isolate": True}}, True),
        ({"runtime": {"start_timeout_s": 5.0}}, True),
        ({"runtime": {"threads_per_rank": 2}}, False),
        ({"num_sm": 5}, False),
        ({"workload": {"repeats": 5}}, False),
    ],
)
def test_another_configuration_is_measured_how_it_is_run_does_not_matter(
    tmp_path: Path, changes: dict[str, Any], kept: bool
) -> None:
    write_result(tmp_path, result_of(operator_point()))
    assert (kept_result(tmp_path, operator_point(**changes)) is not None) is kept


def test_another_environment_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result(tmp_path, result_of(operator_point()))
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert kept_result(tmp_path, operator_point())
    monkeypatch.setenv("NVTE_X", "1")
    assert kept_result(tmp_path, operator_point()) is None


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
