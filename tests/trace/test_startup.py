"""Which iterations are start-up, and what leaves them out."""

from pathlib import Path

import pytest

from overlap_sweep.commands.frames import trace_rows
from overlap_sweep.report.iterations import typical_iteration
from overlap_sweep.results.points import read_points
from overlap_sweep.results.traces import read_traces
from overlap_sweep.trace import TraceRow, startup_iterations
from overlap_sweep.trace.files import read_trace_files, startup_warnings
from overlap_sweep.workloads.tp_training.rows import step_communication
from tests.make_point import make_point, operator_config
from tests.results.reading import trace_row
from tests.timeline import write_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"


def rows(*spans_us: float, gemms: tuple[int, ...] = ()) -> list[TraceRow]:
    """Iterations from number 3 on, as long as that."""
    return [
        trace_row(0, 3 + number, phase, span_us, num_gemm_events=gemms[number] if gemms else 4)
        for number, span_us in enumerate(spans_us)
        for phase in ("fwd", "all")
    ]


@pytest.mark.parametrize(
    ("spans_us", "startup"),
    [
        ((), []),
        ((170.0,), []),
        ((170.0, 100.0), [3]),
        # How much iterations vary is not known.
        ((140.0, 100.0), []),
        ((170.0, 100.0, 101.0), [3]),
        # The others vary by as much.
        ((170.0, 100.0, 140.0), []),
        ((105.0, 100.0, 100.1), []),
        ((100.0, 170.0, 100.0, 100.0), []),
        ((400.0, 170.0, 100.0, 101.0), [3, 4]),
        # Never more than half.
        ((800.0, 400.0, 200.0), [3]),
    ],
)
def test_first_iterations_beyond_what_the_later_ones_vary_by_are_startup(
    spans_us: tuple[float, ...], startup: list[int]
) -> None:
    assert startup_iterations(rows(*spans_us)) == startup


def test_a_later_iteration_that_does_less_says_nothing() -> None:
    assert startup_iterations(rows(170.0, 100.0, gemms=(4, 2))) == []
    assert startup_iterations(rows(170.0, 100.0, 101.0, 20.0, gemms=(4, 4, 4, 1))) == [3]


def test_recorded_ones() -> None:
    files = read_trace_files(sorted(TRACES.glob("*.json.gz")), with_parts=False)
    assert {file.path.name: file.startup for file in files if file.startup} == {
        # gloo connects; a graph is uploaded.
        "cpu_gloo_tp2_rank0.json.gz": [0],
        "h200x2_cuda_graph_rank0.json.gz": [0],
    }
    (sentence,) = startup_warnings(files)
    assert sentence.startswith(f"{TRACES / 'cpu_gloo_tp2_rank0.json.gz'}: start-up iteration 0 left out")
    assert sentence.endswith("up to 19,434.8 us, later iterations at most 9,570.4 us. Also in 1 other trace.")
    assert startup_warnings([file for file in files if not file.startup]) == []


def test_medians_leave_startup_out_and_rows_mark_it(path: Path) -> None:
    path = write_trace(path, 0, [800.0, 100.0, 110.0], 10.0)
    (file,) = read_trace_files([path])
    assert [row["startup"] for row in trace_rows([file], "phase", ["all"], medians=False)] == [True, False, False]
    (median,) = trace_rows([file], "phase", ["all"], medians=True)
    assert (median["gemm_us"], median["iterations"], median["startup_iterations"]) == (105.0, 2, 1)
    gemm = next(row for row in trace_rows([file], "class", ["all"], medians=True) if row["kind"] == "gemm")
    assert (gemm["busy_us"], gemm["iterations"], gemm["startup_iterations"]) == (105.0, 2, 1)
    # The lower median of all three would be number 2.
    assert typical_iteration(path).number == 1


def test_a_points_columns_are_of_no_startup_on_any_rank_and_it_is_reported(tmp_path: Path) -> None:
    names = ["trace_rank0.json", "trace_rank1.json"]
    directory = make_point("operator", tmp_path, operator_config(), traces=names)
    for rank, gemms in enumerate([(800.0, 100.0), (120.0, 101.0)]):
        write_trace(directory / names[rank], rank, list(gemms), 10.0)
    points = read_points(tmp_path).points
    reading = read_traces(points)[directory]
    assert reading.metrics["fwd_gemm_us"] == 101.0
    assert [warning.startswith(f"{directory}: start-up iteration 0 left out") for warning in reading.warnings] == [True]


def test_a_steps_communication_is_of_no_startup(tmp_path: Path) -> None:
    directory = make_point("operator", tmp_path, operator_config(), traces=["trace_rank0.json"])
    write_trace(directory / "trace_rank0.json", 0, [800.0, 100.0, 100.0], 200.0)
    reading = read_traces(read_points(tmp_path).points)[directory]
    found = step_communication(reading)
    assert found
    assert found.exposed_us == 100.0
    assert [warning.startswith(f"{directory}: start-up iteration 0 left out") for warning in reading.warnings] == [True]
