"""What traces tell of points, and traces beside each other. Recorded ones: traces among the golden files."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap_sweep.compare.traces import (
    TraceComparison,
    compare_traces,
    computing_kernels,
    read_trace_dataset,
    shared_computation,
)
from overlap_sweep.errors import UserError
from overlap_sweep.results.points import read_points
from overlap_sweep.results.traces import METRICS, read_traces, summarise
from tests.make_point import make_point, operator_config, pass_times
from tests.results.reading import choices, trace_row
from tests.timeline import write_trace
from tests.trace.conftest import analyse_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"


def test_a_point_is_the_slowest_rank_of_its_typical_iteration() -> None:
    rows = []
    for iteration, spans in enumerate([(100.0, 900.0), (120.0, 80.0), (90.0, 160.0)]):
        for rank, span_us in enumerate(spans):
            rows += [
                trace_row(rank, iteration, phase, span_us, num_gemm_events=4 + rank) for phase in ("fwd", "bwd", "all")
            ]
    metrics = summarise(rows)
    # Slowest: 900 (rank 1), 120 (rank 0), 160 (rank 1).
    assert metrics["fwd_span_us"] == 160.0
    assert metrics["total_span_us"] == 320.0
    assert metrics["fwd_gemm_us"] == 80.0
    assert metrics["bwd_comm_us"] == 40.0
    assert metrics["num_gemm_events"] == 10
    assert metrics.keys() == set(METRICS)


def test_all_figures_of_a_point_are_of_one_iteration_and_rank() -> None:
    # Each figure's own median would be the one of another iteration.
    hiding = {"comm_us": 80.0, "overlap_us": 80.0, "overlap_ratio": 1.0}
    exposing = {"comm_us": 10.0, "overlap_us": 0.0, "overlap_ratio": 0.0}
    rows = [
        trace_row(0, iteration, phase, span_us, **quantities)
        for iteration, (span_us, quantities) in enumerate([(100.0, exposing), (101.0, hiding), (120.0, exposing)])
        for phase in ("fwd", "all")
    ]
    metrics = summarise(rows)
    assert [metrics[f"fwd_{name}_us"] for name in ("span", "comm", "overlap")] == [101.0, 80.0, 80.0]
    assert metrics["fwd_overlap_ratio"] == 1.0
    assert metrics["total_overlap_ratio"] == 80.0 / 50.5


def test_an_iteration_that_lacks_a_pass_is_not_the_typical_one() -> None:
    whole = [trace_row(0, 0, phase, 100.0) for phase in ("fwd", "bwd", "all")]
    broken_off = [trace_row(0, 1, phase, 90.0) for phase in ("fwd", "all")]
    assert summarise([*whole, *broken_off]) == summarise(whole)


def test_where_nothing_tells_the_passes_apart_the_operator_is_the_whole_iteration() -> None:
    metrics = summarise([trace_row(0, 0, "all", 100.0)])
    assert metrics == {"total_span_us": 100.0, "total_overlap_ratio": 0.5, "num_gemm_events": 4, "num_comm_events": 2}


def test_what_the_iteration_has_not_is_left_out() -> None:
    metrics = summarise([trace_row(0, 0, phase, 100.0, overlap_ratio=None) for phase in ("all", "fwd")])
    assert "fwd_overlap_ratio" not in metrics
    assert "bwd_span_us" not in metrics
    assert summarise([]) == {}


def test_traces_of_a_run_directory(tmp_path: Path) -> None:
    directory = make_point(
        "operator",
        tmp_path,
        operator_config(),
        traces=["trace_rank0.json.gz", "trace_rank1.json.gz", "trace_rank2.json"],
    )
    shutil.copy(TRACES / "h200x4_llama3_70b_layer_te_default.json.gz", directory / "trace_rank0.json.gz")
    (directory / "trace_rank2.json").write_text('{"traceEvents": [')
    reading = read_traces(read_points(tmp_path).points)[directory]
    assert reading.missing == ["trace_rank1.json.gz"]
    assert len(reading.problems) == 1
    assert str(directory / "trace_rank2.json") in reading.problems[0]
    forward = [r.span_us for r in analyse_trace(directory / "trace_rank0.json.gz") if r.phase == "fwd"]
    assert reading.metrics["fwd_span_us"] in forward


def test_a_trace_that_was_read_in_part_counts_with_a_warning(tmp_path: Path) -> None:
    directory = make_point("operator", tmp_path, operator_config(), traces=["trace_rank0.json.gz"])
    whole = (TRACES / "h200x4_llama3_70b_layer_none.json.gz").read_bytes()
    (directory / "trace_rank0.json.gz").write_bytes(whole[:-1000])
    reading = read_traces(read_points(tmp_path).points)[directory]
    assert (reading.missing, reading.problems) == ([], [])
    assert len(reading.warnings) == 1
    assert str(directory / "trace_rank0.json.gz") in reading.warnings[0]
    assert "is cut short" in reading.warnings[0]
    assert reading.metrics["fwd_gemm_us"] > 0


def test_objective_overlap_ratio_takes_the_highest_ratio_whatever_its_time(tmp_path: Path) -> None:
    for num_sm, time_us, trace in (
        (1, 90.0, "h200x4_llama3_70b_layer_none.json.gz"),
        (2, 120.0, "h200x4_llama3_70b_layer_ring_rs.json.gz"),
        (4, 80.0, None),
    ):
        asked = operator_config(method="ring_exchange", phase="fprop", num_sm=num_sm)
        directory = make_point(
            "operator", tmp_path, asked, fwd=pass_times(time_us), traces=["trace_rank0.json.gz"] if trace else []
        )
        if trace:
            shutil.copy(TRACES / trace, directory / "trace_rank0.json.gz")
    assert choices(tmp_path, "time")[2, "fc1", "fwd"].chosen.name == "ring_sm4"
    by_ratio = choices(tmp_path, "overlap_ratio")
    assert by_ratio[2, "fc1", "fwd"].chosen.name == "ring_sm2"
    assert by_ratio[2, "fc1", "fwd"].reason == "highest overlap ratio of 2 settings"
    assert by_ratio[2, "fc1", "bwd"].chosen.name == "none"


def test_objective_overlap_ratio_without_traces(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(method="ring_exchange", phase="fprop"), fwd=pass_times(90.0))
    choice = choices(tmp_path, "overlap_ratio")[2, "fc1", "fwd"]
    assert (choice.chosen.name, choice.reason) == ("none", "no trace has an overlap ratio")


def compared(**files: list[Path] | Path) -> TraceComparison:
    datasets = [
        read_trace_dataset(label, Path(label), of_label if isinstance(of_label, list) else [of_label])
        for label, of_label in files.items()
    ]
    return compare_traces(datasets, datasets[0].label)


def ranks_of(directory: Path, ranks: Sequence[int | None], gemm_us: float = 100.0) -> list[Path]:
    """A trace for each rank, whose GEMM takes that much, and twice and three times as much in the next ones."""
    return [
        write_trace(directory / f"{i}.json", rank, [gemm_us * ((rank or 0) + 1)], 50.0) for i, rank in enumerate(ranks)
    ]


def test_ranks_are_matched_by_rank_whatever_the_order(tmp_path: Path) -> None:
    found = compared(old=ranks_of(tmp_path / "old", (0, 1)), new=ranks_of(tmp_path / "new", (1, 0), 110.0))
    assert [pair.rank for pair in found.pairs["new"]] == [0, 1]
    gemm = {match.rank: match for match in found.quantities if match.quantity == "gemm_us" if match.phase == "all"}
    assert {rank: (match.reference_value, match.value) for rank, match in gemm.items()} == {
        None: (150.0, 165.0),
        0: (100.0, 110.0),
        1: (200.0, 220.0),
    }
    assert [match.ratio for match in gemm.values()] == [pytest.approx(1.1)] * 3


@pytest.mark.parametrize(
    ("old", "new", "pairs", "unmatched"),
    [
        ((0, 1, 2), (1, 2, 3), [1, 2], ["Left out: ranks 0, which old has", "Left out: ranks 3, which new has"]),
        ((0,), (1,), [None], []),
    ],
    ids=["some ranks", "single traces"],
)
def test_what_has_no_match_is_left_out_and_named(
    tmp_path: Path, old: tuple[int], new: tuple[int], pairs: list[int | None], unmatched: list[str]
) -> None:
    found = compared(old=ranks_of(tmp_path / "old", old), new=ranks_of(tmp_path / "new", new))
    assert [pair.rank for pair in found.pairs["new"]] == pairs
    assert [said.startswith(begin) for said, begin in zip(found.unmatched, unmatched, strict=True)] == [True] * len(
        unmatched
    )
    assert {match.rank for match in found.quantities} == {None, *pairs}


def test_no_rank_in_both_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"new has \[2, 3\], old has \[0, 1\]"):
        compared(old=ranks_of(tmp_path / "old", (0, 1)), new=ranks_of(tmp_path / "new", (2, 3)))
    with pytest.raises(UserError, match="old has unknown ranks; compare one file with one file"):
        compared(old=ranks_of(tmp_path / "old", (None, None)), new=ranks_of(tmp_path / "new", (0, 1)))


def test_slower_only_where_every_iteration_is(tmp_path: Path) -> None:
    old = write_trace(tmp_path / "old.json", 0, [100.0, 120.0, 110.0], 50.0)
    apart = write_trace(tmp_path / "apart.json", 0, [130.0, 140.0, 125.0], 50.0)
    mixed = write_trace(tmp_path / "mixed.json", 0, [119.0, 140.0, 125.0], 50.0)
    found = compared(old=old, apart=apart, mixed=mixed)
    gemms = {part.dataset: part for part in found.parts if (part.by, part.phase, part.kind) == ("class", "all", "gemm")}
    assert {label: (part.value, part.change) for label, part in gemms.items()} == {
        "apart": (130.0, "slower"),
        "mixed": (125.0, "same"),
    }


def test_kernels_that_only_some_iterations_or_ranks_have_count_as_nothing_elsewhere(tmp_path: Path) -> None:
    old = [write_trace(tmp_path / "old" / f"{rank}.json", rank, [100.0], 50.0, gemm="nvjet_a") for rank in (0, 1)]
    new = [write_trace(tmp_path / "new" / f"{rank}.json", rank, [100.0], 50.0, gemm=f"nvjet_{'ab'[rank]}") for rank in (0, 1)]  # fmt: skip # noqa: E501
    found = compared(old=old, new=new)
    kernels = {part.name: part for part in found.parts if (part.by, part.phase, part.kind) == ("kernel", "all", "gemm")}
    assert (kernels["nvjet_a"].reference_value, kernels["nvjet_a"].value) == (100.0, 50.0)
    assert (kernels["nvjet_b"].value, kernels["nvjet_b"].change) == (50.0, "appeared")


def test_the_rank_that_waits_for_the_other_of_its_run_is_not_slower(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / f"rank{rank}.json", rank, [100.0 + 50 * rank] * 3, 300.0 - 200 * rank) for rank in (0, 1)]  # fmt: skip # noqa: E501
    found = compared(late=paths[1], waits=paths[0])
    assert found.one_run == {"waits"}
    changes = {part.kind: part.change for part in found.parts if (part.by, part.phase) == ("class", "all")}
    assert changes == {"gemm": "faster", "comm": "waits"}
    back = compared(waits=paths[0], late=paths[1])
    assert {part.change for part in back.parts if part.kind == "comm"} == {"awaited"}


def test_traces_of_two_folders_or_of_one_rank_are_not_of_one_run(tmp_path: Path) -> None:
    one, other = (write_trace(tmp_path / name / "rank0.json", 0, [100.0] * 3, 50.0) for name in "ab")
    second = write_trace(tmp_path / "b" / "rank1.json", 1, [100.0] * 3, 90.0)
    found = compared(one=one, other=other, second=second)
    assert found.one_run == set()
    assert {part.change for part in found.parts if part.dataset == "second" and part.kind == "comm"} == {"slower"}


def test_a_quantity_differs_beyond_the_noise_of_its_iterations(tmp_path: Path) -> None:
    old = write_trace(tmp_path / "old.json", 0, [100.0, 104.0, 96.0, 101.0, 99.0], 50.0)
    near = write_trace(tmp_path / "near.json", 0, [101.0, 103.0, 97.0, 102.0, 100.0], 50.0)
    more = write_trace(tmp_path / "more.json", 0, [151.0, 153.0, 147.0, 152.0, 150.0], 50.0)
    found = compared(old=old, near=near, more=more)
    gemm = {match.dataset: match for match in found.quantities if (match.quantity, match.phase) == ("gemm_us", "all")}
    assert {label: match.change for label, match in gemm.items()} == {"near": "same", "more": "higher"}
    for match in gemm.values():
        low, high = match.ratio_ends
        assert low < match.ratio < high
    assert {match.change for match in found.quantities if match.quantity == "num_gemm_events"} == {"same"}
    assert {match.change for match in found.quantities if match.quantity == "wait_us"} == {"same"}


def test_computation_is_shared_as_far_as_both_run_the_same_kernels_as_often(tmp_path: Path) -> None:
    def shared(one: Path, other: Path) -> tuple[float, float]:
        found = compared(one=one, other=other)
        return shared_computation(computing_kernels(found, "other"))

    old = write_trace(tmp_path / "old.json", 0, [100.0] * 3, 50.0, gemm="nvjet_a")
    longer = write_trace(tmp_path / "longer.json", 0, [250.0] * 3, 50.0, gemm="nvjet_a")
    unlike = write_trace(tmp_path / "unlike.json", 0, [100.0] * 3, 50.0, gemm="nvjet_b")
    assert shared(old, longer) == (1.0, pytest.approx(2.5))
    assert shared(old, unlike)[0] == 0.0
