"""Traces that were made to keep their reader busy, or to lead it elsewhere."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.trace.kernel_classes import classify, function_name
from overlap_sweep.trace.kineto import MOST_RANKS, read_trace
from overlap_sweep.trace.places import is_below, is_plain_name, is_special, links_out
from overlap_sweep.trace.search import find_traces, refused_links
from tests.trace.conftest import TRACES

CPU = TRACES / "cpu_gloo_tp2_rank0.json.gz"


@pytest.mark.parametrize("number", [MOST_RANKS, 10**18, 2**70, "9" * 5000, -1, "²", "x", 1e9, 1e300, None, [0]])
def test_a_rank_that_there_cannot_be_is_none(trace: Any, number: Any) -> None:
    trace.kernel("k", 1, 2)
    read = read_trace(trace.write(distributedInfo={"rank": number, "world_size": number}))
    assert (read.rank, read.world_size) == (None, None)


@pytest.mark.parametrize(
    "name",
    [
        *(bit * 10**6 for bit in ("<", "<>", "a::", "gemm", " ", "nccl", "(", "\0\n", "void ")),
        *("_Z" + "L0" * 10**6, "_ZN" + "9" * 10**5, "_Z99999999999a"),
    ],
)
def test_long_names_take_no_time(name: str) -> None:
    begin_s = time.process_time()
    for category in ("kernel", "cpu_op", "user_annotation"):
        classify(category, name)
    assert len(function_name(name)) <= len(name)
    assert time.process_time() - begin_s < 2.0


def test_what_unpacks_to_much_more_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank0.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(b" " * (1 << 20))
    begin_s = time.process_time()
    with pytest.raises(UserError, match="holds no traceEvents in its first"):
        read_trace(path)
    assert time.process_time() - begin_s < 5.0


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
