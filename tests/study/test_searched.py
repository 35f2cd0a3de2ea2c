"""What the page says of a search's trials, from a made-up one: what was expected, measured, left out and why."""

from pathlib import Path

import msgspec
import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.charts import Rows
from overlap_sweep.report.section import Exhibit
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.records import Expected, KnobRecord
from overlap_sweep.workloads import analyse
from tests.golden.made_analysis import write_optimized


def parts(directory: Path, **changed: object) -> list[Exhibit]:
    """Those of the exhibit, of the made search with changes."""
    if not directory.exists():
        write_optimized(directory)
    record = KnobRecord.read(directory / KnobRecord.FILE)
    record.searches = [msgspec.structs.replace(one, **changed) for one in record.searches]
    record.write(directory)
    ((section,),) = [analyse(directory, AnalysisConfig(), "").sections]
    found = [one for one in section.answers[0].charts if one.heading == "From the baseline to the answer"]
    return [part for one in found for part in (one.parts() if one.parts else [])]


def test_changes_of_the_answer_stand_beside_what_was_expected_of_them(tmp_path: Path) -> None:
    chart, *_ = parts(tmp_path / "sweep")
    assert chart.chart
    drawn = chart.chart()
    assert isinstance(drawn, Rows)
    assert [(row.name, row.ends, row.bold) for row in drawn.rows] == [
        ("the baseline", [0.0], False),
        ("ddp.bucket_cap_mb=4", [0.05], False),
        ("nccl.max_ctas=8", [0.02], False),
        ("ddp.bucket_cap_mb=4, nccl.max_ctas=8", [0.065], True),
    ]
    assert [[(dot.at, dot.low, dot.high) for dot in row.dots] for row in drawn.rows] == [
        [],
        [(0.06, 0.04, 0.08)],
        [(0.0114, 0.0, 0.03)],
        [],
    ]
    assert (drawn.rows[1].low, drawn.rows[1].high) == pytest.approx((0.047, 0.053), rel=1e-3)
    assert drawn.rows[1].cells == ["95,000", "+5.0% (4.7 to 5.3)", "+6.0% (4.0 to 8.0)"]
    assert drawn.rows[2].cells[2] == "+1.1%, at most 3.0% (contention)"
    assert drawn.subtitle == "each change alone, then together, as proven"


def test_changes_that_were_tried_one_on_top_of_the_other_stand_so(tmp_path: Path) -> None:
    parts(tmp_path / "sweep")
    (search,) = KnobRecord.read(tmp_path / "sweep" / KnobRecord.FILE).searches
    added = [Gain(0.05, 0.003), Gain(0.016, 0.004)]
    contributions = [
        msgspec.structs.replace(one, alone=None, added=gain)
        for one, gain in zip(search.contributions, added, strict=True)
    ]
    last = "job.levers.nccl.max_ctas=8"
    tried = [msgspec.structs.replace(search.tried[0], change=last, added=added[1]), *search.tried[1:]]
    chart, table, _ = parts(tmp_path / "sweep", contributions=contributions, tried=tried)
    assert chart.chart
    drawn = chart.chart()
    assert isinstance(drawn, Rows)
    assert drawn.subtitle == "each change on top of those before, then all, as proven"
    assert [(row.name, row.ends) for row in drawn.rows] == [
        ("the baseline", [0.0]),
        ("ddp.bucket_cap_mb=4", [0.05]),
        ("+ nccl.max_ctas=8", [0.065]),
        ("ddp.bucket_cap_mb=4, nccl.max_ctas=8", [0.065]),
    ]
    # What was expected of the second is on top of what the first has gained.
    assert [(dot.at, dot.low, dot.high) for dot in drawn.rows[2].dots] == [pytest.approx((0.0614, 0.05, 0.08))]
    assert table.listing
    row = table.listing.rows[0]
    assert [column.text(row) for column in table.listing.columns][3:5] == [
        "+1.6% (1.2 to 2.0)",
        "+1.1%, at most 3.0% (contention)",
    ]


def test_all_trials_are_listed_best_first_and_what_failed_last(tmp_path: Path) -> None:
    _, table, _ = parts(tmp_path / "sweep")
    listing = table.listing
    assert listing
    assert listing.text
    cells = [[column.text(row) for column in listing.columns] for row in listing.rows]
    assert cells[1] == ["ddp.bucket_cap_mb=4", "95,000", "+5.0% (4.7 to 5.3)", "+6.0% (4.0 to 8.0)", "rounding"]
    assert cells[3:] == [
        ["the baseline", "100,000", "", "", "equal"],
        ["ddp.static_graph=true", "100,100", "-0.1% (-0.4 to 0.2)", "", "equal"],
        ["ddp.compress_bf16=true", "90,000", "+10.0%", "+9.0% (6.0 to 10.0)", "differs"],
        ["fsdp2.prefetch=2", "", "", "", ""],
    ]
    said = {row.setting: (listing.text(row).heading, *listing.text(row).sentences) for row in listing.rows}
    assert said["ddp.bucket_cap_mb=4, nccl.max_ctas=8"] == ("Measured, the best first", "best, proven")
    assert said["ddp.compress_bf16=true"] == ("Failed, or must not be used", "it does not compute the same")
    assert said["fsdp2.prefetch=2"] == ("Failed, or must not be used", "CUDA out of memory")


def test_what_was_left_out_has_its_reason(tmp_path: Path) -> None:
    *_, folded = parts(tmp_path / "sweep")
    assert folded.folded == "What was left out, and why (3)"
    assert folded.notes == [
        "ddp.bucket_cap_mb=1: at best 2.0% slower",
        "fsdp2.prefetch=1: as fsdp2.prefetch=2: CUDA out of memory",
        "fsdp2.reshard_after_forward: true, null are equivalent here",
    ]
    *_, folded = parts(
        tmp_path / "sweep", stopped="search.max_points=19 is used up", hopeless={"job.values.b=0.5": 0.002}
    )
    assert folded.notes[0] == "b=0.5: at most 0.2% faster, by what was expected"
    assert "ddp.bucket_cap_mb=1, fsdp2.prefetch=1: search.max_points=19 is used up" in folded.notes
    of_one_library = dict.fromkeys(("job.levers.fsdp2.a", "job.levers.fsdp2.b"), "the trace shows no fsdp2")
    *_, folded = parts(tmp_path / "sweep", left_out=of_one_library, knobs={}, tried=[], best={})
    assert folded.notes[-1] == "fsdp2.a, fsdp2.b: the trace shows no fsdp2"


def test_a_single_change_is_the_answer_itself_and_an_unproven_one_says_so(tmp_path: Path) -> None:
    (only, _) = KnobRecord.read(write(tmp_path) / KnobRecord.FILE).searches[0].contributions
    chart, table, _ = parts(tmp_path / "sweep", best={only.key: "4"}, contributions=[only], proven=False)
    assert chart.chart
    drawn = chart.chart()
    assert isinstance(drawn, Rows)
    assert [(row.name, len(row.dots)) for row in drawn.rows] == [("the baseline", 0), ("ddp.bucket_cap_mb=4", 1)]
    assert drawn.subtitle == "the best setting, NOT PROVEN"
    assert table.listing
    assert (table.listing.rows[0].setting, table.listing.rows[0].note) == ("ddp.bucket_cap_mb=4", "best, NOT PROVEN")


def test_a_search_that_could_not_decide_names_what_is_likeliest(tmp_path: Path) -> None:
    (search,) = KnobRecord.read(write(tmp_path) / KnobRecord.FILE).searches
    first = next(one for one in search.tried if len(one.changed) == 1)
    seemed = {"best": {}, "contributions": [], "verdict": "undecided", "seemed": first.changed}
    for gain, said in (
        (Gain(0.4, 0.05), "saves +40.0% (35.0 to 44.6), NOT PROVEN"),
        (Gain(0.01, 0.05), "may save up to "),
    ):
        parts(tmp_path / "sweep", **seemed, tried=[msgspec.structs.replace(first, gain=gain)])
        ((section,),) = [analyse(tmp_path / "sweep", AnalysisConfig(), "").sections]
        assert f"Undecided: ddp.bucket_cap_mb=4 {said}" in section.answers[0].sentences[0]


def test_a_search_that_could_not_decide_is_no_advice_to_keep_the_reference(tmp_path: Path) -> None:
    """Nor of what its single runs would say."""
    parts(write(tmp_path), best={}, gain=Gain(0.0, 0.2), contributions=[], time_us=100_000.0, verdict="undecided")
    ((section,),) = [analyse(tmp_path / "sweep", AnalysisConfig(), "").sections]
    (answer,) = section.answers
    assert answer.sentences[0].startswith("Undecided: the runs do not show whether anything is faster")
    (compared,) = [answer.compared] if answer.compared else []
    standings = {row.setting: row.standing for row in compared.rows}
    assert standings["defaults"] == "reference"
    assert not any("best" in standing for standing in standings.values())
    # All tables have the times that the search compared.
    times = {row.setting: row.time_us for row in compared.rows}
    assert times["ddp.bucket_cap_mb=4"] == pytest.approx(95_000)


def test_where_nothing_is_better_there_are_trials_and_in_earlier_records_nothing(tmp_path: Path) -> None:
    chart, table, _ = parts(write(tmp_path), best={}, gain=Gain(0.0, 0.004), contributions=[], time_us=100_000.0)
    assert chart.chart
    drawn = chart.chart()
    assert isinstance(drawn, Rows)
    assert [(row.name, row.bold) for row in drawn.rows] == [
        ("the baseline", False),
        ("ddp.bucket_cap_mb=4", False),
        ("nccl.max_ctas=8", False),
    ]
    assert drawn.subtitle == "each change alone, and none is proven to be faster"
    assert table.listing
    (baseline,) = (row.gain for row in table.listing.rows if row.setting == "the baseline")
    assert baseline
    assert baseline.in_brief == ""
    table, _ = parts(tmp_path / "sweep", expected={})
    assert table.listing
    assert "expected" not in [column.header for column in table.listing.columns]
    assert parts(tmp_path / "sweep", tried=[], failed=[]) == []


def test_expectations_in_words() -> None:
    assert Expected(-0.02, -0.05, 0.01, is_predicted=True).in_words == "-2.0% (-5.0 to 1.0)"
    assert Expected(0.01, 0.0, 0.03).in_words == "+1.0%, at most 3.0%"
    assert Gain(0.1, float("nan")).in_brief == "+10.0%"


def write(folder: Path) -> Path:
    write_optimized(folder / "sweep")
    return folder / "sweep"
