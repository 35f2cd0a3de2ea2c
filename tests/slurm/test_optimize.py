"""`overlap-sweep optimize` through a real Slurm."""

import sys
from pathlib import Path

import msgspec
import pytest

from overlap_sweep.optimizer.answer import Answer
from overlap_sweep.results.run_directory import RESULT_FILE, log_file, read_result
from tests.optimizer.training import optimizing
from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--node-rank={node}"),
    *("--master-addr={host}", "--master-port={port}", "train.py"),
)


def test_a_training_on_two_nodes_is_optimized_in_jobs_of_both(slurm: Slurm, tmp_path: Path) -> None:
    cluster = ("hydra/launcher=slurm", "hydra.launcher.poll_s=0.5", "hydra.launcher.gpus_per_node=null")
    options = ("--runs=4", "--format=json", *cluster, "runtime.nodes=2")
    with optimizing(tmp_path, *options, environment=slurm.environment, command=TORCHRUN) as process:
        stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    answer = msgspec.json.decode(stdout, type=Answer)
    by_settings = {tuple(one.settings.items()): one for one in answer.trials}
    slower = by_settings[("test.a_ms", 90),].gain
    assert slower is not None
    assert slower < -1
    runs = [path.parent for path in (tmp_path / "found").glob("*/result.json")]
    assert len(runs) == answer.runs == 4
    for run in runs:
        assert len(read_result(run / RESULT_FILE).environment["hosts"]) == 2
        assert all((run / log_file(node)).exists() for node in range(2))
