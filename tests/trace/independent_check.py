"""The overlap numbers of the four H200 traces, computed a second time, by other means.

Shares no code and no method with overlap_sweep: timestamps are exact decimals, the classes of kernels are written out
by hand for these four files, every question is answered by a plain loop, and times come from one sweep over the
boundaries of all events instead of from interval algebra.
"""

import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

KINDS = {
    "gemm": ("nvjet_",),
    "comm": ("ncclDevKernel_", "void userbuffers_", "kuserbuffers_pushsend(", "Memcpy PtoP"),
    "wait": ("kuserbuffers_pushrecv(", "tiny_delay_kern("),
    "memory": ("Memcpy DtoD", "Memset"),
    "compute": (
        "void at::native::",
        "void (anonymous namespace)::",
        "void transformer_engine::",
        "void reduce_bf16_cuda<",
    ),
}
"""How the names of each begin: written out by hand."""


def kind(name: str) -> str:
    (found,) = (kind for kind, starts in KINDS.items() if name.startswith(starts))
    return found


def nanoseconds(microseconds: Decimal | int) -> int:
    exact = Decimal(microseconds) * 1000
    assert exact == int(exact), microseconds
    return int(exact)


def load(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events = json.load(file, parse_float=Decimal)["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    for event in events:
        event["start"] = nanoseconds(event["ts"])
        event["end"] = event["start"] + nanoseconds(event["dur"])
    return events


def assign(events: list[dict[str, Any]]) -> list[tuple[int, str, dict[str, Any]]]:
    """[(iteration, pass, event)] of every device event."""
    backward = [event for event in events if event["name"].startswith("autograd::engine::evaluate_function")]
    launches = {}
    for event in events:
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            launches[event["args"]["correlation"]] = event
    work = []
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            launch = launches[event["args"]["correlation"]]
            inside = any(
                outer["tid"] == launch["tid"] and outer["start"] <= launch["start"] < outer["end"] for outer in backward
            )
            work.append((launch["start"], "bwd" if inside else "fwd", event))
    work.sort(key=lambda item: item[0])
    assigned, iteration, before = [], 0, None
    for _, which, event in work:
        if before == "bwd" and which == "fwd":
            iteration += 1
        before = which
        assigned.append((iteration, which, event))
    return assigned


def sweep(events: list[tuple[str, int, int]]) -> dict[str, int]:
    """Quantities of some [(kind, start, end)], from the elementary segments between all boundaries."""
    changes: dict[int, list[tuple[str, int]]] = {}
    for label, start, end in events:
        changes.setdefault(start, []).append((label, 1))
        changes.setdefault(end, []).append((label, -1))
    running = dict.fromkeys(KINDS, 0)
    result = dict.fromkeys(("span", "gemm", "comm", "wait", "overlap", "exposed", "idle"), 0)
    previous = None
    for moment in sorted(changes):
        if previous is not None:
            length = moment - previous
            result["span"] += length
            if running["gemm"]:
                result["gemm"] += length
            if running["comm"]:
                result["comm"] += length
            if running["wait"]:
                result["wait"] += length
            if running["gemm"] and running["comm"]:
                result["overlap"] += length
            if running["comm"] and not running["gemm"] and not running["compute"]:
                result["exposed"] += length
            if not any(running.values()):
                result["idle"] += length
        for label, step in changes[moment]:
            running[label] += step
        previous = moment
    assert not any(running.values())
    for label in ("gemm", "comm", "wait", "compute"):
        result[f"num_{label}"] = sum(event[0] == label for event in events)
    return result


def phases(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of each iteration and phase."""
    assigned = assign(load(path))
    found = {}
    for iteration in sorted({item[0] for item in assigned}):
        for phase in ("fwd", "bwd", "all"):
            chosen = [item[2] for item in assigned if item[0] == iteration and phase in (item[1], "all")]
            found[f"{iteration} {phase}"] = chosen
    return found


def check(path: Path) -> dict[str, dict[str, int]]:
    """{"iteration phase": {quantity: nanoseconds or events}}. An iteration lasts until the next one starts: in these
    files, when the one before has ended."""
    chosen = phases(path)
    found = {
        phase: sweep([(kind(event["name"]), event["start"], event["end"]) for event in events])
        for phase, events in chosen.items()
    }
    whole = [phase for phase in chosen if phase.endswith("all")]
    for phase, following in pairwise(whole):
        ended = max(event["end"] for event in chosen[phase])
        pause = min(event["start"] for event in chosen[following]) - ended
        assert pause >= 0, phase
        found[phase]["span"] += pause
        found[phase]["idle"] += pause
    return found


def parts(events: list[dict[str, Any]], name_of: Callable[[dict[str, Any]], str]) -> dict[str, list[int]]:
    """Returns by name [events, ns of the union, ns in all, ns with no other name beside it]."""
    changes: dict[int, list[tuple[str, int]]] = {}
    result: dict[str, list[int]] = {}
    for event in events:
        name = name_of(event)
        changes.setdefault(event["start"], []).append((name, 1))
        changes.setdefault(event["end"], []).append((name, -1))
        numbers = result.setdefault(name, [0, 0, 0, 0])
        numbers[0] += 1
        numbers[2] += event["end"] - event["start"]
    running: dict[str, int] = {}
    previous = None
    for moment in sorted(changes):
        names = [name for name, count in running.items() if count]
        for name in names:
            result[name][1] += moment - previous
            if len(names) == 1:
                result[name][3] += moment - previous
        for name, step in changes[moment]:
            running[name] = running.get(name, 0) + step
        previous = moment
    return result


def check_parts(path: Path) -> dict[str, dict[str, dict[str, list[int]]]]:
    """{"iteration phase": {"kernel" or "stream": {name: [events, ns of the union, ns in all, ns alone]}}}."""
    return {
        phase: {
            "kernel": parts(events, lambda event: event["name"]),
            "stream": parts(events, lambda event: f"{event['pid']} {event['tid']}"),
        }
        for phase, events in phases(path).items()
    }
