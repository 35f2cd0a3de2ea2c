"""Programs of several microbatches: gradients that are reduced each time, and parameters that are one unit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from overlap_sweep.diagnosis import Finding, Role
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.causes.repeated_reduction import repeated_reductions
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.losses import views_of
from overlap_sweep.diagnosis.slowed import lost_of_hidden
from tests.diagnosis.made_facts import call, rank_facts, work
from tests.timeline import AUTOGRAD, Timeline, diagnosed

US = 1000


def gradient(at_us: float, elements: int = 1000, collective: str = "all_reduce", step: int = 1) -> Call:
    return call(at_us, at_us + 10, collective, pass_="bwd", sent=elements, received=elements, step=step)


def repeated(
    calls: Sequence[Call],
    passes_us: Sequence[tuple[float, float]],
    optimizer_us: Sequence[tuple[float, float]] = (),
    role: Role = "gradient",
) -> dict[float, int]:
    """Returns when the repeated calls started, in microseconds, with the number of passes that reduce the same."""
    facts = rank_facts(
        0,
        calls,
        backward_passes=(np.array(passes_us).reshape(-1, 2) * US).astype(np.int64),
        optimizer_steps=(np.array(optimizer_us).reshape(-1, 2) * US).astype(np.int64),
    )
    (view,) = views_of([facts], [exposure_of(facts)], arrivals([facts]))
    view.roles[:] = [role] * len(facts.calls)
    found = repeated_reductions(view)
    return {facts.calls[i].start_ns / US: passes for i, passes in found.items()}


FOUR = [(100 * i, 100 * i + 50) for i in range(4)]
TWO_BUCKETS = [gradient(100 * i + at, size) for i in range(4) for at, size in ((10, 1000), (30, 700))]


def test_all_but_the_last_of_four_microbatches() -> None:
    assert repeated(TWO_BUCKETS, FOUR, [(400, 450)]) == dict.fromkeys((10, 30, 110, 130, 210, 230), 4)


def test_what_is_launched_after_a_pass_belongs_to_it() -> None:
    assert repeated([gradient(60), gradient(160)], FOUR[:2], [(400, 450)]) == {60: 2}


def test_without_an_optimizer_in_the_trace_the_profilers_steps_count() -> None:
    assert repeated([gradient(10), gradient(110)], FOUR[:2]) == {10: 2}
    assert not repeated([gradient(10, step=1), gradient(110, step=2)], FOUR[:2])


@pytest.mark.parametrize(
    ("calls", "optimizer_us"),
    [
        # Layers of equal sizes, in one pass.
        ([gradient(10), gradient(20), gradient(30), gradient(40)], [(400, 450)]),
        # A step of the optimizer after each pass.
        (TWO_BUCKETS, [(100 * i + 60, 100 * i + 80) for i in range(4)]),
        # Two models' losses, such as a generator's and its discriminator's.
        ([gradient(10, 1000), gradient(110, 999)], [(400, 450)]),
        ([gradient(10, collective="all_reduce"), gradient(110, collective="reduce_scatter")], [(400, 450)]),
        # Only the last microbatch reduces.
        ([gradient(310), gradient(330)], [(400, 450)]),
        # An optimizer that evaluates the model in its step.
        (TWO_BUCKETS, [(0, 450)]),
    ],
)
def test_what_is_needed_is_not_repeated(calls: list[Call], optimizer_us: list[tuple[float, float]]) -> None:
    assert not repeated(calls, FOUR, optimizer_us)


@pytest.mark.parametrize("role", ["activation", "parameter"])
def test_only_gradients_are_repeated(role: Role) -> None:
    assert not repeated(TWO_BUCKETS, FOUR, [(400, 450)], role)


MICROBATCH = 10_000


def one_unit(rank: int, units: int = 1) -> Timeline:
    """Two microbatches per step of a sharded model: each gathers its units when they are needed. After the backward
    pass autograd's thread reduces the gradients, which the next forward pass waits for."""
    trace = Timeline(rank)
    trace.annotation("FSDP::root", 0, 1)
    for step in (1, 2):
        begun = 40_000 * step
        trace.step(step, begun, begun + 3 * MICROBATCH)
        for i in range(2):
            at = begun + i * MICROBATCH
            trace.function("LinearFunction", at + 400, at + 4000)
            for unit in range(units):
                first = at + 1000 + 1000 * unit
                trace.collective("all_gather", first, first + 500)
                trace.kernel(first + 500, first + 1000)
            trace.backward(at + 4500, at + 6000)
            trace.kernel(at + 5000, at + 6500, thread=AUTOGRAD)
            trace.collective("reduce_scatter", at + 6600, at + 8600, launch=at + 6100, thread=AUTOGRAD)
            trace.kernel(at + 8610, at + 8620, launch=at + 8000)
        trace.optimizer(begun + 2 * MICROBATCH, begun + 2 * MICROBATCH + 100)
        trace.kernel(begun + 2 * MICROBATCH + 600, begun + 2 * MICROBATCH + 700)
    return trace


def found(directory: Path, *ranks: Timeline) -> dict[tuple[str, str], Finding]:
    return {(each.cause, each.collective): each for each in diagnosed(directory, *ranks).findings}


def test_gradients_of_each_microbatch_are_no_activations(tmp_path: Path) -> None:
    """Autograd's thread reduces them when its last function has ended, before the next forward pass begins."""
    facts = one_unit(0).facts(tmp_path)
    assert {one.pass_ for one in facts.calls if one.collective == "reduce_scatter"} <= {"bwd", "other"}
    findings = found(tmp_path, one_unit(0), one_unit(1))
    assert findings["repeated_reduction", "reduce_scatter"].lost_us == pytest.approx(2000, abs=20)
    assert ("dependency", "reduce_scatter") not in findings or "TP" not in findings["dependency", "reduce_scatter"].try_


@pytest.mark.parametrize(("units", "is_one"), [(1, True), (2, False)])
def test_nothing_is_prefetched_of_one_unit(tmp_path: Path, units: int, is_one: bool) -> None:
    gathers = [
        each
        for (_, kind), each in found(tmp_path, *(one_unit(r, units) for r in (0, 1))).items()
        if kind == "all_gather"
    ]
    assert gathers
    assert all(each.try_.startswith("All parameters are one unit") == is_one for each in gathers)


@pytest.mark.parametrize(("next_to_it_us", "share"), [(100, 0.0), (190, 90 / 190)])
def test_what_gemms_lose_of_what_is_hidden(next_to_it_us: float, share: float) -> None:
    """Of computation next to communication that takes as long as alone everything is gained."""
    spans = [(10_000.0, 10_100.0), (10_100.0, 10_200.0), (10_200.0, 10_300.0), (11_000.0, 11_000.0 + next_to_it_us)]
    facts = rank_facts(0, [call(11_000, 11_400)], work=work(*spans), on_device=False)
    assert lost_of_hidden(facts, exposure_of(facts).gaps) == pytest.approx(share)
