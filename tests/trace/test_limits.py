"""What would take minutes or gigabytes to read is refused in a line. Large ones: benchmarks/hostile_traces.py."""

import gzip
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.trace import columns, disk, iterations, stream
from overlap_sweep.trace.files import read_trace_file
from overlap_sweep.trace.kineto import read_trace

HEAD, TAIL = b'{"traceEvents":[', b"]}"


def kernel(number: int, name: str = "nvjet_a", stream: int = 7) -> bytes:
    named = b'{"ph":"X","cat":"kernel","name":"%b","ts":%d,"dur":1,"pid":0,"tid":%d}'
    return named % (name.encode(), 10 * number, stream)


def listed(entries: list[bytes]) -> bytes:
    return HEAD + b",".join(entries) + TAIL


def refusal(path: Path) -> str:
    """In one line that begins with the file's name."""
    problem = read_trace_file(path, with_parts=True).problem
    assert problem is not None
    assert problem.startswith(f"{path} ")
    assert problem.isprintable()
    return problem


def test_entries_too_short_for_events(path: Path) -> None:
    path.write_bytes(listed([b"{}"] * 700_000))
    assert "entries of less than 24 bytes" in refusal(path)
    # A few among events are no reason.
    path.write_bytes(listed([*map(kernel, range(100)), *[b"{}"] * 5_000]))
    assert len(read_trace(path).device) == 100


def test_what_comes_before_entries_too_short_is_read(path: Path) -> None:
    path.write_bytes(listed([*map(kernel, range(40_000)), *[b'{"a":1}'] * 300_000]))
    trace = read_trace(path)
    assert 0 < len(trace.device) <= 40_000
    assert "entries of less than 24 bytes" in trace.warnings[0]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([kernel(i, name=f"nvjet_{i}") for i in range(30)], "more than 20 different names of events"),
        ([kernel(i, stream=i) for i in range(30)], "more than 20 different threads and streams"),
    ],
    ids=["names", "streams"],
)
def test_more_different_ones_than_any_program_has(
    path: Path, monkeypatch: pytest.MonkeyPatch, entries: list[bytes], said: str
) -> None:
    path.write_bytes(listed(entries))
    assert len(read_trace(path).device) == 30
    monkeypatch.setattr(columns, "MOST_DIFFERENT", 20)
    assert f"{said}; record fewer steps" in refusal(path)


def test_more_iterations_than_anybody_records(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = b'{"ph":"X","cat":"user_annotation","name":"ProfilerStep#%d","ts":%d,"dur":9,"pid":0,"tid":0}'
    gemm = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":%d,"dur":1,"pid":0,"tid":0}'
    path.write_bytes(listed([entry for i in range(30) for entry in (step % (i, 10 * i), gemm % (10 * i + 1))]))
    assert len(read_trace_file(path, with_parts=False).rows) == 60
    monkeypatch.setattr(iterations, "MOST_ITERATIONS", 20)
    assert "30 iterations, more than 20; record fewer steps" in refusal(path)


def members(entries: list[bytes]) -> bytes:
    """A gzip member for each."""
    return b"".join(gzip.compress(part, mtime=0) for part in (HEAD, *entries, TAIL))


def test_gzip_members_with_hardly_anything_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(members([kernel(0), *(b"," + kernel(i) for i in range(1, 300))]))
    assert len(read_trace(path).device) == 300
    monkeypatch.setattr(disk, "MANY_MEMBERS", 100)
    assert "more than 100 gzip members of less than 1024 bytes each; decompress it with `gzip -dc`" in refusal(path)
    # As bgzip writes them: a member for every 64 KiB.
    text = listed([kernel(i, name="nvjet_" + "a" * 1000) for i in range(300)])
    path.write_bytes(b"".join(gzip.compress(text[at : at + 2000]) for at in range(0, len(text), 2000)))
    assert len(read_trace(path).device) == 300


def test_small_members_are_handed_on_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    text = listed([kernel(i) for i in range(20_000)])
    path.write_bytes(b"".join(gzip.compress(text[at : at + 5000], 1) for at in range(0, len(text), 5000)))
    found = list(disk.blocks(path, pytest.fail))
    assert b"".join(found) == text
    assert len(found) == 1 + len(text) // (disk.BLOCK_BYTES // 2)


def test_an_entry_that_never_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MOST_BYTES", 1 << 20)
    path.write_bytes(HEAD + b"1," * 2_000_000)
    with pytest.raises(UserError, match="has no end of an event within 1 MiB"):
        read_trace(path)
