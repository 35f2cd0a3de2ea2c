"""Why communication is exposed: whose traces are diagnosed, what of it is said about measured points, and when."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep.diagnosis import END_OF_STEP, Finding, runs
from overlap_sweep.report.causes import (
    Side,
    cause_rows,
    diagnosed,
    exhibit,
    findings_of,
    first_traced,
    in_a_sentence,
)
from overlap_sweep.report.page import page_files
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import PointRow
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.run_directory import trace_file
from tests.analyze import rows
from tests.golden.archives import unpack
from tests.golden.made_report import BEST_TRACE, NONE_TRACE
from tests.make_point import implementation, kernel_config, make_point
from tests.report.conftest import Made
from tests.report.page.reports import analysis_of, page_of

HEADING = "Why communication is exposed"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Point]]:
    """Points of recorded sweeps by workload, those with traces."""
    found = {}
    for name in ("operators", "layer", "fsdp", "tp_training"):
        points = read_points(unpack(name, tmp_path_factory.mktemp(name))).points
        found[name] = [point for point in points if point.result and point.result.traces]
    return found


@pytest.fixture
def diagnosed_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The traces that are diagnosed, in order."""
    paths: list[Path] = []
    read_runs = runs.read_runs

    def noted(some: list[Path], ranks_per_node: dict[Path, int]) -> list[runs.Run]:
        paths.extend(some)
        return read_runs(some, ranks_per_node)

    monkeypatch.setattr(runs, "read_runs", noted)
    return paths


def named(points: list[Point], part: str) -> Point:
    return next(point for point in points if part in point.name)


def parts_of(shown: Exhibit) -> list[Exhibit]:
    assert shown.parts
    return list(shown.parts())


def words_of(shown: Exhibit) -> dict[str, tuple[list[str], list[list[str]]]]:
    """What is said by heading: below the heading, and below each row."""
    found: dict[str, tuple[list[str], list[list[str]]]] = {}
    for part in parts_of(shown):
        assert part.listing
        assert part.listing.text
        for text in map(part.listing.text, part.listing.rows):
            found.setdefault(text.heading, (list(text.about), []))[1].append(list(text.sentences))
    return found


def causes_of(side: Side) -> list[str]:
    return [one.cause for one in findings_of(side, diagnosed([side])[0])]


def with_host_late(point: Point) -> Point:
    assert point.result
    return replace(point, result=msgspec.structs.replace(point.result, launch_bound=True))


def test_a_side_has_the_traces_of_all_ranks_of_its_variant(recorded: dict[str, list[Point]]) -> None:
    (layer,) = recorded["layer"]
    for variant, names in {
        "none": ["trace_none_rank0.json.gz", "trace_none_rank1.json.gz"],
        "ring_exchange": ["trace_ring-exchange_rank0.json.gz", "trace_ring-exchange_rank1.json.gz"],
        "": [],
        "unknown": [],
    }.items():
        assert [path.name for path in Side(layer, variant).traces] == names
    training = recorded["fsdp"][0]
    assert [path.name for path in Side(training).traces] == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
    assert Side(replace(training, result=None)).traces == []


def test_activations_of_tensor_parallelism_are_needed_at_once(recorded: dict[str, list[Point]]) -> None:
    (layer,) = recorded["layer"]
    found = causes_of(Side(layer, "none"))
    assert "dependency" in found
    # Its GEMMs run alone in no step, and other sizes of the same kernel do not say what they would take.
    assert "contention" not in found
    both = named(recorded["operators"], "fc2_ring_agg0_sm4")
    assert causes_of(Side(both, "none", least_share=0.02)) == ["dependency", "dependency"]
    assert causes_of(Side(both, least_share=0.02)) == ["none"]


def test_our_recordings_wait_for_the_device_after_each_step_which_is_no_cause(recorded: dict[str, list[Point]]) -> None:
    sides = [Side(point) for point in recorded["tp_training"]]
    found = [(side, run) for side, run in zip(sides, diagnosed(sides), strict=True) if run and run.found]
    assert any(one.where == END_OF_STEP for _, run in found if run.found for one in run.found.diagnosis.findings)
    assert not any(one.where == END_OF_STEP for side, run in found for one in findings_of(side, run))
    for name in ("operators", "layer"):
        for point in recorded[name]:
            variants = ["", "none", "default", "ring_exchange", "rs_dgrad"]
            assert not {"host_sync", "host_bound"} & {cause for v in variants for cause in causes_of(Side(point, v))}


def test_what_only_the_profiler_delays_is_said_so(recorded: dict[str, list[Point]]) -> None:
    training = recorded["fsdp"][0]
    ahead, late = Side(training, time_us=28_900.0), Side(with_host_late(training), time_us=28_900.0)
    assert "host_bound" in causes_of(ahead)
    words = words_of(exhibit({"": {"ahead": ahead, "late": late}}))
    assert any("host_bound is the profiler's" in line for line in words["ahead"][0])
    assert any("Recording slows the host down" in line for line in words["late"][0])
    for about, _ in words.values():
        assert "Without the profiler it took 28,900 us." in about[0]
    assert in_a_sentence(ahead) == ""
    assert "host_bound" in in_a_sentence(late)
    rows: list[PointRow[Any]] = [PointRow(one.point, training.directory, None) for one in (ahead, late)]
    # They are the same directory, so only one at a time.
    assert [cause_rows([row])[0]["cause"] for row in rows] == ["straggler", "host_bound"]


def test_what_is_said_of_a_finding(recorded: dict[str, list[Point]]) -> None:
    (layer,) = recorded["layer"]
    sides = {"no overlap": Side(layer, "none"), "best": Side(layer, "ring_exchange"), "gone": None}
    shown = exhibit({"": sides})
    (part,) = parts_of(shown)
    assert part.listing
    assert [row["run"] for row in part.listing.rows] == sorted((row["run"] for row in part.listing.rows), reverse=True)
    headers = [column.header for column in part.listing.columns]
    # All is of one process group.
    assert headers == [
        *("cause", "lost us", "share", "rank", "collective", "pass", "where"),
        *("waiting us", "transfer us"),
    ]
    rows = words_of(shown)["no overlap"][1]
    tries = [line for lines in rows for line in lines[1:]]
    assert all(line.startswith("Try: ") for line in tries)
    assert len(tries) == len(set(tries))
    assert rows[0][0] == part.listing.rows[0]["evidence"]


def test_a_side_without_causes_or_with_a_broken_trace_is_a_note(
    recorded: dict[str, list[Point]], tmp_path: Path
) -> None:
    point = named(recorded["operators"], "fc1_bulk_sm4")
    (part,) = parts_of(exhibit({"fc1": {"backward": Side(point, "none", "bwd")}}))
    assert part.folded == "fc1"
    assert part.listing is None
    assert part.notes == ["backward: The step, both passes, takes 3,917.6 us. No cause costs 1% of it."]
    assert point.result
    for name in point.result.traces:
        (tmp_path / name).write_bytes(b"\x1f\x8bbroken")
    (part,) = parts_of(exhibit({"": {"broken": Side(replace(point, directory=tmp_path))}}))
    assert [note.partition(": ")[0] for note in part.notes] == ["broken"]
    assert "cut short" in part.notes[0]
    assert "No cause" not in part.notes[0]


def test_of_repeated_points_the_first_with_traces_is_diagnosed(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, kernel_config(repetition=0))
    traced = make_point("kernel", tmp_path, kernel_config(repetition=1), traces=[trace_file(0)])
    (traced / trace_file(0)).write_bytes(b"")
    points = sorted(read_points(tmp_path).points, key=lambda point: bool(point.config.repetition))
    side = first_traced(points, time_us=9.0)
    assert side
    assert (side.point.directory, side.time_us) == (traced, 9.0)
    assert first_traced(points[:1]) is None


def test_without_traces_there_is_nothing(made: Made) -> None:
    for name in ("operators", "layers", "training", "stacks", "kernels", "copies"):
        assert HEADING not in page_of(made(name))
    assert in_a_sentence(None) == ""


@pytest.mark.parametrize(("name", "traces"), [("operators", 10), ("layer", 4), ("fsdp", 2), ("tp_training", 6)])
def test_only_what_the_page_shows_is_diagnosed(
    tmp_path: Path, diagnosed_paths: list[Path], name: str, traces: int
) -> None:
    analysis = analysis_of(unpack(name, tmp_path))
    assert diagnosed_paths == []
    page = dict(page_files(analysis, []))["report.html"].decode()
    assert page.count(f">{HEADING}</h4>") == 1
    assert len(diagnosed_paths) == len(set(diagnosed_paths)) == traces


def test_rows_of_one_trace_are_diagnosed_once(recorded: dict[str, list[Point]], diagnosed_paths: list[Path]) -> None:
    (layer,) = recorded["layer"]
    gone = replace(layer, directory=layer.directory / "gone")
    rows: list[PointRow[Any]] = [
        *(PointRow(layer, layer.directory, None, part, "none") for part in ("a", "b")),
        PointRow(gone, layer.directory, None, variant="none"),
    ]
    first, second, without = cause_rows(rows)
    assert first == second
    assert first["cause"] == "dependency"
    assert 0 < first["cause_share"] < 1
    assert first["cause_try"]
    assert set(without.values()) == {None}
    assert len(diagnosed_paths) == 2


def test_many_points_are_diagnosed_some_at_a_time(
    recorded: dict[str, list[Point]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def counted(sides: list[Side]) -> list[None]:
        counts.append(len(sides))
        return [None] * len(sides)

    monkeypatch.setattr("overlap_sweep.report.causes.AT_ONCE", 3)
    monkeypatch.setattr("overlap_sweep.report.causes.diagnosed", counted)
    cause_rows([PointRow(point, point.directory, None) for point in recorded["operators"]])
    assert counts == [3, 2]


def test_traces_in_which_no_cause_is_listed_have_the_cause_none(
    recorded: dict[str, list[Point]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: list[Finding] = []
    monkeypatch.setattr("overlap_sweep.report.causes.findings_of", lambda side, run: nothing)
    point = recorded["operators"][0]
    (row,) = cause_rows([PointRow(point, point.directory, None)])
    assert row["cause"] == "none"
    assert row["cause_share"] is None


def test_a_kernel_is_diagnosed_at_the_largest_m(tmp_path: Path, diagnosed_paths: list[Path]) -> None:
    for m in (1024, 8192):
        names = [trace_file(0, name) for name in ("sequential", "ring")]
        point = make_point(
            "kernel",
            tmp_path,
            kernel_config(m),
            implementations={"ring": implementation(100.0, 1.0)},
            traces=names,
            name=f"m{m}",
        )
        for name, path in zip(names, (NONE_TRACE, BEST_TRACE), strict=True):
            shutil.copy(path, point / name)
    page = page_of(tmp_path)
    assert [path.parent.name for path in diagnosed_paths] == ["m8192"] * 2
    assert "m=8192, torch ring" in page
    assert "m=8192, sequential" in page
    found = rows("query", tmp_path, "--kernels", "--columns", "m,implementation,cause")
    assert {row["cause"] for row in found if row["implementation"] in ("sequential", "ring")} == {"dependency"}
    assert {row["cause"] for row in found if row["implementation"] not in ("sequential", "ring")} == {None}
