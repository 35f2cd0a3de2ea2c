"""What a finding rests on: the losses of one rank, and what their calls, the host and a late rank show."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import END_OF_STEP, IN_TURN, PAUSES, Cause
from overlap_sweep.diagnosis.advice_between_nodes import ACTIVATIONS, NODES, PARAMETERS
from overlap_sweep.diagnosis.calls import Call, bytes_of
from overlap_sweep.diagnosis.causes import Loss
from overlap_sweep.diagnosis.collectives import BYTES_OF, type_of
from overlap_sweep.diagnosis.contention import lost_of_hidden
from overlap_sweep.diagnosis.exposure import Exposure
from overlap_sweep.diagnosis.facts import RankFacts, Wait, size_of
from overlap_sweep.diagnosis.lateness import NOTHING_MORE, POINT_TO_POINT, UNKNOWN_RANK, Often, Share, Why
from overlap_sweep.diagnosis.nodes import place_of
from overlap_sweep.diagnosis.pauses import paused_ns, sign_of
from overlap_sweep.diagnosis.places import LOADING
from overlap_sweep.diagnosis.stalls import Stall
from overlap_sweep.diagnosis.transfers import Alike
from overlap_sweep.trace.intervals import intersect, merge
from overlap_sweep.trace.kernel_classes import function_name

MUCH = 0.3
"""Share of the time lost from which on something explains it: what differs between two ranks, or what the host does."""


MORE_KERNELS = 1.02
"""A rank that runs more kernels than another by this factor has more work, rather than slower clocks."""

TRAINING = {"optimizer", "loader", "ddp", "fsdp1", "fsdp2", "deepspeed"}
"""Libraries of which a training has at least one. Benchmarks of operators and layers have none."""

DEFAULT_BUCKET = 25
"""PyTorch's bucket_cap_mb."""

LEAST_BUCKET = 1
"""Buckets of fewer MiB are mostly latency."""

LEAST_BLOCKS = 4
"""Fewest SMs of NCCL that can be halved twice."""

BUSY = 0.5
"""Share of the time hidden on a CPU from which on what GEMMs lose next to communication makes overlap not worth it."""

MEGATRON = re.compile(r"_PARALLEL_GROUP")
"""In the descriptions of Megatron-Core's process groups."""


def as_time(time_us: float) -> str:
    """Returns the time for a sentence."""
    return f"{time_us:,.0f} us" if abs(time_us) >= 10 else f"{time_us:,.1f} us"


@dataclass(frozen=True)
class Basis:
    """What a finding rests on."""

    facts: Sequence[RankFacts]
    exposures: Sequence[Exposure]
    rank: int
    """Index of the rank that loses the time."""
    cause: Cause
    about: str
    losses: Sequence[Loss]
    """Those of steady steps."""
    lost_us: float
    step_us: float
    num_steps: int
    alike: Mapping[int, Alike] = field(default_factory=dict)
    """As of the rank's view: by call, those like it of all ranks."""
    often: Sequence[Often] = ()
    """By rank: how often it came last."""
    turns: Mapping[int, Share] = field(default_factory=dict)
    """By rank: the waiting of all ranks that it caused, where ranks are late in turn."""
    waiting_us: float | None = None
    transfer_us: float | None = None
    """As of Finding."""

    @property
    def own(self) -> RankFacts:
        return self.facts[self.rank]

    @cached_property
    def calls(self) -> list[Call]:
        """Returns the calls that lost time."""
        return [self.own.calls[i] for i in dict.fromkeys(loss.call for loss in self.losses) if i is not None]

    @cached_property
    def waits(self) -> list[Wait]:
        """Returns the waits of the host that cost time: those that losses name, or that ended before a late call."""
        named = dict.fromkeys(loss.wait for loss in self.losses if loss.wait is not None)
        if named:
            return [self.own.waits[i] for i in named]
        ended = [
            max((w for w in self.own.waits if w.end_ns <= c.launch_ns), key=_end, default=None) for c in self.calls
        ]
        return [wait for wait in ended if wait]

    @property
    def met_all(self) -> bool:
        """Returns whether there are traces of as many ranks as each call's group has."""
        return all((size_of(self.own, call) or self.own.world_size or 0) <= len(self.facts) for call in self.calls)

    @property
    def stalls(self) -> list[Stall]:
        """Returns the stalls of the device that have no cause, the longest first."""
        lost = sorted(self.losses, key=lambda loss: -loss.lost_ns)
        return [self.own.stalls[loss.stall] for loss in lost if loss.stall is not None]

    @property
    def late(self) -> int:
        """Returns the index of the rank that the others waited for; UNKNOWN_RANK also if they are late in turn."""
        return UNKNOWN_RANK if self.about == IN_TURN else int(self.about)

    @property
    def late_rank(self) -> int | None:
        """Returns the rank that the others waited for; None if its trace is missing, or if they are late in turn."""
        return None if self.late == UNKNOWN_RANK else self.facts[self.late].rank

    @property
    def roles(self) -> set[str]:
        return {loss.role for loss in self.losses if loss.role}

    @property
    def blocks(self) -> bool:
        """Returns whether most losses are reductions that held back the backward pass."""
        return 2 * sum("blocked_ns" in loss.numbers for loss in self.losses) > len(self.losses)

    @property
    def occupied(self) -> bool:
        """Returns whether calls waited for multiprocessors that other kernels occupied, rather than in a queue."""
        return any(loss.numbers.get("one_queue") == 0.0 for loss in self.losses)

    @property
    def before_gather(self) -> bool:
        """Returns whether what waited for most of these reductions was an all-gather, which the pass waited for."""
        exposed = self.exposures[self.rank].exposed
        held = 0.0
        for loss in self.losses:
            if loss.call is not None and (last := exposed[loss.call].ended_by) is not None:
                held += loss.lost_ns * (last != loss.call and self.own.calls[last].collective == "all_gather")
        return self.roles == {"gradient"} and 2 * held > sum(loss.lost_ns for loss in self.losses)

    @property
    def one_unit(self) -> bool:
        """Returns whether the parameters of a sharded model are gathered all at once: by one call in each pass."""
        groups = {call.group for call in self.calls}
        gathers = [
            call
            for call in self.own.calls
            if call.group in groups and call.collective == "all_gather" and call.pass_ in ("fwd", "bwd")
        ]
        begun = np.sort(self.own.backward_passes.reshape(-1))
        # Even numbers are forward passes, odd ones backward passes.
        by_pass = Counter(int(np.searchsorted(begun, call.launch_ns, side="right")) for call in gathers)
        alike = {(call.sent, call.received, call.where) for call in gathers if not call.is_of_scalars}
        return self.roles == {"parameter"} and len(alike) == 1 and max(by_pass.values()) == 1

    @cached_property
    def between_nodes(self) -> bool:
        """Returns whether most of the time is lost in communication between nodes."""
        lost = sum(loss.lost_ns for loss in self.losses)
        between = sum(
            loss.lost_ns
            for loss in self.losses
            if loss.call is not None and place_of(self.own, self.own.calls[loss.call]) == "between"
        )
        return 2 * between > lost

    @cached_property
    def pauses(self) -> Counter[str]:
        """Returns the time lost in pauses of the host, in nanoseconds by place."""
        places: Counter[str] = Counter()
        for loss in self.losses:
            if loss.pause is not None:
                places[self.own.pauses[loss.pause].place] += round(loss.lost_ns)
        return places

    @property
    def loading_us(self) -> float:
        """Returns the part of the losses in which the host waited for a DataLoader's next batch."""
        return sum(loss.numbers.get("loading_ns", 0.0) for loss in self.losses) / 1000

    @property
    def loading_share(self) -> float:
        lost = sum(loss.lost_ns for loss in self.losses)
        return 1000 * self.loading_us / lost if lost else 0.0

    def per_step(self, number: float) -> float:
        return number / max(self.num_steps, 1)

    def largest_us(self, name: str) -> float:
        """Returns the largest of a number of the losses, in microseconds."""
        return max((loss.numbers.get(name, 0.0) for loss in self.losses), default=0.0) / 1000

    def median_us(self, values_ns: Iterable[float]) -> float:
        values = list(values_ns)
        return median(values) / 1000 if values else 0.0


def _end(wait: Wait) -> int:
    return wait.end_ns


class Lateness(NamedTuple):
    signs: str
    """`host_late`, `loads_longer`, `more_work`, `slower_kernels`, `late_before`, `as_much_work`, `unknown_rank`; or
    `pauses` with `named`, `unnamed` or `stalled`."""
    words: str


def lateness_of(basis: Basis) -> Lateness:
    """Returns what the late rank does more than the waiting one in the whole step, or, where that explains nothing,
    before the collectives that it is late for."""
    if basis.about == IN_TURN:
        causes = list(basis.turns.values())
        total = Share(UNKNOWN_RANK, sum(one.waited_ns for one in causes), sum_of(one.why for one in causes))
        return why_late(total, basis.num_steps, on_device=basis.own.on_device) or Lateness("as_much_work", "")
    if basis.late == UNKNOWN_RANK:
        return Lateness("unknown_rank", "")
    late, own = basis.facts[basis.late], basis.own
    (late_idle, late_loading), (own_idle, own_loading) = (
        _host_late_us(basis, rank) for rank in (basis.late, basis.rank)
    )
    idle, loading = late_idle - own_idle, late_loading - own_loading
    more = _computed_us(late) - _computed_us(own)
    if idle > max(more, MUCH * basis.lost_us):
        place, paused = next(iter(paused_ns_of(late, basis.exposures[basis.late]).most_common(1)), ("", 0))
        if loading >= MUCH * idle:
            waits = f"its host waits {as_time(loading)} longer for a DataLoader's next batch"
            if paused >= 1000 * MUCH * idle and not LOADING.search(place):
                waits += f", most of it {place}"
            return Lateness("loads_longer", f"it is idle for {as_time(idle)} more, and {waits}")
        if paused >= 1000 * MUCH * idle:
            there = f"its host starts nothing while it is {place}, for {as_time(paused / 1000)} per step"
            return Lateness(f"pauses {sign_of(place)}", f"it is idle for {as_time(idle)} more, and {there}")
        device = ", since its host launches late" if late.on_device else ""
        return Lateness("host_late", f"it is idle for {as_time(idle)} more{device}")
    if more > MUCH * basis.lost_us:
        things = "kernels" if late.on_device else "operators"
        if _launched(late) <= MORE_KERNELS * _launched(own):
            return Lateness("slower_kernels", f"as many {things} as the others' take it {as_time(more)} longer")
        return Lateness("more_work", f"it computes {as_time(more)} more{_most_extra(late, own)}")
    waited = Share(basis.late, sum(loss.lost_ns for loss in basis.losses), sum_of(loss.why for loss in basis.losses))
    before = why_late(waited, basis.num_steps, on_device=own.on_device)
    return before or Lateness("as_much_work", "it computes as much as the others, but later")


def why_late(waited: Share, num_steps: int, *, on_device: bool) -> Lateness | None:
    """Returns what ranks did more that others waited for; None if nothing explains enough of the waiting."""
    why, least_ns = waited.why, MUCH * waited.waited_ns
    per_step_us = Why(*(number / max(num_steps, 1) / 1000 for number in why))
    if why.before_ns >= max(why.host_ns, why.work_ns, least_ns):
        return Lateness("late_before", f"it was late by {as_time(per_step_us.before_ns)} where its recording begins")
    if why.host_ns >= max(why.work_ns, least_ns):
        idle = f"it is idle for {as_time(per_step_us.host_ns)} more"
        if why.loading_ns >= MUCH * why.host_ns:
            loading = as_time(per_step_us.loading_ns)
            return Lateness(
                "loads_longer", f"{idle}, and its host waits {loading} longer for a DataLoader's next batch"
            )
        return Lateness("host_late", f"{idle}{', since its host launches late' if on_device else ''}")
    more = f"it computes {as_time(per_step_us.work_ns)} more"
    return Lateness("more_work", more) if why.work_ns >= least_ns else None


def sum_of(each: Iterable[Why]) -> Why:
    return reduce(Why.plus, each, NOTHING_MORE)


def steady_steps(facts: RankFacts) -> NDArray[np.int64]:
    return np.array([step.number for step in facts.steps if not step.startup], np.int64)


def _computed_us(facts: RankFacts) -> float:
    """Returns the computation of a rank per step."""
    work, steady = facts.work, steady_steps(facts)
    return float((work.end_ns - work.start_ns)[np.isin(work.step, steady)].sum()) / max(len(steady), 1) / 1000


def _launched(facts: RankFacts) -> float:
    """Returns the number of kernels, or of operators on a CPU, per step."""
    steady = steady_steps(facts)
    return float(np.isin(facts.work.step, steady).sum()) / max(len(steady), 1)


def _host_late_us(basis: Basis, rank: int) -> tuple[float, float]:
    """Returns the time per step in which a rank's host was late, and the part of it in which it waited for data."""
    facts, exposure = basis.facts[rank], basis.exposures[rank]
    steady = steady_steps(facts)
    counts = np.isin(facts.work.step[[late.work for late in exposure.late]], steady)
    idle_ns = np.array([late.idle_ns for late in exposure.late])
    idle_us, loading_us = (
        float(times_ns[counts].sum()) / max(len(steady), 1) / 1000 for times_ns in (idle_ns, exposure.loading_ns)
    )
    return idle_us, loading_us


def paused_ns_of(facts: RankFacts, exposure: Exposure) -> Counter[str]:
    """Returns the time per steady step in which a rank's host was late because it paused, by place."""
    steps = [step for step in facts.steps if not step.startup]
    spans = merge(np.array([(step.start_ns, step.end_ns) for step in steps], np.int64).reshape(-1, 2))
    paused = paused_ns(facts.pauses, intersect(exposure.host_late, spans))
    return Counter({place: ns // len(steps) for place, ns in paused.items()})


def _most_extra(late: RankFacts, own: RankFacts) -> str:
    def by_name(facts: RankFacts) -> Counter[str]:
        found: Counter[str] = Counter()
        took = facts.work.end_ns - facts.work.start_ns
        for name, time_ns in zip(facts.work.signature.tolist(), took.tolist(), strict=True):
            found[facts.names[name]] += time_ns
        return found

    extra = by_name(late)
    extra.subtract(by_name(own))
    name, time_ns = extra.most_common(1)[0] if extra else ("", 0)
    return f", most of it in {(function_name(name) or name)[:60]}" if time_ns > 0 else ""


def signs_of(basis: Basis) -> dict[str, str]:
    """Returns what advice depends on: roles, collectives, libraries, passes, and how the cause shows; some have a
    value for the sentence."""
    own, calls = basis.own, basis.calls
    groups = {call.group for call in calls}
    signs = {
        *(own.libraries | basis.roles),
        *(call.collective for call in calls),
        *(call.library for call in calls),
        *(call.pass_ for call in calls),
    }
    found = {
        "cpu": not own.on_device,
        "megatron": any(MEGATRON.search(group.about) for group in own.groups.values()),
        "point_to_point": any(call.collective in POINT_TO_POINT for call in calls),
        "norm": bool(calls)
        and basis.roles == {"activation"}
        and all(call.pass_ == "other" or call.is_of_scalars for call in calls)
        and not any(call.collective in POINT_TO_POINT for call in calls),
        "after_step": basis.roles == {"parameter"} and all(call.pass_ == "other" for call in calls),
        "blocks": basis.blocks,
        "one_unit": basis.one_unit,
        "occupied": basis.occupied,
        "untrained": not any(one.libraries & TRAINING for one in basis.facts),
        "low_precision": bool(calls) and all(BYTES_OF.get(type_of(call.dtype), 4) < 4 for call in calls),
        "gathered_twice": any(
            call.collective == "all_gather" and call.pass_ == "bwd" and call.group in groups for call in own.calls
        ),
        "before_gather": basis.cause == "issued_late" and basis.before_gather,
    }
    if basis.between_nodes:
        messages = found["norm"] or found["point_to_point"]
        found |= {
            NODES: True,
            PARAMETERS: basis.roles == {"parameter"} and not found["after_step"],
            ACTIVATIONS: basis.roles == {"activation"} and not messages,
        }
    if basis.cause == "host_bound":
        found |= {"loading": basis.loading_share >= MUCH, "pauses": basis.about == PAUSES}
        if basis.about == PAUSES:
            signs.add(sign_of(basis.pauses.most_common(1)[0][0]))
    if basis.cause == "host_sync":
        names = {f"{wait.operator or wait.name} {wait.name}" for wait in basis.waits}
        found |= {
            "item": any("aten::item" in name or "_local_scalar_dense" in name for name in names),
            "copy": any(re.match(r"(cuda|hip)Memcpy|aten::(copy_|to|_to_copy) ", name) for name in names),
            "device_sync": any("DeviceSynchronize" in name for name in names),
            "end_of_step": basis.about == END_OF_STEP,
        }
    if basis.cause == "straggler":
        signs |= {*lateness_of(basis).signs.split(), *([IN_TURN] if basis.about == IN_TURN else [])}
    if basis.cause == "unexplained":
        signs |= {stall.holds_back for stall in basis.stalls if stall.holds_back}
    return {**dict.fromkeys(signs | {sign for sign, holds in found.items() if holds}, ""), **_other_values(basis)}


def _other_values(basis: Basis) -> dict[str, str]:
    """Returns values to try instead of those that the trace shows to be in use: buckets in MiB, and SMs of NCCL."""
    found = {}
    if buckets := [size for call in basis.calls if (size := bytes_of(call))]:
        # A parameter larger than the limit has a bucket of its own, so that the largest does not show the limit.
        usual, largest = statistics.median(buckets) / 2**20, max(buckets) / 2**20
        if usual >= LEAST_BUCKET:
            found["smaller"] = f"{DEFAULT_BUCKET if usual > 1.2 * DEFAULT_BUCKET else usual / 2:.2g}"
        # Buckets of a model that is small are below any limit.
        if 4 * largest > DEFAULT_BUCKET:
            found["larger"] = f"{4 * largest:.0f}"
    if not basis.own.on_device and basis.cause in ("dependency", "issued_late"):
        slower = lost_of_hidden(basis.own, basis.exposures[basis.rank].gaps)
        if slower >= BUSY:
            found["busy_cores"] = f"{slower:.0%}"
    most = max((call.blocks for call in basis.calls if call.blocks and call.library == "nccl"), default=0)
    if most >= LEAST_BLOCKS:
        found["fewer"] = f"{most // 2} or {most // 4}"
    return found
