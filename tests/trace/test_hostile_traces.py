"""Traces that were made to keep their reader busy, or to lead it elsewhere."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.trace.files import TraceFile
from overlap_sweep.trace.kernel_classes import classify, function_name
from overlap_sweep.trace.kineto import MOST_RANKS, read_trace
from overlap_sweep.trace.places import is_below, is_plain_name, is_special, links_out
from overlap_sweep.trace.ranks import rank_of, ranks_of
from overlap_sweep.trace.search import find_traces, refused_links
from tests.trace.conftest import TRACES

CPU = TRACES / "cpu_gloo_tp2_rank0.json.gz"


def trace_with(tmp_path: Path, **fields: Any) -> Path:
    trace = json.loads(gzip.decompress(CPU.read_bytes()))
    path = tmp_path / "trace_rank0.json"
    path.write_text(json.dumps({**trace, **fields}))
    return path


@pytest.mark.parametrize("number", [MOST_RANKS, 10**18, "9" * 5000, -1, "²", 1e300])
def test_a_rank_that_there_cannot_be_is_none(tmp_path: Path, number: Any) -> None:
    path = trace_with(tmp_path, distributedInfo={"rank": number, "world_size": number})
    trace = read_trace(path)
    assert (trace.rank, trace.world_size) == (None, None)


def test_a_rank_in_a_name_counts_no_further(tmp_path: Path) -> None:
    assert rank_of(TraceFile(tmp_path / "rank7.json")) == 7
    hostile = TraceFile(tmp_path / f"rank{'9' * 200}.json")
    assert rank_of(hostile) is None
    assert ranks_of([hostile]) == []


@pytest.mark.parametrize(
    "name",
    [
        *(bit * 10**6 for bit in ("<", "<>", "a::", "gemm", " ", "nccl", "(", "\0\n", "void ")),
        *("_Z" + "L0" * 10**6, "_ZN" + "9" * 10**5, "_Z99999999999a"),
    ],
)
def test_long_names_take_no_time(name: str) -> None:
    begin_s = time.perf_counter()
    for category in ("kernel", "cpu_op", "user_annotation"):
        classify(category, name)
    assert len(function_name(name)) <= len(name)
    assert time.perf_counter() - begin_s < 2.0


def test_what_unpacks_to_much_more_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank0.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(b" " * (1 << 20))
    begin_s = time.perf_counter()
    with pytest.raises(UserError, match="holds no traceEvents in its first"):
        read_trace(path)
    assert time.perf_counter() - begin_s < 5.0


def test_links_to_elsewhere_are_named_and_not_read(tmp_path: Path) -> None:
    directory, outside = tmp_path / "traces", tmp_path / "outside"
    directory.mkdir()
    outside.mkdir()
    (outside / "secret.json.gz").write_bytes(CPU.read_bytes())
    (directory / "trace_rank0.json.gz").write_bytes(CPU.read_bytes())
    (directory / "inner.json.gz").symlink_to("trace_rank0.json.gz")
    (directory / "trace_rank1.json.gz").symlink_to(outside / "secret.json.gz")
    (directory / "folder").symlink_to(outside)
    assert [path.name for path in find_traces(directory)] == ["inner.json.gz", "trace_rank0.json.gz"]
    (refused,) = refused_links(directory)
    assert refused.startswith(f"{directory / 'trace_rank1.json.gz'} is a link that leads out of {directory}")
    assert list(links_out(directory)) == [directory / "folder"]


def test_places(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root" / "circle")
    assert is_below(tmp_path / "root" / "a", tmp_path / "link")
    assert is_below(tmp_path / "link" / "a", tmp_path / "root")
    assert is_below(tmp_path / "root" / "circle", tmp_path / "root")
    assert not is_below(tmp_path / "root" / ".." / "a", tmp_path / "root")
    assert not is_below(tmp_path / "rooted", tmp_path / "root")
    assert not is_special(tmp_path / "root" / "circle")
    assert is_special(Path("/dev/null"))
    assert [n for n in ("a", "..", "", ".", "a/b", "/a", "a\n", "a\0", "a b", "..a") if is_plain_name(n)] == [
        *("a", "a b", "..a")
    ]
