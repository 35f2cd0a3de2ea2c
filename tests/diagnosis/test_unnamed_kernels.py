"""Collectives whose kernels don't say which they are, as in traces before PyTorch 2.3."""

import json
from pathlib import Path

import pytest

from overlap_sweep.diagnosis.calls import Call
from tests.timeline import NCCL, Timeline, findings, one_step

SEND_RECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
BROADCAST = "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
ALL_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"


Caller = tuple[str, dict[str, object]]


def caller(written: str) -> Caller:
    """Returns an operator or annotation: its name, and with record_shapes=True `[2, 3], [4] float,int` after it."""
    name, has_shapes, rest = written.partition(" [")
    dims, _, types = rest.rpartition("] ")
    return name, {"Input Dims": json.loads(f"[[{dims}]]"), "Input type": types.split(",")} if has_shapes else {}


def around_launch(kernel: str, *callers: str | Caller, launched_at: float = 50) -> Timeline:
    """Returns a kernel that is launched `launched_at` while its callers run until 60, each within the one before."""
    line = Timeline()
    line.kernel(10, 20, launch=5)
    for i, one in enumerate(callers):
        name, args = caller(one) if isinstance(one, str) else one
        line.operator(name, 30 + i, 60 - i, **args)
    line.kernel(100, 200, kernel, launched_at, stream=NCCL, **{"External id": 4711})
    # Before 2.1 a kernel's External id is its correlation, which another operator may have.
    line.operator("aten::mm", 300, 301, **{"External id": 4711})
    return line


def only_call(line: Timeline, directory: Path) -> Call:
    (found,) = line.facts(directory).calls
    return found


UNKNOWN = (None, None, None)
MORE = ("record_param_comms", {"Collective name": "all_to_allv", "In msg nelems": 5, "dtype": "Int"})


@pytest.mark.parametrize(
    ("kernel", "expected", "callers"),
    [
        (
            SEND_RECV,
            ("all_to_all", 3392, 768, "int"),
            (
                "c10d::alltoall_base_ [768], [3392], [], [], [] int,int,,,Scalar",
                "record_param_comms [3392], [] int,Scalar",
                "nccl:all_to_all [3392] int",
            ),
        ),
        # Of a list of tensors only the annotation knows the sizes.
        (
            SEND_RECV,
            ("all_to_all", 10, None, "float"),
            ("c10d::alltoall_ [], [], [] TensorList,TensorList,", "nccl:all_to_all [3, 2], [4] float,float"),
        ),
        # Without record_shapes=True; before 1.13 there is only the annotation.
        (SEND_RECV, ("all_to_all", *UNKNOWN), ("c10d::alltoall_base_", "nccl:all_to_all")),
        (SEND_RECV, ("all_to_all", 7, None, "float"), ("nccl:all_to_all [7] float",)),
        (
            SEND_RECV,
            ("reduce_scatter", 16 * 384, 2 * 384, "float"),
            (
                "c10d::_reduce_scatter_base_ [2, 384], [16, 384], [] float,float,",
                "nccl:_reduce_scatter_base [16, 384] float",
            ),
        ),
        # An uneven one is a group of broadcasts, which ended before the launch.
        (BROADCAST, ("all_gather", 24, None, None), ("c10d::allgather_ [], [[6, 4]], [] ,TensorList,",)),
        (SEND_RECV, ("gather", 5, None, "float"), ("c10d::gather_", "nccl:gather [5] float")),
        (SEND_RECV, ("scatter", None, 5, "float"), ("c10d::scatter_", "nccl:scatter [5] float")),
        (SEND_RECV, ("send", 5, None, "float"), ("c10d::send", "nccl:send 0->1 [5] float")),
        (SEND_RECV, ("recv", None, 5, "float"), ("c10d::recv_", "nccl:recv 0<-1 [5] float")),
        (SEND_RECV, ("send_recv", *UNKNOWN), ("nccl:coalesced",)),
        (SEND_RECV, ("send_recv", *UNKNOWN), ("aten::copy_",)),
        (
            ALL_REDUCE,
            ("all_reduce", 394241, 394241, "float"),
            ("c10d::allreduce_ [], [], [] TensorList,,Scalar", "nccl:all_reduce [394241] float"),
        ),
        (ALL_REDUCE, ("barrier", *UNKNOWN), ("c10d::barrier", "nccl:all_reduce [1] Byte")),
        # RCCL runs everything with one kernel.
        (
            "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)",
            ("all_gather", 4, 8, "c10::BFloat16"),
            ("c10d::_allgather_base_ [8], [4] c10::BFloat16,c10::BFloat16",),
        ),
        # Where operators say more, they are believed.
        (SEND_RECV, ("all_to_all", 5, None, "Int"), ("c10d::alltoall_base_ [9], [9] float,float", MORE)),
    ],
)
def test_the_operator_or_annotation_around_the_launch_says_what_it_is(
    tmp_path: Path, kernel: str, expected: tuple[str | int | None, ...], callers: tuple[str | Caller, ...]
) -> None:
    found = only_call(around_launch(kernel, *callers), tmp_path)
    assert (found.collective, found.sent, found.received, found.dtype) == expected


def test_batched_sends_and_receives_are_launched_after_their_operators(tmp_path: Path) -> None:
    found = only_call(around_launch(SEND_RECV, "c10d::send", "nccl:send 0->1", launched_at=70), tmp_path)
    assert found.collective == "send_recv"


def message(kind: str, elements: int, peer: int) -> dict[str, object]:
    return {
        **{"Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"},
        **{"Process Group Name": "7", "Group size": 4, "Dst Rank" if kind == "send" else "Src Rank": peer},
    }


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("send", 5, 1)], ("send", "7", 5, 1)),
        ([("recv", 5, 3)], ("recv", "7", 5, 3)),
        ([("send", 5, 1), ("recv", 6, 3)], ("send_recv", "7", 5, None)),
        ([("send", 5, 1), ("send", 6, 3)], ("send", "7", 11, None)),
        ([], ("send_recv", "", None, None)),
    ],
)
def test_what_is_sent_and_received_in_one_batch(
    tmp_path: Path, messages: list[tuple[str, int, int]], expected: tuple[str, str, int | None, int | None]
) -> None:
    line = Timeline()
    line.kernel(10, 20, launch=5)
    # The batch before.
    line.operator("c10d::send", 20, 24)
    line.operator("record_param_comms", 21, 23, **message("send", 9, 1))
    line.annotation("nccl:coalesced", 25, 28)
    for i, one in enumerate(messages):
        line.operator(f"c10d::{one[0]}", 30 + 5 * i, 34 + 5 * i)
        line.operator("record_param_comms", 31 + 5 * i, 33 + 5 * i, **message(*one))
    line.annotation("nccl:coalesced", 50, 60)
    line.kernel(100, 200, SEND_RECV, 55, stream=NCCL)
    found = only_call(line, tmp_path)
    assert (found.collective, found.group, found.sent, found.peer) == expected


def test_no_pipeline_schedule_is_advised_where_embeddings_are_exchanged(tmp_path: Path) -> None:
    """Who is late to an all-to-all: own/all_to_all_rank1_late of tests/data/judged."""
    line = one_step(0, 9000)
    line.function("DistributedDataParallel.forward", 10, 6000)
    line.operator("fbgemm::permute_2D_sparse_data", 10, 20)
    line.kernel(50, 100, launch=30)
    line.operator("c10d::alltoall_base_", 100, 120)
    line.annotation("nccl:all_to_all", 105, 118)
    line.kernel(110, 3000, SEND_RECV, 112, stream=NCCL)
    line.kernel(3001, 5000, launch=150)
    line.backward(5100, 8000)
    (found, *_) = findings(tmp_path, line).values()
    assert (found.cause, found.collective) == ("dependency", "all_to_all")
    assert "First record rank 1" in found.try_
