"""Whole sweeps with made-up numbers and answers that one can compute by hand."""

from collections.abc import Mapping
from functools import partial
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
from tests.listed_points import write_sweep_of
from tests.make_point import (
    default_timing,
    layer_config,
    make_point,
    missing_point,
    operator_config,
    pass_times,
    variant,
)


def write_sweep(directory: Path) -> Path:
    """TP 2: fc1 overlaps backward only, fc2 forward only; TP 4: no overlap pays. Everything takes 1000 us at TP 1."""
    write_sweep_of("operators", directory)
    overrides = {"task": ["tp_size=2,4,8", "method=bulk,ring_exchange"], "hydra": ["hydra.mode=MULTIRUN"]}
    (directory / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    return directory


write_sweep_of_training = partial(write_sweep_of, "training")
write_sweep_of_copies = partial(write_sweep_of, "copies")
write_sweep_of_stacks = partial(write_sweep_of, "stacks")
write_sweep_of_jobs = partial(write_sweep_of, "jobs")
write_sweep_of_kernels = partial(write_sweep_of, "kernels")


def write_layers(directory: Path) -> Path:
    """One whole layer, one that failed, and one that has no result."""
    write_sweep_of("layers", directory)
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
