"""Facts of ranks, made by hand. Times are given in microseconds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts, Work
from overlap_sweep.trace.activity import FWD
from overlap_sweep.trace.iterations import IterationSpan


def call(start_us: float, end_us: float, collective: str = "all_reduce", group: str = "0", **others: Any) -> Call:
    """Returns a call, by default launched as it started."""
    given = {
        "launch_ns": round(start_us * 1000),
        "lane": 7,
        "step": 1,
        "pass_": "fwd",
        "sent": 1024,
        "received": 1024,
        "dtype": "Float",
        "group_size": 2,
        "where": "",
    }
    return Call(
        start_ns=round(start_us * 1000),
        end_ns=round(end_us * 1000),
        collective=collective,
        group=group,
        **{**given, **others},
    )


def work(*spans_us: tuple[float, float], step: int = 1) -> Work:
    """Returns GEMMs."""
    start_ns, end_ns = (np.array([round(span[i] * 1000) for span in spans_us], np.int64) for i in (0, 1))
    count = len(spans_us)
    return Work(
        start_ns=start_ns,
        end_ns=end_ns,
        launch_ns=start_ns,
        lane=np.zeros(count, np.int32),
        is_gemm=np.ones(count, bool),
        signature=np.zeros(count, np.int32),
        pass_=np.full(count, FWD, np.int8),
        step=np.full(count, step, np.int64),
    )


def rank_facts(
    rank: int | None,
    calls: Sequence[Call],
    groups: Sequence[Group] = (Group("0", "", (0, 1), 2),),
    **others: Any,
) -> RankFacts:
    """Returns the facts of a rank whose steps are those of its calls, each 10 ms long."""
    ordered = sorted(calls, key=lambda one: (one.start_ns, one.end_ns))
    numbers = sorted({one.step for one in ordered})
    steps = [IterationSpan(number, number * 10_000_000, (number + 1) * 10_000_000) for number in numbers]
    given = {
        "world_size": 2,
        "on_device": True,
        "base_time_ns": 0,
        "steps": steps,
        "work": work(),
        "copies": np.empty((0, 2), np.int64),
        "waits": [],
        "groups": {group.name: group for group in groups},
        "lanes": [("0", str(stream)) for stream in range(32)],
    }
    return RankFacts(rank=rank, calls=ordered, **{**given, **others})
