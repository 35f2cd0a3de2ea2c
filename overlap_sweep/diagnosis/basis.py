"""What a finding rests on: the losses of one rank, and what their calls, the host and the other ranks show; and what
`advice.yaml` may ask of it, by name. Causes have conditions of their own besides."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median

import numpy as np

from overlap_sweep.diagnosis import Loss, Role, as_size, as_time, counted, some_of
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.collectives import element_bytes
from overlap_sweep.diagnosis.facts import RankFacts, place_of, size_of
from overlap_sweep.diagnosis.host import paused_ns
from overlap_sweep.diagnosis.lateness import Often, Share
from overlap_sweep.diagnosis.losses import RankView
from overlap_sweep.diagnosis.slowed import lost_of_hidden
from overlap_sweep.trace.intervals import intersect, intervals_of, merge
from overlap_sweep.trace.nvtx import BYTES

TRAINING = {"optimizer", "loader", "ddp", "fsdp1", "fsdp2", "deepspeed"}
"""Libraries of which a training run has at least one. Benchmarks of operators and layers have none."""

DEFAULT_BUCKET = 25
"""PyTorch's bucket_cap_mb."""

_MEGATRON = re.compile(r"_PARALLEL_GROUP")
"""In the descriptions of Megatron-Core's process groups."""


@dataclass(frozen=True)
class Basis:
    """What a finding rests on."""

    views: Sequence[RankView]
    """By rank."""
    rank: int
    """Index of the rank that loses the time."""
    cause: str
    about: str
    """As `Loss.about`."""
    losses: Sequence[Loss]
    """Those of steady steps."""
    lost_us: float
    """Per step, median."""
    num_steps: int
    often: Sequence[Often] = ()
    """By rank: how often it came last."""
    turns: Mapping[int, Share] = field(default_factory=dict)
    """By rank: the waiting of all ranks that it caused, where ranks are late in turn."""
    waiting_us: float | None = None
    transfer_us: float | None = None
    """As of Finding."""

    @property
    def view(self) -> RankView:
        return self.views[self.rank]

    @property
    def own(self) -> RankFacts:
        return self.view.facts

    @cached_property
    def calls(self) -> list[Call]:
        return [self.own.calls[i] for i in dict.fromkeys(loss.call for loss in self.losses) if i is not None]

    @property
    def met_all(self) -> bool:
        """Returns whether there are traces of as many ranks as each call's group has."""
        return all((size_of(self.own, call) or self.own.world_size or 0) <= len(self.views) for call in self.calls)

    @property
    def most_blocks(self) -> int:
        """Returns the thread blocks of the calls' kernels, if NCCL's, of the largest; 0 if unknown."""
        return max((call.blocks for call in self.calls if call.blocks and call.library == "nccl"), default=0)

    @property
    def roles(self) -> set[Role]:
        return {loss.role for loss in self.losses if loss.role}

    @property
    def blocks_backward(self) -> bool:
        """Returns whether most losses are reductions that held back the backward pass."""
        return 2 * sum("blocked_ns" in loss.numbers for loss in self.losses) > len(self.losses)

    @cached_property
    def all_lost_ns(self) -> float:
        return sum(loss.lost_ns for loss in self.losses)

    @property
    def step_us(self) -> float:
        """Returns the time of a steady step of the rank, median."""
        steps = [step.end_ns - step.start_ns for step in self.own.steps if not step.startup]
        return median(steps) / 1000 if steps else 0.0

    @property
    def sum_lost_us(self) -> float:
        return self.per_step(self.all_lost_ns) / 1000

    @property
    def longest_us(self) -> float:
        return max(loss.lost_ns for loss in self.losses) / 1000

    @cached_property
    def between_nodes(self) -> bool:
        """Returns whether most of the time is lost in communication between nodes."""
        calls = ((loss.lost_ns, self.own.calls[loss.call]) for loss in self.losses if loss.call is not None)
        return 2 * sum(lost for lost, call in calls if place_of(self.own, call) == "between") > self.all_lost_ns

    def per_step(self, number: float) -> float:
        return number / max(self.num_steps, 1)

    def numbers_us(self, name: str) -> list[float]:
        """Returns a number of each loss, in microseconds."""
        return [loss.numbers.get(name, 0.0) / 1000 for loss in self.losses]

    def sum_us(self, name: str) -> float:
        """Returns the sum of a number of the losses per step, in microseconds."""
        return self.per_step(sum(loss.numbers.get(name, 0.0) for loss in self.losses)) / 1000

    def host_late_ns(self, rank: int) -> tuple[float, float]:
        """Returns the time per step in which a rank's host was late, and the part of it in which it waited for data."""
        facts, exposure = self.views[rank].facts, self.views[rank].exposure
        counts = facts.is_steady[[late.work for late in exposure.late]]
        idle_ns = np.array([late.idle_ns for late in exposure.late])[counts].sum()
        steps = max(len(facts.steady_steps), 1)
        return float(idle_ns) / steps, float(exposure.loading_ns[counts].sum()) / steps

    def paused_ns(self, rank: int) -> Counter[str]:
        """Returns the time per steady step in which a rank's host was late because it paused, by place."""
        facts, late = self.views[rank].facts, self.views[rank].exposure.host_late
        steps = [step for step in facts.steps if not step.startup]
        found = paused_ns(facts.pauses, intersect(late, merge(intervals_of(steps))))
        return Counter({place: ns // len(steps) for place, ns in found.items()})

    @property
    def calls_in_words(self) -> str:
        """Returns such as `12 calls of 67.1 MB per step`, or `4 calls of 67.1 MB in 3 steps`."""
        count, rest = divmod(len(self.calls), max(self.num_steps, 1))
        per = f"in {self.num_steps} steps" if rest else "per step"
        sizes = [size for call in self.calls if (size := call.buffer_bytes(size_of(self.own, call)))]
        of = ""
        if sizes:
            low, high = min(sizes), max(sizes)
            of = f" of {as_size(high)}" if high < 1.1 * low else f" of {as_size(low)} to {as_size(high)}"
        between = " between nodes" if self.between_nodes else ""
        return f"{counted(len(self.calls) if rest else count, 'call')}{of}{between} {per}"

    @property
    def pass_in_words(self) -> str:
        """Returns `forward pass`, `backward pass`, or `pass` if it is neither alone."""
        passes = {"bwd"} if self.roles == {"gradient"} else {call.pass_ for call in self.calls}
        name = {"fwd": "forward ", "bwd": "backward "}.get(passes.pop(), "") if len(passes) == 1 else ""
        return f"{name}pass"

    @property
    def waiting_and_transfer(self) -> str:
        """Returns a sentence with what the calls wait for other ranks, and what they transfer; empty if unknown."""
        if self.waiting_us is None or self.transfer_us is None:
            return ""
        transfer = f"{'' if self.met_all else 'at most '}{as_time(self.transfer_us)}"
        if self.cause == "straggler":
            return f" Besides, these calls have {transfer} of exposed transfer per step."
        waiting = f"{'' if self.met_all else 'at least '}{as_time(self.waiting_us)}"
        exposed = f"{transfer} of exposed transfer, besides {waiting} of waiting for the last rank"
        return f" All such calls of a step: {exposed}."


def conditions_of(basis: Basis) -> dict[str, str]:
    """Returns the conditions that hold, each with its value for the sentence, if it has one."""
    names = {
        *(basis.own.libraries | basis.roles),
        *(name for call in basis.calls for name in (call.collective, call.library, call.pass_)),
    }
    found = {name: holds(basis) for name, holds in (CONDITIONS | dict(CAUSES[basis.cause].conditions)).items()}
    return dict.fromkeys(names, "") | {
        name: value if isinstance(value, str) else "" for name, value in found.items() if value
    }


def _few_numbers(basis: Basis) -> bool:
    """Returns whether the calls move a norm, losses or counts of tokens."""
    are_few = all(call.pass_ == "other" or call.is_of_scalars for call in basis.calls)
    return basis.roles == {"activation"} and bool(basis.calls) and are_few and not _point_to_point(basis)


def _point_to_point(basis: Basis) -> bool:
    return any(call.is_message for call in basis.calls)


def _after_step(basis: Basis) -> bool:
    return basis.roles == {"parameter"} and all(call.pass_ == "other" for call in basis.calls)


def _gathers(basis: Basis) -> list[Call]:
    """Returns the all-gathers of both passes in the process groups of the calls."""
    groups = {call.group for call in basis.calls}
    every = (call for call in basis.own.calls if call.group in groups and call.collective == "all_gather")
    return [call for call in every if call.pass_ in ("fwd", "bwd")]


def _one_unit(basis: Basis) -> bool:
    """Returns whether the parameters of a sharded model are gathered all at once: by one call in each pass."""
    gathers = _gathers(basis)
    begun = sorted(basis.own.backward_passes.reshape(-1).tolist())
    # Even numbers are forward passes, odd ones backward passes.
    by_pass = Counter(bisect_right(begun, call.launch_ns) for call in gathers)
    alike = {(call.sent, call.received, call.where) for call in gathers if not call.is_of_scalars}
    return basis.roles == {"parameter"} and len(alike) == 1 and max(by_pass.values()) == 1


def _bucket_mib(basis: Basis) -> list[float]:
    return [size / 2**20 for call in basis.calls if (size := call.buffer_bytes())]


def _smaller_bucket(basis: Basis) -> str:
    # A parameter larger than the limit has a bucket of its own, so that the largest does not show the limit.
    usual = median(_bucket_mib(basis) or [0.0])
    # Buckets of fewer MiB are mostly latency.
    if usual < 1:
        return ""
    return f"{DEFAULT_BUCKET if usual > 1.2 * DEFAULT_BUCKET else usual / 2:.2g}"


def _larger_bucket(basis: Basis) -> str:
    # Buckets of a model that is small are below any limit.
    larger = 4 * max(_bucket_mib(basis), default=0.0)
    return f"{larger:.0f}" if larger > DEFAULT_BUCKET else ""


def _fewer_blocks(basis: Basis, part: int) -> str:
    # Only what can be halved twice.
    return str(basis.most_blocks // part) if basis.most_blocks >= 4 else ""


def _missing_ranks(basis: Basis) -> str:
    if basis.met_all:
        return ""
    groups = (basis.own.groups[call.group].ranks for call in basis.calls if call.group in basis.own.groups)
    wanted = {rank for ranks in groups for rank in ranks} or {*range(basis.own.world_size or 0)}
    missing = sorted(wanted - {view.facts.rank for view in basis.views})
    return f"rank {some_of(missing)}" if missing else "the other ranks"


def _busy_cores(basis: Basis) -> str:
    if basis.own.on_device or basis.cause not in ("dependency", "issued_late"):
        return ""
    slower = lost_of_hidden(basis.own, basis.view.exposure.gaps)
    # From there on overlap is not worth it.
    return f"{slower:.0%}" if slower >= 0.5 else ""


CONDITIONS: dict[str, Callable[[Basis], bool | str]] = {
    "cpu": lambda basis: not basis.own.on_device,
    "megatron": lambda basis: any(_MEGATRON.search(group.about) for group in basis.own.groups.values()),
    "no_training": lambda basis: not any(view.facts.libraries & TRAINING for view in basis.views),
    "point_to_point": _point_to_point,
    "few_numbers": _few_numbers,
    "after_step": _after_step,
    "one_unit": _one_unit,
    "gathered_twice": lambda basis: any(call.pass_ == "bwd" for call in _gathers(basis)),
    "low_precision": lambda basis: (
        bool(basis.calls) and all((element_bytes(call.dtype) or 4) < 4 and call.dtype != BYTES for call in basis.calls)
    ),
    # Ranks of a tensor-parallel group; those of an expert-parallel one exchange tokens, stages of a pipeline messages.
    "same_samples": lambda basis: (
        basis.roles == {"activation"}
        and all(call.collective in ("all_reduce", "all_gather", "reduce_scatter") for call in basis.calls)
    ),
    "blocks_backward": lambda basis: basis.blocks_backward,
    "between_nodes": lambda basis: basis.between_nodes,
    "parameters_between_nodes": lambda basis: (
        basis.between_nodes and basis.roles == {"parameter"} and not _after_step(basis)
    ),
    "activations_between_nodes": lambda basis: (
        basis.between_nodes and basis.roles == {"activation"} and not (_few_numbers(basis) or _point_to_point(basis))
    ),
    # Values to try instead of those that the trace shows to be in use: buckets in MiB, SMs of NCCL.
    "smaller": _smaller_bucket,
    "larger": _larger_bucket,
    "fewer": partial(_fewer_blocks, part=2),
    "fewest": partial(_fewer_blocks, part=4),
    "busy_cores": _busy_cores,
    # Waiting for them looks like what is found.
    "missing_ranks": _missing_ranks,
}
"""By name; a condition holds if it returns True, or a value for the sentence."""
