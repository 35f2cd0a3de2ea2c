"""Traces beside each other: the recorded ones, checked against what each says by itself, and hand-made ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from overlap_sweep.analysis.comparison.trace_pairs import read_trace_dataset
from overlap_sweep.analysis.comparison.trace_rows import (
    PART_COLUMNS,
    QUANTITY_COLUMNS,
    part_rows,
    quantity_rows,
    trace_summary,
)
from overlap_sweep.analysis.comparison.traces import QUANTITIES, TraceComparison, compare_traces
from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.errors import UserError
from overlap_sweep.trace.overlap import analyse_trace
from tests.trace.conftest import TRACES, HandMadeTrace

NONE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"
DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"


def compared(**files: list[Path] | Path) -> TraceComparison:
    datasets = [
        read_trace_dataset(label, Path(label), of_label if isinstance(of_label, list) else [of_label])
        for label, of_label in files.items()
    ]
    return compare_traces(datasets, datasets[0].label)


def write_trace(path: Path, rank: int | None, gemm_us: list[float], comm_us: float, **kernels: str) -> Path:
    """For each iteration a GEMM of such a length on one stream, and from its start a communication on another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = HandMadeTrace(path)
    for number, length_us in enumerate(gemm_us):
        at = number * 1000.0
        made.annotation(f"ProfilerStep#{number}", at, at + 900)
        for correlation, (name, end, stream) in enumerate(
            [
                (kernels.get("gemm", "nvjet_tst_a"), length_us, 7),
                (kernels.get("comm", "ncclDevKernel_AllGather_RING_LL()"), comm_us, 23),
            ],
            start=10 * number + 1,
        ):
            made.launch(at + 1, correlation)
            made.kernel(name, at + 5, at + 5 + end, correlation, stream)
    document: dict[str, Any] = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    return made.write(**document)


def test_quantities_of_recorded_traces_are_the_medians_of_each(tmp_path: Path) -> None:
    found = compared(none=NONE, default=DEFAULT)
    rows = {"none": analyse_trace(NONE), "default": analyse_trace(DEFAULT)}
    over_ranks = [match for match in found.quantities if match.rank is None]
    assert {match.phase for match in over_ranks} == {"fwd", "bwd", "all"}
    assert len(over_ranks) == 3 * len(QUANTITIES)
    for match in over_ranks:
        if not match.quantity.startswith("num_"):
            one, other = (
                median(getattr(row, match.quantity) for row in rows[label] if row.phase == match.phase)
                for label in ("default", "none")
            )
            assert (match.value, match.reference_value) == (pytest.approx(one), pytest.approx(other))
            assert match.difference == pytest.approx(one - other)
            assert match.ratio == pytest.approx(one / other) if other else math.isnan(match.ratio)
    # Both are of rank 0 of 4.
    assert {match.rank for match in found.quantities} == {None, 0}


def test_classes_and_kernels_of_recorded_traces(tmp_path: Path) -> None:
    found = compared(none=NONE, default=DEFAULT)
    classes = {part.name: part for part in found.parts if (part.by, part.phase) == ("class", "all")}
    assert classes["nccl comm"].change == "disappeared"
    assert {classes[name].change for name in ("userbuffers comm", "peer_copy comm", "userbuffers wait")} == {"appeared"}
    assert classes["cublas gemm"].change == "slower"
    gemm = next(m for m in found.quantities if (m.phase, m.quantity) == ("all", "gemm_busy_us"))
    assert (classes["cublas gemm"].busy_us, classes["cublas gemm"].reference_busy_us) == (
        pytest.approx(gemm.value),
        pytest.approx(gemm.reference_value),
    )
    kernels = [part for part in found.parts if (part.by, part.phase) == ("kernel", "all")]
    assert [abs(part.difference_us) for part in kernels] == sorted(
        (abs(part.difference_us) for part in kernels), reverse=True
    )
    nccl = [part for part in kernels if part.library == "nccl"]
    assert {part.change for part in nccl} == {"disappeared"}
    assert sum(part.reference_total_us for part in nccl) == pytest.approx(classes["nccl comm"].reference_total_us)


def test_a_trace_with_itself_is_the_same() -> None:
    found = compared(one=DEFAULT, other=DEFAULT)
    assert {part.change for part in found.parts} == {"same"}
    assert {match.ratio for match in found.quantities if not math.isnan(match.ratio)} == {1.0}


def test_ranks_are_matched_by_rank_whatever_the_order(tmp_path: Path) -> None:
    old = [write_trace(tmp_path / "old" / f"{rank}.json", rank, [100.0 * (rank + 1)], 50.0) for rank in (0, 1)]
    new = [write_trace(tmp_path / "new" / f"{9 - rank}.json", rank, [110.0 * (rank + 1)], 50.0) for rank in (0, 1)]
    found = compared(old=old, new=new)
    assert [pair.rank for pair in found.pairs["new"]] == [0, 1]
    gemm = {match.rank: match for match in found.quantities if match.quantity == "gemm_busy_us" if match.phase == "all"}
    assert {rank: (match.reference_value, match.value) for rank, match in gemm.items()} == {
        None: (150.0, 165.0),
        0: (100.0, 110.0),
        1: (200.0, 220.0),
    }
    assert [match.ratio for match in gemm.values()] == [pytest.approx(1.1)] * 3


def test_ranks_that_one_lacks_are_left_out_and_named(tmp_path: Path) -> None:
    old = [write_trace(tmp_path / "old" / f"{rank}.json", rank, [100.0], 50.0) for rank in (0, 1, 2)]
    new = [write_trace(tmp_path / "new" / f"{rank}.json", rank, [100.0], 50.0) for rank in (1, 2, 3)]
    found = compared(old=old, new=new)
    assert [pair.rank for pair in found.pairs["new"]] == [1, 2]
    assert found.unmatched == [
        "old has traces of rank 0, new has not: left out.",
        "new has traces of rank 3, old has not: left out.",
    ]


def test_traces_without_ranks_are_matched_by_order(tmp_path: Path) -> None:
    old = [write_trace(tmp_path / "old" / f"{i}.json", None, [100.0], 50.0) for i in (0, 1)]
    new = [write_trace(tmp_path / "new" / f"{i}.json", None, [200.0], 50.0) for i in (0, 1, 2)]
    found = compared(old=old, new=new)
    assert [(pair.rank, pair.ours.path.name) for pair in found.pairs["new"]] == [(None, "0.json"), (None, "1.json")]
    assert found.unmatched == ["new has 3 traces, old 2: they don't tell their ranks and are matched by their order."]
    assert {match.rank for match in found.quantities} == {None}


def test_single_traces_of_different_ranks_are_compared(tmp_path: Path) -> None:
    old = write_trace(tmp_path / "old.json", 0, [100.0], 50.0)
    new = write_trace(tmp_path / "new.json", 1, [200.0], 50.0)
    assert [pair.rank for pair in compared(old=old, new=new).pairs["new"]] == [None]


def test_no_rank_in_both_is_an_error(tmp_path: Path) -> None:
    old = [write_trace(tmp_path / "old" / f"{rank}.json", rank, [100.0], 50.0) for rank in (0, 1)]
    new = [write_trace(tmp_path / "new" / f"{rank}.json", rank, [100.0], 50.0) for rank in (2, 3)]
    with pytest.raises(UserError, match=r"new has traces of ranks 2, 3, old of ranks 0, 1: no rank is in both"):
        compared(old=old, new=new)


def test_slower_only_where_every_iteration_is(tmp_path: Path) -> None:
    old = write_trace(tmp_path / "old.json", 0, [100.0, 120.0, 110.0], 50.0)
    apart = write_trace(tmp_path / "apart.json", 0, [130.0, 140.0, 125.0], 50.0)
    mixed = write_trace(tmp_path / "mixed.json", 0, [119.0, 140.0, 125.0], 50.0)
    found = compared(old=old, apart=apart, mixed=mixed)
    gemms = {part.dataset: part for part in found.parts if (part.by, part.phase, part.kind) == ("class", "all", "gemm")}
    assert {label: (part.busy_us, part.change) for label, part in gemms.items()} == {
        "apart": (130.0, "slower"),
        "mixed": (125.0, "same"),
    }


def test_kernels_that_only_some_iterations_or_ranks_have_count_as_nothing_elsewhere(tmp_path: Path) -> None:
    old = [write_trace(tmp_path / "old" / f"{rank}.json", rank, [100.0], 50.0, gemm="nvjet_a") for rank in (0, 1)]
    new = [write_trace(tmp_path / "new" / f"{rank}.json", rank, [100.0], 50.0, gemm=f"nvjet_{'ab'[rank]}") for rank in (0, 1)]  # fmt: skip # noqa: E501
    found = compared(old=old, new=new)
    kernels = {part.name: part for part in found.parts if (part.by, part.phase, part.kind) == ("kernel", "all", "gemm")}
    assert (kernels["nvjet_a"].reference_busy_us, kernels["nvjet_a"].busy_us) == (100.0, 50.0)
    assert (kernels["nvjet_b"].busy_us, kernels["nvjet_b"].change) == (50.0, "appeared")


def test_unreadable_traces_are_problems_and_the_rest_is_compared(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text("")
    found = compare_traces(
        [read_trace_dataset("old", tmp_path, [DEFAULT, tmp_path / "cut.json"]), read_trace_dataset("b", NONE, [NONE])],
        "old",
    )
    assert len(found.problems) == 1
    assert len(found.pairs["b"]) == 1
    with pytest.raises(UserError, match=r"cut\.json is empty"):
        read_trace_dataset("old", tmp_path, [tmp_path / "cut.json"])


def test_tables_and_summary() -> None:
    found = compared(none=NONE, default=DEFAULT)
    quantities = to_frame(quantity_rows(found), QUANTITY_COLUMNS)
    assert {name: str(kind) for name, kind in quantities.dtypes.items()} == QUANTITY_COLUMNS
    assert len(quantities) == len(to_frame(quantity_rows(found, by_rank=True), QUANTITY_COLUMNS)) == 3 * len(QUANTITIES)
    for by in ("class", "kernel", "stream"):
        parts = to_frame(part_rows(found, by), PART_COLUMNS)
        assert set(parts["by"]) == {by}
        assert {name: str(kind) for name, kind in parts.dtypes.items()} == PART_COLUMNS
    told = trace_summary(found)
    assert told["datasets"]["none"]["ranks"] == [0]
    assert told["datasets"]["default"]["ratios"]["all"]["span_us"] == pytest.approx(34251.2 / 34346.5, abs=1e-5)
    assert json.dumps(told)
