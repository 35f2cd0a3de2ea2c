"""A trace read a piece at a time gives what it gives when it is read as a whole, however it is written or damaged."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_sweep.errors import UserError
from overlap_sweep.trace import content, pieces
from overlap_sweep.trace.document import Document, Event, ExactEvent
from overlap_sweep.trace.findings import find

MIB = 1 << 20

EVENT = '{"ph": "X", "cat": "kernel", "name": "nvjet_k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.0}'

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, text: bytes, kind: type[Event] = Event) -> tuple[list[dict[str, Any]], Any]:
    path.write_bytes(text)
    document = Document(kind=kind)
    events = [event for piece in pieces.pieces(path, document) for event in piece]
    return [as_json(event) for event in events], document


def as_json(event: Event) -> dict[str, Any]:
    """What was read of an event, as `expected` has it."""
    return {name: getattr(event, name) for name in ("ph", "cat", "name", "ts", "pid", "tid")} | {
        "correlation": event.args and event.args.correlation
    }


def expected(event: dict[str, Any]) -> dict[str, Any]:
    """What is to be read of an event, from what json.loads gives."""
    return {name: event.get(name) for name in ("ph", "cat", "name", "ts", "pid", "tid")} | {
        "correlation": (event.get("args") or {}).get("correlation")
    }


@pytest.fixture
def small_blocks() -> Iterator[Callable[[int, int, int], None]]:
    """Sets how much is read at a time, how much of its end is searched for a place to cut, and how many are tried."""
    with pytest.MonkeyPatch.context() as patch:

        def limit(block: int, tail: int, tries: int) -> None:
            patch.setattr(content, "BLOCK_BYTES", block)
            patch.setattr(pieces, "_TAIL_BYTES", tail)
            patch.setattr(pieces, "_TRIES", tries)

        yield limit


like_syntax = [
    '}, {"ph": "X"',
    '},\n{"name": "',
    'a "quoted" name',
    "\\",
    '\\"',
    '"',
    "[{",
    "}]",
    "}",
    '"traceEvents": [',
]
like_mistakes = ["é☃𝄞", "\n\t", "void f<a, b>(int*)", "NaN", "x: NaN, y", ", }", "\x7f", "", "\u2028", "\ufeff"]
tricky = st.sampled_from(like_syntax + like_mistakes)
scalar = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1e6, 1e6) | tricky
keys = st.sampled_from(["name", "ph", "ts", "cat", "x", "args", "traceEvents", "a b"])
nested = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def some_event(draw: st.DrawFn) -> dict[str, Any]:
    event = {
        "ph": draw(st.sampled_from(["X", "M", "i"])),
        "cat": draw(st.sampled_from(["kernel", "cpu_op"])),
        "name": draw(tricky),
        "pid": draw(st.integers(0, 3) | tricky),
        "tid": 7,
        "ts": draw(st.integers(0, 10**6) | st.floats(0, 1e6)),
        "dur": 1,
    }
    if draw(st.booleans()):
        event["args"] = draw(st.dictionaries(keys, nested, max_size=3)) | {"correlation": draw(st.integers(0, 99))}
    order = draw(st.permutations(list(event)))
    return {name: event[name] for name in order}


Written = tuple[list[dict[str, Any]], dict[str, Any], bytes]

compact, spread = {"separators": (",", ":")}, {"indent": "\t", "separators": (" ,\r\n", " : ")}
layouts = st.sampled_from([{}, compact, {"indent": 1}, spread])


@st.composite
def documents(draw: st.DrawFn) -> Written:
    """Events, what else the document says, and its text."""
    events = draw(st.lists(some_event(), min_size=1, max_size=12))
    layout: dict[str, Any] = {**draw(layouts), "ensure_ascii": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        texts = [json.dumps(event, **layout) for event in events]
        return events, {}, ("[" + ",\n".join(texts) + draw(st.sampled_from(["]", "\n]\n"]))).encode()
    others = st.dictionaries(st.sampled_from(["deviceProperties", "traceName", "other"]), nested, max_size=2)
    head = {"distributedInfo": {"rank": 3, "world_size": 8}, "baseTimeNanoseconds": 1_700_000_000_000_000_000}
    early = draw(st.booleans())
    document = draw(others) | (head if early else {}) | {"traceEvents": events} | ({} if early else head)
    if draw(st.booleans()):
        # Like events, but none.
        document["moreEvents"] = draw(st.lists(some_event(), max_size=12))
    return events, head, draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\n "])) + json.dumps(document, **layout).encode()


limits = st.tuples(
    st.sampled_from([1, 7, 64, 200, 500, MIB]), st.sampled_from([1, 40, 200, 8192]), st.sampled_from([1, 2, 8])
)


@quick
@given(written=documents(), limit=limits)
def test_in_pieces_as_in_one(tmp_path: Path, small_blocks: Any, written: Written, limit: tuple[int, int, int]) -> None:
    events, head, text = written
    small_blocks(*limit)
    for kind in (Event, ExactEvent):
        found, document = read(tmp_path / "trace.json", text, kind)
        wanted = [expected(event) for event in events]
        if kind is ExactEvent:
            found, wanted = ([{**event, "ts": float(event["ts"])} for event in which] for which in (found, wanted))
        assert found == wanted
        assert (document.damage, document.repaired, document.malformed) == ("", False, 0)
        if head:
            assert document.base_time_ns == head["baseTimeNanoseconds"]
            assert (document.distributed.rank, document.distributed.world_size) == (3, 8)


@quick
@given(written=documents(), limit=limits, data=st.data())
def test_cut_anywhere_it_gives_every_event_that_is_whole(
    tmp_path: Path, small_blocks: Any, written: Written, limit: tuple[int, int, int], data: st.DataObject
) -> None:
    events, _, text = written
    small_blocks(*limit)
    cut = text[: data.draw(st.integers(0, len(text)))]
    try:
        found, document = read(tmp_path / "trace.json", cut)
    except UserError:
        found, document = [], None
    assert found == [expected(event) for event in events[: whole_events(cut)]]
    assert not found or document.damage == "is cut short" or ends_the_same(cut, text)


def whole_events(text: bytes) -> int:
    """How many entries of a document's list are whole, read one after the other."""
    decoder = json.JSONDecoder()
    rest = text.decode(errors="ignore").lstrip("\ufeff").lstrip()
    if not rest.startswith("["):
        place = events_begin(rest)
        if place is None:
            return 0
        rest = rest[place:]
    place, count = 1, 0
    while True:
        while place < len(rest) and rest[place] in ", \r\n\t":
            place += 1
        try:
            _, place = decoder.raw_decode(rest, place)
        except ValueError:
            return count
        count += 1


def events_begin(text: str) -> int | None:
    """Where the list that stands under the outermost traceEvents begins."""
    depth, place = 0, 0
    while place < len(text):
        if text[place] == '"':
            end = place + 1
            while end < len(text) and text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            if depth == 1 and text[place : end + 1] == '"traceEvents"' and text[end + 1 :].lstrip().startswith(":"):
                start = text.find("[", end)
                return start if start >= 0 else None
            place = end
        depth += (text[place : place + 1] in ("{", "[")) - (text[place : place + 1] in ("}", "]"))
        place += 1
    return None


def ends_the_same(cut: bytes, text: bytes) -> bool:
    return cut.rstrip() == text.rstrip()


def test_cut_at_every_byte(tmp_path: Path, small_blocks: Any) -> None:
    small_blocks(100, 50, 2)
    events = [
        {"ph": "X", "cat": "kernel", "name": 'a}, {"ph": "b', "ts": number + 0.5, "pid": 0, "tid": 7, "args": arguments}
        for number, arguments in enumerate([{}, {"correlation": 4, "l": [{"name": "é"}, {"name": 2}]}, {"n": None}])
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": 0}}, ensure_ascii=False)
    whole = text.encode()
    counts = []
    for length in range(len(whole)):
        try:
            found, document = read(tmp_path / "trace.json", whole[:length])
        except UserError:
            assert not counts or counts[-1] == 0
            continue
        assert document.damage == "is cut short"
        assert found == [expected(event) for event in events[: len(found)]]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert counts[-1] == len(events)


@quick
@given(written=documents(), limit=limits, seed=st.integers(0, 2**32))
def test_damaged_anywhere_it_is_read_or_refused(
    tmp_path: Path, small_blocks: Any, written: Written, limit: tuple[int, int, int], seed: int
) -> None:
    damaged, chance = bytearray(written[2]), random.Random(seed)
    small_blocks(*limit)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(damaged) + 1)
        damage = chance.choice([b"", b"\0\0\0", b"\xff", b'"', b"\\", b"}", b"]", b"{", chance.randbytes(3)])
        damaged[place : place + chance.choice([0, 1, 20])] = damage
    (tmp_path / "trace.json").write_bytes(damaged)
    found = find(tmp_path / "trace.json", with_parts=True)
    assert bool(found.rows) == (found.problem is None)
    assert "\n" not in (found.problem or "")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ('"name": "k", "extra": NaN', "k"),
        ('"name": "k", "extra": [-Infinity, inf, -inf, nan]', "k"),
        ('"name": "a\tb\nc"', "a b c"),
        ('"name": "a\0b"', "a b"),
        (b'"name": "a\xffb"', "a\ufffdb"),
        (b'"name": "\xe9t\xe9"', "\ufffdt\ufffd"),
        ('"name": "k", "list": [1, 2, ]', "k"),
        ('"name": "k", "object": {"a": 1,}', "k"),
        ('"name": "half \\ud83d a pair"', "half \ufffd a pair"),
        ('"name": "\\udc80"', "\ufffd"),
        ('"name": "C:\\path\\file \\x1b"', "C:\\path\file \\x1b"),
        ('"name": "whole \\ud83d\\ude00 \\\\ud83d \\u00e9", "extra": NaN', "whole \U0001f600 \\ud83d \u00e9"),
    ],
)
@pytest.mark.parametrize("block", [50, MIB])
def test_what_is_nearly_json_is_mended(
    tmp_path: Path, small_blocks: Any, wrong: str | bytes, name: str, block: int
) -> None:
    small_blocks(block, 100, 2)
    text = wrong.encode() if isinstance(wrong, str) else wrong
    events = b'{"ph": "X", ' + text + b"}"
    before = b'{"ph": "M", "name": "first"},' * 3
    after = b', {"ph": "M", "name": "last"}' * 9
    for whole in (True, False):
        end = b"]}" if whole else b', {"ph'
        found, document = read(tmp_path / "trace.json", b'{"traceEvents": [' + before + events + after + end)
        assert [event["name"] for event in found] == ["first"] * 3 + [name] + ["last"] * 9
        assert document.repaired
        assert document.damage == ("" if whole else "is cut short")


def test_a_comma_after_the_last_event_is_mended(tmp_path: Path) -> None:
    found, document = read(tmp_path / "trace.json", f'{{"traceEvents": [{EVENT}, {EVENT}, \n]}}'.encode())
    assert (len(found), document.repaired, document.damage) == (2, True, "")


def test_keys_of_no_known_event(tmp_path: Path, small_blocks: Any) -> None:
    small_blocks(100, 50, 2)
    found, document = read(tmp_path / "trace.json", json.dumps([{"zz": 1, "name": str(i)} for i in range(50)]).encode())
    assert [event["name"] for event in found] == [str(i) for i in range(50)]
    assert document.damage == ""


def gzipped(path: Path, text: bytes) -> tuple[list[dict[str, Any]], Any]:
    return read(path / "trace.json.gz", text)


TEXT = json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": f"k{n}"} for n in range(3000)]}).encode()


@pytest.mark.parametrize("trailing", [b"", b"garbage", b"\0" * 600])
@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("block", [97, 4096, MIB])
def test_gzip_members_and_what_follows_them(
    tmp_path: Path, small_blocks: Any, trailing: bytes, members: int, block: int
) -> None:
    small_blocks(block, 200, 2)
    size = -(-len(TEXT) // members)
    text = b"".join(gzip.compress(TEXT[start : start + size], 1) for start in range(0, len(TEXT), size))
    found, document = gzipped(tmp_path, text + trailing)
    assert [event["name"] for event in found] == [f"k{n}" for n in range(3000)]
    assert document.damage == ""


def test_gzip_cut_short_gives_its_beginning(tmp_path: Path) -> None:
    whole, before = gzip.compress(TEXT), 0
    with pytest.raises(UserError, match="is cut short"):
        gzipped(tmp_path, whole[:20])
    for length in range(1000, len(whole), 37):
        found, document = gzipped(tmp_path, whole[:length])
        assert document.damage == "is cut short"
        assert [event["name"] for event in found] == [f"k{n}" for n in range(len(found))]
        assert len(found) >= before
        before = len(found)
    assert before > 2000


def test_gzip_with_a_flipped_bit_gives_its_beginning(tmp_path: Path) -> None:
    chance = random.Random(7)
    whole = gzip.compress(TEXT)
    for _ in range(150):
        text = bytearray(whole)
        text[chance.randrange(10, len(text))] ^= 1 << chance.randrange(8)
        try:
            _, document = gzipped(tmp_path, bytes(text))
        except UserError:
            continue
        # The checksum at the end tells, where nothing else does.
        assert document.damage


LIMITED = """
import json, re, sys
from pathlib import Path
import overlap_sweep.trace.kept_findings, overlap_sweep.trace.findings as findings

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

findings.find(Path(sys.argv[2]), True)
before = peak()
found = findings.find(Path(sys.argv[1]), True)
print(json.dumps([peak() - before, found.problem, [row.num_gemm_events for row in found.rows], found.warnings]))
"""


def in_a_process_of_its_own(path: Path) -> tuple[int, str | None, list[int], list[str]]:
    """How many bytes more than for a file of one event it took, the problem, counts of GEMMs, and the warnings."""
    empty = path.with_name("empty.json")
    empty.write_text(f"[{EVENT}]")
    printed = subprocess.run([sys.executable, "-c", LIMITED, path, empty], check=True, capture_output=True).stdout
    more, problem, gemms, warnings = json.loads(printed)
    return more, problem, gemms, warnings


def write_repeated(path: Path, before: str, repeated: str, count: int, after: str) -> None:
    with path.open("w") as file:
        file.write(before)
        for start in range(0, count, 10_000):
            file.write(repeated * min(10_000, count - start))
        file.write(after)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory was used")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["]}", ', {"ph": "X", "na', "X"])
def test_memory_stays_bounded(tmp_path: Path, end: str) -> None:
    """60 MB, most of them events that are not kept: neither text nor such events may pile up."""
    path = tmp_path / "trace.json"
    stack = EVENT.replace("kernel", "python_function").replace("2.0", f'2.0, "args": {{"Call stack": "{"x" * 150}"}}')
    count = 60 * MIB // (len(stack) * 10)
    write_repeated(path, '{"traceEvents": [', f"{stack},\n" * 9 + f"{EVENT},\n", count, EVENT + end)
    more, problem, gemms, warnings = in_a_process_of_its_own(path)
    assert more < 60 * MIB
    assert problem is None
    assert gemms == [count + 1] * 2
    assert len(warnings) == (end != "]}")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory was used")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["", "\\", '"}]}'])
def test_memory_stays_bounded_without_any_event(tmp_path: Path, end: str) -> None:
    path = tmp_path / "trace.json"
    write_repeated(path, '{"traceEvents": [{"ph": "X", "name": "', "abcdefghij", 10 * MIB, end)
    more, problem, _, _ = in_a_process_of_its_own(path)
    assert more < 150 * MIB
    assert "holds no end of an event" in (problem or "")


_LIST = ", ".join(['{"name": "a", "ph": "b"}'] * 50)
NESTED = EVENT.replace('"ts"', f'"args": {{"list": [{_LIST}]}}, "ts"')
LONG_NAME = EVENT.replace("nvjet_k", r"}, {\"ph\": \"X\", gemm<" * (5 * MIB // 24))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("before", "repeated", "count", "after", "outcome"),
    [
        ("", "[", 60 * MIB, "", "is nested too deeply"),
        ('{"traceEvents": ', "[", 60 * MIB, "", "is nested too deeply"),
        ('{"traceEvents": [{"args": {"x": ', '{"a": ', 4 * MIB, "", "is nested too deeply"),
        ("", '{"traceEvents": [', 4 * MIB, "", "is nested too deeply"),
        ('"', "a", 60 * MIB, '"', "holds no traceEvents"),
        ("", " ", 60 * MIB, "", "holds no traceEvents"),
        ('{"traceEvents": [', ",", 60 * MIB, "", "is no valid JSON"),
        ('{"traceEvents": [', '},{"ph"', 4 * MIB, "", "is no valid JSON"),
        ('{"traceEvents": [', '"', 20 * MIB, "", "is no valid JSON"),
        ('{"traceEvents": [' + EVENT, ',{"ph":X}', 4 * MIB, "]}", None),
        ('{"traceEvents": [', NESTED + ",", 20 * MIB // len(NESTED), NESTED + "]}", None),
        ('{"traceEvents": [', EVENT.replace(" ", "") + ",", 20 * MIB // len(EVENT), EVENT + "]}", None),
        ('{"traceEvents": [', EVENT + ",", 10_000, LONG_NAME + "," + EVENT + "]}", None),
        ('{"traceEvents": [' + EVENT + '], "more": [', EVENT + ",", 20 * MIB // len(EVENT), EVENT + "]}", None),
        ('{"traceEvents": [', EVENT.replace("2.0", "NaN") + ",", 4 * MIB // len(EVENT), EVENT + "]}", None),
    ],
)
def test_strange_files_end_in_time(
    tmp_path: Path, before: str, repeated: str, count: int, after: str, outcome: str | None
) -> None:
    path = tmp_path / "trace.json"
    write_repeated(path, before, repeated, count, after)
    found = find(path, with_parts=True)
    if outcome is None:
        assert found.problem is None
        assert found.rows
    else:
        assert outcome in (found.problem or "")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("category", ["kernel", "cpu_op"])
def test_as_many_threads_as_events(tmp_path: Path, category: str) -> None:
    path = tmp_path / "trace.json"
    event = EVENT.replace("kernel", category).replace("nvjet_k", "aten::mm")
    path.write_text("[" + ",".join(event.replace('"tid": 7', f'"tid": {n}') for n in range(30_000)) + "]")
    found = find(path, with_parts=True)
    assert [row.num_compute_events + row.num_gemm_events for row in found.rows] == [30_000] * 2


@pytest.mark.timeout(30)
def test_as_many_iterations_as_launches(tmp_path: Path) -> None:
    count = 2_000
    on_host = '{"ph": "X", "pid": 1, "tid": 1, "cat"'
    backward = f'{on_host}: "cpu_op", "name": "autograd::engine::evaluate_function: X"'
    events = []
    for n in range(count):
        args = f'"args": {{"correlation": {n}}}'
        events.append(f'{on_host}: "cuda_runtime", "name": "cudaLaunchKernel", "ts": {2 * n}, "dur": 1, {args}}}')
        events.append(EVENT.replace('"ts"', f'{args}, "ts"'))
        events += [f'{backward}, "ts": {2 * n}, "dur": 1}}'] * (n % 2)
    path = tmp_path / "trace.json"
    path.write_text(f"[{','.join(events)}]")
    rows = find(path, with_parts=True).rows
    assert len({row.iteration for row in rows}) == count // 2
