"""Shares of a step and its communication. Which stack is fastest: answers/tp_training, made/stack_answers,
made/every_workload and tp_training among the golden files."""

from pathlib import Path

import pytest

from overlap_sweep.results.traces import TraceReading
from overlap_sweep.workloads.tp_training.rows import StepCommunication, step_communication, tolerance_of
from tests.make_point import make_point, stack_config
from tests.results.reading import stacks_of, trace_row


def test_in_fp32_little_is_rounding() -> None:
    assert tolerance_of("fp32") == {"loss": 1e-4, "grad_norm": 1e-3}


@pytest.mark.parametrize(
    ("parts_us", "shares"),
    [
        ((30.0, 50.0, 10.0), (0.3, 0.5, 0.1, 0.1)),
        # Different ranks were the slowest.
        ((60.0, 60.0, 30.0), (0.4, 0.4, 0.2, 0.0)),
    ],
)
def test_shares_add_up(tmp_path: Path, parts_us: tuple[float, float, float], shares: tuple[float, ...]) -> None:
    make_point("tp_training", tmp_path, stack_config(), step_us=100.0, spread_us=0.0)
    (analysis,) = stacks_of(tmp_path)
    (row,) = analysis.rows
    for step in row.steps:
        step.forward_us, step.backward_us, step.optimizer_us = parts_us
    assert list(row.shares) == ["forward", "backward", "optimizer", "other"]
    assert list(row.shares.values()) == pytest.approx(shares)


def test_communication_is_that_of_the_rank_that_waits_least() -> None:
    rows = [
        trace_row(0, 0, "all", 100.0, comm_us=90.0, exposed_comm_us=90.0),
        trace_row(1, 0, "all", 200.0, comm_us=40.0, exposed_comm_us=10.0),
        trace_row(0, 1, "all", 300.0, comm_us=60.0, exposed_comm_us=30.0),
        trace_row(1, 1, "all", 200.0, comm_us=10.0, exposed_comm_us=0.0),
    ]
    found = step_communication(TraceReading(rows=rows))
    assert found == StepCommunication(total_us=25.0, exposed_us=5.0, waiting_us=50.0)
    assert found.hidden_fraction == 0.8
    assert step_communication(TraceReading()) is None
