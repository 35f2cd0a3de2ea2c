"""Asserts the same of every comparison (workloads, telemetry, traces): verdicts, reference, what only one side has."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.commands.compare import short_names
from overlap_sweep.compare import sweep_report, trace_report
from overlap_sweep.compare.sweeps import Match, SweepComparison, compare_sweeps, read_dataset
from overlap_sweep.compare.traces import compare_traces, read_trace_dataset
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.report.comparison import mean_change
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.verdict import MARGIN, mean_ratio, verdict
from overlap_sweep.workloads.fsdp import compare as telemetry
from overlap_sweep.workloads.operator.section import plain_setting
from tests.made_sweeps import trial, write_tuner
from tests.make_point import (
    ENVIRONMENT,
    copy_config,
    implementation,
    job_config,
    kernel_config,
    layer_config,
    make_point,
    operator_config,
    pass_times,
    stack_config,
    variant,
)
from tests.timeline import write_trace
from tests.workloads.fsdp.telemetry_logs import write_run


@dataclass(frozen=True)
class Kind:
    """How to write one point whose time is multiplied by a factor, and another point."""

    write: Callable[..., object]
    other: Callable[[Path], object]
    subject: str
    """The setting, quantity or kind of kernel whose time it is."""


def _operator(directory: Path, factor: float = 1.0, num_sm: int = 4, **point: Any) -> None:
    config = operator_config(2, "fc1", "all", "bulk", num_sm=num_sm, repetition=point.pop("repetition", 0))
    make_point("operator", directory, config, bwd=pass_times(320.0 * factor, 400.0, 300.0), **point)


def _layer(directory: Path, factor: float = 1.0, num_replicas: int = 1, **point: Any) -> None:
    bound = {"launch_bound": point.pop("launch_bound", False)}
    variants = {"none": variant([60.0] * 6), "default": variant([57.0 * factor] * 6, **bound)}
    config = layer_config(num_replicas=num_replicas, repetition=point.pop("repetition", 0))
    make_point("layer", directory, config, variants=variants, **point)


def _kernel(directory: Path, factor: float = 1.0, m: int = 1024, **point: Any) -> None:
    ring = implementation(150.0 * factor, launch_bound=point.pop("launch_bound", False))
    measured = {"ring": ring, "split": implementation(160.0)}
    config = kernel_config(m, repetition=point.pop("repetition", 0))
    make_point("kernel", directory, config, implementations=measured, **point)


def _copies(directory: Path, factor: float = 1.0, copy_mb: float = 64.0, **point: Any) -> None:
    if "launch_bound" in point:
        point["launch_bound"] = {"overlapped": True}
    config = copy_config(copy_mb=copy_mb, repetition=point.pop("repetition", 0))
    make_point("copy_engine", directory, config, overlapped_us=1100.0 * factor, **point)


def _stack(directory: Path, factor: float = 1.0, dp_size: int = 1, **point: Any) -> None:
    config = stack_config("autotp", 2, dp_size, repetition=point.pop("repetition", 0))
    make_point("tp_training", directory, config, step_us=10_000.0 * factor, **point)


def _job(directory: Path, factor: float = 1.0, ranks: int = 2, **point: Any) -> None:
    """Three runs, if it is not one of several repetitions: fewer say nothing."""
    given = point.pop("repetition", None)
    for repetition in range(3) if given is None else (given,):
        config = job_config({"bucket": 25}, repetition=repetition, **{"job.ranks": ranks})
        make_point("job", directory, config, step_us=100_000.0 * factor, **point)


SWEEPS = {
    "operator": Kind(_operator, lambda path: _operator(path, num_sm=8), "dgrad bulk_sm4 + wgrad bulk_sm4"),
    "layer": Kind(_layer, lambda path: _layer(path, num_replicas=2), "default"),
    "kernel": Kind(_kernel, lambda path: _kernel(path, m=2048), "ring"),
    "copy_engine": Kind(_copies, lambda path: _copies(path, copy_mb=16.0), "overlapped"),
    "tp_training": Kind(_stack, lambda path: _stack(path, dp_size=2), "defaults"),
    "job": Kind(_job, lambda path: _job(path, ranks=4), "bucket=25"),
}
LOGS = {
    "telemetry": Kind(
        lambda path, factor=1.0: write_run(path / "run", factor=factor),
        lambda path: write_run(path / "more"),
        "step_ms",
    ),
    "trace": Kind(
        lambda path, factor=1.0: write_trace(path / "0.json", 0, [100.0 * factor] * 3, 50.0),
        lambda path: write_trace(path / "1.json", 1, [100.0], 50.0),
        "gemm",
    ),
}
ALL = {**SWEEPS, **LOGS}
JUDGED = {"better": "faster", "worse": "slower", "same": "same"}


@dataclass(frozen=True)
class Seen:
    """By dataset the ratio and the verdict of the subject, and the names or sentences of what only one has."""

    found: dict[str, tuple[float, str]]
    unmatched: Sequence[object]
    problems: Sequence[str]


def sweeps(directory: Path, *labels: str, reference: str = "old") -> SweepComparison:
    return compare_sweeps([read_dataset(label, directory / label) for label in labels], reference)


def headlines(kind: str, directory: Path, *labels: str) -> Sequence[str]:
    paths = [(label, directory / label) for label in labels]
    if kind == "telemetry":
        return telemetry.compare(paths, labels[0]).headlines
    if kind == "trace":
        of_traces = [(label, path, sorted(path.iterdir())) for label, path in paths]
        return trace_report.compare(of_traces, labels[0], "phase").headlines
    return sweep_report.compare(paths, labels[0], None).headlines


def compared(kind: str, directory: Path, *labels: str, reference: str = "old") -> Seen:
    subject, paths = ALL[kind].subject, {label: directory / label for label in labels}
    if kind == "telemetry":
        runs = telemetry.match_runs([telemetry.read_dataset(*of) for of in paths.items()], reference)
        quantities = {label: match.quantities[subject] for label, (match,) in runs.matches.items()}
        found = {
            label: (one.ratio, JUDGED.get(str(one.verdict), str(one.verdict))) for label, one in quantities.items()
        }
        return Seen(found, runs.unmatched, [problem for dataset in runs.datasets for problem in dataset.problems])
    if kind == "trace":
        found_in = compare_traces([read_trace_dataset(*of, sorted(of[1].iterdir())) for of in paths.items()], reference)
        parts = [part for part in found_in.parts if (part.by, part.phase, part.kind) == ("class", "all", subject)]
        found = {part.dataset: (part.ratio, part.change) for part in parts}
        problems = [problem for dataset in found_in.datasets for problem in dataset.problems]
        return Seen(found, found_in.unmatched, problems)
    points = sweeps(directory, *labels, reference=reference)
    matches = [match for match in points.matches if match.ours.key.setting == subject]
    problems = [problem for dataset in points.datasets for problem in dataset.problems]
    return Seen({m.dataset: (m.ratio, m.verdict) for m in matches}, points.unmatched, problems)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "same"), (0.8, "faster"), (1.25, "slower")])
@pytest.mark.parametrize("kind", ALL)
def test_the_verdict_is_by_the_ratio_of_the_times(tmp_path: Path, kind: str, factor: float, verdict: str) -> None:
    ALL[kind].write(tmp_path / "old")
    ALL[kind].write(tmp_path / "new", factor)
    seen = compared(kind, tmp_path, "old", "new")
    assert seen == Seen({"new": (pytest.approx(factor, rel=1e-3), verdict)}, [], [])


@pytest.mark.parametrize(("factor", "word"), [(1.0, "do not differ"), (0.8, "faster"), (1.25, "slower")])
@pytest.mark.parametrize("kind", ALL)
def test_the_headline_says_which_is_faster(tmp_path: Path, kind: str, factor: float, word: str) -> None:
    for label, by in (("old", 1.0), ("new", factor)):
        ALL[kind].write(tmp_path / label, factor=by)
    (headline,) = headlines(kind, tmp_path, "old", "new")
    assert headline.startswith("new ")
    assert word in headline
    assert "The machine changed" not in headline


def test_several_times_of_a_pass_share_their_noise_and_several_passes_do_not() -> None:
    one = (Estimate(110.0, 0.0, 9), Estimate(100.0, 4.0, 9))
    assert mean_change([[one]]).noise == pytest.approx(0.04)
    assert mean_change([[one] * 4]).noise == pytest.approx(0.04)
    assert mean_change([[one]] * 4).noise == pytest.approx(0.02)
    assert mean_change([[one] * 4]).ratio == pytest.approx(1.1)
    once = (Estimate(110.0, math.nan, 1), Estimate(100.0, math.nan, 1))
    assert not mean_change([[once]]).differs


@pytest.mark.parametrize("kind", ALL)
def test_each_is_compared_with_the_reference(tmp_path: Path, kind: str) -> None:
    for label, factor in (("a", 1.0), ("b", 1.25), ("c", 2.5)):
        ALL[kind].write(tmp_path / label, factor)
    found = compared(kind, tmp_path, "a", "b", "c", reference="b").found
    assert found == {"a": (pytest.approx(0.8, rel=1e-3), "faster"), "c": (pytest.approx(2.0, rel=1e-3), "slower")}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("more", ["old", "new"])
def test_what_only_one_has_is_told(tmp_path: Path, kind: str, more: str) -> None:
    for label in ("old", "new"):
        ALL[kind].write(tmp_path / label)
    ALL[kind].other(tmp_path / more)
    seen = compared(kind, tmp_path, "old", "new")
    assert seen.found.keys() == {"new"}
    (only,) = seen.unmatched
    if kind in SWEEPS:
        assert only.only_in == more
        assert only.missing_in == {"old": "new", "new": "old"}[more]


@pytest.mark.parametrize("kind", ALL)
def test_what_cannot_be_read_is_a_problem_and_the_rest_is_compared(tmp_path: Path, kind: str) -> None:
    broken = {"telemetry": "run/rank_0_metrics.jsonl", "trace": "cut.json"}.get(kind, "cut/result.json")
    for label in ("old", "new"):
        ALL[kind].write(tmp_path / label)
    (tmp_path / "new" / broken).parent.mkdir(exist_ok=True)
    with (tmp_path / "new" / broken).open("a") as file:
        file.write("{\n")
    seen = compared(kind, tmp_path, "old", "new")
    assert seen.found["new"][1] == "same"
    assert [broken in problem for problem in seen.problems] == [True]


@pytest.mark.parametrize("kind", SWEEPS)
def test_repetitions_are_pooled(tmp_path: Path, kind: str) -> None:
    for repetition, factor in enumerate((0.99, 1.01)):
        SWEEPS[kind].write(tmp_path / "old", factor, repetition=repetition)
    SWEEPS[kind].write(tmp_path / "new", repetition=0)
    (match,) = [m for m in sweeps(tmp_path, "old", "new").matches if m.ours.key.setting == SWEEPS[kind].subject]
    assert (len(match.theirs.points), len(match.ours.points)) == (2, 1)
    assert match.ratio == pytest.approx(1.0)


@pytest.mark.parametrize("kind", SWEEPS)
def test_environment_and_configuration_that_changed_are_told(tmp_path: Path, kind: str) -> None:
    newer = {**ENVIRONMENT, "driver": "590.2", "packages": {"torch": "2.14.0"}}
    SWEEPS[kind].write(tmp_path / "old")
    SWEEPS[kind].write(tmp_path / "new", environment=newer)
    assert sweeps(tmp_path, "old", "new").environment == {
        "driver": {"old": ["580.1"], "new": ["590.2"]},
        "packages.torch": {"old": ["2.13.0"], "new": ["2.14.0"]},
    }


@pytest.mark.parametrize("kind", sorted(SWEEPS.keys() - {"tp_training", "job"}))
def test_what_was_launch_bound_has_no_say(tmp_path: Path, kind: str) -> None:
    SWEEPS[kind].other(tmp_path / "old")
    SWEEPS[kind].other(tmp_path / "new")
    SWEEPS[kind].write(tmp_path / "old")
    SWEEPS[kind].write(tmp_path / "new", 0.01, launch_bound=True)
    found = sweeps(tmp_path, "old", "new")
    assert {match.verdict for match in found.matches} == {"same"}
    assert [only.only_in for only in found.unmatched] == ["old"]


@pytest.mark.parametrize("kind", [*SWEEPS, "fsdp"])
def test_nothing_measured_is_an_error(tmp_path: Path, kind: str) -> None:
    make_point(kind, tmp_path, status="skipped", error="does not fit")
    with pytest.raises(UserError, match=r"no measured times to compare \(1 skipped\)"):
        read_dataset("a", tmp_path)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("/a/old", "/b/new"), ["old", "new"]),
        (("/a/r4/tp4.json.gz", "/a/r6/tp4.json.gz"), ["r4", "r6"]),
        (("/a/x", "/a/x"), ["x", "x"]),
        (("/a/trace.json",), ["trace"]),
    ],
)
def test_paths_are_called_by_what_tells_them_apart(paths: tuple[str, ...], expected: list[str]) -> None:
    assert short_names(list(map(Path, paths))) == expected


def compared_sweeps(*directories: Path) -> SweepComparison:
    """With the first as the reference."""
    datasets = [read_dataset(directory.name, directory) for directory in directories]
    return compare_sweeps(datasets, directories[0].name)


def by_setting(found: SweepComparison) -> dict[str, Match]:
    return {match.ours.key.setting: match for match in found.matches}


@pytest.mark.parametrize(
    ("time_us", "noise_us", "expected"),
    [
        (100.0 * (1 + MARGIN), 0.0, "same"),
        (100.0 * (1 + MARGIN) + 0.1, 0.0, "slower"),
        (100.0 * (1 - MARGIN) - 0.1, 0.0, "faster"),
        (110.0, 8.0, "same"),
        (110.0, 7.0, "slower"),
    ],
)
def test_the_noise_of_both_and_the_margin_make_ties(time_us: float, noise_us: float, expected: str) -> None:
    assert verdict(Estimate(time_us, noise_us, 5), Estimate(100.0, noise_us, 5)) == expected


def test_geometric_means_leave_out_what_is_unknown() -> None:
    assert math.isnan(mean_ratio([]))
    assert mean_ratio([0.5, math.nan, 2.0]) == pytest.approx(1.0)


def test_what_a_tuner_proved_matches_by_its_labels(tmp_path: Path) -> None:
    for name, tuned_us in (("old", 54.0), ("new", 45.0)):
        file = f"file:/{name}/tuned.yaml"
        variants = {"none": variant([60.0] * 6), "default": variant([58.0] * 6), file: variant([tuned_us] * 6)}
        make_point("layer", tmp_path / name, variants=variants, name="proof")
        names = {"none": "none", "default": "default", "tuned": file}
        write_tuner(tmp_path / name, proofs=[trial("proof", names)])
    matches = by_setting(compared_sweeps(tmp_path / "old", tmp_path / "new"))
    assert matches["tuned"].ratio == pytest.approx(45 / 54)
    assert set(matches) == {"none", "default", "tuned"}


@pytest.mark.parametrize("slot", ["fc1_fprop", "fc2_fprop", "fc1_dgrad"])
def test_settings_that_mean_the_same_have_one_name(slot: str) -> None:
    of_ring = {"method": "ring_exchange", "num_sm": 3, "use_ce": True}
    plain = plain_setting(slot, of_ring)
    assert "num_sm" not in plain
    assert space.brief_name(plain) == ("ring_agg0" if slot == "fc1_fprop" else "ring")
    assert plain_setting(slot, {**of_ring, "use_ce": False})["num_sm"] == 3
