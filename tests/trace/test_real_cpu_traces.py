"""Traces recorded here and now on the CPU, against what the recorded program did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule
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


def record(path: Path, step: Callable[[], object], **options: Any) -> dict[tuple[int, str], TraceRow]:
    """Rows by iteration and phase."""
    step()
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        for _ in range(STEPS):
            step()
    profiler.export_chrome_trace(str(path))
    return {(row.iteration, row.phase): row for row in analyse_trace(path)}


def gemms(rows: dict[tuple[int, str], TraceRow]) -> dict[tuple[int, str], int]:
    return {which: row.num_gemm_events for which, row in rows.items()}


def every_step(**counts: int) -> dict[tuple[int, str], int]:
    return {(step, phase): count for step in range(STEPS) for phase, count in counts.items()}


def test_a_plain_model_recomputes_nothing(tmp_path: Path) -> None:
    rows = record(tmp_path / "trace.json", Model().step)
    assert gemms(rows) == every_step(fwd=FORWARD, bwd=BACKWARD, all=FORWARD + BACKWARD)
    assert all(0 < row.gemm_busy_us < row.span_us for row in rows.values())


@pytest.mark.parametrize("options", [{"record_shapes": True}, {"with_stack": True}, {"profile_memory": True}])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_more_in_the_trace_changes_nothing(tmp_path: Path, options: dict[str, bool], suffix: str) -> None:
    rows = record(tmp_path / f"trace{suffix}", Model().step, **options)
    assert gemms(rows) == every_step(fwd=FORWARD, bwd=BACKWARD, all=FORWARD + BACKWARD)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes(tmp_path: Path, reentrant: bool) -> None:
    model = Model()
    rows = record(tmp_path / "trace.json", lambda: model.step(reentrant))
    # The part that is recomputed has one product.
    whole = FORWARD + BACKWARD + 1
    assert gemms(rows) == every_step(fwd=FORWARD, bwd=BACKWARD + 1, recompute=1, all=whole)
    for step in range(STEPS):
        assert rows[step, "recompute"].num_compute_events == 1
        assert rows[step, "recompute"].span_us < rows[step, "bwd"].span_us


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_of_a_checkpoint(tmp_path: Path, reentrant: bool) -> None:
    model = Model()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.hidden, x @ model.w2, use_reentrant=reentrant)

    def step() -> None:
        checkpoint(outer, model.x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()

    rows = record(tmp_path / "trace.json", step)
    # All of it once for the outer one, and what is in the inner one once more: without reentrance, it stops as soon as
    # it has what backward needs, which is what went into the inner product.
    again = 3 if reentrant else 2
    assert gemms(rows) == every_step(fwd=FORWARD, bwd=BACKWARD + again, recompute=again, all=FORWARD + BACKWARD + again)


def test_the_optimizer_is_in_neither_pass(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.w1, model.w2], 1e-3, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model.step()
        optimizer.step()

    rows = record(tmp_path / "trace.json", step)
    assert gemms(rows) == every_step(fwd=FORWARD, bwd=BACKWARD, all=FORWARD + BACKWARD)
    for number in range(STEPS):
        passes = rows[number, "fwd"].num_compute_events + rows[number, "bwd"].num_compute_events
        # One update of each of two parameters.
        assert rows[number, "all"].num_compute_events == passes + 2


def test_micro_batches_within_the_profilers_steps(tmp_path: Path) -> None:
    model, path = Model(), tmp_path / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            for _ in range(3):
                model.step()
            profiler.step()
    rows = {(row.iteration, row.phase): row for row in analyse_trace(path)}
    per_step = {"fwd": 3 * FORWARD, "bwd": 3 * BACKWARD, "all": 3 * (FORWARD + BACKWARD)}
    assert gemms(rows) == {(step, phase): count for step in (2, 3) for phase, count in per_step.items()}


def test_without_the_profilers_steps_every_micro_batch_is_an_iteration(tmp_path: Path) -> None:
    model = Model()
    rows = record(tmp_path / "trace.json", lambda: [model.step() for _ in range(2)])
    assert {iteration for iteration, _ in rows} == set(range(2 * STEPS))
    assert {row.num_gemm_events for (_, phase), row in rows.items() if phase == "bwd"} == {BACKWARD}


def test_inference_is_all_forward(tmp_path: Path) -> None:
    model = Model()

    def step() -> None:
        with torch.no_grad():
            model.loss()

    rows = record(tmp_path / "trace.json", step)
    assert gemms(rows) == {(0, "fwd"): FORWARD * STEPS, (0, "all"): FORWARD * STEPS}


def test_a_compiled_model(tmp_path: Path) -> None:
    """Whatever the backend, what it compiled runs backward inside of autograd. This one needs no compiler of C++."""
    model = Model()
    compiled = torch.compile(lambda x: (model.hidden(x) @ model.w2).sum(), backend="aot_eager")
    x = model.x.clone().requires_grad_()
    rows = record(tmp_path / "trace.json", lambda: compiled(x).backward())
    assert gemms(rows) == every_step(fwd=FORWARD, bwd=BACKWARD, all=FORWARD + BACKWARD)
