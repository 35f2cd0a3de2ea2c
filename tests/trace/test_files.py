"""Several trace files at once: by one process or several, read or remembered."""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep.trace import files
from overlap_sweep.trace.files import TraceFile, read_trace_file, read_trace_files
from tests.timeline import Timeline

TRACES = sorted((Path(__file__).parent.parent / "data" / "traces").glob("h200x4_*.json.gz"))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files this process has read itself, in order."""
    paths: list[Path] = []

    def noted(path: Path, with_parts: bool) -> TraceFile:
        paths.append(path)
        return read_trace_file(path, with_parts)

    monkeypatch.setattr(files, "read_trace_file", noted)
    return paths


@pytest.fixture
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WORTH_A_PROCESS_S", 1e-9)
    monkeypatch.setattr(files.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)


def alone(path: Path, with_parts: bool = True) -> TraceFile:
    return read_trace_file(path, with_parts)


def types(file: TraceFile) -> list[list[type]]:
    return [[type(value) for value in msgspec.structs.astuple(row)] for row in [*file.rows, *file.parts]]


@pytest.fixture
def no_ratio(trace: Timeline) -> Path:
    """A trace without rank, without communication, and with a whole number of microseconds."""
    trace.work("nvjet_a", 1, 1000, 1010)
    return trace.write()


def test_a_trace_is_read_once(gpu_trace: Path, no_ratio: Path, tmp_path: Path, read_paths: list[Path]) -> None:
    copied = shutil.copy(no_ratio, tmp_path / "copy.json")
    paths = [gpu_trace, no_ratio, copied, no_ratio]
    first, second = read_trace_files(paths), read_trace_files(paths)
    assert read_paths == paths[:3]
    assert first == second == [alone(path) for path in paths]
    assert [types(file) for file in second] == [types(alone(path)) for path in paths]
    assert second[1].rows[0].overlap_ratio is None
    assert all(file.parts for file in second)
    assert read_trace_files([]) == []


def test_parts_are_kept_apart(no_ratio: Path, read_paths: list[Path]) -> None:
    assert read_trace_files([no_ratio], with_parts=False) == [alone(no_ratio, with_parts=False)]
    # What was not asked for is not known yet.
    assert read_trace_files([no_ratio]) == [alone(no_ratio)]
    assert len(read_paths) == 2
    assert read_trace_files([no_ratio], with_parts=False) == [alone(no_ratio, with_parts=False)]
    assert len(read_paths) == 2


def test_a_trace_that_changed_is_read_again(no_ratio: Path, read_paths: list[Path]) -> None:
    read_trace_files([no_ratio])
    no_ratio.write_text(no_ratio.read_text().replace("nvjet_a", "nvjet_b"))
    assert {part.name for part in read_trace_files([no_ratio])[0].parts if part.by == "kernel"} == {"nvjet_b"}
    assert len(read_paths) == 2


def test_another_reader_reads_again(no_ratio: Path, read_paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read_trace_files([no_ratio])
    monkeypatch.setattr(files, "code_digest", lambda _: "changed")
    assert read_trace_files([no_ratio]) == [alone(no_ratio)]
    assert len(read_paths) == 2


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Other findings, kept whole: `change` of those that were."""

    def of(content: bytes) -> bytes:
        found = msgspec.msgpack.decode(zlib.decompress(content))
        change(found)
        return zlib.compress(msgspec.msgpack.encode(found))

    return of


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: b"garbage",
        lambda content: b"\0" * len(content),
        lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
        rewritten(lambda found: [row.pop("phase") for row in found["rows"]]),
        rewritten(lambda found: found.pop("path")),
        rewritten(lambda found: found.update(rows=None)),
    ],
)
def test_a_damaged_cache_is_read_around_and_mended(
    no_ratio: Path, empty_cache: Path, read_paths: list[Path], damage: Callable[[bytes], bytes]
) -> None:
    first = read_trace_files([no_ratio])
    kept = sorted(path for path in empty_cache.iterdir() if path.is_file())
    assert len(kept) == 1
    for path in kept:
        path.write_bytes(damage(path.read_bytes()))
    assert read_trace_files([no_ratio]) == first
    assert len(read_paths) == 2
    assert read_trace_files([no_ratio]) == first
    assert len(read_paths) == 2


@pytest.fixture
def wrong(no_ratio: Path, tmp_path: Path) -> list[Path]:
    """One that is read in part, and three that are not at all, the last without work in its iterations."""
    paths = [tmp_path / name for name in ("cut.json", "bad.json", "no_trace.json", "idle.json")]
    idle = no_ratio.read_text().replace('"cat": "kernel"', '"cat": "user_annotation"')
    texts = (no_ratio.read_text()[:-1], "[", '{"a": 1}', idle)
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def test_what_is_wrong_is_kept_too(wrong: list[Path], read_paths: list[Path]) -> None:
    first = read_trace_files(wrong)
    assert [bool(file.rows) for file in first] == [True, False, False, False]
    assert first[0].warnings
    assert all(file.problem for file in first[1:])
    assert "no work" in str(first[3].problem)
    assert read_trace_files(wrong) == first == [alone(path) for path in wrong]
    assert read_trace_files(wrong, with_parts=False) == [alone(path, with_parts=False) for path in wrong]
    assert sorted(read_paths) == sorted([*wrong, *wrong])


def test_what_may_pass_is_not_kept(no_ratio: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(path: Path, with_parts: bool) -> TraceFile:
        return TraceFile(path, problem=f"{path} cannot be read (Input/output error); copy it again.")

    def written_to(path: Path, with_parts: bool) -> TraceFile:
        warnings = [f"{path} is cut short: what it holds was read."]
        cut = TraceFile(path, rows=read_trace_file(path, with_parts).rows, warnings=warnings)
        path.write_text(path.read_text() + " ")
        return cut

    for finder in (unreadable, written_to):
        monkeypatch.setattr(files, "read_trace_file", finder)
        read_trace_files([no_ratio])
    assert not empty_cache.exists() or not list(empty_cache.iterdir())


@pytest.mark.usefixtures("several_processes")
def test_several_processes_find_what_one_finds(tmp_path: Path, no_ratio: Path, read_paths: list[Path]) -> None:
    odd = shutil.copy(TRACES[0], tmp_path / "a space, ü and 'quotes'.json.gz")
    bad = tmp_path / "bad.json"
    bad.write_text("[")
    paths = [*TRACES, no_ratio, odd, bad, tmp_path / "gone.json", no_ratio]
    found = read_trace_files(paths)
    assert found == [alone(path) for path in paths]
    assert 0 < len(read_paths) < len(paths)
    read_paths.clear()
    assert read_trace_files(paths) == found
    # Of which nothing could be kept.
    assert set(read_paths) <= {tmp_path / "gone.json"}


@pytest.mark.usefixtures("several_processes")
@pytest.mark.parametrize("executable", ["/bin/false", "/bin/true", "/nowhere/python"])
def test_what_a_process_that_dies_was_asked_for_is_done_here(
    read_paths: list[Path], monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    if executable.startswith("/bin") and not Path(executable).exists():
        pytest.skip(f"there is no {executable}")
    monkeypatch.setattr(files.sys, "executable", executable)
    assert read_trace_files(TRACES) == [alone(path) for path in TRACES]
    assert sorted(read_paths) == TRACES


@pytest.mark.usefixtures("several_processes")
def test_paths_that_are_no_text(tmp_path: Path, no_ratio: Path) -> None:
    paths = [tmp_path / os.fsdecode(b"\xff%d.json" % number) for number in range(3)]
    try:
        for path in paths:
            shutil.copy(no_ratio, path)
    except OSError:
        pytest.skip("the file system takes no such names")
    assert [len(file.rows) for file in read_trace_files(paths)] == [2, 2, 2]
