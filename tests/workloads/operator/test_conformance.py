"""What every workload is asked for: points that say what they are, and results of real ranks that fit the record."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import workloads
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.results.registry import decoded_point, types_of
from overlap_sweep.results.run_directory import RESULT_FILE, Result, read_result, write_result
from overlap_sweep.runtime.group_config import environment_of
from tests.composed import TINY_FSDP, TINY_MODEL, TINY_OPTIONS, composed
from tests.processes import run_ranks
from tests.sweeps import ROOT

QUICK = ("runtime.device=cpu", "workload.tokens=16", "workload.repeats=3", "workload.warmup=1", "workload.profiled=1")
OPERATOR = ("tp_size=2", *TINY_MODEL, *QUICK, "profile=all")
ASKED: dict[str, tuple[str, ...]] = {
    "operator": ("workload=operator", "operator=fc1", "method=bulk", "num_sm=2", *OPERATOR),
    "layer": ("workload=layer", "layer.variants=[none,bulk]", *OPERATOR),
    "kernel": (
        *("workload=kernel", "kernel=gemm_rs", "m=16", "n=24", "k=32", "implementations=[ring]"),
        *("tp_size=2", "profile=all", "runtime.device=cpu", "iters=3", "warmup_iters=1"),
    ),
    "fsdp": (*TINY_FSDP, "profiling.enabled=true", "profiling.active=1"),
    "copy_engine": (
        *("workload=copy_engine", "copy_engine.matrix_size=32", "copy_engine.copy_mb=0.25", "profile=all"),
        *("runtime.device=cpu", "copy_engine.direction=device_to_device", "workload.repeats=3"),
    ),
    "tp_training": (*TINY_OPTIONS, *TINY_MODEL, "profile=all", "tp_training.num_training_steps=3"),
    "job": (
        *("workload=job", f"job.command='torchrun --standalone {ROOT / 'docs/train.py'} --size 32'", "profile=all"),
        *("runtime.device=cpu", "job.tokens_per_step=64", "job.skip_steps=1", "job.steps=3", "job.profile_steps=1"),
    ),
}


def test_every_workload_is_asked() -> None:
    assert set(ASKED) == set(workloads.names())


@pytest.mark.parametrize("name", workloads.names())
def test_a_point_is_completed_to_plain_data_that_stays_as_it_is(name: str) -> None:
    point = composed(*ASKED[name])
    assert composed(*ASKED[name]) == point
    recorded = decoded_point(json.loads(json.dumps(dict(point))))
    assert recorded == point
    assert point.workload.name == name
    assert point.backend != "auto"
    assert workloads.of(point).refusal(point) is None
    for config in workloads.of(point).overlap_configs(point).values():
        assert isinstance(config, OverlapConfig)
    assert key_of(point_identity(recorded)) == key_of(point_identity(point))


@pytest.mark.parametrize("name", workloads.names())
def test_a_point_of_another_size_is_another_point(name: str) -> None:
    other = {
        "kernel": "m=32",
        "fsdp": "training.batch_size=4",
        "copy_engine": "copy_engine.copy_mb=0.5",
        "tp_training": "tp_training.batch_size=4",
        "job": "job.tokens_per_step=128",
    }
    changed = [option for option in ASKED[name] if not option.startswith("m=")]
    points = [composed(*ASKED[name]), composed(*changed, other.get(name, "workload.tokens=32"))]
    assert points[0]["workload"].get("tokens") != points[1]["workload"].get("tokens") or name in ("copy_engine", "job")
    assert len({key_of(point_identity(point)) for point in points}) == 2
    assert len({point.world_size for point in points}) == 1


def _run(ranks: Ranks, point: dict[str, Any], directory: Path) -> dict[str, Any]:
    run = workloads.of(point).run
    assert run
    return run(point, directory, ranks)


@pytest.mark.parametrize("name", workloads.names())
def test_a_run_returns_the_fields_of_a_result_alike_on_all_ranks(name: str, tmp_path: Path) -> None:
    point = composed(*ASKED[name])
    if here := workloads.load(name).run_here:
        environment = {**environment_of(point), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        by_rank = [here(point, tmp_path, workloads.Here(environment=environment, limit_s=60.0))]
    else:
        by_rank = run_ranks(point.world_size, _run, point, tmp_path, keep="cpu")
    fields = by_rank[0]
    assert set(fields) <= set(Result.__struct_fields__)
    assert isinstance(fields["measured"], types_of(name).measured)
    assert fields["objective_us"] > 0
    assert fields["traces"]
    assert all((tmp_path / trace).stat().st_size > 500 for trace in fields["traces"])
    for other in by_rank[1:]:
        assert (other["objective_us"], set(other)) == (fields["objective_us"], set(fields))
    result = Result(name=name, recorded=dict(point), status="ok", **fields)
    write_result(tmp_path, result)
    assert read_result(tmp_path / RESULT_FILE) == result
    assert math.isfinite(result.objective_us or math.nan)
