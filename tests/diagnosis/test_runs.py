"""Which traces are one run, what is left out of its diagnosis, and what is kept of it."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.diagnosis import facts, runs
from overlap_sweep.diagnosis.facts import read_rank
from overlap_sweep.diagnosis.runs import Run, diagnose, read_runs
from overlap_sweep.trace import files

TRACES = Path(__file__).parent.parent / "data" / "traces"
GRAPH = [TRACES / f"h200x2_cuda_graph_rank{rank}.json.gz" for rank in (0, 1)]
FSDP = [TRACES / f"h200x2_fsdp2_checkpoint_rank{rank}.json.gz" for rank in (0, 1)]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diagnoses"


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which traces were read, in order."""
    paths: list[Path] = []

    def noted(path: Path) -> facts.RankRead:
        paths.append(path)
        return read_rank(path)

    monkeypatch.setattr(facts, "read_rank", noted)
    return paths


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A trace that was changed, uncompressed."""
    content = json.loads(gzip.decompress(source.read_bytes()))
    change(content)
    target.write_text(json.dumps(content))
    return target


def shape(found: list[Run]) -> list[tuple[str, list[str], list[int]]]:
    return [(run.name, [file.path.name for file in run.files], run.missing) for run in found]


def test_ranks_are_grouped_and_sorted_and_a_single_trace_has_its_own_name() -> None:
    found = read_runs([FSDP[1], GRAPH[1], GRAPH[0], FSDP[0], TRACES / "h200x2_ddp_rank0.json.gz"])
    assert shape(found) == [
        (f"{TRACES}/h200x2_fsdp2_checkpoint_rank*.json.gz", [path.name for path in FSDP], []),
        (f"{TRACES}/h200x2_cuda_graph_rank*.json.gz", [path.name for path in GRAPH], []),
        (f"{TRACES}/h200x2_ddp_rank0.json.gz", ["h200x2_ddp_rank0.json.gz"], [1]),
    ]
    diagnoses = [run.found.diagnosis for run in found if run.found]
    assert [one.run for one in diagnoses] == [run.name for run in found]
    assert [one.ranks for one in diagnoses] == [[0, 1], [0, 1], [0]]
    assert all(one.steps and run.found and run.found.groups for one, run in zip(diagnoses, found, strict=True))
    assert diagnose(GRAPH) == [diagnoses[1]]


def test_numpy_is_not_imported_before_the_other_processes_are_started() -> None:
    code = "import sys, overlap_sweep.commands.diagnose, overlap_sweep.diagnosis.runs; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_step_that_is_start_up_on_one_rank_is_left_out_on_all() -> None:
    assert [read_rank(path).file.startup for path in GRAPH] == [[0], []]
    (found,) = diagnose(GRAPH)
    left_out = {(step.rank, step.step): step.startup for step in found.steps}
    assert left_out == {(rank, step): step == 0 for rank in (0, 1) for step in (0, 1, 2)}


def test_a_run_is_read_once_and_again_when_a_trace_or_the_code_changes(
    tmp_path: Path, read_paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [Path(shutil.copy(path, tmp_path)) for path in GRAPH]
    first = read_runs(paths)
    assert read_paths == paths
    assert read_runs(paths) == first
    assert read_paths == paths
    # The other rank's facts are needed again.
    rewritten(paths[1], paths[1], lambda content: content["traceEvents"].pop())
    read_runs(paths)
    assert read_paths == [*paths, paths[1], paths[0]]
    read_paths.clear()
    monkeypatch.setattr(runs, "code_digest", lambda package: f"{package} changed")
    assert [run.name for run in read_runs(paths)] == [run.name for run in first]
    assert read_paths == paths


def test_a_trace_that_cannot_be_read_is_a_problem_and_its_rank_is_missing(tmp_path: Path) -> None:
    paths = [Path(shutil.copy(path, tmp_path)) for path in FSDP]
    paths[1].write_text("[")
    (found,) = read_runs(paths)
    assert found.missing == [1]
    assert [bool(file.problem) for file in found.files] == [False, True]
    assert found.found
    assert found.found.diagnosis.ranks == [0]
    for path in paths:
        path.write_text("[")
    (nothing,) = read_runs(paths)
    assert (nothing.found, nothing.missing) == (None, [0, 1])
    assert diagnose(paths) == []


def test_missing_ranks_are_noted(tmp_path: Path) -> None:
    """Of four ranks only 0 and 2 have a trace."""

    def as_rank(rank: int) -> Callable[[dict[str, Any]], object]:
        return lambda content: content["distributedInfo"].update(rank=rank, world_size=4)

    paths = [rewritten(GRAPH[0], tmp_path / f"t_rank{rank}.json", as_rank(rank)) for rank in (0, 2)]
    (found,) = read_runs(paths)
    assert found.missing == [1, 3]
    assert found.found
    assert [note for note in found.found.diagnosis.notes if note.startswith("No trace of rank 1, 3:")]


def test_a_trace_without_a_rank_is_a_run_and_a_name_may_have_the_rank(tmp_path: Path) -> None:
    def anonymous(content: dict[str, Any]) -> None:
        del content["distributedInfo"]

    unknown = [rewritten(path, tmp_path / f"{name}.json", anonymous) for name, path in zip("ab", GRAPH, strict=True)]
    named = [rewritten(path, tmp_path / f"t_rank{rank}.json", anonymous) for rank, path in enumerate(GRAPH)]
    found = read_runs([*unknown, *named])
    assert shape(found) == [
        *((str(path), [path.name], []) for path in unknown),
        (f"{tmp_path}/t_rank*.json", ["t_rank0.json", "t_rank1.json"], []),
    ]
    assert [run.found.diagnosis.ranks for run in found if run.found] == [[None], [None], [0, 1]]


def test_several_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch, read_paths: list[Path]) -> None:
    paths = [*GRAPH, *FSDP]
    alone = read_runs(paths)
    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", "/dev/null/nowhere")
    monkeypatch.setattr(files, "WORTH_A_PROCESS_S", 1e-9)
    monkeypatch.setattr(files.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    read_paths.clear()
    assert read_runs(paths) == alone
    assert 0 < len(read_paths) < len(paths)


def test_a_trace_that_is_deleted_after_it_was_known(tmp_path: Path, empty_cache: Path) -> None:
    paths = [Path(shutil.copy(path, tmp_path)) for path in GRAPH]
    first = read_runs(paths)
    keys = runs.keys_of(paths)
    shutil.rmtree(empty_cache)
    paths[1].unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "keys_of", lambda _: keys)
        (found,) = read_runs(paths)
    assert first[0].missing == []
    assert (found.missing, found.found and found.found.diagnosis.ranks) == ([1], [0])
    assert not list(empty_cache.glob("*"))
