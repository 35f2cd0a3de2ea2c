"""Traces beside each other: the recorded ones, checked against what each says by itself, and hand-made ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from overlap_sweep.analysis.comparison.trace_pairs import read_trace_dataset
from overlap_sweep.analysis.comparison.trace_rows import quantity_rows, trace_summary
from overlap_sweep.analysis.comparison.traces import QUANTITIES, TraceComparison, compare_traces
from overlap_sweep.errors import UserError
from overlap_sweep.trace.overlap import analyse_trace
from tests.analysis.traces_by_hand import write_trace
from tests.trace.conftest import TRACES

NONE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"
DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"


def compared(**files: list[Path] | Path) -> TraceComparison:
    datasets = [
        read_trace_dataset(label, Path(label), of_label if isinstance(of_label, list) else [of_label])
        for label, of_label in files.items()
    ]
    return compare_traces(datasets, datasets[0].label)


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


def ranks_of(directory: Path, ranks: Sequence[int | None], gemm_us: float = 100.0) -> list[Path]:
    """A trace for each rank, whose GEMM takes that much, and twice and three times as much in the next ones."""
    return [
        write_trace(directory / f"{i}.json", rank, [gemm_us * ((rank or 0) + 1)], 50.0) for i, rank in enumerate(ranks)
    ]


def test_ranks_are_matched_by_rank_whatever_the_order(tmp_path: Path) -> None:
    found = compared(old=ranks_of(tmp_path / "old", (0, 1)), new=ranks_of(tmp_path / "new", (1, 0), 110.0))
    assert [pair.rank for pair in found.pairs["new"]] == [0, 1]
    gemm = {match.rank: match for match in found.quantities if match.quantity == "gemm_busy_us" if match.phase == "all"}
    assert {rank: (match.reference_value, match.value) for rank, match in gemm.items()} == {
        None: (150.0, 165.0),
        0: (100.0, 110.0),
        1: (200.0, 220.0),
    }
    assert [match.ratio for match in gemm.values()] == [pytest.approx(1.1)] * 3


@pytest.mark.parametrize(
    ("old", "new", "pairs", "unmatched"),
    [
        ((0, 1, 2), (1, 2, 3), [1, 2], ["old has traces of rank 0", "new has traces of rank 3"]),
        # Traces without ranks are matched by their order.
        ((None, None), (None, None, None), [None, None], ["new has 3 traces, old 2"]),
        ((0,), (1,), [None], []),
    ],
    ids=["some ranks", "no ranks", "single traces"],
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
    with pytest.raises(UserError, match=r"new has traces of ranks 2, 3, old of ranks 0, 1"):
        compared(old=ranks_of(tmp_path / "old", (0, 1)), new=ranks_of(tmp_path / "new", (2, 3)))


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


def test_a_dataset_without_a_readable_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text("")
    with pytest.raises(UserError, match=r"cut\.json is empty"):
        read_trace_dataset("old", tmp_path, [tmp_path / "cut.json"])


def test_a_summary_tells_ranks_and_ratios() -> None:
    found = compared(none=NONE, default=DEFAULT)
    assert len(list(quantity_rows(found))) == len(list(quantity_rows(found, by_rank=True))) == 3 * len(QUANTITIES)
    told = trace_summary(found)["datasets"]
    assert told["none"]["ranks"] == [0]
    assert told["default"]["ratios"]["all"]["span_us"] == pytest.approx(34251.2 / 34346.5, abs=1e-5)
