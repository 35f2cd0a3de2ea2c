"""Whole sweeps with made-up numbers and answers that one can compute by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.results.records import (
    LayerTrial,
    PassSearch,
    SearchRecord,
    TriedSetting,
    TunerRecord,
)
from overlap_sweep.workloads.layer.result import VariantTimes
from tests.make_point import (
    copy_config,
    default_timing,
    falling,
    implementation,
    job_config,
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


def write_sweep(directory: Path) -> Path:
    """TP 2: fc1 overlaps backward only, fc2 forward only; TP 4: no overlap pays. Every operator takes 1000 us at TP 1.

    fc1, TP 2: forward none 200, ring 220; backward none 400, floor 300, bulk sm4 320, sm8 360.
    fc2, TP 2: forward none 200, floor 100, pipeline sm8 150.
    """

    def write(*where: Any, fwd_us: float = 200.0, bwd_us: float = 400.0, at: str = "21:14:03", **knobs: Any) -> None:
        fwd, bwd = pass_times(fwd_us, 200.0, 100.0, tp1_us=500.0), pass_times(bwd_us, 400.0, 300.0, tp1_us=500.0)
        started = f"2026-11-20T{at}+00:00"
        make_point("operator", directory, operator_config(*where, **knobs), fwd=fwd, bwd=bwd, started=started)

    def fail(*where: Any, status: Any, error: str, **knobs: Any) -> None:
        make_point("operator", directory, operator_config(*where, **knobs), status=status, error=error)

    write(2, "fc1", "fprop", "ring_exchange", aggregate=False, fwd_us=220.0)
    for num_sm, bwd_us in ((4, 320.0), (8, 360.0)):
        write(2, "fc1", "all", "bulk", num_sm=num_sm, bwd_us=bwd_us, at="21:15:00")
        write(4, "fc1", "all", "bulk", num_sm=num_sm, bwd_us=500.0)
    write(2, "fc2", "fprop", "pipeline", num_sm=8, num_splits=4, fwd_us=150.0)
    fail(2, "fc2", "dgrad", "bulk", num_sm=8, status="skipped", error="bulk does not fit\n...")
    fail(2, "fc2", "wgrad", "bulk", num_sm=8, status="skipped", error="bulk does not fit")
    fail(8, "fc1", "all", "bulk", num_sm=4, status="failed", error="[rank3] out of memory")
    overrides = {"task": ["tp_size=2,4,8", "method=bulk,ring_exchange"], "hydra": ["hydra.mode=MULTIRUN"]}
    (directory / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    return directory


def write_sweep_of_training(directory: Path) -> Path:
    """Prefetch by accumulation on the same floor: prefetching saves a fifth, keeping parameters gathered some more, and
    accumulation communicates once for two micro batches."""
    for i, (prefetch, reshard, accumulation, step_us, none_us, floor_us) in enumerate(
        (
            (0, True, 1, 1500.0, 2000.0, 1000.0),
            (1, True, 1, 1200.0, 2000.0, 1000.0),
            (0, False, 1, 1450.0, 1800.0, 1000.0),
            (1, False, 1, 1150.0, 1800.0, 1000.0),
            (0, True, 2, 2500.0, 3000.0, 2000.0),
            (1, True, 2, 2200.0, 3000.0, 2000.0),
            (1, False, 2, 2100.0, 2800.0, 2000.0),
        )
    ):
        fsdp = {"forward_prefetch": prefetch, "reshard_after_forward": reshard}
        point = resolved("fsdp", fsdp=fsdp, training={"gradient_accumulation": accumulation})
        times = {"step_us": step_us, "none_us": none_us, "floor_us": floor_us, "spread_us": step_us / 200}
        make_point("fsdp", directory, point, name=f"fsdp_{i}", **times)
    point = resolved("fsdp", **{"training.batch_size": 4096})
    make_point("fsdp", directory, point, name="large", status="failed", error="CUDA out of memory")
    refused = resolved("fsdp", **{"distributed.strategy": "ddp", "fsdp.forward_prefetch": 1})
    reason = "fsdp.forward_prefetch has no effect under DDP"
    make_point("fsdp", directory, refused, name="refused", status="skipped", error=reason)
    return directory


def write_sweep_of_copies(directory: Path) -> Path:
    """To the host everything is hidden but at the smallest size; from one part of the GPU to another nothing."""
    for matrix_size, gemm_us in ((2048, 140.0), (4096, 1000.0)):
        for copy_mb, host_us in ((16.0, 300.0), (64.0, 1200.0)):
            hidden_us = max(gemm_us, host_us) + 0.1 * min(gemm_us, host_us)
            numbers = {"bytes_copied": int(4 * copy_mb * 2**20), "flops": 4 * 2 * matrix_size**3, "spread_us": 2.0}
            for direction, copy_us, overlapped_us in (
                ("device_to_host", host_us, hidden_us),
                ("device_to_device", host_us / 10, gemm_us + host_us / 10 + 1),
            ):
                point = copy_config(direction, matrix_size, copy_mb=copy_mb)
                times = {"overlapped_us": overlapped_us, "gemm_us": gemm_us, "copy_us": copy_us}
                make_point("copy_engine", directory, point, **times, **numbers)
    refused = copy_config("peer", device="cpu")
    make_point("copy_engine", directory, refused, name="refused", status="skipped", error="needs a GPU")
    return directory


def write_sweep_of_stacks(directory: Path) -> Path:
    """On TP=2 DP=2 Megatron-Core is fastest and AutoTP, with ZeRO 1 and 2, slowest; on TP=4 DP=1 asynchronous TP ties
    with it. Losses agree to a thousandth."""
    times_us = {
        (2, 2): {"autotp": 16_000.0, "fsdp_dtensor": 12_000.0, "async_tp": 11_000.0, "megatron": 10_000.0},
        (4, 1): {"autotp": 14_000.0, "fsdp_dtensor": 9_000.0, "async_tp": 7_020.0, "megatron": 7_000.0},
    }
    for (tp_size, dp_size), of_grid in times_us.items():
        for i, (impl, step_us) in enumerate(of_grid.items()):
            point = stack_config(impl, tp_size, dp_size)
            make_point("tp_training", directory, point, step_us=step_us, losses=falling(times=1 + i / 4000))
    second = stack_config("autotp", 2, 2, **{"tp_training.zero_stage": 2})
    make_point("tp_training", directory, second, step_us=16_500.0)
    refused = stack_config("async_tp", 1, 4)
    reason = "at tp_size=1 there is nothing for asynchronous TP to overlap; use impl=fsdp_dtensor"
    make_point("tp_training", directory, refused, name="refused", status="skipped", error=reason)
    large = stack_config("fsdp_dtensor", 1, 4)
    make_point("tp_training", directory, large, name="large", status="failed", error="CUDA out of memory")
    return directory


def write_sweep_of_jobs(directory: Path) -> Path:
    """Larger buckets save a twentieth, twice; more connections next to nothing."""
    for repetition in range(2):
        for minute, (bucket, connections, step_us) in enumerate(
            ((25, 1, 100_000.0), (25, 8, 99_800.0), (100, 1, 95_000.0), (100, 8, 94_900.0)), start=4 * repetition
        ):
            env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
            point = job_config({"bucket": bucket, "lr": 0.1}, env, repetition=repetition)
            causes = {"issued_late": 0.09, "dependency": 0.03} if bucket == 25 else {"issued_late": 0.04}
            make_point(
                *("job", directory, point),
                started=f"2026-11-20T21:{minute:02}:00+00:00",
                step_us=step_us * (1 + repetition / 500),
                exposed={"DP, ranks 0,2": 40.0 * (125 - bucket), "TP, ranks 0,1": 9_000.0},
                causes=causes,
                samples_per_step=64.0,
            )
    large = job_config({"bucket": 400, "lr": 0.1}, {"CUDA_DEVICE_MAX_CONNECTIONS": 1})
    make_point("job", directory, large, name="large", status="failed", error="CUDA out of memory")
    return directory


def write_sweep_of_kernels(directory: Path) -> Path:
    """Two backends at m=1024 and 8192: symm_mem wins at the first, torch at the second; bulk is independent."""
    refused = {"refused": "too large\nfor it", "pipeline": "wrong numbers: relative error 0.5, tolerance 0.01"}
    wrong = {"left_out": refused, "relative_error": {"pipeline": 0.5}}
    for m, ring_us, fused_us, left_out in ((1024, 160.0, 120.0, wrong), (8192, 130.0, 150.0, {})):
        torch = {"ring": implementation(ring_us, 1.0), "bulk": implementation(110.0, independent=True)}
        make_point("kernel", directory, kernel_config(m), implementations=torch, name=f"torch_{m}")
        fused, point = {"fused": implementation(fused_us, 1.0)}, kernel_config(m, "symm_mem")
        make_point("kernel", directory, point, implementations=fused, name=f"symm_mem_{m}", **left_out)
    flux = kernel_config(backend="flux")
    make_point("kernel", directory, flux, name="flux", status="skipped", error="flux is not installed")
    return directory


def write_layers(directory: Path) -> Path:
    """One whole layer, one that failed, and one that has no result."""
    times_us = {"none": 60_000.0, "floor": 50_000.0, "file:best.yaml": 57_000.0}
    variants = {name: variant([time_us] * 6) for name, time_us in times_us.items()}
    make_point("layer", directory, variants=variants, name="a_layer", warnings=["GPU 3 was throttled."])
    make_point("layer", directory, name="b_layer", status="failed", error="[rank3] out of memory\n...")
    missing_point(directory, layer_config(), "c_layer")
    return directory


def write_every_workload(directory: Path) -> None:
    write_sweep(directory / "operators")
    write_layers(directory / "layers")
    write_sweep_of_kernels(directory / "kernels")
    write_sweep_of_training(directory / "training")
    write_sweep_of_copies(directory / "copies")
    write_sweep_of_stacks(directory / "stacks")
    write_sweep_of_jobs(directory / "jobs")


def trial(point: str, variants: Mapping[str, str], tp_size: int = 4) -> LayerTrial:
    """`variants` by label the name in the point."""
    return LayerTrial(tp_size=tp_size, point=point, variants=dict(variants))


def write_tuner(directory: Path, **fields: Any) -> None:
    """tuner.json beside the points of `directory`."""
    known = {"command": "python launch.py +experiment=tp_overlap_tuner", "started": "2026-11-20T21:00:00+00:00"}
    numbers = {"wall_s": 750.0, "search_s": 485.0, "points": 143}
    TunerRecord(**{**known, **numbers, **fields}).write(directory)


TUNED = "file:/far/away/llama3_8b_tp4_bf16_tokens8192_tuned.yaml"
PRESET = "file:/far/away/preset_tp4.yaml"

BULK = {"method": "bulk", "num_sm": 4}
PIPELINE = {"method": "pipeline", "num_sm": 8, "num_splits": 4}
BEST_SLOTS = {"fc1_dgrad": BULK, "fc1_wgrad": BULK, "fc2_fprop": PIPELINE}
BEST_SWITCHES = {**SWITCH_DEFAULTS, "tp_comm_overlap_ag": False}
"""What the operators of `write_operators` come to one by one: fc1_fprop is better not overlapped."""
PRESET_SLOTS = {"fc2_fprop": {"method": "pipeline", "num_sm": 16}}

LIBRARY: dict[str, Any] = {"settings": {}, "switches": dict(SWITCH_DEFAULTS)}
BEST: dict[str, Any] = {"settings": BEST_SLOTS, "switches": BEST_SWITCHES}
OTHER: dict[str, Any] = {"settings": {"fc2_fprop": PIPELINE}, "switches": BEST_SWITCHES}
PRESETS: dict[str, Any] = {"settings": PRESET_SLOTS, "switches": dict(SWITCH_DEFAULTS)}

LABELS = {"none": "none", "default": "default", "tuned": TUNED, "preset preset_tp4": PRESET}
WINS = {"none": 1.0, "default": 0.95, "tuned": 0.905, "preset preset_tp4": 0.97, "floor": 0.85}
"""Of 60 ms, by label, where the tuned configuration is fastest."""


def rounds(ratio: float, noise: float = 0.0, **changed: Any) -> VariantTimes:
    """Seven rounds that take this ratio of 60 ms, give or take the noise, on a machine that gets slower by 3 %."""
    drift = [1.0, 1.005, 1.01, 1.015, 1.02, 1.025, 1.03]
    return variant([60_000.0 * slow * (ratio + (-noise, noise, 0.0)[i % 3]) for i, slow in enumerate(drift)], **changed)


def write_operators(directory: Path, tp_size: int = 4, **changed: Any) -> None:
    """Default, in us: fc1 forward 210, backward 360; fc2 forward 160.

    fc1: forward none 200, ring 220; backward none 400, bulk sm4 320, sm8 360. fc2: forward none 200, pipeline 150.
    """
    defaults = {"fc1": (210.0, 360.0), "fc2": (160.0, 400.0)}
    for operator, phase, fwd_us, bwd_us, method, knobs in (
        ("fc1", "fprop", 220.0, 400.0, "ring_exchange", {"aggregate": False}),
        ("fc1", "all", 200.0, 320.0, "bulk", {"num_sm": 4}),
        ("fc1", "all", 200.0, 360.0, "bulk", {"num_sm": 8}),
        ("fc2", "fprop", 150.0, 400.0, "pipeline", {"num_sm": 8, "num_splits": 4}),
    ):
        fwd, bwd = (
            default_timing(default_us, none_us)
            for default_us, none_us in zip(defaults[operator], (200.0, 400.0), strict=True)
        )
        times = {
            "fwd": pass_times(fwd_us, 200.0, 100.0, tp1_us=500.0, default=fwd),
            "bwd": pass_times(bwd_us, 400.0, 300.0, tp1_us=1000.0, default=bwd),
        }
        point = operator_config(tp_size, operator, phase, method, **{"backend": "megatron", **knobs, **changed})
        make_point("operator", directory, point, started="2026-11-20T21:02:00+00:00", **times)


def write_proof(
    directory: Path,
    ratios: Mapping[str, float] = WINS,
    noise: float = 0.0,
    tp_size: int = 4,
    name: str = "proof",
    changed: Mapping[str, Mapping[str, Any]] | None = None,
    **result: Any,
) -> Path:
    """The layer point of a proof: by label the ratio to 60 ms, and what else is true of the variant."""
    names, configs = {**LABELS, "floor": "floor"}, {"default": LIBRARY, "tuned": BEST, "preset preset_tp4": PRESETS}
    variants = {}
    for label, ratio in ratios.items():
        told = {**configs.get(label, {}), **(changed or {}).get(label, {})}
        variants[names[label]] = rounds(ratio, noise if label == "tuned" else 0.0, **told)
    known = {"attention_backend": "fused (cuDNN 9.19.0)", "started": "2026-11-20T21:11:00+00:00"}
    point = result.pop("point", layer_config(tp_size=tp_size))
    return make_point("layer", directory, point, variants=variants, name=name, **{**known, **result})


def write_together(directory: Path, tp_size: int = 4) -> None:
    """Best of each slot takes 0.91 of none, one alternative 0.92."""
    tried = {"file:/far/a_0.yaml": rounds(0.91, **BEST), "file:/far/a_1.yaml": rounds(0.92, **OTHER)}
    variants = {"none": rounds(1.0), **tried, "floor": rounds(0.85)}
    make_point("layer", directory, layer_config(tp_size=tp_size), variants=variants, name="together")


TOGETHER = trial(
    "together",
    {"none": "none", "best of each slot": "file:/far/a_0.yaml", "fc1 bwd by none": "file:/far/a_1.yaml"},
)


def write_tuned_sweep(directory: Path, **proof: Any) -> Path:
    """TP 4, all of it: `proof` as `write_proof` takes it."""
    write_operators(directory)
    write_together(directory)
    write_proof(directory, **proof)
    dropped = {"TP sizes": "TP=8 left out: 4 GPUs are visible"}
    write_tuner(directory, together=[TOGETHER], proofs=[trial("proof", LABELS)], dropped=dropped)

    def search(of_pass: str, time_us: float, none_us: float, floor_us: float, **found: Any) -> PassSearch:
        what = {"model": "llama3_8b", "tp_size": 4, "operator": "fc1", "exhaustive": 340, "evaluations": 12}
        ended = {"stopped": "nothing left promises 1.0%", "refused": {"num_sm=40 is more than 32": 3}}
        times = {"time_us": time_us, "none_us": none_us, "floor_us": floor_us}
        return PassSearch(pass_name=of_pass, **what, **times, **ended, **found)

    def tried(setting: str, time_us: float, measurements: int) -> TriedSetting:
        return TriedSetting(setting=setting, time_us=time_us, noise_us=1.0, measurements=measurements)

    fwd = search("fwd", 200.0, 200.0, 200.0, tried=[tried("ring_agg0", 220.0, 1)])
    chosen, notes = {"fc1_dgrad": BULK, "fc1_wgrad": BULK}, ["pipeline_sm8 failed: out of memory"]
    both = [tried(f"bulk_sm{sms}", 320.0, 2) for sms in (4, 8)]
    bwd = search("bwd", 320.0, 400.0, 300.0, chosen=chosen, notes=notes, tried=both)
    record = SearchRecord(points=143, elapsed_s=485.0, rounds=9, searches=[fwd, bwd])
    record.write(directory)
    return directory
