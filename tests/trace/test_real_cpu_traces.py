"""Traces recorded here and now on the CPU, against what the recorded program did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from overlap_sweep.trace import TraceRow, analyse_trace

STEPS = 3


class Model:
    """Two products, each of which has two backward."""

    def __init__(self) -> None:
        self.x = torch.randn(16, 32)
        self.w1 = torch.randn(32, 32, requires_grad=True)
        self.w2 = torch.randn(32, 32, requires_grad=True)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1)

    def loss(self, reentrant: bool | None = None) -> torch.Tensor:
        x = self.x.clone().requires_grad_()
        h = self.hidden(x) if reentrant is None else checkpoint(self.hidden, x, use_reentrant=reentrant)
        return (h @ self.w2).sum()

    def step(self, reentrant: bool | None = None) -> None:
        self.loss(reentrant).backward()


FORWARD, BACKWARD = 2, 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Rows = dict[tuple[int, str], TraceRow]
Record = Callable[..., Rows]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Records steps of a function, after one that is not recorded; returns the rows by iteration and phase."""

    def of(step: Callable[[], object], name: str = "trace.json", **options: Any) -> Rows:
        step()
        with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
            for _ in range(STEPS):
                step()
        profiler.export_chrome_trace(str(tmp_path / name))
        return {(row.iteration, row.phase): row for row in analyse_trace(tmp_path / name)}

    return of


def gemms(rows: Rows) -> dict[tuple[int, str], int]:
    return {which: row.num_gemm_events for which, row in rows.items()}


def every_step(recompute: int | None = None) -> dict[tuple[int, str], int]:
    """Products of each step and phase, of which checkpoints run some again."""
    again = recompute or 0
    counts = {"fwd": FORWARD, "bwd": BACKWARD + again, "all": FORWARD + BACKWARD + again}
    counts |= {} if recompute is None else {"recompute": recompute}
    return {(step, phase): count for step in range(STEPS) for phase, count in counts.items()}


EVERYTHING = {"record_shapes": True, "with_stack": True, "profile_memory": True}


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"name": "trace.json.gz"}])
def test_a_plain_model_recomputes_nothing_and_more_in_the_trace_changes_nothing(
    record: Record, options: dict[str, Any]
) -> None:
    rows = record(Model().step, **options)
    assert gemms(rows) == every_step()
    assert all(0 < row.gemm_busy_us < row.span_us for row in rows.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes(record: Record, reentrant: bool) -> None:
    model = Model()
    rows = record(lambda: model.step(reentrant))
    # The part that is recomputed has one product.
    assert gemms(rows) == every_step(recompute=1)
    for step in range(STEPS):
        assert rows[step, "recompute"].num_compute_events == 1
        assert rows[step, "recompute"].span_us < rows[step, "bwd"].span_us


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_of_a_checkpoint(record: Record, reentrant: bool) -> None:
    model = Model()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.hidden, x @ model.w2, use_reentrant=reentrant)

    def step() -> None:
        checkpoint(outer, model.x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()

    # All of it once for the outer one, and what is in the inner one once more: without reentrance, it stops as soon as
    # it has what backward needs, which is what went into the inner product.
    assert gemms(record(step)) == every_step(recompute=3 if reentrant else 2)


def test_the_optimizer_is_in_neither_pass(record: Record) -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.w1, model.w2], 1e-3, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model.step()
        optimizer.step()

    rows = record(step)
    assert gemms(rows) == every_step()
    for number in range(STEPS):
        passes = rows[number, "fwd"].num_compute_events + rows[number, "bwd"].num_compute_events
        # One update of each of two parameters.
        assert rows[number, "all"].num_compute_events == passes + 2


def test_inference_is_all_forward(record: Record) -> None:
    rows = record(torch.no_grad()(Model().loss))
    assert gemms(rows) == {(0, "fwd"): FORWARD * STEPS, (0, "all"): FORWARD * STEPS}


def test_a_compiled_model(record: Record) -> None:
    """Whatever the backend, what it compiled runs backward inside of autograd. This one needs no compiler of C++."""
    model = Model()
    compiled = torch.compile(lambda x: (model.hidden(x) @ model.w2).sum(), backend="aot_eager")
    x = model.x.clone().requires_grad_()
    assert gemms(record(lambda: compiled(x).backward())) == every_step()
