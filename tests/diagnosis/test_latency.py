"""When small collectives could be merged: timelines that are drawn by hand."""

from pathlib import Path

import pytest

from overlap_sweep.diagnosis import as_share
from overlap_sweep.diagnosis.causes.latency import MANY
from overlap_sweep.report.numbers import as_rate
from tests.timeline import AUTOGRAD, Timeline, diagnosed, findings, one_step

SMALL, LARGE = 1 << 10, 1 << 24
"""Elements of two bytes: 2 KB, and 34 MB that take 340 us at 100 GB/s."""


def sums(count: int, elements: int, took: float, *, computed: float = 0.0) -> Timeline:
    """A backward pass, reductions after it one by one with some computation between them, and the optimizer."""
    made = one_step(-3000, 900)
    made.kernel(0, 1000)
    made.backward(500, 900, "torch::autograd::AccumulateGrad")
    made.kernel(1000, 2000, launch=600, thread=AUTOGRAD)
    # Shows the bandwidth.
    made.collective("all_reduce", 1500, 1840, launch=700, thread=AUTOGRAD, elements=LARGE)
    start = 2000.0
    for _ in range(count):
        made.collective("all_reduce", start, start + took, launch=800, elements=elements)
        if computed:
            made.kernel(start + took, start + took + computed, launch=810)
        start += took + computed
    made.optimizer(820, 900)
    made.kernel(start, start + 1000, "multi_tensor_apply_kernel", launch=840)
    return made


def test_many_small_reductions_have_their_latency_once(tmp_path: Path) -> None:
    found = findings(tmp_path, sums(50, SMALL, 20))
    rate = LARGE * 2 / 340_000
    assert found["latency"].lost_us == pytest.approx(50 * (20 - SMALL * 2 / rate / 1000) * 49 / 50, abs=0.01)
    assert "50 calls of 2.0 KB per step, 20 us each" in found["latency"].evidence
    assert "one call instead of 50" in found["latency"].evidence
    assert found["latency"].try_.startswith("Record rank 1 as well, which may be what is late. If it is not: ")
    assert (found["latency"].changes, found["latency"].cannot_tell) == ([], True)
    assert "torch.cat" in found["latency"].try_


@pytest.mark.parametrize(
    "made",
    [sums(MANY - 1, SMALL, 20), sums(1, 50 * SMALL, 1000), sums(50, LARGE, 340)],
    ids=["few", "the same bytes at once", "large"],
)
def test_few_or_large_ones_have_other_causes(tmp_path: Path, made: Timeline) -> None:
    causes = {finding.cause for finding in diagnosed(tmp_path, made).findings}
    assert causes
    assert "latency" not in causes


def test_activations_that_are_computed_from_one_another_cannot_be_merged(tmp_path: Path) -> None:
    """Tensor parallelism with a few tokens: a small all-reduce after each layer."""

    def made(computed: float) -> Timeline:
        timeline, start = Timeline(), 0.0
        timeline.step(0, -3000, -100)
        for layer in range(40):
            timeline.kernel(start, start + computed, launch=-2000 + 10 * layer)
            timeline.collective(
                "all_reduce", start + computed, start + computed + 20, launch=-1998 + 10 * layer, elements=SMALL
            )
            start += computed + 20
        timeline.kernel(start, start + 100, launch=-500)
        return timeline

    assert list(findings(tmp_path, made(30))) == ["dependency"]
    assert next(iter(findings(tmp_path, made(2)))) == "latency"


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.5, "50%"), (0.0996, "10%"), (0.0549, "5.5%"), (0.01, "1.0%"), (0.0003, "0.03%"), (0.0, "0%")],
)
def test_a_small_share_has_a_digit(share: float, words: str) -> None:
    assert as_share(share) == words


@pytest.mark.parametrize(("rate", "words"), [(312.4, "312"), (0.0231, "0.0231"), (4.57e-5, "0.0000457"), (0.0, "0")])
def test_a_small_rate_has_digits(rate: float, words: str) -> None:
    assert as_rate(rate) == words
