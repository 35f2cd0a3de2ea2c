"""Timing variants side by side by the host's clock, a simulated GPU's and a real one's, and comparing their results."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from overlap_sweep.config import Runtime
from overlap_sweep.measure import Ranks, timing
from overlap_sweep.measure.instruments import instruments
from overlap_sweep.measure.timing import (
    FIRST_SPIN_US,
    LONG_TURN_US,
    REST,
    REST_OF_LONG_TURNS,
    SPIN_MARGIN,
    Mark,
    Turn,
    Variant,
    enqueues_ahead,
    gpu_clock,
    relative_error,
    summarise,
    time_variants,
)
from overlap_sweep.results.measured import Timing
from tests.processes import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def noting(
    calls: list[str],
    name: str,
    take: Callable[[float], object] = lambda us: None,
    fwd_us: float = 0.0,
    bwd_us: float = 0.0,
    **more: Callable[[], None],
) -> Variant:
    """Notes its forward passes and their turns; the backward must get what the forward of the same turn returned."""

    def forward(turn: int) -> str:
        calls.append(f"{name}{turn}")
        take(fwd_us)
        return f"output{turn}"

    def backward(turn: int, output: str) -> dict[str, torch.Tensor]:
        assert output == f"output{turn}"
        take(bwd_us)
        return {}

    return Variant(forward, backward, **more)


@dataclass
class ScriptedClock:
    """Runs each pass, and answers with the numbers of its turns: 1, 2, 3, ... us for every pass."""

    late: Iterator[bool] = field(default_factory=lambda: iter([False] * 1000))
    turns: int = 0

    def __call__(self, variant: Variant, repeat: int) -> Turn:
        self.turns += 1
        kept, us = None, {}
        for name, run in variant.passes():
            kept, us[name] = run(repeat, kept), float(self.turns)
        return Turn(us, next(self.late))


def time_on_rank(ranks: Ranks) -> tuple[dict[str, dict[str, list[float]]], list[str], bool]:
    """Times by variant and pass, the variants' calls in order, and whether one that is late now and then is bound."""
    calls: list[str] = []
    slow, host = ranks.rank == 1, SimulatedStream()
    variants = {
        "a": noting(calls, "a", host.wait, fwd_us=20.0 if slow else 1.0),
        "b": noting(calls, "b", host.wait, bwd_us=0.0 if slow else 30.0),
        "c": noting(calls, "c"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", host)
        samples = time_variants(variants, ranks, warmup=1, repeats=3)
    # Late in one repeat each: no rank in a majority of its own repeats, but two of three have a late rank.
    clock = ScriptedClock(iter([repeat == ranks.rank for repeat in range(3)]))
    late = time_variants({"it": noting([], "it")}, ranks, warmup=0, repeats=3, clock=clock)["it"]
    return {name: taken.us for name, taken in samples.items()}, calls, late.launch_bound


def test_the_slowest_rank_counts_and_the_variants_take_turns() -> None:
    (first, calls, *late), (second, _, *late_too) = run_ranks(2, time_on_rank, keep="cpu")
    assert first == second
    assert {name: {one: set(each) for one, each in us.items()} for name, us in first.items()} == {
        "a": {"fwd": {20.0}, "bwd": {0.0}, "all": {20.0}},
        "b": {"fwd": {0.0}, "bwd": {30.0}, "all": {30.0}},
        "c": {"fwd": {0.0}, "bwd": {0.0}, "all": {0.0}},
    }
    # One round of warm-up, then every variant is first once.
    assert calls == ["a0", "b1", "c2", "a3", "b4", "c5", "b6", "c7", "a8", "c9", "a10", "b11"]
    assert late == late_too == [True]


@pytest.mark.parametrize(
    ("late", "bound"),
    [
        ((False, True, False, True, False), False),
        ((True, False, True, False, True), True),
        ((True, True, False, False), False),
    ],
)
def test_launch_bound_is_a_majority_of_late_repeats(late: Sequence[bool], bound: bool) -> None:
    clock = ScriptedClock(iter([True, True, *late]))
    samples = time_variants({"it": noting([], "it")}, ALONE, warmup=2, repeats=len(late), clock=clock)
    assert samples["it"].launch_bound is bound


def test_a_prepared_variant_runs_forward_untimed_before_each_of_its_turns_and_another_does_not() -> None:
    calls: list[str] = []

    def note_backward(us: float) -> None:
        if us:
            calls.append("bwd")

    prepared = noting(calls, "a", note_backward, bwd_us=1.0, prepare=lambda: calls.append("prepare"))
    variants = {"a": prepared, "b": noting(calls, "b")}
    samples = time_variants(variants, ALONE, warmup=1, repeats=2, clock=ScriptedClock())
    # After the warm-up, they take turns in being first.
    assert calls == [
        *("prepare", "a0", "a0", "bwd", "b1"),
        *("prepare", "a2", "a2", "bwd", "b3"),
        *("b4", "prepare", "a5", "a5", "bwd"),
    ]
    # The clock counts every run; those right after preparing are dropped.
    assert {name: taken.us["fwd"] for name, taken in samples.items()} == {"a": [5.0, 9.0], "b": [6.0, 7.0]}
    for variant in variants.values():
        variant.get_ready()
    assert calls[15:] == ["prepare"]


def test_a_prepared_variant_with_an_optimizer_runs_a_whole_step_untimed() -> None:
    calls: list[str] = []
    trains = noting(calls, "a", prepare=lambda: calls.append("prepare"), step=lambda: calls.append("step"))
    time_variants({"a": trains}, ALONE, warmup=0, repeats=1, clock=ScriptedClock())
    assert calls == ["prepare", "a0", "step", "a0", "step"]


def test_repeats_end_when_they_are_enough_and_some_variants_seldom_take_a_turn() -> None:
    calls: list[str] = []
    variants = {name: noting(calls, name) for name in ("a", "b", "floor")}
    asked: list[dict[str, int]] = []

    def enough(samples: Any) -> bool:
        asked.append({name: len(taken.us["all"]) for name, taken in samples.items()})
        return len(asked) == 2

    taken = time_variants(variants, ALONE, 1, 30, ScriptedClock(), enough=enough, seldom=["floor"])
    assert asked == [{"a": 6, "b": 6, "floor": 4}, {"a": 9, "b": 9, "floor": 5}]
    assert {name: len(samples.us["fwd"]) for name, samples in taken.items()} == asked[-1]
    # Each turn has a number of its own, so that inputs rotate.
    assert [int("".join(filter(str.isdigit, call))) for call in calls] == list(range(3 + 9 + 9 + 5))


def test_summary_statistics() -> None:
    samples_us = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert summarise(samples_us) == Timing(median_us=3.0, q1_us=2.0, q3_us=4.0, samples_us=samples_us)


@dataclass
class SimulatedStream:
    """A rank whose GPU works off a queue in order; every time is exact."""

    host_us: float = 0.0
    idle_us: float = 0.0
    """When the GPU will have worked off its queue."""
    slowest_us: float = 0.0
    """What the slowest of the other ranks says."""
    spins: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    device: torch.device = ALONE.device

    def perf_counter_ns(self) -> float:
        return self.host_us * 1e3

    def wait(self, us: float) -> None:
        """Has the host take that long."""
        self.host_us += us

    def barrier(self) -> None:
        self.calls.append("wait")
        self.host_us = max(self.host_us, self.idle_us)

    def spin(self, us: float) -> None:
        self.calls.append("spin")
        self.spins.append(us)
        self._enqueue(us)

    def mark(self) -> Mark:
        self.calls.append("mark")
        mark = Mark(self.device)
        mark.host_ns = round(max(self.idle_us, self.host_us) * 1e3)
        return mark

    def slowest(self, values: list[float]) -> list[float]:
        return [max(value, self.slowest_us) for value in values]

    def run(self, kernels: int, launch_us: float, kernel_us: float) -> None:
        """Launch kernels one after the other; the host takes `launch_us` for each, the GPU `kernel_us`."""
        for _ in range(kernels):
            self.host_us += launch_us
            self._enqueue(kernel_us)

    def _enqueue(self, us: float) -> None:
        self.idle_us = max(self.idle_us, self.host_us) + us


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimulatedStream:
    """In place of the GPU's stream and of the host's time."""
    stream = SimulatedStream()
    monkeypatch.setattr(timing, "time", stream)
    monkeypatch.setattr(timing, "spin", lambda _ranks, us: stream.spin(us))
    monkeypatch.setattr(timing, "meet", lambda _ranks: stream.calls.append("meet"))
    monkeypatch.setattr(timing, "Mark", lambda _device: stream.mark())
    return stream


def gpu(stream: Any) -> timing.Clock:
    return gpu_clock(stream)


def kernels(stream: SimulatedStream, launch_us: float) -> Variant:
    """Four kernels of 10 us forward and four of 20 us backward."""

    def forward(_repeat: int) -> None:
        stream.calls.append("fwd")
        stream.run(4, launch_us, 10.0)

    def backward(_repeat: int, _kept: None) -> dict[str, Any]:
        stream.calls.append("bwd")
        stream.run(4, launch_us, 20.0)
        return {}

    return Variant(forward, backward)


@pytest.mark.parametrize(
    ("launch_us", "late", "bwd_us"),
    [(0.0, False, 80.0), (FIRST_SPIN_US / 8, False, 80.0), (1.01 * FIRST_SPIN_US / 8, True, 80.0), (1e3, True, 4010.0)],
)
def test_passes_are_timed_by_the_gpus_clock_and_a_host_that_outlasts_the_spin_is_late_until_that_has_grown(
    launch_us: float, late: bool, bwd_us: float, stream: SimulatedStream
) -> None:
    # What ran before.
    stream.run(1, 0.0, 1e6)
    clock, variant = gpu(stream), kernels(stream, launch_us)
    first, second = (clock(variant, repeat) for repeat in range(2))
    assert (first.late, first.us["bwd"]) == (late, bwd_us)
    assert second == Turn({"fwd": 40.0, "bwd": 80.0}, late=False)


def test_the_ranks_meet_on_the_gpu_before_each_pass_and_outside_of_its_time(stream: SimulatedStream) -> None:
    gpu(stream)(kernels(stream, 1.0), 0)
    passes = ["spin", "meet", "mark", "fwd", "mark", "spin", "meet", "mark", "bwd", "mark"]
    assert stream.calls == ["wait", *passes, "wait"]


def test_the_spin_outlasts_the_slowest_variant_of_the_slowest_rank_and_never_falls_below_the_first(
    stream: SimulatedStream,
) -> None:
    clock, slow, fast = gpu(stream), kernels(stream, 1000.0), kernels(stream, 1.0)
    for variant in (fast, slow, fast, slow):
        clock(variant, 0)
    # Of another rank it is slower yet.
    stream.slowest_us = 9_000.0
    for variant in (slow, fast):
        clock(variant, 0)
    spins_us = [FIRST_SPIN_US, FIRST_SPIN_US, *[SPIN_MARGIN * 8000.0] * 3, SPIN_MARGIN * 9_000.0]
    before_forward_us = stream.spins[::2]
    assert before_forward_us == spins_us


def test_the_gpu_rests_before_each_pass_for_a_share_of_what_its_longest_takes_unless_it_waited_for_the_host(
    stream: SimulatedStream,
) -> None:
    def variant(launch_us: float, fwd_us: float, bwd_us: float) -> Variant:
        return Variant(
            lambda _repeat: stream.run(1, launch_us, fwd_us), lambda _repeat, _kept: stream.run(1, launch_us, bwd_us)
        )

    clock, short = gpu(stream), variant(1.0, 40.0, 80.0)
    long, waiting = variant(1.0, 5_000.0, 10_000.0), variant(1e6, 5_000.0, 10_000.0)
    for one in (long, short, waiting, long):
        clock(one, 0)
    rest_us = [REST * 5_000.0, REST * 10_000.0]
    assert stream.spins[:6] == [FIRST_SPIN_US, 0.0, *rest_us, *rest_us]
    assert stream.spins[6:] == [pytest.approx(SPIN_MARGIN * 2e6), rest_us[1]]
    for _ in range(2):
        clock(waiting, 0)
    assert stream.spins[-2] == pytest.approx(SPIN_MARGIN * 2e6)


def test_long_turns_get_more_rest(stream: SimulatedStream) -> None:
    def both(us: float) -> Variant:
        return Variant(lambda _repeat: stream.run(1, 1.0, us), lambda _repeat, _kept: stream.run(1, 1.0, us))

    for us, rest in ((LONG_TURN_US / 2, REST), (LONG_TURN_US / 2 + 1.0, REST_OF_LONG_TURNS)):
        clock, variant = gpu(stream), both(us)
        clock(variant, 0)
        clock(variant, 1)
        assert stream.spins[-2:] == [rest * us, rest * us]


def test_a_variant_that_was_slow_once_is_not_waited_for_again(stream: SimulatedStream) -> None:
    """Its first run compiles: were every spin as long, a layer's 21 rounds would take a minute more."""
    clock, other, host_us = gpu(stream), kernels(stream, 1.0), iter([1e6, 1.0, 1.0])
    compiling = replace(other, forward=lambda _repeat: stream.run(1, next(host_us), 1.0))
    for repeat in range(3):
        clock(compiling, repeat)
        clock(other, repeat)
    assert [spin_us > 1e6 for spin_us in stream.spins[::2]] == [False, True, True, False, False, False]


def test_nothing_is_enqueued_ahead_where_the_host_waits_or_a_debugged_point_waits_for_each_pass() -> None:
    plain, gpu_0 = Variant(lambda _repeat: None), torch.device("cuda", 0)
    assert enqueues_ahead([plain], gpu_0)
    assert not enqueues_ahead([plain], ALONE.device)
    assert not enqueues_ahead([plain, replace(plain, waits=True)], gpu_0)
    with instruments(Runtime(debug=True), ALONE):
        assert not enqueues_ahead([plain], gpu_0)


def test_what_the_warm_up_enqueued_in_time_is_never_launch_bound_and_a_step_is_a_pass_of_its_own(
    stream: SimulatedStream,
) -> None:
    stepping = replace(kernels(stream, 1000.0), step=lambda: stream.run(1, 1.0, 7.0))
    samples = time_variants({"slow": stepping, "fast": kernels(stream, 1.0)}, ALONE, 1, 3, gpu(stream))
    passes = {"fwd": [40.0] * 3, "bwd": [80.0] * 3}
    assert samples["slow"].us == {**passes, "step": [7.0] * 3, "all": [127.0] * 3}
    assert samples["fast"].us == {**passes, "all": [120.0] * 3}
    assert not any(taken.launch_bound for taken in samples.values())


@pytest.mark.quiet
@pytest.mark.gpu(count=1)
def test_a_gpu_is_timed_by_its_own_clock_behind_a_spin() -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    single = Variant(lambda _: matrix @ matrix, lambda _r, _k: {})
    four = Variant(lambda _: [matrix @ matrix for _ in range(4)], lambda _r, _k: {})
    samples = time_variants({"single": single, "four": four}, ranks, warmup=2, repeats=9)
    one, many = (summarise(samples[name].us["fwd"]).median_us for name in ("single", "four"))
    # 2 * 4096^3 FLOP take over 100 us at any GPU's rate so far; the host enqueues them in a tenth of it.
    assert one > 100
    assert 3.2 < many / one < 4.8
    assert not samples["four"].launch_bound


@pytest.mark.quiet
@pytest.mark.gpu(count=1)
def test_a_host_that_is_too_slow_is_noticed() -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    pause_s = iter([0.0, 0.0, 0.1, 0.4, 1.6, 1.6])

    def forward(_: int) -> torch.Tensor:
        time.sleep(next(pause_s))
        return torch.zeros(1, device="cuda")

    samples = time_variants({"late": Variant(forward, lambda _r, _k: {})}, ranks, warmup=2, repeats=3)
    assert samples["late"].launch_bound


TENSORS = ("output", "input_grad", "weight_grad")


def returning(*tensors: torch.Tensor, names: tuple[str, ...] = TENSORS[1:]) -> Variant:
    """A variant of this output and these gradients."""
    output, *gradients = tensors
    named = dict(zip(names, gradients, strict=True))
    return Variant(lambda _: output, lambda _repeat, _output: named)


def filled(value: float) -> list[torch.Tensor]:
    return [torch.full((3, 3), value) for _ in TENSORS]


def test_a_pass_between_forward_and_backward_is_timed_and_checked() -> None:
    def scheduled(factor: float) -> Variant:
        return Variant(
            lambda _: torch.ones(2),
            lambda _, output: {"gradient": output + 1},
            both=lambda _, output: factor * output,
        )

    samples = time_variants({"one": scheduled(2.0)}, ALONE, warmup=0, repeats=1, clock=ScriptedClock())
    assert list(samples["one"].us) == ["fwd", "both", "bwd", "all"]
    errors = relative_error(scheduled(3.0), scheduled(2.0), ALONE)
    assert errors == pytest.approx({"output": 0.0, "output of both": 0.5, "gradient": 1 / 3})


@pytest.mark.parametrize(
    ("place", "value", "error"), [(0, 11.0, 0.1), (1, 9.0, 0.1), (2, 11.0, 0.1), (0, torch.nan, torch.inf)]
)
def test_one_wrong_element_is_found_in_every_tensor(place: int, value: float, error: float) -> None:
    wrong = filled(10.0)
    wrong[place][1, 2] = value
    expected = {name: pytest.approx(error) if number == place else 0.0 for number, name in enumerate(TENSORS)}
    found = relative_error(returning(*wrong), returning(*filled(10.0)), ALONE)
    # What is no number is the largest one.
    assert {name: torch.inf if each > 1e30 else each for name, each in found.items()} == expected


def test_tensors_are_compared_by_name_whatever_their_order() -> None:
    output, *gradients = (index * torch.ones(2) for index in range(3))
    backwards = returning(output, *reversed(gradients), names=TENSORS[:0:-1])
    assert max(relative_error(returning(output, *gradients), backwards, ALONE).values()) == 0.0


def wrong_on_rank_1(ranks: Ranks) -> dict[str, float]:
    wrong = filled(10.0)
    wrong[0][0, 0] += ranks.rank
    return relative_error(returning(*wrong), returning(*filled(10.0)), ranks)


def test_all_ranks_hear_of_the_error_of_one() -> None:
    expected = {"output": pytest.approx(0.1), "input_grad": 0.0, "weight_grad": 0.0}
    assert run_ranks(2, wrong_on_rank_1, keep="cpu") == [expected, expected]


def test_zeros_equal_zeros_and_nothing_else() -> None:
    zeros = returning(*filled(0.0))
    assert max(relative_error(zeros, zeros, ALONE).values()) == 0.0
    assert min(relative_error(returning(*filled(1.0)), zeros, ALONE).values()) > 1e30


def test_random_numbers_are_the_same_in_both() -> None:
    inputs = torch.ones(3), 2 * torch.ones(3)
    rounded = Variant(lambda repeat: inputs[repeat] + torch.rand(3), lambda _repeat, _output: {"grad": torch.rand(2)})
    assert relative_error(rounded, rounded, ALONE) == {"output": 0.0, "grad": 0.0}


def test_what_answers_with_the_last_calls_numbers_is_found() -> None:
    inputs = [torch.ones(3), 2 * torch.ones(3)]
    buffer = [inputs[0]]

    def stale(repeat: int) -> torch.Tensor:
        buffer.append(inputs[repeat])
        return buffer[-2]

    late = Variant(stale, lambda _repeat, _output: {})
    prompt = Variant(lambda repeat: inputs[repeat], lambda _repeat, _output: {})
    assert relative_error(late, prompt, ALONE)["output"] == pytest.approx(0.5)
