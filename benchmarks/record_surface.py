"""Records a response surface for replay_search.py: every operator of a model under a list of overlap configurations.

    python benchmarks/record_surface.py OUT.jsonl MODEL TP [override ...]

One line per measurement: `model`, `tp`, `kind` (`none`, `floor`, `overlap`), `cfg` (the ub_cfgs; every slot is named),
`sec`, and `times[operator]`: forward ms, backward ms, the spread (interquartile range) of each, and the point's wall
time in ms. Spreads and medians are over the repeats, slowest rank.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import Result, find_points, read_result

LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
AT_REST = 16
"""Setting of dgrad while wgrad varies, and the other way round."""

Phases = dict[str, dict[str, Any]]


def bulk(num_sm: int) -> dict[str, Any]:
    return {"method": "bulk", "num_sm": num_sm, "cga_size": 2 if num_sm % 2 == 0 else 1, "set_sm_margin": False}


def ring(num_sm: int = 1, **knobs: bool) -> dict[str, Any]:
    return {"method": "ring_exchange", "num_sm": num_sm, **knobs}


def pipeline(num_sm: int, num_splits: int) -> dict[str, Any]:
    return {"method": "pipeline", "num_sm": num_sm, "num_splits": num_splits}


def column_points() -> Iterator[Phases]:
    """Forward and backward settings have nothing to do with each other, so one point measures one of each."""
    forward = [ring(), ring(aggregate=True), ring(2, set_sm_margin=True), ring(8, set_sm_margin=True)]
    backward = [(bulk(n), bulk(AT_REST)) for n in LADDER]
    backward += [(bulk(AT_REST), bulk(n)) for n in LADDER if n != AT_REST]
    for index, (dgrad, wgrad) in enumerate(backward):
        yield {"fprop": forward[index % len(forward)], "dgrad": dgrad, "wgrad": wgrad}
    for index, scatter in enumerate((ring(), ring(8, set_sm_margin=True))):
        yield {"fprop": forward[index], "dgrad": scatter}


def row_points() -> Iterator[Phases]:
    backward = [ring(), ring(aggregate=True), ring(2, set_sm_margin=True), ring(8, set_sm_margin=True)]
    forward = [ring(), ring(set_sm_margin=True), ring(8, set_sm_margin=True)]
    forward += [pipeline(n, splits) for splits in (2, 4, 8) for n in (2, 4, 8, 12, 16, 24, 32)]
    for index, fprop in enumerate(forward):
        yield {"fprop": fprop, "dgrad": backward[index % len(backward)]}


def override(phases: Phases) -> str:
    of_phase = (
        f"{phase}:{{{','.join(f'{knob}:{str(value).lower()}' for knob, value in setting.items())}}}"
        for phase, setting in phases.items()
    )
    return f"{{{','.join(of_phase)}}}"


def lines(result: Result, model: str) -> Iterator[dict[str, Any]]:
    operator, tp = result.recorded["operator"], result.recorded["tp_size"]
    for kind in ("none", "floor", "overlap"):
        timings: list[Timing] = [
            getattr(result.measured.times[name], "point" if kind == "overlap" else kind) for name in space.PASSES
        ]
        spreads = [(timing.q3_us - timing.q1_us) / 1e3 for timing in timings]
        sec = result.wall_s or 0.0
        times = [*(timing.median_us / 1e3 for timing in timings), *spreads, 1e3 * sec]
        cfg = result.settings if kind == "overlap" else None
        yield {"model": model, "tp": tp, "kind": kind, "cfg": cfg, "sec": sec, "times": {operator: times}}


def main() -> None:
    out, model, tp, *overrides = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        for parallel, points in (("column", column_points()), ("row", row_points())):
            operators = ",".join(name for name, kind in space.OPERATORS.items() if kind == parallel)
            swept = ",".join(override(phases) for phases in points)
            command = [sys.executable, "launch.py", "-m", f"model={model}", f"tp_size={tp}", f"operator={operators}"]
            command += [f"phases={swept}", "profile=none", f"hydra.sweep.dir={scratch}/{parallel}", *overrides]
            subprocess.run(command, check=False)
        results = [read_result(directory / "result.json") for directory in find_points(Path(scratch))]
    with Path(out).open("a") as file:
        for result in results:
            if result.status == "ok":
                file.writelines(json.dumps(line) + "\n" for line in lines(result, model))


if __name__ == "__main__":
    main()
