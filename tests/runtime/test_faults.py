"""What happens to one point stays with it, and no process outlives the sweep."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from overlap_sweep.runtime.devices import visible_gpus
from tests.sweeps import SMALL, Launch, wait_for

pytestmark = pytest.mark.faults

LONG = (*SMALL[:1], "workload.tokens=32", "workload.repeats=1000", "profile=none")


def test_ctrl_c_keeps_results_and_leaves_no_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    process = launch.start("-m", "num_sm=1,2,3,4,5,6,7,8", *SMALL)
    wait_for(lambda: list(tmp_path.glob("*/result.json")))
    assert launch.workers()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finished results are kept" in stderr
    assert "Traceback" not in stderr
    assert launch.processes() == {}
    results = launch.results()
    assert results
    assert all(result.status == "ok" for result in results.values())


def test_a_sweep_leaves_nothing_in_the_temporary_directory(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = Launch(tmp_path / "runs", {"TMPDIR": str(temporary)}).run("method=none", "tp_size=2", *SMALL)
    assert done.returncode == 0, done.stderr
    # The cache of torch's compiler is for every later process too.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_a_killed_launcher_or_agent_leaves_no_process(tmp_path: Path, victim: str) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    launch = Launch(tmp_path / "runs", {"TMPDIR": str(temporary)})
    process = launch.start(*LONG, "runtime.retries=0")
    wait_for(launch.workers)
    if victim == "launcher":
        process.kill()
    else:
        (agent,) = (pid for pid, command in launch.processes().items() if "runtime.agent" in command)
        os.kill(agent, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: not launch.processes(), 20)
    assert not list(temporary.glob("overlap_sweep_*"))
    if victim == "agent":
        (result,) = launch.results().values()
        assert result.status == "failed"


def test_a_killed_worker_fails_its_point_only(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    process = launch.start("-m", "num_sm=1,2", *LONG[:-2], "workload.repeats=60", "runtime.retries=0")
    wait_for(lambda: list(tmp_path.glob("*_sm1*/worker.log")))
    os.kill(launch.workers()[0], signal.SIGKILL)
    stdout, _ = process.communicate(timeout=120)
    results = {result.point["num_sm"]: result for result in launch.results().values()}
    assert (results[1].status, results[2].status) == ("failed", "ok"), stdout
    assert "died" in str(results[1].error)
    assert process.returncode == 1
    assert "1 ok, 1 failed" in stdout
    assert launch.processes() == {}


def test_a_killed_worker_s_point_is_tried_again_by_itself(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    process = launch.start("-m", "num_sm=1,2", *LONG[:-2], "workload.repeats=60")
    wait_for(lambda: list(tmp_path.glob("*_sm1*/worker.log")))
    os.kill(launch.workers()[0], signal.SIGKILL)
    stdout, _ = process.communicate(timeout=120)
    results = {result.point["num_sm"]: result for result in launch.results().values()}
    assert (results[1].status, results[2].status) == ("ok", "ok"), stdout
    (earlier,) = results[1].earlier_attempts
    assert (earlier.status, results[2].earlier_attempts) == ("failed", [])
    assert "died" in earlier.error
    assert process.returncode == 0
    assert "2 ok; analyse" in stdout
    assert launch.processes() == {}


def test_wrong_numbers_fail_the_point_whatever_its_speed(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    # A ring adds in another order than gloo does, and no tolerance forgives that.
    strict = launch.run("-m", "tp_size=4", "operator=proj", "method=ring_exchange", "workload.tolerance=0", *SMALL)
    (result,) = launch.results().values()
    assert result.status == "failed"
    assert "wrong numbers" in str(result.error)
    assert {"output", "input_grad", "weight_grad"} <= set(result.relative_error)
    assert 0 < (result.relative_error["output"] or 0) < 1e-5
    assert result.times == {}
    assert strict.returncode == 1
    assert (tmp_path / result.name / "worker.log").exists()


def test_after_wrong_numbers_the_sweep_goes_on_in_the_same_group(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    # Without overlap the point is its own reference, so that no tolerance is needed.
    done = launch.run(
        "-m", "num_sm=1,2", "method=none,ring_exchange", "tp_size=4", "operator=proj", "workload.tolerance=0", *SMALL
    )
    assert done.returncode == 1
    lines = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("[") and "/4]" in line]
    assert [status for status, _ in lines] == ["ok", "failed", "ok", "failed"]
    results = launch.results()
    assert all("wrong numbers" in str(result.error) for result in results.values() if result.status == "failed")
    # What depends on no setting is measured once per group.
    first, second = (results[name].times["fwd"].tp1 for status, name in lines if status == "ok")
    assert first == second


def test_a_group_that_cannot_start_fails_the_point_with_the_reason(tmp_path: Path) -> None:
    launch = Launch(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    if visible_gpus():
        pytest.skip("needs a machine without a GPU")
    done = launch.run("tp_size=1", "method=none")
    (result,) = launch.results().values()
    assert result.status == "failed"
    assert "this torch sees no GPU" in str(result.error).splitlines()[0]
    assert "this torch sees no GPU" in done.stdout
    assert done.returncode == 1


def test_a_hanging_point_times_out_and_the_sweep_goes_on(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    process = launch.start(
        "-m", "num_sm=1,2", "runtime.timeout_s=10", "runtime.retries=0", *LONG[:-2], "workload.repeats=60"
    )
    wait_for(lambda: list(tmp_path.glob("*_sm1*/worker.log")))
    os.kill(launch.workers()[1], signal.SIGSTOP)
    stdout, _ = process.communicate(timeout=120)
    results = {result.point["num_sm"]: result for result in launch.results().values()}
    assert (results[1].status, results[2].status) == ("timeout", "ok"), stdout
    assert "in 10 s" in str(results[1].error)
    assert process.returncode == 1
    assert launch.processes() == {}
