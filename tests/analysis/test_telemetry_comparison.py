"""Training runs beside each other: which match, and what is beyond the noise. How it is told: telemetry and
made/telemetry_troubles among the golden files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep.analysis.comparison.telemetry import (
    QuantityRatio,
    RunMatch,
    TelemetryComparison,
    Verdict,
    compare_telemetry,
    mean_ratios,
    read_telemetry_dataset,
)
from overlap_sweep.analysis.comparison.telemetry_rows import telemetry_summary
from overlap_sweep.analysis.telemetry_steps import QUANTITIES, Aggregate, single
from overlap_sweep.errors import UserError
from tests.analysis.telemetry_logs import SLOW_DEVICE, record, write_logs, write_run
from tests.make_point import make_point, resolved
from tests.sweeps import ROOT

H200 = ROOT / "tests" / "data" / "h200x2_fsdp"
POINT = resolved("fsdp", **{"distributed.dp_size": 2})
PREFETCHING = resolved("fsdp", **{"distributed.dp_size": 2, "fsdp.forward_prefetch": 1})


def compared(reference: str, candidate: str | None = None, **paths: Path) -> TelemetryComparison:
    datasets = [read_telemetry_dataset(label, path) for label, path in paths.items()]
    return compare_telemetry(datasets, reference, candidate)


def only_match(**paths: Path) -> RunMatch:
    (match,) = compared(next(iter(paths)), **paths).matches
    return match


def run(directory: Path, point: dict[str, Any], factor: float = 1.0, **measured: Any) -> Path:
    """Telemetry beside a result."""
    return write_run(make_point("fsdp", directory.parent, point, name=directory.name, **measured), factor=factor)


def around(median: float, noise: float | None) -> Aggregate:
    return Aggregate(median, median - 1, median + 1, median, noise, 20)


@pytest.mark.parametrize(
    ("quantity", "ours", "theirs", "noise", "expected"),
    [
        ("step_ms", 110.0, 100.0, 1.0, "worse"),
        ("step_ms", 90.0, 100.0, 1.0, "better"),
        ("step_ms", 101.0, 100.0, 1.0, "same"),
        ("hidden_share", 0.9, 0.5, 1.0, "same"),
        ("samples_per_s", 90.0, 100.0, 1.0, "worse"),
        ("samples_per_s", 110.0, 100.0, 1.0, "better"),
        ("power_w", 110.0, 100.0, 1.0, "higher"),
        ("hidden_comm_ms", 90.0, 100.0, 1.0, "lower"),
        ("all_reduce_ms", 90.0, 100.0, 1.0, "lower"),
        ("exposed_comm_ms", 5.0, 0.0, 1.0, "worse"),
        ("exposed_comm_ms", 0.0, 0.0, 1.0, "same"),
        # Less than the margin is the same however small the noise.
        ("step_ms", 100.4, 100.0, 1e-6, "same"),
        ("step_ms", 100.6, 100.0, 1e-6, "worse"),
    ],
)
def test_verdicts_beside_the_noise(quantity: str, ours: float, theirs: float, noise: float, expected: Verdict) -> None:
    assert QuantityRatio(quantity, around(ours, noise), around(theirs, noise)).verdict == expected


def test_ratios_and_their_noise() -> None:
    one = QuantityRatio("step_ms", around(110.0, 1.1), around(100.0, 2.0))
    assert one.ratio == pytest.approx(1.1)
    assert one.ratio_noise == pytest.approx(1.1 * math.hypot(0.01, 0.02))


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (None, around(1.0, 0.1), None),
        (around(1.0, 0.1), None, None),
        (single(3.0), single(4.0), None),
        (around(1.0, 0.1), around(0.0, 0.1), "worse"),
    ],
)
def test_what_is_unknown_has_no_noise(
    ours: Aggregate | None, theirs: Aggregate | None, verdict: Verdict | None
) -> None:
    one = QuantityRatio("step_ms", ours, theirs)
    assert math.isnan(one.ratio_noise)
    assert one.verdict == verdict


def test_one_run_of_each_matches_whatever_it_is_called(tmp_path: Path) -> None:
    match = only_match(a=write_run(tmp_path / "one"), b=write_run(tmp_path / "other", factor=1.1))
    assert (match.dataset, match.ours.name, match.theirs.name) == ("b", "other", "one")
    assert match.quantities["hidden_share"].verdict == "same"
    assert match.settings == {}
    assert {one.verdict for one in only_match(a=tmp_path / "one", b=tmp_path / "one").quantities.values()} <= {
        "same",
        None,
    }


def test_runs_of_sweeps_match_by_name(tmp_path: Path) -> None:
    for side, factor in (("a", 1.0), ("b", 0.8)):
        for i, point in enumerate((POINT, PREFETCHING)):
            run(tmp_path / side / f"fsdp_{i}", point, factor, step_us=1500.0 * factor, spread_us=5.0)
    write_run(tmp_path / "a" / "fsdp_2")
    write_run(tmp_path / "b" / "fsdp_3")
    both = compared("a", a=tmp_path / "a", b=tmp_path / "b")
    assert [match.ours.name for match in both.matches] == ["fsdp_0", "fsdp_1"]
    assert [("only in a" in said, "fsdp_3" in said) for said in both.unmatched] == [(True, False), (False, True)]
    assert [match.quantities["point_ms"].verdict for match in both.matches] == ["better", "better"]
    assert [match.quantities["floor_ms"].verdict for match in both.matches] == ["same", "same"]
    assert mean_ratios(both.matches)["point_ms"] == pytest.approx(0.8)
    assert mean_ratios(both.matches)["step_ms"] == pytest.approx(0.8, rel=1e-3)
    assert "all_reduce_ms" not in mean_ratios(both.matches)


def test_knobs_that_differ_are_told_and_scheduling_is_the_same_work(tmp_path: Path) -> None:
    match = only_match(a=run(tmp_path / "a", POINT), b=run(tmp_path / "b", PREFETCHING))
    assert match.settings == {"fsdp.forward_prefetch": (0, 1)}
    assert match.different_work == {}


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({"training.batch_size": 32}, "worse"),
        ({"training.gradient_accumulation": 2}, "better"),
        ({"training.mixed_precision": "none"}, "same"),
        ({"distributed.dp_size": 4}, "better"),
        ({"ranking": {"num_layers": 4}}, "same"),
        ({"model": {"hidden_size": 64}}, "same"),
    ],
)
def test_other_work_has_no_better_times(tmp_path: Path, changes: dict[str, Any], samples: str) -> None:
    other = resolved("fsdp", **{"distributed.dp_size": 2, **changes})
    ours = run(tmp_path / "b", other, step_us=700.0, spread_us=1.0)
    match = only_match(a=run(tmp_path / "a", POINT, step_us=1500.0, spread_us=1.0), b=ours)
    assert match.different_work
    assert match.quantities["point_ms"].verdict == "lower"
    assert match.quantities["samples_per_s"].verdict == samples
    others = {one.verdict for name, one in match.quantities.items() if name != "samples_per_s"}
    assert not others & {"better", "worse"}


def test_a_faster_smaller_model_is_not_better(tmp_path: Path) -> None:
    smaller = resolved("fsdp", **{"distributed.dp_size": 2, "ranking": {"num_layers": 4}})
    match = only_match(a=run(tmp_path / "a", POINT), b=run(tmp_path / "b", smaller, 0.5, step_us=700.0))
    assert match.quantities["samples_per_s"].verdict == "higher"


def test_logs_of_other_ranks_are_other_work(tmp_path: Path) -> None:
    match = only_match(a=write_run(tmp_path / "two", ranks=2), b=write_run(tmp_path / "four", ranks=4, factor=0.5))
    assert match.different_work == {"ranks": (2, 4)}
    assert match.quantities["step_ms"].verdict == "lower"


def test_marks_that_disagree_with_the_kernels_have_no_verdict() -> None:
    match = only_match(ddp=H200 / "ddp_one_connection", fsdp=H200 / "fsdp2")
    assert not match.believed
    assert {one.verdict for name, one in match.quantities.items() if QUANTITIES[name].by_marks} == {None}
    assert match.quantities["step_ms"].verdict is not None
    exposed, share = (match.quantities[f"kernels_{name}"] for name in ("exposed_comm_ms", "hidden_share"))
    assert exposed.theirs
    assert exposed.theirs.median == pytest.approx(2.73, abs=0.01)
    assert share.theirs
    assert share.theirs.median == pytest.approx(0.0, abs=0.01)
    assert share.verdict == "better"


def test_nothing_in_common_is_one_sentence(tmp_path: Path) -> None:
    for place in ("a/x", "a/y", "b/z"):
        write_run(tmp_path / place, steps=5)
    with pytest.raises(UserError, match="No run is in both: 2 only in a, not in b: x, y") as error:
        compared("a", a=tmp_path / "a", b=tmp_path / "b")
    assert "\n" not in str(error.value)


def test_only_the_candidate_is_compared_and_all_are_told(tmp_path: Path) -> None:
    paths = {label: write_run(tmp_path / label) for label in ("a", "b", "c")}
    both = compared("b", "c", **paths)
    assert both.candidates == ["c"]
    assert [(match.dataset, match.reference) for match in both.matches] == [("c", "b")]
    told = telemetry_summary(both)["datasets"]
    assert {label: set(of["ratios"]) for label, of in told.items()} == {"a": set(), "b": set(), "c": {"c"}}
    assert told["a"]["runs"]["a"]["aggregates"]["step_ms"]["count"] == 29


def test_runs_that_are_too_short_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "long")
    write_logs(tmp_path / "short", [record(0)])
    write_logs(tmp_path / "two", [record(0), record(1)])
    dataset = read_telemetry_dataset("a", tmp_path)
    assert [measured.name for measured in dataset.runs] == ["long"]
    assert [problem.split(" ")[0] for problem in dataset.problems] == [f"{tmp_path}/short", f"{tmp_path}/two"]
    with pytest.raises(UserError, match="too few; train for more"):
        read_telemetry_dataset("a", tmp_path / "short")


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    dips = {(17, 1): {"compute_ms": 120.0, "device": SLOW_DEVICE}}
    directory = write_run(make_point("fsdp", tmp_path, POINT, name="fsdp"), profiled=2, dips=dips)
    summary = telemetry_summary(compared("a", a=write_run(tmp_path / "one"), b=directory))
    told = msgspec.json.decode(msgspec.json.encode(summary))["datasets"]["b"]
    of_run = told["runs"]["fsdp"]
    assert of_run["steps"] == {"measured": 29, "warm_up": [0], "profiled": [30, 31], "incomplete": []}
    (dip,) = of_run["dips"]
    assert (dip["step"], dip["rank"], dip["device"]["reasons"]) == (17, 1, ["SW power cap"])
    ratios = told["ratios"]["fsdp"]
    assert ratios["quantities"]["step_ms"]["ratio"] == pytest.approx(1.0, rel=1e-3)
    # Only one of both was timed in turns.
    assert ratios["quantities"]["point_ms"] == {"ratio": None, "noise": None, "verdict": None}
