from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from overlap_sweep.measure.timing import Variant, summarise, time_variants
from overlap_sweep.ranks import Ranks
from tests.processes import run_ranks


def sleeper(forward_s: float, backward_s: float, calls: list[str], name: str) -> Variant:
    def forward(repeat: int) -> int:
        calls.append(f"{name}{repeat}")
        time.sleep(forward_s)
        return repeat

    def backward(repeat: int, kept: Any) -> tuple[torch.Tensor, ...]:
        assert kept == repeat
        time.sleep(backward_s)
        return ()

    return Variant(forward, backward)


def time_on_rank(ranks: Ranks) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    calls: list[str] = []
    slow = ranks.rank == 1
    variants = {
        "a": sleeper(0.02 if slow else 0.0, 0.0, calls, "a"),
        "b": sleeper(0.0, 0.0 if slow else 0.03, calls, "b"),
        "c": sleeper(0.0, 0.0, calls, "c"),
    }
    samples = time_variants(variants, ranks, warmup=1, repeats=3)
    return {name: taken.us for name, taken in samples.items()}, calls


def test_the_slowest_rank_counts_and_the_variants_take_turns() -> None:
    (first, calls), (second, _) = run_ranks(2, time_on_rank)
    assert first == second
    assert all(us >= 20_000 for us in first["a"]["fwd"])
    assert all(us >= 30_000 for us in first["b"]["bwd"])
    # The best of them: what else the machine runs may delay any one.
    assert min(first["a"]["bwd"]) < 15_000
    assert min(first["b"]["fwd"]) < 15_000
    for us in first.values():
        assert us["all"] == [fwd + bwd for fwd, bwd in zip(us["fwd"], us["bwd"], strict=True)]
    # One round of warm-up, then every variant is first once.
    assert calls == ["a0", "b0", "c0", "a1", "b1", "c1", "b2", "c2", "a2", "c3", "a3", "b3"]


def test_summary_statistics() -> None:
    summary = summarise([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.q1_us, summary.median_us, summary.q3_us) == (2.0, 3.0, 4.0)
    assert summary.samples_us == [4.0, 1.0, 3.0, 2.0, 5.0]


@pytest.mark.gpu(count=1)
def test_a_gpu_is_timed_by_its_own_clock_behind_a_spin() -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    single = Variant(lambda _: matrix @ matrix, lambda _r, _k: ())
    four = Variant(lambda _: [matrix @ matrix for _ in range(4)], lambda _r, _k: ())
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

    samples = time_variants({"late": Variant(forward, lambda _r, _k: ())}, ranks, warmup=2, repeats=3)
    assert samples["late"].launch_bound
