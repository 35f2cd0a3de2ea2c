"""Sweeps of the tuner: operators, what was tried together, and a proof; answers that one can compute by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.run_directory import VariantTimes
from tests.analysis.run_directories import (
    config,
    default_timing,
    layer_config,
    pass_times,
    trial,
    variant,
    write_layer,
    write_point,
    write_search,
    write_tuner,
)

TUNED = "file:/far/away/llama3_8b_tp4_bf16_tokens8192_tuned.yaml"
PRESET = "file:/far/away/preset_tp4.yaml"

BULK = {"method": "bulk", "num_sm": 4}
PIPELINE = {"method": "pipeline", "num_sm": 8, "num_splits": 4}
BEST_SLOTS = {"fc1_dgrad": BULK, "fc1_wgrad": BULK, "fc2_fprop": PIPELINE}
BEST_SWITCHES = {**SWITCH_DEFAULTS, "tp_comm_overlap_disable_fc1": True}
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
    changed = {"backend": "megatron", **changed}
    fwd, bwd = {"none_us": 200.0, "floor_us": 100.0, "tp1_us": 500.0}, {"none_us": 400.0, "floor_us": 300.0}
    bwd["tp1_us"] = 1000.0
    fc1 = default_timing(210.0, none_us=200.0), default_timing(360.0, none_us=400.0)
    fc2 = default_timing(160.0, none_us=200.0), default_timing(400.0, none_us=400.0)

    def write(operator: str, phase: str, fwd_us: float, bwd_us: float, method: str, **knobs: Any) -> None:
        default_fwd, default_bwd = fc1 if operator == "fc1" else fc2
        times = {
            "fwd": pass_times(fwd_us, **fwd, default=default_fwd),
            "bwd": pass_times(bwd_us, **bwd, default=default_bwd),
        }
        point = config(tp_size, operator, phase, method, **knobs, **changed)
        write_point(directory, point, **times, started="2026-11-20T21:02:00+00:00")

    write("fc1", "fprop", 220.0, 400.0, "ring_exchange", aggregate=False)
    write("fc1", "all", 200.0, 320.0, "bulk", num_sm=4)
    write("fc1", "all", 200.0, 360.0, "bulk", num_sm=8)
    write("fc2", "fprop", 150.0, 400.0, "pipeline", num_sm=8, num_splits=4)


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
    configs = {"default": LIBRARY, "tuned": BEST, "preset preset_tp4": PRESETS}
    variants = {
        {**LABELS, "floor": "floor"}[label]: rounds(
            ratio, noise if label == "tuned" else 0.0, **{**configs.get(label, {}), **(changed or {}).get(label, {})}
        )
        for label, ratio in ratios.items()
    }
    known = {"attention_backend": "fused (cuDNN 9.19.0)", "started": "2026-11-20T21:11:00+00:00"}
    point = result.pop("point", layer_config(tp_size=tp_size))
    return write_layer(directory, variants, point, name, **{**known, **result})


def write_together(directory: Path, tp_size: int = 4) -> None:
    """Best of each slot takes 0.91 of none, one alternative 0.92."""
    variants = {
        "none": rounds(1.0),
        "file:/far/a_0.yaml": rounds(0.91, **BEST),
        "file:/far/a_1.yaml": rounds(0.92, **OTHER),
    }
    write_layer(directory, {**variants, "floor": rounds(0.85)}, layer_config(tp_size=tp_size), "together")


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
    search = {"model": "llama3_8b", "tp_size": 4, "operator": "fc1", "exhaustive": 340, "evaluations": 12}
    searches = [
        {
            **search,
            "pass": "fwd",
            "chosen": {},
            "time_us": 200.0,
            "none_us": 200.0,
            "floor_us": 100.0,
            "stopped": "nothing left promises 1.0%",
            "notes": [],
            "refused": {"num_sm=40 is more than 32": 3},
            "tried": [{"setting": "ring_agg0", "time_us": 220.0, "noise_us": 1.0, "measurements": 1}],
        },
        {
            **search,
            "pass": "bwd",
            "chosen": {"fc1_dgrad": BULK, "fc1_wgrad": BULK},
            "time_us": 320.0,
            "none_us": 400.0,
            "floor_us": 300.0,
            "stopped": "nothing left promises 1.0%",
            "notes": ["pipeline dropped: 40% slower than the best"],
            "refused": {"num_sm=40 is more than 32": 3},
            "tried": [
                {"setting": f"bulk_sm{sms}", "time_us": 320.0, "noise_us": 1.0, "measurements": 2} for sms in (4, 8)
            ],
        },
    ]
    write_search(directory, searches)
    return directory
