"""Made-up sweeps with what is rare in a report: one sweep has many such things, told apart by the model's name."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.analysis.knob_search import Gain, KnobRecord, KnobSearch, TriedKnobs
from overlap_sweep.report.knob_search import write_knobs
from overlap_sweep.run_directory import trace_file
from tests.analysis.telemetry_logs import SLOW_DEVICE, USUAL_DEVICE, write_run
from tests.made_sweeps import (
    BEST,
    BEST_SLOTS,
    LABELS,
    OTHER,
    TUNED,
    WINS,
    rounds,
    trial,
    write_layers,
    write_operators,
    write_proof,
    write_sweep,
    write_sweep_of_copies,
    write_sweep_of_kernels,
    write_sweep_of_stacks,
    write_sweep_of_training,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import (
    ENVIRONMENT,
    baselines,
    default_timing,
    falling,
    implementation,
    kernel_config,
    layer_config,
    make_point,
    missing_point,
    operator_config,
    pass_times,
    resolved,
    stack_config,
    variant,
)

DATA = Path(__file__).parent.parent / "data"
TRACES = DATA / "traces"
BEST_TRACE = TRACES / "h200x4_llama3_70b_layer_ring_rs.json.gz"
NONE_TRACE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"


def write_rare_operators(directory: Path) -> None:
    ring = {"tp_size": 2, "operator": "fc1", "phase": "fprop", "method": "ring_exchange", "aggregate": False}
    bulk = {"tp_size": 2, "operator": "fc1", "phase": "all", "method": "bulk", "num_sm": 4}

    def write(model: str, setting: Mapping[str, Any], **measured: Any) -> Path:
        return make_point("operator", directory, operator_config(**setting, model=model), **measured)

    fwd, bwd = default_timing(190.0, none_us=200.0), default_timing(440.0, none_us=400.0)
    for setting, fwd_us, bwd_us in ((ring, 220.0, 400.0), (bulk, 200.0, 320.0)):
        times = {"fwd": pass_times(fwd_us, 200.0, default=fwd), "bwd": pass_times(bwd_us, 400.0, default=bwd)}
        write("defaults", setting, **times)
    for model, default_us in (("default_is_faster", 90.0), ("default_is_slower", 110.0)):
        write(model, ring, fwd=pass_times(120.0, default=default_timing(default_us)))
    # One switch holds for both: off loses 10 at fc2, on would lose 40 at proj.
    for operator, time_us in (("proj", 120.0), ("fc2", 70.0)):
        write("overruled", {**ring, "operator": operator, "phase": "dgrad"}, bwd=pass_times(time_us, none_us=80.0))
    for minute, none_us in enumerate((100.0, 100.0, 110.0, 110.0)):
        drifting = pass_times(90.0, none_us=none_us)
        write("drifted", bulk, fwd=drifting, bwd=drifting, started=f"2026-11-20T21:0{minute}:00+00:00")
    hot = {"gpus": [{"temperature_c": 91, "sm_clock_mhz": 1200, "throttle_reasons": 0x40}]}
    write("hot", bulk, conditions={"before": hot, "after": hot}, name="hot")
    for time_us in (100.0, 101.0):
        write("repeated", {**bulk, "phase": "dgrad"}, bwd=pass_times(time_us), warnings=["GPU 3 was throttled."])
    for phase in ("dgrad", "wgrad"):
        write("predicted", {**bulk, "phase": phase}, bwd=pass_times(90.0))
    write("hint", {**bulk, "backend": "torch"}, bwd=pass_times(90.0))
    write("below_the_floor", bulk, bwd=pass_times(90.0, 200.0, 140.0), launch_bound=False)
    write("host_bound", bulk, launch_bound=True)


def write_rare_proofs(directory: Path) -> None:
    """Verdicts beside those of made_analysis.py, one sweep more than once, and a search without a tuner."""
    for name, proof in {
        "preset_in_between": {"ratios": {**WINS, "preset preset_tp4": 0.94}},
        "default_ties": {"ratios": {**WINS, "tuned": 0.95}, "noise": 0.01},
        "none_ties": {"ratios": {"none": 1.0, "default": 1.03, "tuned": 1.0, "floor": 0.9}, "noise": 0.01},
        "only_none": {"ratios": {"none": 1.0, "tuned": 0.9, "floor": 0.8}},
        "only_default": {"ratios": {"default": 1.0, "tuned": 0.9, "floor": 0.8}},
        "together": {},
    }.items():
        write_operators(directory / name, model=name)
        write_proof(directory / name, **{"point": layer_config(model=name), **proof})
        if name != "together":
            write_tuner(directory / name, proofs=[trial("proof", LABELS)])
    failed = layer_config(model="together")
    make_point("layer", directory / "together", failed, name="together", status="failed", error="boom")
    together = [trial("together", {"best of each slot": "file:a"})]
    write_tuner(directory / "together", together=together, proofs=[trial("proof", LABELS)])
    # The same case twice, and once more without the tuner's record.
    write_tuned_sweep(directory / "10-00", started="2026-11-20T10:00:00+00:00")
    write_tuned_sweep(directory / "11-00", ratios={**WINS, "tuned": 0.9}, started="2026-11-20T11:00:00+00:00")
    write_tuned_sweep(directory / "12-00")
    (directory / "12-00" / "tuner.json").unlink()
    search = directory / "12-00" / "search.json"
    search.write_text(search.read_text().replace('"dropped": {}', '"dropped": {"fc2": "no time"}'))


def write_rare_files(directory: Path) -> None:
    """Proofs whose files are not what the operators say one by one, or are for other libraries."""
    more = {**BEST_SLOTS, "fc2_fprop": {"method": "pipeline", "num_sm": 24, "num_splits": 4}}
    more["qkv_dgrad"] = {"method": "bulk", "num_sm": 2}
    del more["fc1_wgrad"]
    for name, proof in {
        "proven": {"warnings": ["GPU 3 was throttled."]},
        "taken_together": {"changed": {"tuned": OTHER}},
        "more_slots": {"changed": {"tuned": {**BEST, "settings": more}}},
        "don_t_overlap": {"ratios": {**WINS, "none": 0.8}},
        "default": {"ratios": {**WINS, "tuned": 0.96}},
        "failed": {"ratios": {}, "status": "failed", "error": "boom"},
        "hint": {"point": {**layer_config(model="hint"), "backend": "torch"}},
    }.items():
        backend = {"backend": "torch"} if name == "hint" else {}
        write_operators(directory / name, model=name, **backend)
        write_proof(directory / name, **{"point": layer_config(model=name), **proof})
        write_tuner(directory / name, proofs=[trial("proof", LABELS)])


def write_async_tp(directory: Path) -> None:
    symm_mem = {"backend": "symm_mem"}
    for model, default in (("faster", 0.95), ("slower", 1.04), ("as_fast", 1.0)):
        write_operators(directory / model, model=model, **symm_mem)
        ratios = {**WINS, "default": default, "tuned": 0.97, "preset preset_tp4": 0.99}
        write_proof(directory / model, ratios, point={**layer_config(model=model), **symm_mem})
        write_tuner(directory / model, proofs=[trial("proof", LABELS)])
    write_operators(directory / "no_layer", model="no_layer", **symm_mem)
    bulk = operator_config(2, "fc1", "all", "bulk", model="not_timed", **symm_mem)
    make_point("operator", directory, bulk, bwd=pass_times(90.0))
    for model, default_us in (("better_as_a_whole", 350.0), ("worse_than_none", 450.0)):
        as_a_whole = pass_times(390.0, 400.0, 300.0, default=default_timing(default_us, 400.0))
        bulk = operator_config(2, "fc1", "all", "bulk", model=model, **symm_mem)
        make_point("operator", directory, bulk, bwd=as_a_whole)


def write_rare_layers(directory: Path) -> None:
    def alternating(*ratios: float) -> Any:
        return variant([60_000.0 * ratios[i % len(ratios)] for i in range(6)])

    write_layers(directory)
    bound = variant([60_000.0] * 6, launch_bound=True)
    none, noisy = alternating(1.0), alternating(0.99, 1.01)
    for name, variants in {
        "faster": {"none": none, "default": noisy, "file:best.yaml": alternating(0.962, 0.966, 0.969)},
        "slower": {"none": none, "floor": alternating(0.5), "default": alternating(1.04), "file:a": noisy},
        "no_none": {"default": none, "file:a": alternating(0.9)},
        "nothing_to_compare": {"none": none, "floor": alternating(0.5)},
        "reference_is_bound": {"none": bound, "default": alternating(0.5)},
        "default_is_bound": {"none": none, "default": bound, "file:a": none},
        "step": {"none": variant([60_000.0] * 6, step_us=1234.0)},
        "few_rounds": {"default": variant([100.0] * 3), "file:a": variant([90.0] * 3, launch_bound=True)},
        "same_names": {"none": none, "file:/one/a.yaml": alternating(0.9), "file:/two/a.yaml": noisy},
    }.items():
        make_point("layer", directory, layer_config(model=name), variants=variants, name=name)
    replicas = layer_config("linear", 2, num_replicas=2, training=True)
    settings = {"settings": {"fc1_fprop": {"method": "ring_exchange"}}, "switches": {"tp_comm_overlap": True}}
    variants = {"none": none, "file:a.yaml": variant([90.0] * 6, **settings)}
    make_point("layer", directory, replicas, variants=variants, name="replicas", attention_backend="fused")


def write_rare_kernels(directory: Path) -> None:
    """Of no model, below the bound, in environments that differ, on another machine."""
    ring = {"ring": implementation(150.0)}
    make_point("kernel", directory, kernel_config(operator=None), implementations={"ring": implementation(260.0)})
    make_point("kernel", directory, kernel_config(n=4096), implementations=ring)
    below = {"fused": implementation(90.0)}
    older = {**ENVIRONMENT, "packages": {"torch": "2.6.0"}}
    make_point("kernel", directory, kernel_config(n=4096, backend="flux"), implementations=below, environment=older)
    h100 = {**ENVIRONMENT, "gpu": "NVIDIA H100"}
    make_point("kernel", directory, implementations={"ring": implementation(250.0)}, environment=h100)


def write_rare_training(directory: Path) -> None:
    def write(model: str, changes: Mapping[str, Any] | None = None, **measured: Any) -> None:
        make_point("fsdp", directory, resolved("fsdp", model=model, **(changes or {})), **measured)

    prefetch = {"fsdp.forward_prefetch": 1}
    write("alone", host_us={}, peak_memory_gb=None)
    write("noisy", spread_us=30.0)
    write("noisy", prefetch, step_us=1490.0, spread_us=30.0)
    write("compiled", step_us=1500.0)
    write("compiled", prefetch, step_us=1400.0)
    write("compiled", {"compile.enabled": True}, step_us=1300.0)
    found = KnobSearch(
        label="ranking fsdp2 step on 4 ranks",
        overrides=["workload=fsdp", "model=ranking"],
        knobs={"fsdp.forward_prefetch": ["false", "1", "2"], "fsdp.limit_all_gathers": ["false", "true"]},
        best={"fsdp.forward_prefetch": "1"},
        time_us=1200.0,
        baseline_us=1500.0,
        gain=Gain(0.2, 0.03),
        proven=True,
        stopped="search.max_points is used up",
        tried=[TriedKnobs(changed={"fsdp.forward_prefetch": "1"}, time_us=1200.0, noise_us=9.0, measurements=1)],
    )
    for ahead, step_us in ((0, 1500.0), (1, 1200.0), (2, 1100.0)):
        write("ranking", {"fsdp.forward_prefetch": ahead}, step_us=step_us)
    write_knobs(directory, KnobRecord(searches=[found]))


def write_rare_stacks(directory: Path) -> None:
    autotp = stack_config("autotp")
    make_point("tp_training", directory, autotp, launch_bound=True, warnings=["attention is not fused"])
    other = {**ENVIRONMENT, "driver": "590.2", "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    make_point("tp_training", directory, stack_config("megatron"), environment=other)
    make_point("tp_training", directory, environment={"gpu": "something else"})


def write_every_workload(directory: Path) -> None:
    write_sweep(directory / "operators")
    write_layers(directory / "layers")
    write_sweep_of_kernels(directory / "kernels")
    write_sweep_of_training(directory / "training")
    write_sweep_of_copies(directory / "copies")
    write_sweep_of_stacks(directory / "stacks")


def write_damaged(directory: Path) -> None:
    """Whatever cannot be read is named after the answers."""
    write_tuned_sweep(directory)
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    cut = make_point("operator", directory, bulk, name="cut") / "result.json"
    cut.write_text('{"schema": 1, "na')
    (make_point("operator", directory, bulk, traces=["t.json"], name="empty_trace") / "t.json").write_text("")
    missing_point(directory, bulk)
    (directory / "tuner.json").write_text("{")


def write_nothing_measured(directory: Path) -> None:
    error = "bulk does not fit fc1_fprop"
    make_point("operator", directory, operator_config(2, "fc1", "fprop", "bulk"), status="skipped", error=error)
    make_point("kernel", directory, kernel_config(backend="flux"), status="skipped", error="flux is not installed")


def write_traced(directory: Path) -> None:
    """Timelines: no overlap above the best, the best alone, what was not chosen, a trace that is broken."""
    for model, bwd_us, traces in (
        ("both", 80.0, {"trace_rank0.json.gz": BEST_TRACE, "trace_none_rank0.json.gz": NONE_TRACE}),
        ("beside_another_point", 80.0, {"trace_rank0.json.gz": BEST_TRACE}),
        ("best_alone", 80.0, {"trace_rank0.json.gz": BEST_TRACE}),
        ("not_chosen", 120.0, {"trace_rank0.json.gz": BEST_TRACE}),
        ("broken", 80.0, {"trace_rank0.json.gz": BEST_TRACE, "trace_none_rank0.json.gz": None}),
        ("untraced", 80.0, {}),
    ):
        point = operator_config(2, "fc1", "all", "bulk", num_sm=4, model=model)
        written = make_point("operator", directory, point, bwd=pass_times(bwd_us), traces=list(traces), name=model)
        for name, path in traces.items():
            shutil.copy(path, written / name) if path else (written / name).write_bytes(b"\x1f\x8bbroken")
    of_layer = {trace_file(0, "none"): NONE_TRACE, trace_file(0, TUNED): BEST_TRACE}
    write_operators(directory / "tuner")
    proof = write_proof(directory / "tuner", traces=list(of_layer))
    for name, path in of_layer.items():
        shutil.copy(path, proof / name)
    write_tuner(directory / "tuner", proofs=[trial("proof", LABELS)])
    # The trace of a point without overlap will do, too.
    point = operator_config(2, "fc1", model="beside_another_point")
    written = make_point("operator", directory, point, traces=["trace_rank0.json.gz"], name="no_overlap")
    shutil.copy(NONE_TRACE, written / "trace_rank0.json.gz")


def write_rare_charts(directory: Path) -> None:
    """What charts draw differently: of operators by model, of kernels by n, of training runs by model, of stacks."""
    bulk = {"operator": "fc1", "phase": "all", "method": "bulk", "num_sm": 4}
    ring = {"operator": "fc1", "phase": "fprop", "method": "ring_exchange", "aggregate": False}

    def write(model: str, setting: Mapping[str, Any], **measured: Any) -> None:
        make_point("operator", directory, operator_config(**{**setting, "model": model}), **measured)

    noisy = pass_times(160.0, 200.0, 150.0, spread_us=5.0, default=default_timing(260.0, 200.0))
    write("noise_and_a_harmful_default", bulk, bwd=noisy)
    write("nothing_to_hide", bulk, bwd=pass_times(90.0, 100.0, 100.0))
    write("more_than_all_hidden", bulk, bwd=pass_times(90.0, 200.0, 140.0))
    # Another day the machine takes twice as long.
    for slower in (1, 2):
        times = pass_times(150.0 * slower, 200.0 * slower, 100.0 * slower, spread_us=2.0 * slower)
        write("two_days", bulk, bwd=times)
    for num_sm, use_ce in ((1, True), (2, False), (4, False)):
        write("copy_engines", {**ring, "num_sm": num_sm, "use_ce": use_ce}, fwd=pass_times(80.0 + num_sm))
    for num_sm in (1, 2, 4, 8):
        write("one_level", {**ring, "num_sm": num_sm, "use_ce": True}, fwd=pass_times(80.0 - num_sm))
    for dgrad, wgrad in ((4, 8), (4, 16), (8, 16)):
        phases = {"dgrad": {"method": "bulk", "num_sm": dgrad}, "wgrad": {"method": "bulk", "num_sm": wgrad}}
        write("apart", {"operator": "fc1", "phases": phases}, bwd=pass_times(150.0 + wgrad, 200.0, 100.0))
    write("failed_and_launch_bound", bulk, bwd=pass_times(1500.0, 200.0, 100.0))
    write("failed_and_launch_bound", {**bulk, "num_sm": 8}, status="failed", error="no")
    bound = pass_times(1.0, 200.0, 100.0)
    write("failed_and_launch_bound", {**bulk, "num_sm": 16}, bwd=bound, launch_bound=True)
    variants = {"none": rounds(1.0), "file:/far/away/tp4.yaml": rounds(0.9, 0.01), "floor": rounds(0.8)}
    make_point("layer", directory, variants={**variants, "default": rounds(1.1, launch_bound=True)})
    for m in (1024, 2048):
        for n, measured in {
            4096: {"a": implementation(900.0)},
            8192: baselines(300.0, 100.0, 160.0) | {"a": implementation(240.0)},
            16384: {"a": implementation(110.0, launch_bound=m == 1024), "b": implementation(150.0)},
        }.items():
            make_point("kernel", directory, kernel_config(m, n=n), implementations=measured)
    dots = {f"ring{i}": implementation(150.0 + 10 * i, 1.0) for i in range(3)}
    dots["bulk"] = implementation(110.0, independent=True)
    make_point("kernel", directory, implementations=dots)
    fused = {"fused": implementation(145.0)}
    make_point("kernel", directory, kernel_config(backend="symm_mem"), implementations=fused)
    write_sweep_of_training(directory / "by_the_sample")
    for ahead, step_us in ((0, 1500.0), (1, 1200.0)):
        point = resolved("fsdp", **{"model": "by_the_step", "fsdp.forward_prefetch": ahead})
        make_point("fsdp", directory, point, step_us=step_us, spread_us=10.0)
    make_point("copy_engine", directory, overlapped_us=1100.0)
    write_sweep_of_stacks(directory / "stacks")
    unknown = {"environment": {"gpu": "something else"}}
    make_point("tp_training", directory, losses=falling(off={3: None, 6: 9.0}), **unknown)


def write_compared(folder: Path) -> None:
    """Pairs to compare: operators, many of them, layers, copies, and training runs with dips."""

    def bulk(directory: Path, **times_us: float) -> None:
        for name, time_us in times_us.items():
            point = operator_config(2, "fc1", "all", "bulk", num_sm=int(name.removeprefix("sm")))
            make_point("operator", directory, point, bwd=pass_times(time_us, 400.0, 300.0))

    bulk(folder / "old", sm4=320.0, sm8=360.0)
    bulk(folder / "new", sm4=400.0, sm8=310.0, sm16=330.0)
    many = {f"sm{number}": 300.0 + number for number in range(1, 25)}
    bulk(folder / "many" / "old", **many)
    bulk(folder / "many" / "new", **{name: time_us * (2 if name == "sm7" else 1) for name, time_us in many.items()})
    for name, file_us, copy_us in (("old", 57.0, 400.0), ("new", 51.3, 200.0)):
        variants = {"none": variant([60.0] * 6), f"file:/{name}/best.yaml": variant([file_us] * 6)}
        make_point("layer", folder / "layers" / name, variants=variants)
        make_point("copy_engine", folder / "copies" / name, copy_us=copy_us)
    slow = {"compute_ms": 96.0, "hidden_ms": 17.0, "exposed_ms": 24.0, "device": SLOW_DEVICE}
    exposed = {"hidden_ms": 10.0, "exposed_ms": 30.0}
    little = {"device": {**SLOW_DEVICE, "sm_clock_mhz": 1900.0, "temperature_c": 61.0}, "compute_ms": 400.0}
    write_run(folder / "cuda", profiled=2)
    write_run(folder / "rocm", factor=1.1, dips={(17, 1): slow, (25, 0): exposed})
    for name, dip in {
        "elsewhere": {(9, 0): exposed, (9, 1): {"device": SLOW_DEVICE}},
        "capped": {(9, 0): {**exposed, "device": {**USUAL_DEVICE, "sm_clock_mhz": 1965.0, "throttle_reasons": 4.0}}},
        "little": {(9, 0): little},
        "near": {(9, 0): {**exposed, "device": {**USUAL_DEVICE, "sm_clock_mhz": 1950.0, "temperature_c": 66.0}}},
        "blind": {(9, 0): {**exposed, "device": {}}},
    }.items():
        write_run(folder / "dips" / name, dips=dip)
    for batch_size, factor in ((64, 1.0), (32, 0.8)):
        changes = {"distributed.dp_size": 2, "training.batch_size": batch_size}
        point = {"step_us": 1500.0 * factor, "spread_us": 5.0, "name": f"m_training.batch_size={batch_size}"}
        write_run(make_point("fsdp", folder / "work", resolved("fsdp", **changes), **point), factor=factor)
    for side, factor in (("a", 1.0), ("b", 0.8)):
        for i in range(4):
            changes = {"distributed.dp_size": 2, "fsdp.forward_prefetch": i, "distributed.enable_overlap": side == "b"}
            point = {"step_us": 1500.0 * factor, "spread_us": 5.0, "name": f"fsdp_{i}"}
            written = make_point("fsdp", folder / "runs" / side, resolved("fsdp", **changes), **point)
            write_run(written, factor=factor)
    write_run(folder / "runs" / "b" / "fsdp_more")
    shutil.copytree(DATA / "h200x2_fsdp", folder / "h200x2_fsdp")


COMPARISONS = (
    "compare old new",
    "compare a=old b=new --reference b --by slot",
    "compare many/old many/new",
    "compare layers/old layers/new",
    "compare copies/old copies/new",
    "compare cuda rocm",
    "compare cuda=cuda rocm=rocm capped=dips/capped --candidate rocm",
    *(f"compare cuda dips/{name}" for name in ("elsewhere", "capped", "little", "near", "blind")),
    "compare big=work/m_training.batch_size=64 small=work/m_training.batch_size=32",
    "compare runs/a runs/b",
    "compare runs/a runs/b --by point",
    "compare ddp=h200x2_fsdp/ddp_one_connection fsdp=h200x2_fsdp/fsdp2",
)


def write_rank(directory: Path, rank: int, slower: float = 1.0) -> Path:
    """A recorded trace on CPUs, as if of another rank of four, its times stretched."""
    content = json.loads(gzip.decompress((TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()))
    content["distributedInfo"] |= {"rank": rank, "world_size": 4}
    for event in content["traceEvents"]:
        for name in event.keys() & {"ts", "dur"}:
            event[name] = float(event[name]) * slower
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"trace_rank{rank}.json"
    path.write_text(json.dumps(content))
    return path


def write_ranks(folder: Path) -> None:
    """Traces of three of four ranks, of one alone, and one that was cut short."""
    for rank, slower in ((0, 1.0), (1, 2.0), (3, 1.5)):
        write_rank(folder / "ranks", rank, slower)
    whole = write_rank(folder / "alone", 2).read_bytes()
    (folder / "cut.json").write_bytes(whole[: len(whole) * 3 // 4])


OF_RANKS = (
    "trace ranks --phase all",
    "trace ranks --by rank",
    "trace alone/trace_rank2.json",
    "trace alone --format csv",
    "trace cut.json --median",
    "timeline ranks --output timeline.json",
    "timeline alone --iteration 1 --output timeline.json.gz",
)

MADE_UP: dict[str, Callable[[Path], object]] = {
    "rare_operators": write_rare_operators,
    "rare_proofs": write_rare_proofs,
    "rare_files": write_rare_files,
    "async_tp": write_async_tp,
    "rare_layers": write_rare_layers,
    "rare_kernels": write_rare_kernels,
    "rare_training": write_rare_training,
    "rare_stacks": write_rare_stacks,
    "every_workload": write_every_workload,
    "damaged": write_damaged,
    "nothing_measured": write_nothing_measured,
    "traced": write_traced,
    "rare_charts": write_rare_charts,
}
"""By name what writes the run directories into a folder that is not there yet."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "rare_operators": ("query sweep --columns all",),
    "rare_layers": ("query sweep --layers",),
    "every_workload": (
        "query sweep \"tp_size == 2 and num_splits == 4 or status != 'ok'\"",
        "query sweep --layers",
        "query sweep chosen --kernels --sort m",
        "query sweep chosen --training",
        "query sweep 'hidden_fraction > 0.5' --copies --sort matrix_size",
        "query sweep 'chosen and tp_size == 4' --tp-training",
        "report sweep --output out --format csv --fail-if 'hidden_fraction < 0.3'",
    ),
    "nothing_measured": ("query sweep --kernels", "report sweep --format csv --fail-if 'speedup < 1'"),
}
"""Run after the report."""
FILES = ("summary.txt", "page.txt", "*/optimal_tp_comm_overlap_cfg_tp?.yaml")
"""What of the written files is held."""
FILES_OF = {"rare_charts": ("chart_data.txt",)}
"""Of some, what is held instead."""
