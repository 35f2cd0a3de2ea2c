"""A trace read a piece at a time gives what it gives when it is read as a whole, however it is written or damaged."""

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_sweep.errors import UserError
from overlap_sweep.trace import disk, stream
from overlap_sweep.trace.events import Event, ExactEvent
from overlap_sweep.trace.files import read_trace_file
from overlap_sweep.trace.stream import Document
from tests.timeline import Timeline

MIB = 1 << 20

EVENT = '{"ph": "X", "cat": "kernel", "name": "nvjet_k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.0}'

quick = settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, text: bytes, kind: type[Event] = Event) -> tuple[list[Event], Document]:
    path.write_bytes(text)
    document = Document(kind=kind)
    return [event for piece in stream.pieces(path, document) for event in piece], document


def expected(events: list[dict[str, Any]], kind: type[Event] = Event) -> list[Event]:
    """What is to be read of events, one by one."""
    return [msgspec.json.decode(json.dumps(event), type=kind) for event in events]


@pytest.fixture
def small_blocks() -> Iterator[Callable[[int, int, int], None]]:
    """Sets how much is read at a time, how much of its end is searched for a place to cut, and how many are tried."""
    with pytest.MonkeyPatch.context() as patch:

        def limit(block: int, tail: int, tries: int) -> None:
            patch.setattr(disk, "BLOCK_BYTES", block)
            patch.setattr(stream, "_TAIL_BYTES", tail)
            patch.setattr(stream, "_TRIES", tries)

        yield limit


like_syntax = ['}, {"ph": "X"', '},\n{"name": "', 'a "quoted" name', "\\", '\\"', '"', "[{", "}]", "}"]
like_mistakes = ["é☃𝄞", "\n\t", "void f<a, b>(int*)", "NaN", "x: NaN, y", ", }", "\x7f", "", "\u2028", "\ufeff"]
tricky = st.sampled_from([*like_syntax, *like_mistakes, '"traceEvents": ['])
scalar = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1e6, 1e6) | tricky
keys = st.sampled_from(["name", "ph", "ts", "cat", "x", "args", "traceEvents", "a b"])
nested = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
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


class Written(NamedTuple):
    events: list[dict[str, Any]]
    head: dict[str, Any]
    """What else the document says."""
    text: bytes
    ends: list[int]
    """Where in the text each event ends."""


compact, spread = {"separators": (",", ":")}, {"indent": "\t", "separators": (" ,\r\n", " : ")}
layouts = st.sampled_from([{}, compact, {"indent": 1}, spread])


@st.composite
def documents(draw: st.DrawFn) -> Written:
    events = draw(st.lists(some_event(), min_size=1, max_size=12))
    layout: dict[str, Any] = {**draw(layouts), "ensure_ascii": draw(st.booleans())}
    comma, colon = layout.get("separators", (",\n", ": "))
    begin, head, end = "[", {}, draw(st.sampled_from(["]", "\n]\n"]))
    if draw(st.integers(0, 3)):
        head = {"distributedInfo": {"rank": 3, "world_size": 8}, "baseTimeNanoseconds": 1_700_000_000_000_000_000}
        early = draw(st.booleans())
        others = draw(st.dictionaries(st.sampled_from(["deviceProperties", "traceName", "other"]), nested, max_size=2))
        # The last is like events, but none.
        more = {"moreEvents": draw(st.lists(some_event(), max_size=12))} if draw(st.booleans()) else {}
        before, after = (
            [f"{json.dumps(key)}{colon}{json.dumps(value, **layout)}" for key, value in fields.items()]
            for fields in (others | (head if early else {}), more | ({} if early else head))
        )
        begin = draw(st.sampled_from(["", "\ufeff", "\n "])) + "{" + comma.join([*before, f'"traceEvents"{colon}['])
        end = comma.join(["]", *after]) + "}"
    text, ends = begin.encode(), []
    for event in events:
        text += ((comma if ends else "") + json.dumps(event, **layout)).encode()
        ends.append(len(text))
    return Written(events, head, text + end.encode(), ends)


limits = st.tuples(
    st.sampled_from([1, 7, 64, 200, 500, MIB]), st.sampled_from([1, 40, 200, 8192]), st.sampled_from([1, 2, 8])
)


@quick
@given(written=documents(), limit=limits, kind=st.sampled_from([Event, ExactEvent]))
def test_in_pieces_as_in_one(
    path: Path, small_blocks: Any, written: Written, limit: tuple[int, int, int], kind: type[Event]
) -> None:
    small_blocks(*limit)
    found, document = read(path, written.text, kind)
    assert found == expected(written.events, kind)
    assert (document.damage, document.repaired, document.malformed) == ("", False, 0)
    if written.head:
        assert document.base_time_ns == written.head["baseTimeNanoseconds"]
        assert (document.distributed.rank, document.distributed.world_size) == (3, 8)


@quick
@given(written=documents(), limit=limits, data=st.data())
def test_cut_anywhere_it_gives_every_event_that_is_whole(
    path: Path, small_blocks: Any, written: Written, limit: tuple[int, int, int], data: st.DataObject
) -> None:
    small_blocks(*limit)
    for length in data.draw(st.lists(st.integers(0, len(written.text)), min_size=1, max_size=5, unique=True)):
        whole = [event for event, end in zip(written.events, written.ends, strict=True) if end <= length]
        try:
            found, document = read(path, written.text[:length])
        except UserError:
            assert not whole
            continue
        assert found == expected(whole)
        assert not found or document.damage == "is cut short" or length >= len(written.text.rstrip())


@quick
@given(written=documents(), limit=limits, seed=st.integers(0, 2**32))
def test_damaged_anywhere_it_is_read_or_refused(
    path: Path, small_blocks: Any, written: Written, limit: tuple[int, int, int], seed: int
) -> None:
    damaged, chance = bytearray(written.text), random.Random(seed)
    small_blocks(*limit)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(damaged) + 1)
        damage = chance.choice([b"", b"\0\0\0", b"\xff", b'"', b"\\", b"}", b"]", b"{", chance.randbytes(3)])
        damaged[place : place + chance.choice([0, 1, 20])] = damage
    (path).write_bytes(damaged)
    found = read_trace_file(path, with_parts=True)
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
        ('"name": "k", "extra": NaN, "args": {"list": [' + '{"name": 1}, ' * 20 + '{"name": 2}]}', "k"),
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
    path: Path, small_blocks: Any, wrong: str | bytes, name: str, block: int
) -> None:
    small_blocks(block, 100, 2)
    text = wrong.encode() if isinstance(wrong, str) else wrong
    events = b'{"ph": "X", ' + text + b"}"
    before = b'{"ph": "M", "name": "first"},' * 3
    after = b', {"ph": "M", "name": "last"}' * 9
    for whole in (True, False):
        end = b"]}" if whole else b', {"ph'
        found, document = read(path, b'{"traceEvents": [' + before + events + after + end)
        assert [event.name for event in found] == ["first"] * 3 + [name] + ["last"] * 9
        assert document.repaired
        assert document.damage == ("" if whole else "is cut short")


def test_what_mending_does_not_help_is_not_called_repaired(path: Path, small_blocks: Any) -> None:
    small_blocks(50, 100, 2)
    text = f'{{"traceEvents": [{EVENT}, {{"name": NaN, "a": "b" "c": {{]}}, {", ".join([EVENT] * 9)}]}}'
    found, document = read(path, text.encode())
    assert (len(found), bool(document.damage), document.repaired) == (1, True, False)


MORE = ", ".join([EVENT] * 9)


@pytest.mark.parametrize(
    ("limit", "text", "count", "repaired"),
    [
        # A comma after the last event.
        ((MIB, 8192, 8), f'{{"traceEvents": [{EVENT}, {EVENT}, \n]}}', 2, True),
        # A beginning that is much longer than the events.
        ((16, 50, 2), f'{{"traceName": "{"n" * 200}", "traceEvents": [{EVENT}]}}', 1, False),
        # What follows a list that had to be mended is not read.
        ((2000, 200, 2), f'{{"traceEvents": [{EVENT.replace("2.0", "NaN")}, {EVENT}], "more": [{MORE}]}}', 2, True),
        # Keys of no known event.
        ((100, 50, 2), json.dumps([{"zz": 1, "name": str(number)} for number in range(50)]), 50, False),
    ],
)
def test_unusual_lists_are_read_whole(
    path: Path, small_blocks: Any, limit: tuple[int, int, int], text: str, count: int, repaired: bool
) -> None:
    small_blocks(*limit)
    found, document = read(path, text.encode())
    names = ["nvjet_k"] * count if count < 50 else [str(number) for number in range(count)]
    assert [event.name for event in found] == names
    assert (document.repaired, document.damage) == (repaired, "")


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
    found, document = read(tmp_path / "trace.json.gz", text + trailing)
    assert [event.name for event in found] == [f"k{n}" for n in range(3000)]
    assert document.damage == ""


def test_a_block_is_never_much_longer_than_asked_for_however_well_it_was_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (32 * MIB), 1))
    sizes = [len(block) for block in disk.blocks(path, pytest.fail)]
    assert sum(sizes) == 32 * MIB
    assert max(sizes) <= 2 * disk.BLOCK_BYTES


def test_gzip_cut_short_gives_its_beginning(tmp_path: Path) -> None:
    whole, before = gzip.compress(TEXT), 0
    with pytest.raises(UserError, match="is cut short"):
        read(tmp_path / "trace.json.gz", whole[:20])
    for length in range(1000, len(whole), 370):
        found, document = read(tmp_path / "trace.json.gz", whole[:length])
        assert document.damage == "is cut short"
        assert [event.name for event in found] == [f"k{n}" for n in range(len(found))]
        assert len(found) >= before
        before = len(found)
    assert before > 2000


def test_gzip_with_a_flipped_bit_gives_its_beginning(tmp_path: Path) -> None:
    chance, whole = random.Random(7), gzip.compress(TEXT)
    for _ in range(50):
        text = bytearray(whole)
        text[chance.randrange(10, len(text))] ^= 1 << chance.randrange(8)
        try:
            _, document = read(tmp_path / "trace.json.gz", bytes(text))
        except UserError:
            continue
        # The checksum at the end tells, where nothing else does.
        assert document.damage


LIMITED = """
import json, re, sys
from pathlib import Path
from overlap_sweep.trace.events import Event, ExactEvent
from overlap_sweep.trace.files import read_trace_file

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

empty, *paths = sys.argv[1:]
read_trace_file(Path(empty), True)
before = peak()
found = [read_trace_file(Path(path), True) for path in paths]
found = [[file.problem, [row.num_gemm_events for row in file.rows], len(file.warnings)] for file in found]
print(json.dumps([peak() - before, found]))
"""
"""How many bytes more than for a file of one event it takes to read others; of each [problem, GEMMs, warnings]."""


def write_repeated(path: Path, before: str, repeated: str, count: int, after: str) -> None:
    with path.open("w") as file:
        file.write(before)
        for start in range(0, count, 10_000):
            file.write(repeated * min(10_000, count - start))
        file.write(after)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory was used")
@pytest.mark.timeout(60)
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Neither text nor events that are not kept may pile up, nor a string that does not end."""
    stack = EVENT.replace("kernel", "python_function").replace("2.0", f'2.0, "args": {{"Call stack": "{"x" * 150}"}}')
    count = 24 * MIB // (len(stack) * 10)
    empty, *many = [tmp_path / name for name in ("empty.json", "whole.json", "cut.json", "damaged.json")]
    empty.write_text(f"[{EVENT}]")
    for path, end in zip(many, ("]}", ', {"ph": "X", "na', "X"), strict=True):
        write_repeated(path, '{"traceEvents": [', f"{stack},\n" * 9 + f"{EVENT},\n", count, EVENT + end)
    endless = tmp_path / "endless.json"
    write_repeated(endless, '{"traceEvents": [{"ph": "X", "name": "', "abcdefghij", 8 * MIB, '"}]}')
    commands = ([sys.executable, "-c", LIMITED, empty, *paths] for paths in (many, [endless]))
    printed = (subprocess.run(command, check=True, capture_output=True).stdout for command in commands)
    (more, found), (more_of_string, [(problem, _, _)]) = map(json.loads, printed)
    assert more < 24 * MIB
    assert found == [[None, [count + 1] * 2, warnings] for warnings in (0, 1, 1)]
    assert more_of_string < 150 * MIB
    assert "has no end of an event" in problem


_LIST = ", ".join(['{"name": "a", "ph": "b"}'] * 50)
NESTED = EVENT.replace('"ts"', f'"args": {{"list": [{_LIST}]}}, "ts"')
LONG_NAME = EVENT.replace("nvjet_k", r"}, {\"ph\": \"X\", gemm<" * (MIB // 24))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "case",
    [
        ("", "[", 3 * MIB, "", "is nested too deeply"),
        ('{"traceEvents": ', "[", 3 * MIB, "", "is nested too deeply"),
        ('{"traceEvents": [{"args": {"x": ', '{"a": ', MIB, "", "is nested too deeply"),
        ("", '{"traceEvents": [', MIB // 4, "", "is nested too deeply"),
        ('"', "a", 3 * MIB, '"', "has no traceEvents"),
        ("", " ", 3 * MIB, "", "has no traceEvents"),
        ('{"traceEvents": [', ",", 3 * MIB, "", "is not valid JSON"),
        ('{"traceEvents": [', '},{"ph"', MIB // 2, "", "is not valid JSON"),
        ('{"traceEvents": [', '"', 3 * MIB, "", "is not valid JSON"),
        ('{"traceEvents": [{"name": "', "abcdefghij", MIB // 2, "", "has no end of an event"),
        ('{"traceEvents": [' + EVENT, ',{"ph":X}', MIB // 2, "]}", None),
        ('{"traceEvents": [', NESTED + ",", 4 * MIB // len(NESTED), NESTED + "]}", None),
        ('{"traceEvents": [', EVENT.replace(" ", "") + ",", 4 * MIB // len(EVENT), EVENT + "]}", None),
        ('{"traceEvents": [', EVENT + ",", 10_000, LONG_NAME + "," + EVENT + "]}", None),
        ('{"traceEvents": [' + EVENT + '], "more": [', EVENT + ",", 4 * MIB // len(EVENT), EVENT + "]}", None),
        ('{"traceEvents": [', EVENT.replace("2.0", "NaN") + ",", MIB // len(EVENT), EVENT + "]}", None),
    ],
)
def test_strange_files_end_in_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, int, str, str | None]
) -> None:
    monkeypatch.setattr(stream, "_MOST_BYTES", 2 * MIB)
    *text, outcome = case
    write_repeated(path, *text)
    found = read_trace_file(path, with_parts=True)
    assert bool(found.rows) == (outcome is None)
    assert (outcome or "") in (found.problem or "")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("category", ["kernel", "cpu_op"])
def test_as_many_threads_as_events(trace: Timeline, category: str) -> None:
    for thread in range(10_000):
        trace.add(category, "aten::mm", 1.5, 3.5, 0, thread)
    rows = read_trace_file(trace.write(), with_parts=True).rows
    assert [row.num_compute_events + row.num_gemm_events for row in rows] == [10_000] * 2


@pytest.mark.timeout(30)
def test_as_many_iterations_as_launches(trace: Timeline) -> None:
    for number in range(500):
        trace.work("nvjet_fwd", 4 * number)
        trace.backward(4 * number + 2, 4 * number + 3, thread=1)
        trace.work("nvjet_bwd", 4 * number + 2)
    rows = read_trace_file(trace.write(), with_parts=True).rows
    assert len({row.iteration for row in rows}) == 500
