"""Which points share a Slurm job."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.cluster.launcher import adopt
from overlap_sweep.runtime.cluster.packs import LEAST, options_of, pack
from overlap_sweep.runtime.cluster.records import JobRecord
from overlap_sweep.runtime.cluster.slurm import CLUSTER
from overlap_sweep.runtime.jobs import Job
from tests.composed import configuration
from tests.make_point import operator_point

TP_SIZES = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=20)


def job(number: int, tp_size: int = 2, **options: Any) -> Job:
    ours = {"_target_": "x", "points_per_job": 4, "max_jobs": None, "poll_s": 1, "gpus_per_node": "${tp_size}"}
    stock = {"nodes": 1, "tasks_per_node": 1, "timeout_min": 60, "signal_delay_s": 120}
    unset = dict.fromkeys(("gres", "gpus_per_task", "cpus_per_gpu", "cpus_per_task"))
    config = OmegaConf.create({"tp_size": tp_size, "hydra": {"launcher": {**ours, **stock, **unset, **options}}})
    return Job(number, [], config, operator_point(tp_size=tp_size), Path(f"/sweep/{number}"))


@settings(max_examples=50)
@given(TP_SIZES, st.integers(1, 10), st.none() | st.integers(1, 5))
def test_each_point_is_in_one_pack_of_its_like(tp_sizes: list[int], points_per_job: int, max_jobs: int | None) -> None:
    jobs = [
        job(number, tp_size, points_per_job=points_per_job, max_jobs=max_jobs)
        for number, tp_size in enumerate(tp_sizes)
    ]
    packs = pack(CLUSTER, jobs)
    for each in packs:
        assert {one.point["tp_size"] for one in each.jobs} == {each.options["gpus_per_node"]}
        assert not each.options.keys() & {*LEAST, "_target_"}
    for tp_size in set(tp_sizes):
        alike = [[int(one.name) for one in each.jobs] for each in packs if each.options["gpus_per_node"] == tp_size]
        in_order = [number for number, size in enumerate(tp_sizes) if size == tp_size]
        assert [number for numbers in alike for number in numbers] == in_order
        # No more jobs than may be; longer ones than asked for only where that would make more.
        assert len(alike) == min(math.ceil(len(in_order) / points_per_job), max_jobs or len(in_order))
        lengths = [len(numbers) for numbers in alike]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1


def test_points_of_other_options_don_t_share_a_job() -> None:
    packs = pack(CLUSTER, [job(0, partition="a"), job(1, partition="b"), job(2, partition="a")])
    assert [([one.name for one in each.jobs], each.options["partition"]) for each in packs] == [
        (["0", "2"], "a"),
        (["1"], "b"),
    ]


@pytest.mark.parametrize(("option", "value"), [("points_per_job", 0), ("max_jobs", 0), ("poll_s", 0), ("poll_s", -1)])
def test_options_out_of_range_are_named(option: str, value: int) -> None:
    with pytest.raises(UserError, match=f"hydra.launcher.{option}={value} is out of range; give "):
        pack(CLUSTER, [job(0, **{option: value})])


def asked_for(*overrides: str) -> dict[str, Any]:
    """The options of one point's job, as launch.py composes them."""
    config = configuration(*overrides)
    HydraConfig.instance().set_config(config)
    common, own = options_of(CLUSTER, Job(0, [], config, {}, Path("/sweep/0")))
    return {**own, **common._asdict(), "_target_": config.hydra.launcher._target_}


@pytest.mark.parametrize(
    ("overrides", "gpus", "cpus"),
    [
        ((), 2, 4),
        (("tp_size=4", "runtime.device=cuda"), 4, 8),
        (("tp_size=4", "runtime.device=cpu", "runtime.threads_per_rank=3"), None, 24),
        (("tp_size=2", "workload=layer", "layer.num_replicas=4"), 8, 16),
        (("tp_size=2", "layer.num_replicas=4"), 2, 4),
        (("tp_size=2", "hydra.launcher.gpus_per_node=4", "hydra.launcher.cpus_per_task=7"), 4, 7),
    ],
)
def test_a_job_asks_for_what_its_points_need(overrides: tuple[str, ...], gpus: int | None, cpus: int) -> None:
    options = asked_for("hydra/launcher=slurm", *overrides)
    assert (options["gpus_per_node"], options["cpus_per_task"]) == (gpus, cpus)
    assert (options["points_per_job"], options["max_jobs"]) == (32, 8)


def test_the_stock_launchers_name_gives_each_point_a_job_of_ours() -> None:
    options, ours = (
        asked_for(f"hydra/launcher={launcher}", "hydra.sweep.dir=swept") for launcher in ("submitit_slurm", "slurm")
    )
    classes = [found.pop("_target_").rpartition(".")[2] for found in (options, ours)]
    assert classes == ["ClusterLauncher", "ClusterLauncher"]
    assert options == {**ours, "points_per_job": 1, "max_jobs": None}


def test_a_launch_takes_over_the_points_of_a_living_job_that_it_asks_for(tmp_path: Path) -> None:
    jobs = [replace(job(number), directory=tmp_path / f"sm{number}") for number in (1, 2, 3)]
    record = JobRecord("7", {one.name: one.key for one in jobs}, str(tmp_path / "7_0_log.err"))
    for asked in (jobs, jobs[:2]):
        (adopted,) = adopt(CLUSTER, [record], asked).values()
        assert adopted.pack.jobs == asked
        assert adopted.has_others is (asked != jobs)
    (adopted,) = adopt(CLUSTER, [record], jobs[:2], {"sm3"}).values()
    assert not adopted.has_others, "the third has a result"
    other = replace(jobs[0], point=operator_point(num_sm=77))
    with pytest.raises(UserError, match="measures sm1 with a different configuration"):
        adopt(CLUSTER, [record], [other])
