"""What launch.py shows without measuring, and what it refuses before anything is started."""

import copy
import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from overlap_sweep import workloads
from overlap_sweep.config import ModelConfig
from overlap_sweep.errors import NodeLost, UserError
from overlap_sweep.runtime import group_config, jobs, point
from overlap_sweep.runtime.jobs import Job, distinct
from overlap_sweep.runtime.outcome import Outcomes
from tests.composed import composed, multirun
from tests.sweeps import ROOT, Launch, launch_here


def test_cfg_job_shows_the_composed_configuration() -> None:
    shown = yaml.safe_load(launch_here("--cfg", "job", "tp_size=8", "num_sm=37", "method=pipeline").stdout)
    assert (shown["tp_size"], shown["num_sm"], shown["method"], shown["num_splits"]) == (8, 37, "pipeline", 4)
    assert shown["model"]["hidden_size"] == 1024


def test_configurations_share_nothing_although_hydra_does_not_copy_what_is_registered() -> None:
    changed, untouched, again = (multirun.__wrapped__()[1] for _ in range(3))
    changed.model.hidden_size, changed.workload.tokens = 7, 8
    # As they are: resolved they name the second in which that was.
    assert OmegaConf.to_container(again) == OmegaConf.to_container(untouched)
    assert copy.deepcopy(ConfigStore.instance()) is ConfigStore.instance()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("tp_size=2", "runtime.device=auto"), "tp_size=2 needs 2 GPUs, but 1 are visible"),
        (
            ("tp_size=2", "workload=layer", "layer.num_replicas=2", "runtime.device=cuda"),
            "tp_size=2 with layer.num_replicas=2 needs 4 GPUs, but 1 are visible",
        ),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(point, "visible_gpus", lambda: 1)
    with pytest.raises(UserError, match=says):
        composed(*overrides)


PRESETS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml") if path.stem != "hf")


WITH_MODEL = [name for name in workloads.names() if issubclass(workloads.schema(name), ModelConfig)]


@pytest.mark.parametrize("workload", WITH_MODEL)
def test_what_a_preset_says_is_refused_by_no_workload(workload: str) -> None:
    for name in PRESETS:
        if workload != "tp_training" or "architecture" in (ROOT / f"conf/model/{name}.yaml").read_text():
            # The only operator that all of them have.
            operator = ["operator=proj"] if workload == "kernel" else []
            found = composed(f"workload={workload}", f"model={name}", "runtime.device=cpu", *operator)
            assert found["workload"]["name"] == workload


def test_a_key_of_model_that_a_file_of_ones_own_gives_in_vain_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmodel:\n  num_layers: 1\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text((ROOT / "conf/model/qwen3_tiny.yaml").read_text())
    search = f"hydra.searchpath=[file://{tmp_path}]"
    composed(search, "model=own", "runtime.device=cpu")
    with pytest.raises(UserError, match=r"does not use model\.num_layers=1;"):
        composed(search, "model=own", "+experiment=mine", "runtime.device=cpu")


def test_a_refused_start_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "earlier" / ".hydra").mkdir(parents=True)
    done = launch_here("-m", "num_sm=2,0", "hydra/launcher=basic", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["earlier", ".hydra"]


def test_layers_that_cannot_run_on_a_cpu_are_skipped_with_the_reason(tmp_path: Path) -> None:
    backends = "backend=transformer_engine,megatron,torch"
    given = ("workload=layer", backends, "layer.variants=[none,default]", "runtime.device=cpu")
    done = launch_here("-m", *given, f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=${backend}")
    results = Launch(tmp_path).results()
    for name, says in {
        "transformer_engine": "transformer_engine",
        "megatron": "backend=megatron has no whole layers",
        "torch": "default: backend=torch has no default overlap of its own",
    }.items():
        assert results[name].status == "skipped"
        assert says in str(results[name].error)
        assert says in done.stderr
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("workers.log"))


def test_a_python_without_torch_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    group_config.check_torch()
    monkeypatch.setattr(group_config, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"PyTorch is not installed for .*; pip install 'overlap-sweep\[torch\]'"):
        group_config.check_torch()


def test_a_point_that_is_given_twice_runs_once_where_it_was_first_asked_for() -> None:
    """In the order in which they were asked for: with profile=best, what was measured before decides."""
    empty = OmegaConf.create({})
    jobs = [Job(number, [], empty, {}, Path(name)) for number, name in enumerate("abcbda")]
    assert [(job.number, job.directory.name) for job in distinct(jobs)] == [(0, "a"), (1, "b"), (2, "c"), (4, "d")]


def test_two_points_that_differ_share_no_directory() -> None:
    empty = OmegaConf.create({})
    jobs = [Job(number, [], empty, {"num_sm": number}, Path("a")) for number in (3, 4)]
    with pytest.raises(UserError, match="Jobs 3 and 4 of the sweep differ but would both be written to a; set"):
        distinct(jobs)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NodeLost("node 1 (h2) does not answer any more"), "node 1 (h2) does not answer any more"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some space there"),
    ],
)
def test_a_point_that_is_given_up_keeps_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError, said: str
) -> None:
    monkeypatch.setattr(jobs, "outcomes", found := Outcomes())
    monkeypatch.setattr(jobs, "job_return", lambda job, result: job)
    job = Job(0, [], OmegaConf.create({}), {}, tmp_path / "point")
    jobs.run_jobs(Mock(spec=jobs.Sweep, run=Mock(side_effect=error)), [job])
    assert said in found.given_up[job.directory]
    assert (str(job.directory) in found.given_up[job.directory]) == (error.errno is not None)
