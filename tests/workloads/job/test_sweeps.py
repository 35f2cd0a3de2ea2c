"""Sweeps over commands by launch.py: points that fail or hang, launchers that are stopped, and a real training."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins.overlap_sweep_config import GridSweeper
from overlap_sweep.recorder.recording import STEPS_FILE
from overlap_sweep.results.run_directory import RESULT_FILE, Result, find_points, read_result
from overlap_sweep.workloads.job.result import JobRun
from tests.sweeps import Launch, launch_here, wait_for
from tests.workloads.job.commands import recorded, recording

TRAIN = """
import os, sys, time
import torch
from torch import nn
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10**6):
    optimizer.zero_grad()
    model(torch.randn(32, 256)).square().mean().backward()
    time.sleep(float(os.environ.get("SLEEP_S", "0")))
    optimizer.step()
    print("step", step, flush=True)
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={{ranks}}"


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    """The arguments that train on two ranks."""
    (tmp_path / "train.py").write_text(TRAIN)
    return ["workload=job", f"job.command='{TORCHRUN} {tmp_path}/train.py'", "job.ranks=2", "runtime.device=cpu"]


def results(directory: Path) -> dict[str, Result]:
    """By the value of `how`."""
    found = [read_result(path / RESULT_FILE) for path in find_points(directory)]
    return {one.recorded["job"]["values"]["how"]: one for one in found}


@pytest.mark.end_to_end
def test_a_sweep_goes_on_after_points_that_fail_and_hang(tmp_path: Path) -> None:
    record = recorded(tmp_path / "made", recording()).replace("{run}", '"$2"')
    script = f"""
echo "trained with $1"
case $1 in
    fails) exit 3 ;;
    hangs) sleep 600 & wait ;;
    flaky) test -e {tmp_path}/before || {{ touch {tmp_path}/before; exit 4; }} ;;
    early) exit 0 ;;
esac
{record}
sleep 600
"""
    (tmp_path / "train.sh").write_text(script)
    command = ("-m", "workload=job", f"job.command='sh {tmp_path}/train.sh {{how}} {{run}}'", "job.steps=4")
    every = (*command, "+job.values.how=fails,hangs,early,flaky,well", "runtime.timeout_s=2")
    launched = launch_here(*every, f"hydra.sweep.dir={tmp_path}/sweep")
    assert launched.returncode == 1, launched.stderr
    found = results(tmp_path / "sweep")
    attempts = {how: (one.status, [a.status for a in one.earlier_attempts]) for how, one in found.items()}
    assert attempts == {
        "fails": ("failed", ["failed"]),
        "hangs": ("timeout", ["timeout"]),
        "early": ("failed", []),
        "flaky": ("ok", ["failed"]),
        "well": ("ok", []),
    }
    for how in ("fails", "hangs", "early"):
        assert f"trained with {how}" in (found[how].error or "")
    assert "exit status 4" in found["flaky"].earlier_attempts[0].error
    # Only what is not measured yet is tried again.
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").glob("*/result.json")}
    again = launch_here(*every, f"resume={tmp_path}/sweep")
    assert again.returncode == 1, again.stderr
    kept = {path.parent.name for path, at in written.items() if path.stat().st_mtime_ns == at}
    assert kept == {found["flaky"].name, found["well"].name}


@pytest.mark.end_to_end
def test_several_arguments_are_one_value_as_the_hint_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('tps: 5\\n' * 5, 'given', *sys.argv[1:])\n")
    command = ("-m", "workload=job", "job.attach=false", f"job.command='{sys.executable} {tmp_path}/train.py {{how}}'")
    typed = (*command, "runtime.device=cpu", "job.metric='tps: (.)'", "job.skip_steps=1", "job.steps=4", "report=false")
    refused = launch_here(*typed, "+job.values.how=--a=4 --b=16,--a=32 --b=2", f"hydra.sweep.dir={tmp_path}/0")
    assert "cannot be parsed" in refused.stderr
    several, single = re.findall("'[+]job.*?'", refused.stderr)
    given = []
    for hint in (several, single):
        (word,) = shlex.split(hint)
        directory = tmp_path / str(len(given))
        launched = launch_here(*typed, word, f"hydra.sweep.dir={directory}")
        assert launched.returncode == 0, launched.stderr
        logs = [path.read_text() for path in directory.glob("*/worker.log")]
        given.append({line.strip() for log in logs for line in log.splitlines() if "given" in line})
    assert given == [{"given --a=4 --b=16", "given --a=32 --b=2"}, {"given --a=4 --b=16,--a=32 --b=2"}]


@pytest.mark.end_to_end
def test_a_training_that_knows_nothing_of_it_is_measured(tmp_path: Path, training: list[str]) -> None:
    launched = launch_here(*training, "job.samples_per_step=64", f"hydra.run.dir={tmp_path}/point")
    assert launched.returncode == 0, launched.stderr
    result = read_result(tmp_path / "point" / RESULT_FILE)
    found = result.measured_as(JobRun)
    assert (len(found.step.samples_us), found.timed_by, found.calls_per_step) == (20, "host", 1)
    assert result.traces == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
    assert result.warnings == []
    assert found.profiled_us
    assert found.exposed_comm_us
    assert found.exposed_comm_us <= found.profiled_us
    # A median of its own: on a busy machine it may exceed that of the steps.
    (group,) = found.groups
    assert group.exposed_us > 0
    assert result.environment["torch"]
    assert (tmp_path / "point" / STEPS_FILE).exists()
    # What torchrun prints when it is ended is left out.
    *said, ended = (tmp_path / "point" / "worker.log").read_text().splitlines()
    assert not [line for line in said if "torch/distributed/elastic" in line]
    assert ended.startswith("overlap_sweep: ")


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_stopped_leaves_no_training(
    tmp_path: Path, training: list[str], number: signal.Signals
) -> None:
    launch = Launch(tmp_path / "sweep")
    # So that it trains for as long as it is let.
    process = launch.start("-m", *training, "job.skip_steps=1000000", "repetition=0,1")
    log = tmp_path / "sweep"
    wait_for(lambda: any("step 3" in path.read_text() for path in log.glob("*/worker.log")), 120)
    ranks = [pid for pid, command in launch.processes("RANK=1").items() if "train.py" in command]
    assert ranks
    told = time.monotonic()
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    wait_for(lambda: not launch.processes(), 20)
    assert time.monotonic() - told < 15
    assert launch.results() == {}
    assert "Traceback" not in stderr
    status = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 128 + 15}[number]
    assert process.returncode == status


@pytest.mark.parametrize("typed", [["+job.values.a=1,2", "repetition=0,1"], ["repetition=0,1", "+job.values.a=1,2"]])
def test_settings_take_turns_wherever_the_repetition_was_written(typed: list[str]) -> None:
    # Without its constructor: tests that let Hydra look for plugins load the class again that it calls.
    sweeper = GridSweeper.__new__(GridSweeper)
    sweeper.config = OmegaConf.create({"workload": {"name": "job"}})
    (batch,) = sweeper.split_arguments(OverridesParser.create().parse_overrides(typed), None)
    assert batch == [[f"repetition={turn}", f"+job.values.a={value}"] for turn in (0, 1) for value in (1, 2)]
