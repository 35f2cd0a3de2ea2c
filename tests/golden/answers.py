"""What is answered about made-up points, question by question: answers/*.yaml has the points, the golden file what
analyze.py prints of them.

A point has the options in which it differs from the usual one of its workload, which is the file's unless it says
`workload`, and what was measured, as tests/make_point.py takes it: a time alone is the first argument. Points below
names are sweeps, of which the first is the reference of their comparison.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.console import summary_text
from overlap_sweep.results.registry import types_of
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.sections import analyse
from tests import make_point as made
from tests.analyze import analyze

FILES = sorted(Path(__file__).with_suffix("").glob("*.yaml"))
DEFAULT = {"comparisons": "operator"}
Point = Mapping[str, Any]
POINTS: dict[str, Callable[..., Any]] = {
    "operator": made.operator_config,
    "layer": made.layer_config,
    "kernel": made.kernel_config,
    "fsdp": partial(made.resolved, "fsdp"),
    "copy_engine": made.copy_config,
    "tp_training": made.stack_config,
    "job": made.job_config,
}


def write(file: Path, folder: Path) -> None:
    """Writes answers.txt into the folder: each question of the file and what is said."""
    folder.mkdir()
    questions: dict[str, Sequence[Point] | dict[str, Sequence[Point]]] = yaml.safe_load(file.read_text())
    said = []
    for question, points in questions.items():
        with TemporaryDirectory() as place, chdir(place):
            sweeps = points if isinstance(points, dict) else {".": points}
            for name, of_sweep in sweeps.items():
                for point in of_sweep:
                    write_point(Path(name), {"workload": DEFAULT.get(file.stem, file.stem), **point})
            said.append(f"## {question}\n{_compared(*sweeps) if len(sweeps) > 1 else _answered()}\n")
    (folder / "answers.txt").write_text("\n".join(said))


def _answered() -> str:
    analysis = analyse(Path(), AnalysisConfig())
    return summary_text(analysis) + "".join(f"{problem}\n" for problem in analysis.problems)


def _compared(*names: str) -> str:
    ran = analyze("compare", *names, "--reference", names[0], "--by", "point")
    return ran.stdout + ran.stderr


def write_point(directory: Path, point: Point) -> None:
    """Writes the point into a folder of the directory; unless it says otherwise it started a minute after the last."""
    of_point, taken = dict(point), {"started": f"2026-11-20T21:{len(list(directory.glob('*'))):02}:00+00:00"}
    workload = of_point.pop("workload")
    measured = [*Result.__struct_fields__, *types_of(workload).measured.__struct_fields__]
    for name in {*measured, *inspect.signature(made.MEASURED[workload]).parameters} & of_point.keys():
        taken[name] = MEASURED.get(name, lambda given: given)(of_point.pop(name))
    made.make_point(workload, directory, POINTS[workload](**of_point), **taken)


def _built(build: Callable[..., Any], given: Any) -> Any:
    """Calls `build` with the arguments, or with the only one."""
    return build(**given) if isinstance(given, dict) else build(given)


def _pass(given: Any) -> Any:
    if isinstance(given, dict) and "default" in given:
        given = {**given, "default": _built(made.default_timing, given["default"])}
    return _built(made.pass_times, given)


def _implementations(given: dict[str, Any]) -> dict[str, Any]:
    own = {name: _built(made.implementation, one) for name, one in given.items() if name != "baselines"}
    return {**made.baselines(**given.get("baselines", {})), **own}


def _environment(changed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**made.ENVIRONMENT, **changed}.items() if value is not None}


MEASURED: dict[str, Callable[[Any], Any]] = {
    "environment": _environment,
    "fwd": _pass,
    "bwd": _pass,
    "implementations": _implementations,
    "variants": lambda given: {name: _built(made.variant, one) for name, one in given.items()},
    "losses": lambda given: made.falling(**given) if isinstance(given, dict) else given,
}
