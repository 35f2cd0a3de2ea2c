"""Events in their usual form, which are quick to read, and in any other give the same trace."""

import gzip
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_sweep.trace.columns import Events
from overlap_sweep.trace.events import Event, UsualEvent
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.stream import Document, pieces
from tests.trace.conftest import TRACES

RECORDED = sorted(TRACES.glob("*.json.gz"))


def forms(path: Path) -> set[str]:
    found = (event for piece in pieces(path, Document(kind=UsualEvent)) for event in piece)
    return {type(event).__name__ for event in found if event.ph == "X"}


def as_lists(trace: Any) -> dict[str, Any]:
    own = {field.name: getattr(trace, field.name) for field in fields(trace) if field.name != "warnings"}
    columns = {
        name: [getattr(value, one.name).tolist() for one in fields(Events)]
        for name, value in own.items()
        if isinstance(value, Events)
    }
    return own | columns | {"forward": np.flatnonzero(trace.forward).tolist()}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.name)
def test_a_recorded_trace_is_the_same_in_either_form(recorded: Path, path: Path) -> None:
    assert forms(recorded) == {UsualEvent.__name__}
    path.write_bytes(re.sub(rb'"ts": ([\d.]+)', rb'"ts": "\1"', gzip.decompress(recorded.read_bytes())))
    assert forms(path) == {Event.__name__}
    trace = read_trace(path)
    assert trace.warnings == []
    assert as_lists(trace) == as_lists(read_trace(recorded))


@pytest.mark.parametrize(
    ("changes", "args"),
    [
        ({"ts": "1.5", "dur": "2"}, {}),
        ({"dur": None}, {"correlation": None, "External id": "7"}),
        ({}, {"correlation": "5", "External id": None}),
        ({}, {"grid": [2, 3], "block": None, "bytes": 2.5, "Group size": "8"}),
        ({}, {"Process Group Ranks": [0, 1], "Process Group Name": 0, "Collective name": "allreduce", "dtype": 5}),
    ],
)
def test_odd_values_are_read_as_far_as_they_say_something(
    path: Path, changes: dict[str, Any], args: dict[str, Any]
) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.5, "dur": 2.0, "pid": 0, "tid": 7}
    path.write_text(json.dumps([{**event, **changes, "args": args}, event]))
    trace = read_trace(path)
    assert trace.warnings == []
    assert trace.device.start_ns.tolist() == [1500, 1500]
    assert trace.device.end_ns.tolist() == [1500 if "dur" in changes and not changes["dur"] else 3500, 3500]
    assert trace.device.correlation.tolist() == [5 if args.get("correlation") else -1, -1]
    assert trace.device.external.tolist() == [-1, -1]
    detail = trace.details[trace.device.detail[0]]
    assert detail.shape == ("[2, 3] None" if "grid" in args else None)
    assert (detail.bytes, detail.group_size) == (None, None)
    about = (detail.group, detail.group_ranks, detail.dtype)
    assert about == (("0", "[0, 1]", "5") if "dtype" in args else (None, None, None))
