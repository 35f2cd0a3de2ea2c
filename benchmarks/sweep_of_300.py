"""Makes up a realistic sweep of 300 points: smooth surfaces over num_sm, noise, failures, traces."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.runtime.resolvers import point_name
from tests.make_point import default_timing, make_point, operator_config, pass_times, timing_of

TRACES = Path(__file__).parent.parent / "tests" / "data" / "traces"
NONE_TRACE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"
BEST_TRACE = TRACES / "h200x4_llama3_70b_layer_ring_rs.json.gz"

TIMES_US = {"qkv": (420.0, 860.0), "proj": (400.0, 690.0), "fc1": (1480.0, 2990.0), "fc2": (760.0, 1510.0)}
"""Times of the GEMMs alone at TP=4, forward and backward."""
COMMUNICATION_US = {"qkv": (190.0, 380.0), "proj": (200.0, 210.0), "fc1": (190.0, 390.0), "fc2": (200.0, 215.0)}
NUM_SMS = (1, 2, 4, 8, 16, 24, 32)
REPEATS = 20
DEFAULT_SPEEDUP = {"qkv": 1.03, "proj": 0.97, "fc1": 0.985, "fc2": 1.05}


def write_sweep_of_300(directory: Path, points: int = 300, traced: bool = True) -> Path:
    """TP=4 and 8, all operators; the last points repeat earlier ones. `directory` is made."""
    random.seed(7)
    configurations = list(_configurations())
    chosen = [configurations[i % len(configurations)] for i in range(points)]
    for i, (tp_size, operator, phase, method, knobs) in enumerate(chosen):
        point = operator_config(tp_size, operator, phase, method, **knobs, model="llama3_70b")
        name = f"{point_name(point, [])}_{i:03}"
        started = f"2026-11-20T{20 + i // 120}:{i // 2 % 60:02}:{i % 2 * 30:02}+00:00"
        if refused := space.refusal(point):
            make_point("operator", directory, point, status="skipped", error=refused, name=name)
        elif i % 41 == 40:
            error = "rank 3 died: CUDA error: an illegal memory access was encountered </script><b>\nTraceback ..."
            make_point("operator", directory, point, status="failed", error=error, name=name, started=started)
        elif i % 97 == 96:
            make_point(
                "operator", directory, point, status="timeout", error="no answer in 300 s", name=name, started=started
            )
        else:
            times = {p: _pass(point, p) for p in space.PASSES}
            traces = [trace_file(0), "trace_none_rank0.json.gz"] if traced and i < len(configurations) else []
            written = make_point(
                "operator",
                directory,
                point,
                name=name,
                started=started,
                traces=traces,
                launch_bound=i % 67 == 66,
                **times,
            )
            if traces:
                shutil.copy(BEST_TRACE, written / trace_file(0))
                shutil.copy(NONE_TRACE, written / "trace_none_rank0.json.gz")
    return directory


def _configurations() -> Iterator[tuple[int, str, str, str, dict[str, Any]]]:
    for tp_size in (4, 8):
        for operator, parallel in space.OPERATORS.items():
            yield tp_size, operator, "all", "none", {}
            for num_sm in NUM_SMS:
                if parallel == "column":
                    yield tp_size, operator, "all", "bulk", {"num_sm": num_sm, "cga_size": 2, "set_sm_margin": True}
                for num_splits in (2, 4):
                    knobs = {"num_sm": num_sm, "num_splits": num_splits}
                    yield tp_size, operator, "dgrad" if parallel == "column" else "fprop", "pipeline", knobs
            for aggregate in (False, True):
                ring: dict[str, Any] = {"num_sm": 1, "aggregate": aggregate, "use_ce": True}
                yield tp_size, operator, "fprop" if parallel == "column" else "dgrad", "ring_exchange", ring
        yield tp_size, "fc2", "all", "bulk", {"num_sm": 4}


def _pass(point: dict[str, Any], name: str) -> Any:
    """Times of one pass: hidden communication grows with the SMs that copy, and the GEMMs lose what those take."""
    at, operator, tp_size = space.PASSES.index(name), point["operator"], point["tp_size"]
    floor_us = TIMES_US[operator][at] * 4 / tp_size
    communication_us = COMMUNICATION_US[operator][at] * (1 + 0.15 * (tp_size - 4) / 4)
    none_us = floor_us + communication_us
    slots = {s: v for s, v in space.settings(point).items() if space.PASS_OF_PHASE[s.partition("_")[2]] == name}
    drift = 1 + random.gauss(0, 0.004)
    default = default_timing(none_us / DEFAULT_SPEEDUP[operator], none_us, minute=at)
    times_us = _overlapped_us(point, floor_us, communication_us) if slots else none_us
    base = pass_times(1.0, default=default)
    base.point, base.none, base.floor, base.tp1 = (
        _timing(time_us * drift) for time_us in (times_us, none_us, floor_us, TIMES_US[operator][at] * 4 * 0.985)
    )
    return base


def _overlapped_us(point: dict[str, Any], floor_us: float, communication_us: float) -> float:
    num_sm, method = point["num_sm"], point["method"]
    if method == "ring_exchange":
        return floor_us + communication_us * (0.55 if point["aggregate"] else 0.34)
    slowed = floor_us / (1 - num_sm / 132)
    copying_us = communication_us * (1 + 5.5 / num_sm)
    exposed = 0.18 if method == "bulk" else 0.1 + 0.8 / point["num_splits"]
    return max(slowed, copying_us) + exposed * communication_us


def _timing(time_us: float) -> Timing:
    return timing_of([max(1.0, time_us * (1 + random.gauss(0.002, 0.006))) for _ in range(REPEATS)])
