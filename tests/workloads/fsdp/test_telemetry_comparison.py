"""Training runs beside each other: verdicts, and what is other work. Which runs match and what is left out: telemetry,
made/compared and made/telemetry_troubles among the golden files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.workloads.fsdp.compare import (
    UNKNOWN,
    Match,
    QuantityRatio,
    RunComparison,
    Verdict,
    compare,
    match_runs,
    settings_throughout,
    summary,
)
from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.runs import Run, read_dataset
from tests.make_point import make_point, resolved
from tests.workloads.fsdp.telemetry_logs import record, write_logs, write_run

ANY_MATCH = Match("b", "a", Run("run", Path(), {0: {}}), None)
POINT = resolved("fsdp", **{"distributed.dp_size": 2})


def compared(**paths: Path) -> RunComparison:
    """With the first as the reference."""
    datasets = [read_dataset(label, path) for label, path in paths.items()]
    return match_runs(datasets, datasets[0].label)


def only_match(**paths: Path) -> Match:
    ((match,),) = compared(**paths).matches.values()
    return match


def run(directory: Path, point: Resolved, factor: float = 1.0, **measured: Any) -> Path:
    """Telemetry beside a result."""
    return write_run(make_point("fsdp", directory.parent, point, name=directory.name, **measured), factor=factor)


def around(median: float, noise: float) -> Estimate:
    return Estimate(median, noise, 20)


def beside(quantity: str, ours: Estimate, theirs: Estimate) -> QuantityRatio:
    return QuantityRatio(ANY_MATCH, quantity, ours, theirs)


@pytest.mark.parametrize(
    ("quantity", "ours", "theirs", "noise", "expected"),
    [
        ("step_ms", 110.0, 100.0, 1.0, "worse"),
        ("step_ms", 90.0, 100.0, 1.0, "better"),
        ("step_ms", 101.0, 100.0, 1.0, "same"),
        ("samples_per_s", 90.0, 100.0, 1.0, "worse"),
        ("samples_per_s", 110.0, 100.0, 1.0, "better"),
        ("power_w", 110.0, 100.0, 1.0, "higher"),
        ("hidden_comm_ms", 90.0, 100.0, 1.0, "lower"),
        ("exposed_comm_ms", 5.0, 0.0, 1.0, "worse"),
        ("exposed_comm_ms", 0.0, 0.0, 1.0, "same"),
        # Less than the margin is the same however small the noise.
        ("step_ms", 100.4, 100.0, 1e-6, "same"),
        ("step_ms", 100.6, 100.0, 1e-6, "worse"),
    ],
)
def test_verdicts_beside_the_noise(quantity: str, ours: float, theirs: float, noise: float, expected: Verdict) -> None:
    assert beside(quantity, around(ours, noise), around(theirs, noise)).verdict == expected


def test_ratios_and_their_noise() -> None:
    one = beside("step_ms", around(110.0, 1.1), around(100.0, 2.0))
    assert one.ratio == pytest.approx(1.1)
    assert one.ratio_noise == pytest.approx(1.1 * math.hypot(0.01, 0.02))


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (UNKNOWN, around(1.0, 0.1), None),
        (around(1.0, 0.1), UNKNOWN, None),
        (estimate([3.0]), estimate([4.0]), None),
        (around(1.0, 0.1), around(0.0, 0.1), "worse"),
    ],
)
def test_what_is_unknown_has_no_noise(ours: Estimate, theirs: Estimate, verdict: Verdict | None) -> None:
    one = beside("step_ms", ours, theirs)
    assert math.isnan(one.ratio_noise)
    assert one.verdict == verdict


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({"training.batch_size": 32}, "same"),
        ({"training.gradient_accumulation": 2}, "better"),
        ({"training.mixed_precision": "none"}, "better"),
        ({"distributed.dp_size": 4}, "better"),
        # A smaller model's samples are other samples.
        ({"ranking": {"num_layers": 4}}, "higher"),
        ({"model": {"hidden_size": 64}}, "higher"),
    ],
)
def test_other_work_has_no_better_times(tmp_path: Path, changes: dict[str, Any], samples: str) -> None:
    """Of a step that takes half as long."""
    other = resolved("fsdp", **{"distributed.dp_size": 2, **changes})
    ours = run(tmp_path / "b", other, 0.5, step_us=700.0, spread_us=1.0)
    match = only_match(a=run(tmp_path / "a", POINT, step_us=1500.0, spread_us=1.0), b=ours)
    assert match.different_work
    assert match.quantities["time_us"].verdict == "lower"
    assert match.quantities["samples_per_s"].verdict == samples
    others = {one.verdict for name, one in match.quantities.items() if name != "samples_per_s"}
    assert not others & {"better", "worse"}


def test_logs_of_other_ranks_are_other_work(tmp_path: Path) -> None:
    match = only_match(a=write_run(tmp_path / "two", ranks=2), b=write_run(tmp_path / "four", ranks=4, factor=0.5))
    assert match.settings == {"ranks": {"a": 2, "b": 4}}
    assert match.different_work == ["ranks"]
    assert match.quantities["step_ms"].verdict == "lower"


def test_nothing_in_common_is_one_sentence(tmp_path: Path) -> None:
    for place in ("a/x", "a/y", "b/z"):
        write_run(tmp_path / place, steps=5)
    with pytest.raises(UserError, match="No runs match: 2 only in a, not in b: x, y") as error:
        compared(a=tmp_path / "a", b=tmp_path / "b")
    assert "\n" not in str(error.value)


def test_a_dataset_of_runs_that_are_too_short_is_an_error(tmp_path: Path) -> None:
    write_logs(tmp_path, [record(0)])
    with pytest.raises(
        UserError, match="fewer than two steps of all ranks after warm-up, not profiled; train for more"
    ):
        read_dataset("a", tmp_path)


def test_a_quantity_that_one_of_both_knows_has_no_ratio(tmp_path: Path) -> None:
    found = summary(compared(a=write_run(tmp_path / "one"), b=run(tmp_path / "fsdp", POINT)))
    ratios = msgspec.json.decode(msgspec.json.encode(found))["datasets"]["b"]["ratios"]["fsdp"]
    assert ratios["quantities"]["time_us"] == {"ratio": None, "noise": None, "verdict": None}


def test_runs_without_communication_have_no_chart_of_what_is_hidden(tmp_path: Path) -> None:
    silent = [record(number, hidden_ms=0.0, exposed_ms=0.0) for number in range(9)]
    paths = {label: write_logs(tmp_path / label, silent) for label in ("a", "b")}
    charts = {chart.file_name: chart for chart in compare(list(paths.items()), "a").charts()}
    assert {name: len(chart.drawn) for name, chart in charts.items()} == {
        "a_timeline.png": 1,
        "b_timeline.png": 1,
        "overlay.png": 1,
    }


def write_sweep_of_runs(directory: Path, settings: Sequence[Mapping[str, Any]], **throughout: Any) -> Path:
    """A training sweep as launch.py leaves it: runs are named by what was asked for."""
    for given in settings:
        asked = {**given, **throughout}
        # Of the environment no variable is usual.
        variables = {
            key.rpartition(".")[2]: value for key, value in asked.items() if key.startswith("distributed.env.")
        }
        point = resolved(
            "fsdp", **{key: value for key, value in asked.items() if not key.startswith("distributed.env.")}
        )
        point.distributed = replace(point.distributed, dp_size=2, env=variables)
        name = "_".join(["fsdp", *(f"{key}={value}" for key, value in asked.items())])
        run(directory / name, point)
    return directory


SWEPT = [
    {"fsdp.forward_prefetch": ahead, "fsdp.reshard_after_forward": reshard}
    for ahead in (0, 1)
    for reshard in (True, False)
]
CTAS = "distributed.env.NCCL_MAX_CTAS"


def swept_of(match: Match) -> list[Any]:
    return [[run.settings[name] for name in SWEPT[0]] for run in (match.theirs, match.ours) if run]


@pytest.mark.parametrize("throughout", [{CTAS: "8"}, {CTAS: "8", "training.batch_size": 32}])
def test_sweeps_match_by_what_was_swept_where_a_setting_differs_throughout(
    tmp_path: Path, throughout: dict[str, Any]
) -> None:
    found = compared(
        cuda=write_sweep_of_runs(tmp_path / "cuda", SWEPT),
        rocm=write_sweep_of_runs(tmp_path / "rocm", SWEPT[::-1], **throughout),
    )
    assert len(found.matches["rocm"]) == 4
    assert found.unmatched == []
    assert all(ours == theirs for theirs, ours in map(swept_of, found.matches["rocm"]))
    assert {name: of["rocm"] for name, of in settings_throughout(found.matches["rocm"]).items()} == throughout
    for told in summary(found)["datasets"]["rocm"]["ratios"].values():
        assert told["settings_that_differ"][CTAS] == {"cuda": None, "rocm": "8"}
    assert all(bool(match.different_work) == (len(throughout) > 1) for match in found.matches["rocm"])


def test_what_only_one_sweep_has_swept_matches_the_value_that_the_other_has(tmp_path: Path) -> None:
    found = compared(
        cuda=write_sweep_of_runs(tmp_path / "cuda", SWEPT),
        rocm=write_sweep_of_runs(tmp_path / "rocm", SWEPT[:2], **{CTAS: "8"}),
    )
    assert sorted(swept_of(match)[0] for match in found.matches["rocm"]) == [[0, False], [0, True]]
    assert len(found.unmatched) == 1


@pytest.mark.parametrize(
    ("ours", "throughout"),
    [
        # Swept in both, and never the same.
        ([{"training.batch_size": size} for size in (64, 128)], {}),
        # Which of the two it is nobody knows.
        ([{"training.batch_size": 16, "runtime.threads_per_rank": threads} for threads in (1, 2)], {CTAS: "8"}),
    ],
)
def test_runs_that_differ_in_what_was_swept_are_no_pairs(
    tmp_path: Path, ours: list[dict[str, Any]], throughout: dict[str, Any]
) -> None:
    theirs = write_sweep_of_runs(tmp_path / "a", [{"training.batch_size": size} for size in (16, 32)])
    with pytest.raises(UserError, match="No runs match: 2 only in a"):
        compared(a=theirs, b=write_sweep_of_runs(tmp_path / "b", ours, **throughout))
