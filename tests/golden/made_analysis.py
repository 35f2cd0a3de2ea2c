"""Made-up sweeps of kernels, training runs, stacks and copies with what analysis says of answers, ties and doubts, of
points that measured nothing."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from overlap_sweep.results.gain import Gain
from overlap_sweep.results.records import (
    Contribution,
    Expected,
    FailedKnobs,
    Finalist,
    KnobFinal,
    KnobRecord,
    KnobSearch,
    Noises,
    TriedKnobs,
)
from tests.listed_points import write_sweep_of
from tests.made_nodes import write_two_nodes
from tests.make_point import (
    PIPELINE,
    RING,
    implementation,
    kernel_config,
    make_point,
    missing_point,
    operator_config,
    resolved,
    variant,
)
from tests.workloads.fsdp.telemetry_logs import SLOW_DEVICE, record, write_logs, write_run

DATA = Path(__file__).parent.parent / "data"


def write_training(directory: Path) -> None:
    """A case for each doubt; searches of knobs; and recorded runs, one with wrong marks."""
    write_sweep_of("training_doubts", directory)
    write_searches(directory)
    shutil.copytree(DATA / "h200x2_fsdp", directory / "recorded")


def write_searches(directory: Path) -> None:
    """What searches of knobs settled, beside what their points would say: proven, nothing faster, not proven."""
    typed = ["workload=fsdp", "model=ranking", "training.batch_size=64", "profile=none"]
    best, gain = {"fsdp.forward_prefetch": "1"}, Gain(0.2, 0.03)
    known = {
        "label": "ranking fsdp2 step on 4 ranks",
        "knobs": {"fsdp.forward_prefetch": ["false", "1", "2"], "fsdp.limit_all_gathers": ["false", "true"]},
        **{"time_us": 1200.0, "baseline_us": 1500.0},
    }
    told: dict[str, Any] = {
        "contributions": [
            Contribution(key="fsdp.forward_prefetch", baseline="false", value="1", alone=gain, taken_away=None),
            Contribution(key="fsdp.replicas", baseline="1", value="2", alone=None, taken_away=Gain(-0.01, 0.02)),
        ],
        **{"over_none": Gain(-0.002, 0.021), "by_time": True, "host_bound": 2, "notes": ["beware"]},
        **{"refused": {"no such stream": 2}, "left_out": {"fsdp.reduce_dtype": "all are the same here"}},
        "stopped": "search.max_points is used up",
        "tried": [TriedKnobs(changed=best, time_us=1200.0, noise_us=9.0, measurements=1)],
    }
    answers: dict[str, dict[str, Any]] = {
        "proven": {"best": best, "gain": gain, "proven": True, **told},
        "nothing": {"best": {}, "gain": None, "proven": False},
        "unproven": {"best": best, "gain": gain, "proven": False},
    }
    for layers, (name, answer) in enumerate(answers.items(), start=2):
        found = {
            **known,
            **answer,
            "overrides": [*typed, f"ranking.num_layers={layers}"],
            "baseline_points": ["fsdp_0"],
            "best_points": ["fsdp_1" if answer["best"] else "fsdp_0"],
        }
        KnobRecord(searches=[KnobSearch(**found)]).write(directory / name)


def write_stacks(directory: Path) -> None:
    """A case for each answer about stacks, and the end of a search over two stacks."""
    write_sweep_of("stack_answers", directory)
    write_final(directory / "final")


def write_final(directory: Path) -> None:
    """Its winner is not the fastest of all points: that was measured once."""

    def finalist(number: int, impl: str, changed: dict[str, str], time_us: float) -> Finalist:
        return Finalist(
            label=f"model {impl} TP=2 DP=1 step on 2 ranks",
            overrides=["workload=tp_training", f"impl={impl}"],
            points=[f"tp_training_{number}"],
            **{"changed": changed, "time_us": time_us, "noise_us": 90.0, "place": "" if number else "fastest"},
        )

    finalists = [
        finalist(0, "fsdp_dtensor", {"tp_training.sequence_parallel": "true"}, 7_000.0),
        finalist(1, "autotp", {"tp_training.zero_stage": "2"}, 8_000.0),
        finalist(2, "fsdp_dtensor", {}, 9_000.0),
    ]
    left_out = {"model megatron TP=2 DP=1 step on 2 ranks": "impl=megatron requires GPUs"}
    KnobRecord(points=4, finals=[KnobFinal(rounds=2, finalists=finalists, left_out=left_out)]).write(directory)


def write_jobs(directory: Path) -> None:
    """A case for each answer and doubt about jobs, and what a search proved of the last one."""
    write_sweep_of("job_answers", directory)
    names = [f"job_{number}" for number in range(83, 89)]
    knobs = {"+job.values.bucket": ["25", "100", "400"]}
    of_ranks = {"label": "train.py", "overrides": ["workload=job", "job.ranks=16"], "knobs": knobs, "proven": True}
    times = {"time_us": 97_000.0, "baseline_us": 100_000.0, "gain": Gain(0.03, 0.004), "by_time": True}
    search = KnobSearch(
        **of_ranks,
        **times,
        best={"+job.values.bucket": "100"},
        baseline_points=names[:3],
        best_points=names[3:],
        disturbed=Noises(times=0.011, ratios=0.24),
    )
    other = KnobSearch(
        label="train.py", overrides=["workload=job", "job.ranks=32"], knobs=knobs, dropped="too few GPUs"
    )
    KnobRecord(searches=[search, other]).write(directory)


def write_optimized(directory: Path) -> None:
    """A search that expected something of each lever, and proved two of them together."""
    write_sweep_of("optimized", directory)
    bucket, channels, graph = "job.levers.ddp.bucket_cap_mb", "job.levers.nccl.max_ctas", "job.levers.ddp.static_graph"
    compressed, ahead = "job.levers.ddp.compress_bf16", "job.levers.fsdp2.prefetch"
    names = [[f"job_{number}" for number in range(first, first + 4)] for first in (0, 4, 8, 12)]
    best = {bucket: "4", channels: "8"}
    alone = {bucket: Gain(0.05, 0.003), channels: Gain(0.02, 0.004)}
    taken_away = {bucket: Gain(0.046, 0.004), channels: Gain(0.016, 0.004)}
    search = KnobSearch(
        label="train.py on 4 ranks",
        overrides=["workload=job", "job.ranks=4"],
        knobs={
            bucket: ["null", "1", "4"],
            channels: ["null", "8"],
            **{graph: ["null", "true"], compressed: ["null", "true"], ahead: ["null", "2", "1"]},
        },
        **{"best": best, "best_points": names[3], "baseline_points": names[0], "proven": True, "by_time": True},
        **{"time_us": 93_500.0, "baseline_us": 100_000.0, "gain": Gain(0.065, 0.004)},
        contributions=[
            Contribution(key=key, baseline="null", value=value, alone=alone[key], taken_away=taken_away[key])
            for key, value in best.items()
        ],
        **{"points": 19, "settings": 7, "grid": 72},
        notes=[f"{compressed}=true failed: it does not compute the same", f"{ahead}=2 failed: CUDA out of memory"],
        left_out={"job.levers.fsdp2.reshard_after_forward": "true, null are equivalent here"},
        tried=[
            TriedKnobs(changed=changed, time_us=1e5 * (1 - share), noise_us=200.0, measurements=2, **more)
            for changed, share, points in (
                (best, 0.065, names[3]),
                ({bucket: "4"}, 0.05, names[1]),
                ({channels: "8"}, 0.02, names[2]),
                ({}, 0.0, names[0]),
                ({graph: "true"}, -0.001, ["job_16"]),
            )
            for noise in [0.004 if changed == best else 0.003]
            for more in [{"points": points, "gain": Gain(share, noise) if changed else None}]
        ],
        failed=[
            FailedKnobs(changed={compressed: "true"}, reason="it does not compute the same", points=["job_17"]),
            FailedKnobs(changed={ahead: "2"}, reason="CUDA out of memory"),
        ],
        expected={
            f"{bucket}=4": Expected(0.06, 0.04, 0.08, is_predicted=True, why="ddp.bucket_cap_mb=4"),
            f"{bucket}=1": Expected(-0.04, -0.06, -0.02, is_predicted=True, why="ddp.bucket_cap_mb=1"),
            f"{channels}=8": Expected(0.0114, 0.0, 0.03, why="contention"),
            f"{compressed}=true": Expected(0.09, 0.06, 0.1, is_predicted=True, why="ddp.compress_bf16=true"),
        },
        expected_scale=0.88,
        hopeless={f"{bucket}=1": -0.02},
    )
    KnobRecord(points=19, elapsed_s=820.0, searches=[search]).write(directory)


def write_statuses(directory: Path) -> None:
    """A folder for each workload with points that are ok, failed, skipped, timed out and missing."""
    kernels = {"ring_exchange": implementation(125.0, 1.0, RING), "bulk": implementation(110.0, independent=True)}
    asked = kernel_config(implementations={"ring_exchange": RING, "pipeline": {**PIPELINE, "schedule": "x"}})
    measured: dict[str, dict[str, Any]] = {
        "operator": {"relative_error": {"output": 1e-6, "weight_grad": 1e-5}, "traces": ["trace_rank0.json.gz"]},
        "layer": {"variants": {"none": variant([100.0] * 6), "default": variant([90.0] * 6)}},
        "kernel": {"point": asked, "implementations": kernels, "left_out": {"pipeline": "refused: too large"}},
        **{"fsdp": {}, "copy_engine": {}, "tp_training": {}, "job": {}},
    }
    points = {"operator": operator_config(method="pipeline", phase="fprop", num_sm=2, num_splits=4), "kernel": asked}
    for workload, ok in measured.items():
        make_point(workload, directory / workload, name="ok", **ok)
        point = points.get(workload, resolved(workload))
        for status in ("failed", "skipped", "timeout"):
            make_point(workload, directory / workload, point, name=status, status=status, error=f"it {status}\n...")
        missing_point(directory / workload, {**point, "precision": None})


def write_telemetry(directory: Path) -> None:
    """Two places of runs to compare, many of which cannot be compared, or only in part."""
    two = resolved("fsdp", **{"distributed.dp_size": 2})
    slow = {"compute_ms": 120.0, "device": SLOW_DEVICE}
    for place, factor in (("a", 1.0), ("b", 0.8)):
        for name in ("fsdp_0", "fsdp_1", "fsdp_2", "fsdp_3", "fsdp_4"):
            bound = place == "a" or name == "fsdp_0"
            point = {"step_us": 1500.0 * factor, "spread_us": 5.0, "launch_bound": bound}
            dips = {(17, 1): slow} if name == "fsdp_1" else {}
            write_run(make_point("fsdp", directory / place, two, name=name, **point), factor=factor, dips=dips)
        write_run(make_point("fsdp", directory / place, resolved("fsdp"), name="half"))
    failed = make_point("fsdp", directory / "a", two, name="bad", status="failed", error="CUDA out of memory")
    write_run(failed)
    make_point("fsdp", directory / "a", two, name="bare")
    make_point("operator", directory / "a", operator_config(2, "fc1", "all", "bulk", num_sm=4))
    write_logs(directory / "a" / "short", [record(0)])
    write_logs(directory / "a" / "two", [record(0), record(1)])
    write_run(directory / "b" / "only_here")
    lost = write_run(directory / "b" / "lost", ranks=3)
    (lost / "rank_1_metrics.jsonl").unlink()
    with (directory / "b" / "only_here" / "rank_0_metrics.jsonl").open("a") as file:
        file.write("nonsense\n" * 3)


MADE_UP: dict[str, tuple[Any, ...]] = {
    "kernel_answers": (partial(write_sweep_of, "kernel_answers"),),
    "training_doubts": (write_training,),
    "stack_answers": (write_stacks,),
    "copy_answers": (partial(write_sweep_of, "copy_answers"),),
    "job_answers": (write_jobs, "query sweep chosen --columns ranks,setting,time_us,samples_per_s"),
    "optimized": (write_optimized,),
    "telemetry_troubles": (write_telemetry, "compare a=sweep/a b=sweep/b"),
    "statuses": (
        write_statuses,
        *(
            f"query sweep/{name} --format csv"
            for name in ("operator", "kernel", "fsdp", "copy_engine", "tp_training", "job")
        ),
        "query sweep/layer --layers --format csv",
    ),
    "two_nodes": (
        write_two_nodes,
        "query sweep",
        "query sweep 'nodes == 2' --columns setting,nodes,between_nodes_us,within_node_us,between_nodes_gb_s",
        "query sweep 'nodes == 2' --columns setting,nodes,ranks,between_nodes_us,between_nodes_gb_s --format json",
        "diagnose sweep/sharded",
        "diagnose sweep/hybrid --by group",
        "diagnose sweep/hybrid --by group --ranks-per-node 4 --format csv",
    ),
    "nothing_measured": (
        partial(write_sweep_of, "nothing_measured"),
        "query sweep --kernels",
        "report sweep --format csv --fail-if 'speedup < 1'",
    ),
}
"""By name what writes the run directories into a folder that is not there yet, and commands after the report."""
