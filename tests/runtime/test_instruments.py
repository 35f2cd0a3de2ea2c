"""Points that are looked into: what their workers are given, what is refused, and that their times are not compared."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.results.points import read_points
from overlap_sweep.runtime.group_config import GroupConfig, check_instruments, environment_of
from overlap_sweep.runtime.kept import remember
from overlap_sweep.store import read_store
from tests.composed import configuration
from tests.make_point import make_point, resolved
from tests.sweeps import SMALL, Launch

LAYER = ("workload=layer", "tp_size=2", "model=llama3_8b", *SMALL)


def point(workload: str = "operator", profile: str = "all", device: str = "cuda", **runtime: Any) -> dict[str, Any]:
    changes = {f"runtime.{name}": value for name, value in runtime.items()}
    return resolved(workload, profile=profile, device=device, **changes)


def test_debugging_has_libraries_print_unless_the_user_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    environment = environment_of(point(debug=True, ub_timeout_s=20))
    assert {"NVTE_UBDEBUG": "1", "NVTE_DEBUG_LEVEL": "2", "NCCL_DEBUG": "WARN", "UB_TIMEOUT": "20"}.items() <= (
        environment.items()
    )
    assert "NVTE_NVTX_ENABLED" not in environment
    assert environment_of(point(nsys=True))["NVTE_NVTX_ENABLED"] == "1"
    assert "UB_TIMEOUT" not in environment_of(point())
    monkeypatch.setenv("UB_TIMEOUT", "600")
    assert environment_of(point())["UB_TIMEOUT"] == "600"


def test_a_debugged_point_has_workers_of_its_own() -> None:
    assert GroupConfig.of(point(debug=True)) != GroupConfig.of(point()) == GroupConfig.of(point(debug=False))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (point(device="cpu", nvtx=True), "leave it out with runtime.device=cpu"),
        (point(profile="none", nsys=True), "profile=none"),
        (point("job", nsys=True), "workload=job starts processes of its own"),
    ],
)
def test_what_would_record_nothing_is_refused(refused: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_instruments(refused)
    check_instruments(point(nsys=True, nvtx=True))
    check_instruments(point("job", debug=True))


@pytest.mark.parametrize("option", ["debug", "nvtx", "nsys"])
def test_its_times_are_neither_compared_nor_stored(option: str, tmp_path: Path) -> None:
    for name, runtime in (("usual", {}), ("looked_into", {option: True})):
        make_point("operator", tmp_path / "runs", point(**runtime), name=name)
    looked_into, usual = read_points(tmp_path / "runs").points
    assert (usual.status, looked_into.status) == ("ok", "skipped")
    assert looked_into.why_not_ok == f"measured with runtime.{option}=true, which costs time: not compared"
    config = configuration(f"store={tmp_path / 'store'}")
    for one in (usual, looked_into):
        assert one.result
        remember(config, one.result, one.directory)
    assert [kept.result.name for kept in read_store(tmp_path / "store").measurements] == ["usual"]


@pytest.mark.end_to_end
def test_a_debugged_layer_says_what_it_does_and_where_it_was_stopped(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    done = launch.run(*LAYER, "runtime.debug=true", "layer.variants=[none,ring_exchange]")
    assert done.returncode == 0, done.stderr
    assert "runtime.debug=true, which costs time: not compared" in done.stdout
    log = (tmp_path / "single" / "worker.log").read_text()
    for rank in (0, 1):
        own = [line for line in log.splitlines() if line.startswith(f"[rank {rank}, ")]
        assert any("builds transformer_layer ring_exchange" in line for line in own)
        assert any("check: ring_exchange output, turn 1," in line for line in own)
        assert any(f"groups: tensor-parallel [0, 1], data-parallel [{rank}]" in line for line in own)
        # One for each backward pass, and the same for each variant of a turn.
        losses = [line.partition("] ")[2].split()[1] for line in own if "] loss " in line]
        assert len(losses) == sum(" bwd, turn " in line and line.endswith("begins") for line in own)
        assert len(set(losses)) < len(losses) / 2
        assert own[-1].endswith("ends")
    stopped = launch.run(
        *LAYER, "workload.tokens=16384", "model.hidden_size=1024", "runtime.timeout_s=4", "runtime.retries=0"
    )
    assert stopped.returncode == 1
    (result,) = launch.results().values()
    assert result.status == "timeout"
    assert result.error
    assert result.error.splitlines()[1].startswith("rank 0 was in ")
    assert not list((tmp_path / "single").glob(".stacks*"))


PROGRAM = """#!/bin/sh
for argument in "$@"; do echo "$argument"; done > {place}/arguments
while [ "$1" != "{python}" ]; do
    case "$1" in --output=*) echo report > "${{1#--output=}}.nsys-rep" ;; esac
    shift
done
"$@"
"""


@pytest.mark.end_to_end
def test_workers_run_under_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a stand-in for the program, which stays beside its command."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "nsys").write_text(PROGRAM.format(place=shlex.quote(str(place)), python=sys.executable))
    (place / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    launch = Launch(tmp_path / "runs")
    done = launch.run(*LAYER, "runtime.nsys=true", "runtime.nsys_args='--trace=nvtx,osrt --stats=true'")
    assert done.returncode == 0, done.stderr
    asked = (place / "arguments").read_text().splitlines()
    report = launch.directory / "single" / "nsys_%h"
    assert asked[:3] == ["profile", "--kill=none", f"--output={report}"]
    assert asked[3:6] == ["--force-overwrite=true", "--trace=nvtx,osrt", "--stats=true"]
    assert report.with_name("nsys_%h.nsys-rep").exists()
    (result,) = launch.results().values()
    # Only on GPUs do the two profilers exclude each other.
    assert result.traces
    assert launch.processes() == {}


def test_nsys_records_the_profiled_passes_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = GroupConfig.of(point(nsys=True), tmp_path).wrapper
    assert words[:4] == ("nsys", "profile", "--capture-range=cudaProfilerApi", "--capture-range-end=repeat")
    both = point("fsdp", nsys=True)
    both.profiling.rocprofv3 = True
    with pytest.raises(UserError, match="nsys=true and rocprofv3 would both start the workers"):
        GroupConfig.of(both, tmp_path)
