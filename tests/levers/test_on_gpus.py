"""Levers that have a meaning on GPUs only, in trainings on two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.levers import Value
from tests.levers.runs import TRAINING, Ran, run

HOST: dict[str, Value] = {"loader.pin_memory": True, "host.non_blocking": True, "optimizer.fused": True}


def blocks(ran: Ran) -> set[int | None]:
    return {moved.blocks for one in ran.prints for step in one.steps for moved in step.moved}


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("ddp", {"group.max_ctas": "default_pg:1", "group.high_priority": True, "ddp.compress_bf16": True, **HOST}),
        ("fsdp2", {"group.max_ctas": "0-1:1", "fsdp2.prefetch": 2, "fsdp2.reshard_after_forward": False, **HOST}),
        (
            "fsdp1",
            {
                "group.max_ctas": 1,
                "fsdp1.forward_prefetch": True,
                "fsdp1.backward_prefetch": "BACKWARD_POST",
                "fsdp1.limit_all_gathers": False,
            },
        ),
    ],
)
def test_levers_are_in_force(kind: str, values: dict[str, Value], tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", TRAINING.read_text(), kind)
    ran = run(tmp_path / "lever", TRAINING.read_text(), kind, levers=values)

    assert (ran.applied, ran.skipped) == ({*values}, {})
    assert blocks(ran) == {1}
    assert blocks(plain) > {1} or max(filter(None, blocks(plain))) > 1
    if "ddp.compress_bf16" in values:
        types = {moved.dtype for one in ran.prints for step in one.steps for moved in step.moved}
        assert {"BFloat16"} == types


@pytest.mark.gpu(count=2)
def test_the_fewest_thread_blocks_are_taken_alone(tmp_path: Path) -> None:
    ran = run(tmp_path / "lever", TRAINING.read_text(), "ddp", levers={"group.min_ctas": 4})
    assert (ran.applied, ran.skipped) == ({"group.min_ctas"}, {})
    assert max(filter(None, blocks(ran))) >= 4


@pytest.mark.gpu(count=2)
def test_symmetric_memory_and_a_group_of_its_own_need_pytorch_2_13(tmp_path: Path) -> None:
    asked: dict[str, Value] = {"fsdp2.separate_reduce_scatter_group": True, "fsdp2.symmetric_memory": "kernels"}
    ran = run(tmp_path / "run", TRAINING.read_text(), "fsdp2", levers=asked)

    assert ran.applied | {*ran.skipped} == {*asked}
    assert all("needs PyTorch 2.13" in reason for reason in ran.skipped.values())
