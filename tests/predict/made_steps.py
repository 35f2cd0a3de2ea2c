"""Steps of two ranks, made by hand, whose changed times are known exactly: forward and backward GEMMs, all-reduces of
gradients, an optimizer. The host has launched everything long before. Times are in microseconds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.facts import RankFacts, Work
from overlap_sweep.diagnosis.host import StreamEvent
from overlap_sweep.diagnosis.losses import views_of
from overlap_sweep.predict.graph import StepGraph, graph_of
from overlap_sweep.trace.activity import BWD, FWD, NEITHER
from overlap_sweep.trace.iterations import IterationSpan
from tests.diagnosis.made_facts import call, rank_facts

AHEAD_US = 500_000
LAUNCH_US = 10
COMPUTE, COMM = 0, 7


@dataclass(frozen=True)
class Kernel:
    """Computation, or with `megabytes` an all-reduce of gradients on a stream of its own."""

    start_us: float
    end_us: float
    pass_: int = FWD
    megabytes: float = 0.0
    step: int = 1


def training(steps: int = 2, gemm_us: float = 1000, reduce_us: float = 2000, optimizer_us: float = 300) -> list[Kernel]:
    """Two forward GEMMs, four backward ones, one all-reduce of 64 MB when these are over, then the optimizer."""
    kernels, now_us = [], 1_000_000.0
    for step in range(1, steps + 1):
        for pass_ in (FWD, FWD, BWD, BWD, BWD, BWD):
            kernels.append(Kernel(now_us, now_us + gemm_us, pass_, step=step))
            now_us += gemm_us
        kernels.append(Kernel(now_us, now_us + reduce_us, BWD, 64, step))
        now_us += reduce_us
        kernels.append(Kernel(now_us, now_us + optimizer_us, NEITHER, step=step))
        now_us += optimizer_us
    return kernels


def taking_turns(passes: int = 2, *, optimizers: bool) -> list[Kernel]:
    """Two steps of passes of 1 ms forward, 4 ms backward and an all-reduce of 64 MB in 2 ms: each before the step of an
    optimizer of its own, as in a GAN, or with `optimizers` False all before one, as microbatches that all reduce."""
    kernels, now_us = [], 1_000_000.0
    for step in (1, 2):
        for number in range(passes):
            took_us = [(FWD, 0.0, 1000), *[(BWD, 0.0, 1000)] * 4, (BWD, 64.0, 2000)]
            took_us += [(NEITHER, 0.0, 300)] if optimizers or number == passes - 1 else []
            for pass_, megabytes, length_us in took_us:
                kernels.append(Kernel(now_us, now_us + length_us, pass_, megabytes, step))
                now_us += length_us
    return kernels


def facts_of(rank: int, kernels: Sequence[Kernel]) -> RankFacts:
    """Returns the facts of a rank, whose host launches in this order, and makes streams wait as DDP does."""
    first_us = min(kernel.start_us for kernel in kernels)
    launches_us = [first_us - AHEAD_US + LAUNCH_US * number for number in range(len(kernels))]
    computed = [(one, at_us) for one, at_us in zip(kernels, launches_us, strict=True) if not one.megabytes]
    events: list[StreamEvent] = []
    calls: list[Call] = []
    is_reduced = False
    for one, at_us in zip(kernels, launches_us, strict=True):
        at_ns = round(at_us * 1000)
        if one.megabytes:
            elements = round(one.megabytes * 250_000)
            sizes = {"sent": elements, "received": elements, "dtype": "Float", "pass_": "bwd", "accumulates": True}
            calls.append(call(one.start_us, one.end_us, launch_ns=at_ns, lane=COMM, step=one.step, **sizes))
            # It waits for what was launched before, and records its own end.
            events += [
                StreamEvent(at_ns - 2000, False),
                StreamEvent(at_ns - 1000, True),
                StreamEvent(at_ns + 1000, False),
            ]
            is_reduced = True
        elif one.pass_ == NEITHER and is_reduced:
            events.append(StreamEvent(at_ns - 1000, True))
            is_reduced = False
    work = Work(
        start_ns=np.array([round(one.start_us * 1000) for one, _ in computed], np.int64),
        end_ns=np.array([round(one.end_us * 1000) for one, _ in computed], np.int64),
        launch_ns=np.array([round(at_us * 1000) for _, at_us in computed], np.int64),
        lane=np.full(len(computed), COMPUTE, np.int32),
        is_gemm=np.array([one.pass_ != NEITHER for one, _ in computed], bool),
        signature=np.zeros(len(computed), np.int32),
        pass_=np.array([one.pass_ for one, _ in computed], np.int8),
        step=np.array([one.step for one, _ in computed], np.int64),
    )
    steps = [
        IterationSpan(
            number,
            round(min(one.start_us for one in kernels if one.step == number) * 1000),
            round(max(one.end_us for one in kernels if one.step == number) * 1000),
        )
        for number in sorted({one.step for one in kernels})
    ]
    # A pass ends where another begins.
    runs = [[at_us for _, at_us in run] for run in _runs_of(computed, BWD)]
    backward = [[round(min(run) * 1000), round(max(run) * 1000)] for run in runs]
    optimizing = [[round(run[0][1] * 1000), round(run[-1][1] * 1000)] for run in _runs_of(computed, NEITHER)]
    made = rank_facts(rank, calls, work=work, names=["gemm"], grids=[1])
    return replace(
        made,
        steps=steps,
        stream_events=events,
        backward_passes=np.array(backward, np.int64).reshape(-1, 2),
        optimizer_steps=np.array(optimizing, np.int64).reshape(-1, 2),
    )


def _runs_of(computed: Sequence[tuple[Kernel, float]], pass_: int) -> list[list[tuple[Kernel, float]]]:
    """Returns what is launched in a row of this pass, each kernel with its launch."""
    return [list(run) for kind, run in groupby(computed, key=lambda one: one[0].pass_) if kind == pass_]


def graph(*ranks: Sequence[Kernel], contention: bool = False) -> StepGraph:
    """Returns the graph of ranks. Without `contention` computation and communication cost each other nothing, as is
    right where none ran beside each other."""
    facts = [facts_of(rank, kernels) for rank, kernels in enumerate(ranks)]
    met = arrivals(facts)
    found = graph_of(views_of(facts, [exposure_of(one) for one in facts], met), met)
    for node in () if contention else found.nodes:
        node.slowdown = 0.0
    return found
