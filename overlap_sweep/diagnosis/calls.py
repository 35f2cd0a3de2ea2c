"""Finds the collectives of a rank: what each moved, in which process group, where and when it was launched; and roles.

- Activations are needed by the next kernels: a collective of activations blocks them by nature.
- Parameters of a sharded model are there since the optimizer's step: gathering them can begin at any time before.
- Gradients are not needed before the optimizer's step: reducing them can last until then.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import NEVER, Pass, Role
from overlap_sweep.diagnosis.collectives import (
    REDUCTIONS,
    Group,
    batched,
    collective_of,
    detail_around,
    element_bytes,
    group_of,
    sizes_of_host,
)
from overlap_sweep.diagnosis.host import Places
from overlap_sweep.trace.activity import BWD, COMM, FWD, NEITHER, NO_ITERATION, RECOMPUTE, WAIT, Activity
from overlap_sweep.trace.columns import NO_CORRELATION, Detail, Trace

SCALARS = 64
"""Most elements of a norm, a loss or a count of tokens."""

SMALL = 0.1
"""Share of the elements of a group's collectives below which others, such as those of a loss, don't decide."""

PASSES: dict[int, Pass] = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "bwd"}

_GRID = re.compile(r"\[([\d, ]+)\] \[([\d, ]+)\]")
"""Dimensions of the grid, and of a block."""
_C10D = re.compile(r"c10d::(?!barrier|monitored_barrier)|_c10d_functional::(?!wait_tensor|_wrap)")


@dataclass
class Call:
    """One collective, or one kernel that communicates or waits for another rank."""

    start_ns: int
    end_ns: int
    launch_ns: int
    """Start of the launch on the host; NEVER if unknown."""
    lane: int
    """Stream, or on a CPU thread."""
    step: int
    pass_: Pass
    """Pass of the launch."""
    collective: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv or send_recv; of kernels that are no
    collective of a process group their library."""
    group: str
    """Name of the process group; empty if unknown."""
    sent: int | None
    """Elements that this rank gives; None if unknown."""
    received: int | None
    dtype: str | None
    group_size: int | None
    where: str
    is_wait: bool = False
    """Whether it only waits for other ranks, or signals to them."""
    library: str = ""
    """Whose kernel it is, such as nccl; on a CPU gloo, mpi or ucc."""
    in_function: bool = False
    """Whether a function of the forward computation launched it, rather than a hook or plain code."""
    computed_before: bool = False
    """Whether that function had launched computation before."""
    accumulates: bool = False
    """Whether it was launched where autograd accumulates gradients, or by a hook there."""
    peer: int | None = None
    """Rank that a send or recv is to or from."""
    kernel: str = ""
    """Name of its kernel, copy or span."""
    blocks: int | None = None
    """Thread blocks of its kernel."""
    threads: int | None = None
    """Threads of each block."""

    @property
    def is_in_step(self) -> bool:
        return self.step != NO_ITERATION

    @property
    def elements(self) -> int:
        """Returns the elements of the whole buffer, as far as the trace has them."""
        return max(self.sent or 0, self.received or 0)

    def buffer_bytes(self, group_size: int | None = None) -> int | None:
        """Returns the size of the whole buffer as nccl-tests counts it: an all-gather's output, a reduce-scatter's
        input, also where the trace has only the other one and the size of the group is given; None if unknown."""
        bytes_each, sent, received = element_bytes(self.dtype), self.sent, self.received
        if bytes_each is None or (sent is None and received is None):
            return None
        if self.collective in ("all_gather", "gather", "reduce_scatter", "scatter"):
            whole, part = (received, sent) if "gather" in self.collective else (sent, received)
            elements = max(whole or 0, (part or 0) * group_size) if group_size else whole
        else:
            elements = sent if sent is not None else received
        return None if elements is None else elements * bytes_each

    @property
    def is_message(self) -> bool:
        """Returns whether it is between two ranks: to wait for what the other one computes is its nature."""
        return self.collective in ("send", "recv", "send_recv")

    @property
    def is_of_scalars(self) -> bool:
        """Returns whether it moves a few numbers, such as losses, a norm or counts of tokens: at most SCALARS in all,
        or one of each rank."""
        return self.sent == 1 or 0 < self.elements <= SCALARS


def calls_of(trace: Trace, activity: Activity, launch: NDArray[np.intp] | None, places: Places) -> Iterator[Call]:
    """Yields the collectives and waits of a rank. `launch`: index of each event's launch, or -1; None on a CPU."""
    events, kind = activity.events, activity.kind
    chosen = np.flatnonzero(np.isin(kind, (COMM, WAIT)))
    passes = PASSES
    if not np.isin(activity.assignment.pass_, (BWD, RECOMPUTE)).any():
        # What is in no pass, such as a CUDA graph, may be anything.
        passes = {FWD: "fwd", NEITHER: ""}
    # What operators say about the collectives that they launched, by External id.
    has = np.flatnonzero((trace.host.external != NO_CORRELATION) & (trace.host.detail > 0))
    details = ((int(trace.host.external[i]), trace.details[trace.host.detail[i]]) for i in has)
    by_external = {external: detail for external, detail in details if detail.collective}
    launched_by = _launched_by(trace, activity, chosen) if launch is None else {}
    detailed = np.flatnonzero(trace.host.detail > 0)
    for i in chosen.tolist():
        kernel_class = activity.classes[int(events.label[i])]
        if kernel_class.library == "aten":
            # torch.cuda._sleep waits for nobody.
            continue
        detail = trace.details[events.detail[i]]
        blocks, threads = blocks_and_threads(detail) if launch is not None else (None, None)
        name = kernel = activity.labels[events.label[i]][1]
        pass_ = int(activity.assignment.pass_[i])
        if launch is None:
            at = launched_by.get(i)
            source, place = (events, i) if at is None else (trace.host, at)
            launch_ns, thread = int(source.start_ns[place]), int(source.lane[place])
            if at is None:
                detail = sizes_of_host(name, detail)
            else:
                # gloo names some collectives after others, and its threads know no pass.
                detail, name = _host_detail(trace, detailed, at, detail), trace.name(trace.host, at)
                pass_ = BWD if places.is_backward(thread, launch_ns) else pass_
        else:
            place = int(launch[i])
            launch_ns = int(trace.launches.start_ns[place]) if place >= 0 else NEVER
            thread = int(trace.launches.lane[place]) if place >= 0 else NEVER
            if detail.collective is None:
                found = by_external.get(int(events.external[i])) or _detail_at_launch(trace, places, thread, launch_ns)
                detail = found._replace(bytes=detail.bytes) if found else detail
        collective = collective_of(detail, name, kernel_class.library)
        in_function = places.in_function(thread, launch_ns)
        if pass_ == FWD and collective in REDUCTIONS and not in_function and places.follows_backward(launch_ns):
            # Of a microbatch's gradients: what has not begun is no forward pass.
            pass_ = NEITHER
        yield Call(
            start_ns=int(events.start_ns[i]),
            end_ns=int(events.end_ns[i]),
            launch_ns=launch_ns,
            lane=int(events.lane[i]),
            step=int(activity.assignment.iteration[i]),
            pass_=passes.get(pass_, "other"),
            collective=collective,
            group=detail.group or "",
            sent=detail.sent,
            received=detail.received,
            dtype=detail.dtype,
            group_size=detail.group_size,
            where=places.at(thread, launch_ns),
            is_wait=bool(kind[i] == WAIT),
            library=kernel_class.library,
            in_function=in_function,
            computed_before=places.computed_before(thread, launch_ns),
            accumulates=places.accumulates(thread, launch_ns),
            peer=detail.peer,
            kernel=kernel,
            blocks=blocks,
            threads=threads,
        )


def blocks_and_threads(detail: Detail) -> tuple[int | None, int | None]:
    """Returns the thread blocks of a kernel's grid and the threads of each; None and None if it has none."""
    found = _GRID.match(detail.shape or "")
    blocks, threads = (math.prod(map(int, each.split(","))) for each in found.groups()) if found else (None, None)
    return blocks, threads


def _detail_at_launch(trace: Trace, places: Places, thread: int, launch_ns: int) -> Detail | None:
    """Returns what operators and annotations around a launch say about the collective, or those before it of a batch;
    None if there are none."""

    def described(at: int) -> tuple[str, Detail]:
        return trace.name(trace.host, at), trace.details[trace.host.detail[at]]

    around = [described(at) for at, _, _ in places.collectives.around(thread, launch_ns)]
    found = detail_around(tuple(around))
    if found or not around:
        return found
    # nccl:coalesced
    return batched(map(described, islice(places.collectives.begun_before(thread, launch_ns), len(around), None)))


def _launched_by(trace: Trace, activity: Activity, chosen: NDArray[np.intp]) -> dict[int, int]:
    """Returns for communication on a CPU, indices of `activity.events`, the operator that launched it, an index of
    `trace.host`: the first call of its kind before it that has none yet, since gloo's threads run them in order."""
    host = trace.host
    operators = np.flatnonzero(trace.is_named(host, _C10D))
    operators = operators[np.lexsort((-host.end_ns[operators], host.start_ns[operators]))]
    outermost: list[int] = []
    reach: dict[int, int] = defaultdict(lambda: -1)
    for i in operators.tolist():
        if host.start_ns[i] >= reach[int(host.lane[i])]:
            outermost.append(i)
            reach[int(host.lane[i])] = int(host.end_ns[i])
    found: dict[int, int] = {}
    for event in chosen[np.argsort(activity.events.start_ns[chosen], kind="stable")].tolist():
        start_ns = int(activity.events.start_ns[event])
        name = activity.labels[activity.events.label[event]][1]
        own = next((i for i in outermost if host.start_ns[i] > start_ns or _same_kind(trace, i, name)), None)
        if own is not None and host.start_ns[own] <= start_ns:
            outermost.remove(own)
            found[event] = own
    return found


def _same_kind(trace: Trace, operator: int, span: str) -> bool:
    """Returns whether gloo runs the operator's collective under the span's name: it reduces and scatters by an
    all-reduce."""
    kind = collective_of(Detail(), span, "gloo")
    called = collective_of(Detail(), trace.name(trace.host, operator), "gloo")
    return called == kind or (kind, called) == ("all_reduce", "reduce_scatter")


def _host_detail(trace: Trace, detailed: NDArray[np.intp], operator: int, span: Detail) -> Detail:
    """Returns what is known of a collective that ran on the CPU, from its operator, one inside of it, and its span.
    `detailed`: the host's events with details."""
    host = trace.host
    own_lane = host.lane[detailed] == host.lane[operator]
    starts, ends = host.start_ns[detailed], host.end_ns[detailed]
    inside = detailed[own_lane & (starts >= host.start_ns[operator]) & (ends <= host.end_ns[operator])].tolist()
    said = next((detail for i in inside if (detail := trace.details[host.detail[i]]).collective), None)
    if said:
        return said
    names = {i: trace.name(host, i) for i in (operator, *inside)}
    own = next((i for i, name in names.items() if name.startswith("c10d::")), operator)
    return sizes_of_host(names[own], trace.details[host.detail[own]], span)


def groups_of(trace: Trace, calls: list[Call]) -> dict[str, Group]:
    details = {detail.group: detail for detail in trace.details if detail.group is not None}
    return {
        name: group_of(name, details.get(name), trace.groups.get(name)) for name in {c.group for c in calls} if name
    }


def roles_of(calls: Sequence[Call]) -> list[Role]:
    """Returns the role of each call, as docs/diagnosis.md (Limits) explains. Functions that autograd runs gather
    activations, or weights that they had not computed; hooks and plain code gather parameters if the group reduces
    later. What was reduced and scattered as gradients stays that if a group that does nothing else all-reduces it, as
    hybrid sharding does."""
    by_group: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_group[call.group].append(call)
    gathers = {group: _gathers_parameters(own) for group, own in by_group.items()}
    roles = [_role(call, gathers[call.group]) for call in calls]
    # All-reduce after the forward pass, and do nothing else.
    reduce_alone = {
        group
        for group, own in by_group.items()
        if all(call.is_of_scalars or (call.collective == "all_reduce" and call.pass_ != "fwd") for call in own)
    }
    shards = {
        call.received
        for call, role in zip(calls, roles, strict=True)
        if role == "gradient" and call.collective == "reduce_scatter" and call.received is not None
    }
    return [
        "gradient" if call.sent in shards and call.group in reduce_alone else role
        for call, role in zip(calls, roles, strict=True)
    ]


def _volume(calls: Iterable[Call]) -> float:
    """Returns the elements of the whole buffers; where sizes are unknown, calls are counted."""
    return sum(float(call.elements or 1) for call in calls)


def _gathers_parameters(calls: Sequence[Call]) -> tuple[bool, bool]:
    """Returns whether functions gather the group's parameters, and whether hooks or plain code do."""
    forward = [
        call for call in calls if call.collective == "all_gather" and call.pass_ == "fwd" and not call.is_of_scalars
    ]
    gathered = _volume(forward)
    reductions = [call for call in calls if call.collective in REDUCTIONS]
    reduced_forward = _volume(call for call in reductions if call.pass_ == "fwd")
    if not gathered or _volume(call for call in reductions if call.pass_ != "fwd") < SMALL * gathered:
        return False, False
    elsewhere = _volume(call for call in forward if not call.in_function) >= SMALL * gathered
    computed = sum(1 if call.computed_before else -1 for call in forward if call.in_function) > 0
    return reduced_forward < SMALL * gathered and not computed, elsewhere


def _role(call: Call, gathers: tuple[bool, bool]) -> Role:
    in_functions, elsewhere = gathers
    if call.collective == "all_gather":
        # Functions of the backward pass look like hooks there.
        is_of_parameters = call.pass_ == "other" or in_functions or (elsewhere and not call.in_function)
        return "parameter" if is_of_parameters and not call.is_of_scalars else "activation"
    if call.collective not in REDUCTIONS or call.pass_ == "fwd" or (call.pass_ == "other" and call.is_of_scalars):
        # The last is the norm of all gradients, which the optimizer's step needs at once.
        return "activation"
    return "gradient" if in_functions or call.pass_ == "other" or call.accumulates else "activation"
