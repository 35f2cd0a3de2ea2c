"""Which files of a directory are traces, and in what order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from overlap_sweep.trace.search import find_traces, is_timeline, natural_order
from tests.trace.conftest import TRACES

CPU = (TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()


def write(path: Path, content: bytes = CPU) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_numbers_are_ordered_by_value(tmp_path: Path) -> None:
    expected = [
        write(tmp_path / name)
        for name in (
            *("node2/trace_rank0.json.gz", "node2/trace_rank9.json.gz", "node2/trace_rank10.json.gz"),
            *("node10/trace_rank1.json.gz", "trace_rank2.json.gz"),
        )
    ]
    assert find_traces(tmp_path) == expected
    assert sorted(map(Path, ("a/10", "a/b", "a/2", "a")), key=natural_order) == [
        *map(Path, ("a", "a/2", "a/10", "a/b"))
    ]


def test_traces_are_known_by_content_or_name(tmp_path: Path) -> None:
    write(tmp_path / "a_compressed.json", CPU)
    write(tmp_path / "b_plain.json.gz", gzip.decompress(CPU))
    write(tmp_path / "c_trace.json", b"")
    write(tmp_path / "d_cut.json.gz", CPU[:20])
    for name, content in {
        "result.json": b"{}",
        "other.json.gz": gzip.compress(b"{}"),
        "empty.json.gz": b"",
        "trace.txt": CPU,
        ".trace_rank0.json.gz.7.tmp": CPU,
    }.items():
        write(tmp_path / name, content)
    (tmp_path / "trace_directory.json").mkdir()
    names = [path.name for path in find_traces(tmp_path)]
    assert names == ["a_compressed.json", "b_plain.json.gz", "c_trace.json", "d_cut.json.gz"]


def test_timelines_are_no_traces_whatever_their_name(tmp_path: Path) -> None:
    document = {"otherData": {"made_by": "overlap_sweep timeline"}, "traceEvents": []}
    text = json.dumps(document, separators=(",", ":")).encode()
    plain = write(tmp_path / "trace_rank0.json", text)
    compressed = write(tmp_path / "timeline.json.gz", gzip.compress(text))
    assert is_timeline(plain)
    assert is_timeline(compressed)
    assert not is_timeline(TRACES / "cpu_gloo_tp2_rank0.json.gz")
    assert find_traces(tmp_path) == []
