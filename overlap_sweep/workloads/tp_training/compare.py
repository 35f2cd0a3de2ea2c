"""Tensor-parallel stacks in comparisons and histories: their step times."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import Comparable, Key, KeyedTime, Sample
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.study import STEP
from overlap_sweep.study.settings import DEFAULTS
from overlap_sweep.workloads import nodes
from overlap_sweep.workloads.tp_training.answer import TpTrainingCase, analyse_tp_training
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow, setting_of


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the step times of all stacks, including those with deviating losses, which their own report names."""
    analyses = analyse_tp_training(points, {})
    return Comparable([_time(analysis.case, row) for analysis in analyses for row in analysis.rows])


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the step, even if it is launch-bound."""
    config = result.point_as(Resolved)
    options = setting_of(config).removeprefix(config.impl)
    sample = Sample((result.measured_as(TpTrainingRun).timing,), None, STEP, config.workload.tokens)
    return {f"dp{config.dp_size}{on_nodes(nodes(result.recorded))}{options}": sample}


COMPARED = Comparing(
    measured,
    samples,
    matched=("impl", "dp_size"),
    # They affect the report only.
    changes_nothing=("tp_training.log_interval", "tp_training.peak_tflops"),
)


def _time(case: TpTrainingCase, row: TpTrainingRow) -> KeyedTime:
    """Returns the step time, with the implementation as backend, so that sweeps of two implementations compare."""
    micro_batches = f" x {case.gradient_accumulation_steps}" if case.gradient_accumulation_steps > 1 else ""
    options = row.setting.removeprefix(row.impl).strip()
    key = Key(
        model=case.model,
        tokens=row.run.tokens_per_step,
        precision=row.config.precision,
        backend=row.impl,
        device=case.device,
        tp_size=row.grid.tp_size,
        operator=f"DP={row.grid.dp_size}, {case.num_layers} layers, batch {case.batch_size}{micro_batches}",
        pass_name=STEP,
        setting=options or DEFAULTS,
        nodes=case.nodes,
    )
    return KeyedTime(key, row.step, None, None, tuple(point.name for point in row.points))
