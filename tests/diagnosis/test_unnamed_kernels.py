"""Collectives whose kernels don't say which they are, as in traces before PyTorch 2.3."""

import json
from pathlib import Path

import pytest

from overlap_sweep.diagnosis.calls import Call
from tests.timeline import NCCL, Timeline, findings, one_step

SEND_RECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
ALL_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"


def shapes(dims: str, types: str) -> dict[str, object]:
    """Returns the arguments that record_shapes=True adds to an operator or annotation."""
    return {"Input Dims": json.loads(f"[{dims}]"), "Input type": types.split(",")}


def around_launch(kernel: str, *callers: tuple[str, dict[str, object]], launched_at: float = 50) -> Timeline:
    """Returns a kernel that is launched `launched_at` while its callers run until 60, each within the one before."""
    line = Timeline()
    line.kernel(10, 20, launch=5)
    for i, (name, args) in enumerate(callers):
        line.operator(name, 30 + i, 60 - i, **args)
    line.kernel(100, 200, kernel, launched_at, stream=NCCL, **{"External id": 4711})
    # Before 2.1 a kernel's External id is its correlation, which another operator may have.
    line.operator("aten::mm", 300, 301, **{"External id": 4711})
    return line


def only_call(line: Timeline, directory: Path) -> Call:
    (found,) = line.facts(directory).calls
    return found


NOTHING: dict[str, object] = {}
FIVE = shapes("[5]", "float")


ALL_TO_ALL = "c10d::alltoall_base_"
UNKNOWN = (None, None, None)


@pytest.mark.parametrize(
    ("kernel", "callers", "expected"),
    [
        (
            SEND_RECV,
            [
                (ALL_TO_ALL, shapes("[768], [3392], [], [], []", "int,int,,,Scalar")),
                ("record_param_comms", shapes("[3392], []", "int,Scalar")),
                ("nccl:all_to_all", shapes("[3392]", "int")),
            ],
            ("all_to_all", 3392, 768, "int"),
        ),
        # Of a list of tensors only the annotation knows the sizes.
        (
            SEND_RECV,
            [
                ("c10d::alltoall_", shapes("[], [], []", "TensorList,TensorList,")),
                ("nccl:all_to_all", shapes("[3, 2], [4]", "float,float")),
            ],
            ("all_to_all", 10, None, "float"),
        ),
        # Without record_shapes=True; before 1.13 there is only the annotation.
        (SEND_RECV, [(ALL_TO_ALL, NOTHING), ("nccl:all_to_all", NOTHING)], ("all_to_all", *UNKNOWN)),
        (SEND_RECV, [("nccl:all_to_all", shapes("[7]", "float"))], ("all_to_all", 7, None, "float")),
        (
            SEND_RECV,
            [
                ("c10d::_reduce_scatter_base_", shapes("[2, 384], [16, 384], []", "float,float,")),
                ("nccl:_reduce_scatter_base", shapes("[16, 384]", "float")),
            ],
            ("reduce_scatter", 16 * 384, 2 * 384, "float"),
        ),
        # An uneven one is a group of broadcasts, which ended before the launch.
        (
            "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
            [("c10d::allgather_", shapes("[], [[6, 4]], []", ",TensorList,"))],
            ("all_gather", 24, None, None),
        ),
        (SEND_RECV, [("c10d::gather_", NOTHING), ("nccl:gather", FIVE)], ("gather", 5, None, "float")),
        (SEND_RECV, [("c10d::scatter_", NOTHING), ("nccl:scatter", FIVE)], ("scatter", None, 5, "float")),
        (SEND_RECV, [("c10d::send", NOTHING), ("nccl:send 0->1", FIVE)], ("send", 5, None, "float")),
        (SEND_RECV, [("c10d::recv_", NOTHING), ("nccl:recv 0<-1", FIVE)], ("recv", None, 5, "float")),
        (SEND_RECV, [("nccl:coalesced", NOTHING)], ("send_recv", *UNKNOWN)),
        (SEND_RECV, [("aten::copy_", NOTHING)], ("send_recv", *UNKNOWN)),
        (
            ALL_REDUCE,
            [
                ("c10d::allreduce_", shapes("[], [], []", "TensorList,,Scalar")),
                ("nccl:all_reduce", shapes("[394241]", "float")),
            ],
            ("all_reduce", 394241, 394241, "float"),
        ),
        (
            ALL_REDUCE,
            [("c10d::barrier", NOTHING), ("nccl:all_reduce", shapes("[1]", "Byte"))],
            ("barrier", *UNKNOWN),
        ),
        # RCCL runs everything with one kernel.
        (
            "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)",
            [("c10d::_allgather_base_", shapes("[8], [4]", "c10::BFloat16,c10::BFloat16"))],
            ("all_gather", 4, 8, "c10::BFloat16"),
        ),
        # Where operators say more, they are believed.
        (
            SEND_RECV,
            [
                (ALL_TO_ALL, shapes("[9], [9]", "float,float")),
                ("record_param_comms", {"Collective name": "all_to_allv", "In msg nelems": 5, "dtype": "Int"}),
            ],
            ("all_to_all", 5, None, "Int"),
        ),
    ],
)
def test_the_operator_or_annotation_around_the_launch_says_what_it_is(
    tmp_path: Path,
    kernel: str,
    callers: list[tuple[str, dict[str, object]]],
    expected: tuple[str, int | None, int | None, str | None],
) -> None:
    found = only_call(around_launch(kernel, *callers), tmp_path)
    assert (found.collective, found.sent, found.received, found.dtype) == expected


def test_batched_sends_and_receives_are_launched_after_their_operators(tmp_path: Path) -> None:
    callers = [("c10d::send", NOTHING), ("nccl:send 0->1", NOTHING)]
    found = only_call(around_launch(SEND_RECV, *callers, launched_at=70), tmp_path)
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
    assert "torchrec" in found.try_
