"""Times a collective and a GEMM on the workers, each alone and both at once, by marks on their own streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from overlap_sweep.backends.communicator import Communicator, Pending, communicator
from overlap_sweep.errors import Refused
from overlap_sweep.measure import DTYPES, Ranks, stream
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.timing import (
    FIRST_SPIN_US,
    SPIN_MARGIN,
    Clock,
    Mark,
    Turn,
    Variant,
    meet,
    spin,
    summarise,
    time_variants,
)
from overlap_sweep.overlap.models import GEMM_ONLY
from overlap_sweep.workloads import MeasuredFields
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

COMM, GEMM = "comm", "gemm"
FEWEST, MOST = 6, 200
"""Calls in a turn: of what takes longer at least, of the other at most."""
INPUTS = {"cuda": 4, "cpu": 2}
"""Inputs of the GEMM, taken in turn."""
ROWS = 64
"""Rows that each rank has of the buffer, which gloo cuts into chunks."""
_OTHER_THREAD = ThreadPoolExecutor(1, initializer=torch.set_grad_enabled, initargs=(False,))

Call = Callable[[int], object]
Marks = dict[str, list[Mark]]
"""Of each of the two: when both begin, and when each of its calls has ended."""


@dataclass(frozen=True)
class Work:
    """The collective with so many thread blocks, and the GEMM."""

    device: torch.device
    collective: Call
    gemm: Call
    beside: torch.cuda.Stream | None
    """Stream of the collective beside GEMMs; None on a CPU, where another thread waits for it."""

    def run(self, comms: int, gemms: int, _turn: int = 0) -> Marks:
        """Runs so many of both at once, or of one alone. Returns the marks."""
        begin = Mark(self.device)
        move = partial(self._repeat, self.collective, comms)
        if not gemms:
            return {COMM: [begin, *move()]}
        if self.beside and comms:
            current = torch.cuda.current_stream()
            self.beside.wait_stream(current)
            with torch.cuda.stream(self.beside):
                moved = move()
            multiplied = self._repeat(self.gemm, gemms)
            current.wait_stream(self.beside)
        else:
            moving = _OTHER_THREAD.submit(move)
            multiplied, moved = self._repeat(self.gemm, gemms), moving.result()
        return {GEMM: [begin, *multiplied], **({COMM: [begin, *moved]} if comms else {})}

    def _repeat(self, call: Call, count: int) -> list[Mark]:
        marks = []
        for number in range(count):
            call(number)
            marks.append(Mark(self.device))
        return marks


@torch.no_grad()
def measure(point: Resolved, directory: Path, ranks: Ranks) -> MeasuredFields:
    """Returns the measured fields of a collective's `Result`. Collective."""
    on_gpu = ranks.device.type == "cuda"
    shares = {name: int(str(setting["num_sm"])) for name, setting in point.implementations.items()}
    if on_gpu and max(shares.values()) > (sms := torch.cuda.get_device_properties(ranks.device).multi_processor_count):
        raise Refused(f"num_sm={max(shares.values())} exceeds the GPU's {sms} SMs")
    call, gemm, beside = _collective(point, ranks), _gemm(point, ranks), torch.cuda.Stream() if on_gpu else None
    works = {name: Work(ranks.device, call(communicator(ranks, n)), gemm, beside) for name, n in shares.items()}
    variants = _variants(works, ranks)
    found = time_variants(variants, ranks, point.workload.warmup, point.workload.repeats, clock(ranks))
    measured = {GEMM_ONLY: ImplementationTimes(time=summarise(found[GEMM_ONLY].us[GEMM]))}
    for name in works:
        both = found[_beside(name)]
        measured[name] = ImplementationTimes(
            time=summarise(found[name].us[COMM]),
            setting=point.implementations[name],
            independent=True,
            launch_bound=any(one.launch_bound for one in (found[GEMM_ONLY], found[name], both)),
            beside=summarise(both.us[COMM]),
            gemm_beside=summarise(both.us[GEMM]),
        )
    fastest = min(works, key=lambda name: measured[name].time.median_us)
    profiled = {"all": [*variants], "best": [GEMM_ONLY, fastest, _beside(fastest)], "none": []}[point.profile]
    return {
        "measured": KernelTimes(implementations=measured),
        "objective_us": measured[fastest].time.median_us,
        "launch_bound": any(one.launch_bound for one in measured.values()),
        "traces": capture_each({one: variants[one] for one in profiled}, ranks, point.workload.profiled, directory),
    }


def _beside(name: str) -> str:
    return f"{name}_beside"


def _collective(point: Resolved, ranks: Ranks) -> Callable[[Communicator], Call]:
    dtype = DTYPES[point.precision]
    assert point.size_mb
    columns = max(1, int(point.size_mb * 2**20) // (dtype.itemsize * ROWS * ranks.world_size))
    generator = stream(ranks.device, point.workload.seed, f"{point.kernel} {point.size_mb}", ranks.rank)
    shape = (ranks.world_size * ROWS, columns)
    full = torch.randn(shape, generator=generator, device=ranks.device, dtype=dtype)
    if point.kernel == "all_reduce":
        # In place: sums of sums would overflow, and zeros stay zeros.
        full.zero_()
    shard = full[:ROWS].clone()
    calls: Mapping[str, Callable[[Communicator], Pending]] = {
        "all_gather": lambda group: group.all_gather(shard),
        "reduce_scatter": lambda group: group.reduce_scatter(full, shard),
        "all_reduce": lambda group: group.all_reduce(full),
        "all_to_all": lambda group: group.all_to_all(full),
    }
    return lambda group: lambda _: calls[point.kernel](group).wait()


def _gemm(point: Resolved, ranks: Ranks) -> Call:
    dtype, device = DTYPES[point.precision], ranks.device
    generator = stream(device, point.workload.seed, f"{point.m} {point.n} {point.k}", ranks.rank)
    draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    weight, output = draw(point.n, point.k), torch.empty(point.m, point.n, device=device, dtype=dtype)
    inputs = [draw(point.m, point.k) for _ in range(INPUTS[device.type])]
    return lambda number: torch.mm(inputs[number % len(inputs)], weight.t(), out=output)


def _variants(works: Mapping[str, Work], ranks: Ranks) -> dict[str, Variant]:
    """Returns what is timed: the GEMM, each collective, and both at once, so many of each that they take about the same
    time: which of them ends last does not matter. Collective."""

    def alone(work: Work, what: str) -> tuple[Variant, float]:
        counts = (FEWEST, 0) if what == COMM else (0, FEWEST)
        variant = Variant(partial(work.run, *counts))
        # The first one prepares libraries and connections.
        _, turn = (clock(ranks)(variant, number) for number in range(2))
        return variant, ranks.slowest([turn.us[what]])[0]

    gemm, gemm_us = alone(next(iter(works.values())), GEMM)
    variants = {GEMM_ONLY: gemm}
    for name, work in works.items():
        variants[name], comm_us = alone(work, COMM)
        span_us = FEWEST * max(gemm_us, comm_us)
        counts = (min(MOST, math.ceil(span_us / each)) for each in (comm_us, gemm_us))
        variants[_beside(name)] = Variant(partial(work.run, *counts))
    return variants


def clock(ranks: Ranks) -> Clock:
    """Returns a clock of the time of one call of each, while both run."""
    on_gpu = ranks.device.type == "cuda"
    enqueuing_us: dict[Variant, float] = {}

    def turn(variant: Variant, repeat: int) -> Turn:
        spin_us = max(FIRST_SPIN_US, SPIN_MARGIN * max(enqueuing_us.values(), default=0.0))
        ranks.barrier()
        if on_gpu:
            spin(ranks, spin_us)
        start_ns = time.perf_counter_ns()
        if on_gpu:
            meet(ranks)
        marks: Marks = variant.forward(repeat)
        own_us = (time.perf_counter_ns() - start_ns) / 1e3
        ranks.barrier()
        (enqueuing_us[variant],) = ranks.slowest([own_us])
        ends = {name: [one.after_ns(own[0]) for one in own[1:]] for name, own in marks.items()}
        return Turn(time_of_each(ends), late=on_gpu and own_us > spin_us)

    return turn


def time_of_each(ends_ns: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Returns how long each call took, in microseconds, in the time until one of the two had none left: that time over
    the calls in it, the last one by the part of it. `ends_ns`: since both began."""
    until_ns = min(ends[-1] for ends in ends_ns.values())
    found = {}
    for name, ends in ends_ns.items():
        spans = zip([0, *ends[:-1]], ends, strict=True)
        calls = sum(min(1.0, (until_ns - start) / (end - start)) for start, end in spans if start < until_ns)
        found[name] = until_ns / calls / 1e3
    return found
