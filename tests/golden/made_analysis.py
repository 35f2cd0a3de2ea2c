"""Made-up sweeps of kernels, training runs, stacks and copies with what analysis says of answers, ties and doubts, of
points that measured nothing."""

import shutil
from pathlib import Path
from typing import Any, Literal

from overlap_sweep.results.gain import Gain
from overlap_sweep.results.records import (
    Contribution,
    Finalist,
    KnobFinal,
    KnobRecord,
    KnobSearch,
    Noises,
    TriedKnobs,
)
from tests.made_nodes import write_two_nodes
from tests.make_point import (
    ENVIRONMENT,
    PIPELINE,
    RING,
    baselines,
    copy_config,
    falling,
    implementation,
    job_config,
    kernel_config,
    make_point,
    missing_point,
    operator_config,
    resolved,
    stack_config,
    timing,
    timing_of,
    variant,
)
from tests.workloads.fsdp.telemetry_logs import SLOW_DEVICE, record, write_logs, write_run

DATA = Path(__file__).parent.parent / "data"


def write_kernels(directory: Path) -> None:
    """A kernel for each way to answer, told apart by n: which backend wins along m, ties, doubts and no answers."""

    def measure(n: int, backend: str = "torch", m: int = 1024, *, first: Any = None, **times: Any) -> None:
        measured = {name: time if not isinstance(time, float) else implementation(time) for name, time in times.items()}
        make_point("kernel", directory, kernel_config(m, backend, n=n), implementations={**(first or {}), **measured})

    fastest = {1024: "symm_mem", 2048: "symm_mem", 4096: "torch", 8192: "transformer_engine", 16384: None}
    for m, wins in fastest.items():
        for backend in ("torch", "symm_mem", "transformer_engine"):
            measure(1024, backend, m, ring=150.0 if backend == wins else 250.0)
    # Within the noise of the fastest; within half a percent of it and of no overlap.
    for backend, time_us in (("torch", 104.0), ("symm_mem", 100.0), ("flux", 103.0)):
        measure(2048, backend, first=baselines(spread_us=3.0), a=implementation(time_us, 3.0))
    measure(2048, "flux", 2048, first=baselines(spread_us=3.0), a=implementation(195.0, 3.0))
    measure(2048, "flux", 4096, a=250.0)
    for m, times in ((8192, (150.4, 150.0)), (16384, (199.5, 199.2))):
        for backend, time_us in zip(("torch", "flux"), times, strict=True):
            measure(2048, backend, m, a=time_us)
    # What cannot be used, beats the bound, or computed wrong numbers when it was measured again.
    fast = implementation(95.0, launch_bound=True)
    measure(3072, bulk=implementation(90.0, independent=True), fast=fast, wrong=96.0, ring=150.0)
    why = "wrong numbers: relative error 0.5, tolerance 0.01"
    again = {"left_out": {"wrong": why}, "relative_error": {"wrong": 0.5}, "warnings": ["beware"]}
    ring = {"ring": implementation(150.0)}
    make_point("kernel", directory, kernel_config(n=3072, repetition=1), implementations=ring, **again)
    measure(4096, bulk=implementation(110.0, independent=True))
    measure(5120, first=baselines(launch_bound=True), ring=50.0)
    measure(6144, first=baselines(300.0, 100.0, 180.0), ring=implementation(150.0, 1.0))
    for m in (1024, 2048):
        measure(7168, "flux", m, slow=110.0, **{f"ring{i}": 80.0 + i for i in range(9)})
        # Slower than no overlap by far; nearly all hidden; one of them bound by the host.
        measure(8192, m=m, a=900.0)
        measure(10240, m=m, first=baselines(300.0, 100.0, 160.0), a=240.0)
        measure(12288, m=m, a=implementation(110.0, launch_bound=m == 1024), b=150.0)
    measure(7168, m=2048, ring=90.0)
    # Of no model; below the bound in another environment; on another machine.
    make_point("kernel", directory, kernel_config(operator=None), implementations={"ring": implementation(260.0)})
    measure(9216, ring=150.0)
    older, below = {**ENVIRONMENT, "packages": {"torch": "2.6.0"}}, {"fused": implementation(90.0)}
    make_point("kernel", directory, kernel_config(n=9216, backend="flux"), implementations=below, environment=older)
    h100, slow = {**ENVIRONMENT, "gpu": "NVIDIA H100"}, {"ring": implementation(250.0)}
    make_point("kernel", directory, implementations=slow, environment=h100)


def write_training(directory: Path) -> None:
    """A case for each doubt, told apart by its ranks; searches of knobs; and recorded runs, one with wrong marks."""

    def step(ranks: int, changes: dict[str, Any] | None = None, **measured: Any) -> None:
        point = resolved("fsdp", **{"distributed.dp_size": ranks, **(changes or {})})
        make_point("fsdp", directory, point, **measured)

    def ahead(number: int) -> dict[str, Any]:
        return {"fsdp.forward_prefetch": number}

    # The host limits one setting, all of them, or a baseline.
    step(2, step_us=1000.0, host_us={"point": 960.0})
    step(2, ahead(1), step_us=1000.0, host_us={"point": 900.0})
    for number in range(3):
        step(3, ahead(number), step_us=1000.0, host_us={"point": 990.0})
    for number, (none_us, floor_us) in enumerate(((1990.0, 300.0), (300.0, 990.0))):
        step(4, ahead(number), host_us={"point": 300.0, "none": none_us, "floor": floor_us})
    # The best computes something else.
    step(5, step_us=1000.0)
    step(5, ahead(1), step_us=950.0)
    step(5, {"training.mixed_precision": "fp16"}, step_us=400.0, floor_us=300.0)
    # Losses: another one, one that is no number, and others that are next to nothing.
    for number in (0, 1, 2):
        step(6, ahead(number), losses=[0.7, 0.6, 0.5] if number < 2 else [0.7, 0.6, 0.9])
    step(6, {"training.batch_size": 8}, losses=[9.0])
    step(7)
    step(7, ahead(1), step_us=1100.0, losses=[0.7, None, None])
    for number, last in enumerate((3.55e-7, 3.1e-7, 3.6e-7)):
        step(8, ahead(number), losses=[0.7, 0.1, last])
    step(9, {"compile.enabled": True}, compiled="no: no C++ compiler\nfound")
    # Baselines that drift, on GPUs that were slowed down; hidden fractions that are all noise; a tie inside the noise.
    slow = {"sm_clock_mhz": 1980.0, "temperature_c": 60.0, "throttle_reasons": 0x40}
    for number, floor_us in enumerate((1000.0, 1000.0, 1100.0)):
        told = {"conditions": {"after": {"gpus": [slow]}}, "warnings": ["beware"]}
        step(10, ahead(number), floor_us=floor_us, started=f"2026-11-21T2{number}:00:00+00:00", **told)
    point = timing_of([980.0, 1000.0, 1010.0, 1030.0, 1060.0])
    none = timing_of([1045.0, 965.0, 1005.0, 985.0, 1025.0])
    step(11, step={"point": point, "none": none, "floor": timing(1000.0, 20.0)})
    step(12, step_us=1000.0, spread_us=60.0)
    step(12, {**ahead(1), "fsdp.reshard_after_forward": False}, step_us=960.0, spread_us=60.0)
    step(13, step_us=1000.0)
    step(13, ahead(1), step_us=996.0)
    step(14, host_us={}, peak_memory_gb=None)
    for changes, step_us in ((ahead(0), 1500.0), (ahead(1), 1400.0), ({"compile.enabled": True}, 1300.0)):
        step(15, changes, step_us=step_us)
    write_searches(directory)
    shutil.copytree(DATA / "h200x2_fsdp", directory / "recorded")


def write_searches(directory: Path) -> None:
    """What a search of knobs settled beside what the table alone would say: proven, nothing faster, not proven."""
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
        names = []
        for ahead, step_us in enumerate((1500.0, 1200.0, 1100.0)):
            point = resolved("fsdp", **{"fsdp.forward_prefetch": ahead, "ranking.num_layers": layers})
            names.append(make_point("fsdp", directory / name, point, step_us=step_us).name)
        found = {
            **known,
            **answer,
            "overrides": [*typed, f"ranking.num_layers={layers}"],
            "baseline_points": names[:1],
            "best_points": names[1:2] if answer["best"] else names[:1],
        }
        KnobRecord(searches=[KnobSearch(**found)]).write(directory / name)


def write_stacks(directory: Path) -> None:
    """A case for each answer about stacks, told apart by the length of its sequences."""

    def run(length: int, impl: str, step_us: float = 10_000.0, **made: Any) -> None:
        options = {"seq_length": length, **made.pop("options", {})}
        make_point("tp_training", directory, stack_config(impl, tp_training=options), step_us=step_us, **made)

    # Who computes something else: by its loss, by its gradients, by a loss that is no number, or nobody can tell.
    run(128, "autotp", 5_000.0, losses=falling(off={4: 6.4}))
    run(256, "autotp", 5_000.0, norms=[1.5, 1.5, 1.5, 1.4, 1.5, 1.5, 1.5])
    run(384, "autotp", 5_000.0, losses=falling(off={6: None}))
    for length in (128, 256, 384):
        run(length, "fsdp_dtensor")
        run(length, "megatron", 8_000.0)
    run(512, "autotp", losses=falling(off={2: 6.0}))
    run(512, "megatron", losses=falling(off={3: None, 6: 9.0}))
    for impl in ("autotp", "megatron"):
        run(640, impl, losses=falling(off={6: None}))
    # Times that say little, and one alone whose options are not the usual ones.
    for impl, step_us in (("autotp", 10_000.0), ("megatron", 9_000.0)):
        run(768, impl, step_us, options={"num_training_steps": 3})
    run(896, "autotp", 10_000.0, spread_us=4_900.0)
    run(896, "megatron", 20_000.0, spread_us=9_900.0)
    run(1024, "autotp", options={"learning_rate": 0.001, "gradient_accumulation_steps": 4}, warnings=["beware"])
    # The host limits one; the other ran in another environment; and who knows where the third did.
    other = {**ENVIRONMENT, "driver": "590.2", "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    run(1152, "autotp", launch_bound=True)
    run(1152, "megatron", environment=other)
    run(1152, "fsdp_dtensor", environment={"gpu": "something else"})
    write_final(directory / "final")


def write_final(directory: Path) -> None:
    """The end of a search over two stacks, whose winner is not the fastest of all points: that was measured once."""
    stage, cut = "tp_training.zero_stage", "tp_training.sequence_parallel"

    def finalist(impl: str, changed: dict[str, str], time_us: float, place: Literal["fastest", ""] = "") -> Finalist:
        options = {key: int(value) if value.isdigit() else value == "true" for key, value in changed.items()}
        point = stack_config(impl, **{"tp_training.seq_length": 1280, **options})
        return Finalist(
            **{
                "label": f"model {impl} TP=2 DP=1 step on 2 ranks",
                "overrides": ["workload=tp_training", f"impl={impl}"],
            },
            **{"changed": changed, "time_us": time_us, "noise_us": 90.0, "place": place},
            points=[make_point("tp_training", directory, point, step_us=time_us).name],
        )

    finalists = [
        finalist("fsdp_dtensor", {cut: "true"}, 7_000.0, "fastest"),
        finalist("autotp", {stage: "2"}, 8_000.0),
        finalist("fsdp_dtensor", {}, 9_000.0),
    ]
    lucky = stack_config("autotp", **{"tp_training.seq_length": 1280, stage: 0})
    make_point("tp_training", directory, lucky, step_us=6_900.0)
    left_out = {"model megatron TP=2 DP=1 step on 2 ranks": "impl=megatron requires GPUs"}
    KnobRecord(points=4, finals=[KnobFinal(rounds=2, finalists=finalists, left_out=left_out)]).write(directory)


def write_copies(directory: Path) -> None:
    """An answer for each direction: hidden (more with GEMMs in chunks), nothing hidden, not to be told, slower, no
    answer."""
    for direction, overlapped_us, spread_us in (
        *(("host_to_device", 1100.0, 1.0), ("device_to_host", 1395.0, 1.0)),
        *(("device_to_device", 1300.0, 100.0), ("peer", 1500.0, 1.0)),
    ):
        make_point("copy_engine", directory, copy_config(direction), overlapped_us=overlapped_us, spread_us=spread_us)
    for chunks, in_chunks_us in ((4, (1030.0, 1060.0)), (16, (1150.0, 1170.0))):
        config = copy_config("host_to_device", **{"copy_engine.chunks": chunks})
        make_point("copy_engine", directory, config, in_chunks_us=in_chunks_us, spread_us=1.0)
    bound = {"gemm": False, "copy": True, "sequential": False, "overlapped": False}
    environment = {**ENVIRONMENT, "gpu": "NVIDIA B200"}
    make_point("copy_engine", directory, launch_bound=bound, environment=environment)


def write_jobs(directory: Path) -> None:
    """A case for each answer and doubt about jobs, told apart by their ranks."""

    def run(ranks: int, bucket: int | None, step_us: float, repetition: int | None = None, **made: Any) -> list[str]:
        """Returns the names of the points."""
        changed, env, names = made.pop("config", {}), made.pop("env", {}), []
        for number in range(3) if repetition is None else (repetition,):
            hour, minute = divmod(len(list(directory.glob("*"))), 60)
            config = {"job.ranks": ranks, "repetition": number, **changed}
            point = job_config({} if bucket is None else {"bucket": bucket}, env, **config)
            started = f"2026-11-20T{hour:02}:{minute:02}:00+00:00"
            names.append(make_point("job", directory, point, step_us=step_us, started=started, **made).name)
        return names

    # Faster in every run, within the noise between runs, and faster in the only run, which is too few.
    for ranks, repetitions, second_us in ((2, 3, 95_000.0), (3, 3, 99_900.0), (4, 1, 95_000.0)):
        for repetition in range(repetitions):
            for bucket, step_us in ((25, 100_000.0), (100, second_us)):
                exposed = {"exposed": {"DP, ranks 0-1": 0.1 * step_us}, "causes": {"issued_late": 0.05}}
                run(ranks, bucket, step_us * (1 + repetition / 100), repetition, **exposed)
    # All slower; the simplest of two; nothing to compare with; one that failed.
    for bucket, step_us in ((25, 100_000.0), (100, 120_000.0)):
        run(5, bucket, step_us)
    for bucket, queues, step_us in ((25, 1, 100_000.0), (100, 8, 89_900.0), (100, 1, 90_000.0)):
        run(6, bucket, step_us, env={"CUDA_DEVICE_MAX_CONNECTIONS": queues})
    run(7, 25, 100_000.0)
    run(7, 100, 0.0, status="failed", error="CUDA out of memory")
    # By a rate of its own, by samples, and by steps since the samples of one are unknown.
    by_metric = {"timed_by": "metric", "unit": "tps", "calls_per_step": None, "peak_memory_gb": None}
    for bucket, time_us in ((25, 20.0), (100, 16.0)):
        run(8, bucket, time_us, spread_us=0.1, config={"job.metric": "tps: ([0-9.]+)"}, **by_metric)
    for bucket, step_us, samples in ((1, 100_000.0, 32.0), (2, 180_000.0, 64.0)):
        run(9, bucket, step_us, samples_per_step=samples)
        run(10, bucket, step_us, **({"samples_per_step": samples} if bucket == 1 else {"calls_per_step": 2}))
    # The host limits one, which is timed otherwise; warnings, other drivers, hot GPUs; multicast in one; on a CPU.
    run(11, 25, 100_000.0, launch_bound=True)
    run(11, 100, 90_000.0, timed_by="host")
    hot = {"gpus": [{"throttle_reasons": 0x40}]}
    run(12, 25, 100_000.0, warnings=["Ranks 3: no trace."], conditions={"after": hot})
    run(12, 100, 90_000.0, environment={**ENVIRONMENT, "driver": "590.2"})
    for on in (False, True):
        run(13, None, 100_000.0 - 9_000.0 * on, config={"runtime": {"device": "cuda", "multicast": on}})
    for bucket, step_us in ((25, 100_000.0), (100, 85_000.0)):
        run(14, bucket, step_us, config={"device": "cpu"}, environment={"device": "cpu"}, peak_memory_gb=None)
    # Two commands with one script; a proven answer of a search.
    for options in ("", " --compile"):
        run(15, None, 100_000.0, config={"job.command": f"torchrun train.py{options}"})
    names = [run(16, bucket, us) for bucket, us in ((25, 100_000.0), (100, 97_000.0), (400, 90_000.0))]
    knobs = {"+job.values.bucket": ["25", "100", "400"]}
    of_ranks = {"label": "train.py", "overrides": ["workload=job", "job.ranks=16"], "knobs": knobs, "proven": True}
    times = {"time_us": 97_000.0, "baseline_us": 100_000.0, "gain": Gain(0.03, 0.004), "by_time": True}
    search = KnobSearch(
        **of_ranks,
        **times,
        best={"+job.values.bucket": "100"},
        baseline_points=names[0],
        best_points=names[1],
        disturbed=Noises(times=0.011, ratios=0.24),
    )
    other = KnobSearch(
        label="train.py", overrides=["workload=job", "job.ranks=32"], knobs=knobs, dropped="too few GPUs"
    )
    KnobRecord(searches=[search, other]).write(directory)


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


def write_nothing_measured(directory: Path) -> None:
    error = "bulk does not fit fc1_fprop"
    make_point("operator", directory, operator_config(2, "fc1", "fprop", "bulk"), status="skipped", error=error)
    make_point("kernel", directory, kernel_config(backend="flux"), status="skipped", error="flux is not installed")


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
    "kernel_answers": (write_kernels,),
    "training_doubts": (write_training,),
    "stack_answers": (write_stacks,),
    "copy_answers": (write_copies,),
    "job_answers": (write_jobs, "query sweep chosen --columns ranks,setting,time_us,samples_per_s"),
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
        write_nothing_measured,
        "query sweep --kernels",
        "report sweep --format csv --fail-if 'speedup < 1'",
    ),
}
"""By name what writes the run directories into a folder that is not there yet, and commands after the report."""
