"""Which files of a directory are traces, in what order, and which links lead out of it."""

import gzip
from pathlib import Path

from overlap_sweep.trace.disk import (
    TIMELINE_MARK,
    find_traces,
    is_below,
    is_special,
    links_out,
    natural_order,
    refused_links,
)
from tests.trace.conftest import TRACES

CPU = (TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()


def write(path: Path, content: bytes = CPU) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_numbers_are_ordered_by_value(tmp_path: Path) -> None:
    ranks = (("node2", 0), ("node2", 9), ("node2", 10), ("node10", 1), ("", 2))
    expected = [write(tmp_path / node / f"trace_rank{rank}.json.gz") for node, rank in ranks]
    assert find_traces(tmp_path) == expected
    assert sorted(map(Path, ("a/10", "a/b", "a/2", "a")), key=natural_order) == [
        *map(Path, ("a", "a/2", "a/10", "a/b"))
    ]


def test_traces_are_known_by_content_or_name(tmp_path: Path) -> None:
    write(tmp_path / "a_compressed.json", CPU)
    write(tmp_path / "b_plain.json.gz", gzip.decompress(CPU))
    write(tmp_path / "c_trace.json", b"")
    write(tmp_path / "d_cut.json.gz", CPU[:20])
    timeline = f'{{"otherData":{{"made_by":"{TIMELINE_MARK}"}},"traceEvents":[]}}'.encode()
    for name, content in {
        "trace_rank0.json": timeline,
        "trace_rank1.json.gz": gzip.compress(timeline),
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


def test_links_to_elsewhere_are_named_and_not_read(tmp_path: Path) -> None:
    directory, secret = tmp_path / "traces", write(tmp_path / "outside" / "secret.json.gz")
    write(directory / "trace_rank0.json.gz")
    (directory / "inner.json.gz").symlink_to("trace_rank0.json.gz")
    (directory / "trace_rank1.json.gz").symlink_to(secret)
    (directory / "folder").symlink_to(secret.parent)
    assert [path.name for path in find_traces(directory)] == ["inner.json.gz", "trace_rank0.json.gz"]
    (refused,) = refused_links(directory)
    assert refused.startswith(f"{directory / 'trace_rank1.json.gz'} is a link that leads out of {directory}")
    assert list(links_out(directory)) == [directory / "folder"]


def test_places(tmp_path: Path) -> None:
    root, link, circle = tmp_path / "root", tmp_path / "link", tmp_path / "root" / "circle"
    root.mkdir()
    link.symlink_to(root)
    circle.symlink_to(circle)
    below = {(root / "a", link), (link / "a", root), (circle, root)}
    places = below | {(root / ".." / "a", root), (tmp_path / "rooted", root)}
    assert {(path, of) for path, of in places if is_below(path, of)} == below
    assert not is_special(circle)
    assert is_special(Path("/dev/null"))
