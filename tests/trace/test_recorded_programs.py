"""Traces of programs against what these are known to have done: recorded here and now on the CPU, and on two H200s
(benchmarks/record_gpu_traces.py)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.files import read_trace_files
from tests.trace.conftest import TRACES, analyse_trace

STEPS, FORWARD, BACKWARD = 3, 2, 4
"""Steps that are recorded; products of each."""


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


@pytest.fixture
def model() -> Iterator[Model]:
    """On one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Model()
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


def every_step(recompute: int = 0) -> dict[tuple[int, str], int]:
    """Products of each step and phase, of which checkpoints run some again."""
    counts = {"fwd": FORWARD, "bwd": BACKWARD + recompute, "all": FORWARD + BACKWARD + recompute}
    counts |= {"recompute": recompute} if recompute else {}
    return {(step, phase): count for step in range(STEPS) for phase, count in counts.items()}


def test_a_plain_model_recomputes_nothing_and_more_in_the_trace_changes_nothing(record: Record, model: Model) -> None:
    rows = record(model.step, "trace.json.gz", record_shapes=True, with_stack=True, profile_memory=True)
    assert gemms(rows) == every_step()
    assert all(0 < row.gemm_us < row.span_us for row in rows.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes(record: Record, model: Model, reentrant: bool) -> None:
    rows = record(lambda: model.step(reentrant))
    # The part that is recomputed has one product.
    assert gemms(rows) == every_step(recompute=1)
    for step in range(STEPS):
        assert rows[step, "recompute"].num_compute_events == 1
        assert rows[step, "recompute"].span_us < rows[step, "bwd"].span_us


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_of_a_checkpoint(record: Record, model: Model, reentrant: bool) -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.hidden, x @ model.w2, use_reentrant=reentrant)

    def step() -> None:
        checkpoint(outer, model.x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()

    # All of it once for the outer one, and what is in the inner one once more: without reentrance, it stops as soon as
    # it has what backward needs, which is what went into the inner product.
    assert gemms(record(step)) == every_step(recompute=3 if reentrant else 2)


def test_inference_is_all_forward(record: Record, model: Model) -> None:
    rows = record(torch.no_grad()(model.loss))
    assert gemms(rows) == {(0, "fwd"): FORWARD * STEPS, (0, "all"): FORWARD * STEPS}


EXPECTED = json.loads((TRACES / "h200x2_expected.json").read_text())
LAYERS = 2


@pytest.mark.parametrize(
    ("case", "iterations", "recomputed"),
    [
        # Numbered by the profiler's steps.
        ("ddp", (1, 2), {}),
        # A layer has four products. Without reentrance the last of them is not needed again, and left out.
        ("fsdp2_checkpoint", (1, 2), {"recompute": 3 * LAYERS}),
        ("reentrant_checkpoint", (0, 1, 2), {"recompute": 4 * LAYERS}),
        ("compiled", (1, 2), {}),
        # Replays are iterations without passes.
        ("cuda_graph", (0, 1, 2), {}),
        ("send_recv", (1, 2), {}),
    ],
)
def test_every_matrix_product_is_found_in_its_iteration_and_pass(
    case: str, iterations: tuple[int, ...], recomputed: dict[str, int]
) -> None:
    counts = {"all": sum(EXPECTED[case].values())} | EXPECTED[case] | recomputed
    for file in read_trace_files(sorted(TRACES.glob(f"h200x2_{case}_rank*.json.gz"))):
        assert (file.problem, file.warnings, file.world_size) == (None, [], 2)
        found = {(row.iteration, row.phase): row.num_gemm_events for row in file.rows}
        assert found == {(i, phase): count for i in iterations for phase, count in counts.items()}
