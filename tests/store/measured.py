"""Results to be kept, and processes that keep them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.results.run_directory import Result
from overlap_sweep.store import Measurement, Store
from tests.make_point import ENVIRONMENT as MACHINE
from tests.make_point import made_result, operator_config, pass_times

ROOT = Path(__file__).parent.parent.parent

ENVIRONMENT: dict[str, Any] = {
    **MACHINE,
    **{"device": "cuda", "gpus": ["NVIDIA H200"], "driver": "570.1", "links": ["NV18"]},
    "packages": {"torch": "2.12.0", "transformer-engine": "2.9.0", "nccl": "2.27.3"},
    "variables": {"UB_SKIPMC": "1"},
}


def environment(packages: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    return {**ENVIRONMENT, "packages": {**ENVIRONMENT["packages"], **(packages or {})}, **changes}


def result(
    num_sm: int = 4,
    time_us: float = 100.0,
    minute: int = 0,
    on: dict[str, Any] | None = None,
    spread_us: float = 0.0,
    none_us: float = 100.0,
    point: dict[str, Any] | None = None,
    resolved: dict[str, Any] | None = None,
    **fields: Any,
) -> Result:
    """An operator's backward pass by bulk, measured at that minute of the hour; a spread is half the IQR. Of another
    workload `resolved` is the whole point, and `fields` what it measured."""
    resolved = resolved or operator_config(method="bulk", num_sm=num_sm, **(point or {}))
    usual: dict[str, Any] = {"name": "p", "objective_us": time_us, "environment": on or ENVIRONMENT, "wall_s": 1.5}
    if "operator" in resolved:
        usual |= {"fwd": pass_times(50.0), "bwd": pass_times(time_us, none_us, spread_us=spread_us)}
    usual["started"] = f"2026-11-20T21:{minute:02}:00+00:00"
    return made_result(resolved["workload"]["name"], resolved, **{**usual, **fields})


def minutes(measurements: Sequence[Measurement]) -> list[int]:
    """Of the hour, when they were measured."""
    return [int(measurement.measured[14:16]) for measurement in measurements]


def keep(path: Path, *minutes: int) -> None:
    """Adds results that were measured then."""
    with Store(path) as store:
        for minute in minutes:
            store.add(result(minute=minute), path.parent)


def latest(store: Store) -> int | None:
    """When that was measured which stands for `result()`."""
    found = store.find(result().point, ENVIRONMENT)
    return minutes([found])[0] if found else None


WRITER = """
import sys
from pathlib import Path
from overlap_sweep.store import Store
from tests.store.measured import result

path, first, count = sys.argv[1:]
with Store(Path(path)) as store:
    for i in range(int(first), int(first) + int(count)):
        store.add(result(num_sm=i), Path("/results") / str(i))
        print(i, flush=True)
"""


def start_writer(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    """A process that opens the store and adds results with num_sm from `first` on, and says so after each."""
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)


def added(process: subprocess.Popen[str]) -> list[int]:
    """Returns what the writer said that it added, when it has ended."""
    # Not by communicate(timeout=...), which loses what an earlier readline() has read ahead.
    assert process.stdout
    with process:
        return list(map(int, process.stdout.read().split()))


def write_history(path: Path) -> None:
    """Three settings before and after another torch: the same, slower, faster; and one that was launch-bound."""
    path.parent.mkdir(exist_ok=True)
    new = environment(packages={"torch": "2.13.0"}, driver="580.2")
    with Store(path) as kept:
        for num_sm, before_us, after_us in ((1, 100.0, 100.1), (2, 100.0, 120.0), (4, 100.0, 70.0)):
            for minute in (1, 2):
                kept.add(result(num_sm, before_us, minute), path.parent / "old")
            kept.add(result(num_sm, after_us, 5, new), path.parent / "new")
        kept.add(result(8, minute=6, on=new, launch_bound=True), path.parent / "new")
