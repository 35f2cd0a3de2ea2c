from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from overlap_sweep.measure.clock import Turn
from overlap_sweep.measure.timing import summarise, time_variants
from overlap_sweep.measure.variant import Variant
from overlap_sweep.ranks import Ranks
from tests.processes import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def sleeper(forward_s: float, backward_s: float, calls: list[str], name: str) -> Variant:
    def forward(repeat: int) -> int:
        calls.append(f"{name}{repeat}")
        time.sleep(forward_s)
        return repeat

    def backward(repeat: int, kept: Any) -> dict[str, torch.Tensor]:
        assert kept == repeat
        time.sleep(backward_s)
        return {}

    return Variant(forward, backward)


def time_on_rank(ranks: Ranks) -> tuple[dict[str, dict[str, list[float]]], list[str], bool]:
    """Times by variant and pass, the variants' calls in order, and whether one that is late now and then is bound."""
    calls: list[str] = []
    slow = ranks.rank == 1
    variants = {
        "a": sleeper(0.02 if slow else 0.0, 0.0, calls, "a"),
        "b": sleeper(0.0, 0.0 if slow else 0.03, calls, "b"),
        "c": sleeper(0.0, 0.0, calls, "c"),
    }
    samples = time_variants(variants, ranks, warmup=1, repeats=3)
    # Late in one repeat each: no rank in a majority of its own repeats, but two of three have a late rank.
    clock = ScriptedClock(iter([repeat == ranks.rank for repeat in range(3)]))
    late = time_variants({"it": named([])}, ranks, warmup=0, repeats=3, clock=clock)["it"]
    return {name: taken.us for name, taken in samples.items()}, calls, late.launch_bound


def test_the_slowest_rank_counts_and_the_variants_take_turns() -> None:
    (first, calls, *late), (second, _, *late_too) = run_ranks(2, time_on_rank)
    assert first == second
    assert all(us >= 20_000 for us in first["a"]["fwd"])
    assert all(us >= 30_000 for us in first["b"]["bwd"])
    # The best of them: what else the machine runs may delay any one.
    assert min(first["a"]["bwd"]) < 15_000
    assert min(first["b"]["fwd"]) < 15_000
    for us in first.values():
        assert us["all"] == [fwd + bwd for fwd, bwd in zip(us["fwd"], us["bwd"], strict=True)]
    # One round of warm-up, then every variant is first once.
    assert calls == ["a0", "b1", "c2", "a3", "b4", "c5", "b6", "c7", "a8", "c9", "a10", "b11"]
    assert late == late_too == [True]


@dataclass
class ScriptedClock:
    """Runs each pass, and answers with the numbers of its turns: 1, 2, 3, ... us for every pass."""

    late: Iterator[bool] = field(default_factory=lambda: iter([False] * 1000))
    turns: int = 0

    def time(self, variant: Variant, repeat: int) -> Turn:
        self.turns += 1
        kept, us = None, {}
        for name, run in variant.passes():
            kept, us[name] = run(repeat, kept), float(self.turns)
        return Turn(us, next(self.late))


def named(calls: list[str], **more: Callable[[], None]) -> Variant:
    """Notes its calls; its passes return something that the next must get."""

    def forward(repeat: int) -> str:
        calls.append("fwd")
        return f"output{repeat}"

    def backward(repeat: int, output: str) -> dict[str, torch.Tensor]:
        assert output == f"output{repeat}"
        calls.append("bwd")
        return {}

    return Variant(forward, backward, **more)


@pytest.mark.parametrize(
    ("late", "bound"),
    [
        ((False, False, False, False, False), False),
        ((True, False, False, False, False), False),
        ((False, True, False, True, False), False),
        ((True, False, True, False, True), True),
        ((True, True, True, True, True), True),
        ((True, True, False, False), False),
    ],
)
def test_launch_bound_is_a_majority_of_late_repeats(late: Sequence[bool], bound: bool) -> None:
    clock = ScriptedClock(iter([True, True, *late]))
    samples = time_variants({"it": named([])}, ALONE, warmup=2, repeats=len(late), clock=clock)
    assert samples["it"].launch_bound is bound


def test_a_prepared_variant_runs_once_untimed_before_each_of_its_turns_and_another_does_not() -> None:
    calls: list[str] = []
    variants = {"a": named(calls, prepare=lambda: calls.append("prepare")), "b": named(calls)}
    samples = time_variants(variants, ALONE, warmup=1, repeats=2, clock=ScriptedClock())
    a, b = ["prepare", "fwd", "bwd", "fwd", "bwd"], ["fwd", "bwd"]
    # After the warm-up, they take turns in being first.
    assert calls == [*a, *b, *a, *b, *b, *a]
    # The clock counts every run; those right after preparing are dropped.
    assert {name: taken.us["fwd"] for name, taken in samples.items()} == {"a": [5.0, 9.0], "b": [6.0, 7.0]}


def test_getting_ready_prepares_where_there_is_something_to() -> None:
    calls: list[str] = []
    for variant in (named(calls, prepare=lambda: calls.append("prepare")), named(calls)):
        variant.get_ready()
    assert calls == ["prepare"]


def test_a_step_is_timed_and_counts_in_the_sum() -> None:
    calls: list[str] = []
    variant = named(calls, step=lambda: calls.append("step"))
    samples = time_variants({"it": variant}, ALONE, warmup=0, repeats=2, clock=ScriptedClock())
    assert calls == ["fwd", "bwd", "step"] * 2
    assert samples["it"].us == {"fwd": [1.0, 2.0], "bwd": [1.0, 2.0], "step": [1.0, 2.0], "all": [3.0, 6.0]}


def test_the_hosts_clock_times_a_step_too() -> None:
    variant = named([], step=lambda: time.sleep(0.02))
    us = time_variants({"it": variant}, ALONE, warmup=0, repeats=2)["it"].us
    assert min(us["step"]) >= 20_000
    assert us["all"] == [sum(parts) for parts in zip(us["fwd"], us["bwd"], us["step"], strict=True)]


def test_summary_statistics() -> None:
    summary = summarise([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.q1_us, summary.median_us, summary.q3_us) == (2.0, 3.0, 4.0)
    assert summary.samples_us == [4.0, 1.0, 3.0, 2.0, 5.0]


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


@pytest.mark.gpu(count=1)
def test_a_host_that_is_too_slow_is_noticed() -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    pause_s = iter([0.0, 0.0, 0.1, 0.4, 1.6, 1.6])

    def forward(_: int) -> torch.Tensor:
        time.sleep(next(pause_s))
        return torch.zeros(1, device="cuda")

    samples = time_variants({"late": Variant(forward, lambda _r, _k: {})}, ranks, warmup=2, repeats=3)
    assert samples["late"].launch_bound
