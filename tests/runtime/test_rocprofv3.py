"""Workers under a stand-in for AMD's rocprofv3: a program in PATH that writes when the processes under it end."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import gpus
from overlap_sweep.errors import UserError
from overlap_sweep.runtime.group_config import GroupConfig, check_wrapper
from overlap_sweep.runtime.point import resolve
from tests.composed import composed, configuration
from tests.make_point import operator_config
from tests.sweeps import Launch

pytestmark = pytest.mark.end_to_end

FSDP = (
    *("workload=fsdp", "model=ranking_tiny", "runtime.device=cpu", "profile=none", "training.max_steps=2"),
    *("ranking.num_layers=1", "ranking.sequence_length=4", "ranking.num_sparse_features=2"),
    *("training.batch_size=1", "workload.repeats=3"),
)
COPIES = (
    *("workload=copy_engine", "runtime.device=cpu", "profile=none", "copy_engine.matrix_size=64"),
    *("copy_engine.copy_mb=0.5", "copy_engine.iterations=3"),
)
PROGRAM = """#!/bin/sh
for argument in "$@"; do echo "$argument"; done > {place}/arguments
while [ "$1" != -- ]; do
    [ "$1" = -d ] && output=$2
    shift
done
shift
mkdir -p "$output"
export PROFILER_OUTPUT="$output" PYTHONPATH="{place}:$PYTHONPATH"
exec "$@"
"""
# As the library that rocprofv3 has every process load: it writes when the process exits as usual.
LOADED = """
import atexit, os, pathlib

@atexit.register
def write():
    if "RANK" in os.environ:
        pathlib.Path(os.environ["PROFILER_OUTPUT"], f"rank{os.environ['RANK']}.csv").write_text("kernels")
"""


@pytest.fixture
def rocprofv3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs it. Returns the file in which it notes its arguments."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    (place / "rocprofv3").write_text(PROGRAM.format(place=shlex.quote(str(place))))
    (place / "rocprofv3").chmod(0o755)
    (place / "sitecustomize.py").write_text(LOADED)
    return place / "arguments"


def point(*overrides: str, arguments: str = "--kernel-trace", profiled: bool = True) -> Any:
    """As it is completed."""
    found: Any = composed(*FSDP, *overrides)
    found.profiling.rocprofv3, found.profiling.rocprofv3_args = profiled, arguments
    return found


@pytest.mark.parametrize(("workload", "ranks"), [(FSDP, 2), (COPIES, 1)], ids=["fsdp", "copy_engine"])
def test_a_profiled_points_group_runs_under_it_and_what_it_writes_at_the_end_is_kept(
    rocprofv3: Path, tmp_path: Path, workload: tuple[str, ...], ranks: int
) -> None:
    launch = Launch(tmp_path / "runs")
    given = ("profiling.rocprofv3=true", "profiling.rocprofv3_args='--kernel-trace --name \"a b\"'")
    done = launch.run(*workload, *given)
    assert done.returncode == 0, done.stderr
    asked = rocprofv3.read_text().splitlines()
    output = launch.directory / "single" / "rocprofv3"
    assert asked[:2] == ["--output-format", "json"]
    assert asked[2:8] == ["--kernel-trace", "--name", "a b", "-d", str(output), "--"]
    assert asked[9:11] == ["-m", "overlap_sweep.runtime.agent"]
    assert sorted(path.name for path in output.iterdir()) == [f"rank{rank}.csv" for rank in range(ranks)]
    (result,) = launch.results().values()
    assert result.measured
    assert result.recorded["profiling"]["rocprofv3"]
    assert launch.processes() == {}


def test_each_profiled_point_has_a_group_of_its_own(tmp_path: Path) -> None:
    assert GroupConfig.of(point(), tmp_path / "a") != GroupConfig.of(point(), tmp_path / "b")
    assert GroupConfig.of(operator_config(), tmp_path / "a") == GroupConfig.of(operator_config(), tmp_path / "b")


def test_what_cannot_be_started_is_an_error_of_the_user_unless_the_launcher_only_hands_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="rocprofv3_args cannot be split"):
        check_wrapper(point(arguments="--name 'a"))
    check_wrapper(point(arguments="--name 'a", profiled=False))
    check_wrapper(operator_config())
    config = configuration(*FSDP, "profiling.rocprofv3=true")
    with pytest.raises(UserError, match="requires rocprofv3 in PATH"):
        resolve(config)
    monkeypatch.setattr(gpus, "_elsewhere", True)
    assert resolve(config)["profiling"]["rocprofv3"]
