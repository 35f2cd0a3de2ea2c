"""A sweep with a bit of everything, and answers that one can compute by hand."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.analysis.run_directories import config, pass_times, write_point


def write_sweep(directory: Path) -> Path:
    """TP 2: fc1 overlaps backward only, fc2 forward only; TP 4: no overlap pays. Every operator takes 1000 us at TP 1.

    fc1, TP 2: forward none 200, ring 220; backward none 400, floor 300, bulk sm4 320, sm8 360.
    fc2, TP 2: forward none 200, floor 100, pipeline sm8 150.
    """
    # Times in us; the unsharded operator takes 500 forward and 500 backward.
    fwd = {"none_us": 200.0, "floor_us": 100.0, "tp1_us": 500.0}
    bwd = {"none_us": 400.0, "floor_us": 300.0, "tp1_us": 500.0}
    none = {"fwd": pass_times(200.0, **fwd), "bwd": pass_times(400.0, **bwd)}
    ring = config(2, "fc1", "fprop", "ring_exchange", aggregate=False)
    write_point(directory, ring, **{**none, "fwd": pass_times(220.0, **fwd)}, started="2026-11-20T21:14:03+00:00")
    for num_sm, time_us in ((4, 320.0), (8, 360.0)):
        bulk = config(2, "fc1", "all", "bulk", num_sm=num_sm)
        write_point(directory, bulk, **{**none, "bwd": pass_times(time_us, **bwd)}, started="2026-11-20T21:15:00+00:00")
        write_point(directory, {**bulk, "tp_size": 4}, **{**none, "bwd": pass_times(500.0, **bwd)})
    pipeline = config(2, "fc2", "fprop", "pipeline", num_sm=8, num_splits=4)
    write_point(directory, pipeline, **{**none, "fwd": pass_times(150.0, **fwd)})
    write_point(
        directory, config(2, "fc2", "dgrad", "bulk", num_sm=8), status="skipped", error="bulk does not fit\n..."
    )
    write_point(directory, config(2, "fc2", "wgrad", "bulk", num_sm=8), status="skipped", error="bulk does not fit")
    write_point(directory, config(8, "fc1", "all", "bulk", num_sm=4), status="failed", error="[rank3] out of memory")
    overrides = {"task": ["tp_size=2,4,8", "method=bulk,ring_exchange"], "hydra": ["hydra.mode=MULTIRUN"]}
    (directory / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    return directory
