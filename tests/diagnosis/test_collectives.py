import pytest

from overlap_sweep.diagnosis.collectives import collective_of, element_bytes, group_of, sizes_of_host, type_of
from overlap_sweep.trace.columns import Detail, ProcessGroup


@pytest.mark.parametrize(
    ("said", "name", "library", "expected"),
    [
        # What ProcessGroupNCCL and ProcessGroupXCCL write, whatever kernel does it.
        ("allreduce", "ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "nccl", "all_reduce"),
        ("allreduce_coalesced", "", "nccl", "all_reduce"),
        ("allreduce_sparse", "", "nccl", "all_reduce"),
        ("all_gather", "ncclDevKernel_Broadcast_RING_LL", "nccl", "all_gather"),
        ("_allgather_base", "", "nccl", "all_gather"),
        ("allgather_into_tensor_coalesced", "", "nccl", "all_gather"),
        ("reduce_scatter", "", "nccl", "reduce_scatter"),
        ("_reduce_scatter_base", "", "nccl", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "", "nccl", "reduce_scatter"),
        ("all_to_all", "ncclDevKernel_SendRecv", "nccl", "all_to_all"),
        ("all_to_allv", "ncclDevKernel_SendRecv", "nccl", "all_to_all"),
        ("alltoall_base", "", "nccl", "all_to_all"),
        ("_broadcast_oop", "", "nccl", "broadcast"),
        ("_reduce_oop", "", "nccl", "reduce"),
        ("barrier", "ncclDevKernel_AllReduce_Sum_i8_RING_LL", "nccl", "barrier"),
        ("send", "ncclDevKernel_SendRecv", "nccl", "send"),
        ("recv", "ncclDevKernel_SendRecv", "nccl", "recv"),
        ("gather", "", "nccl", "gather"),
        ("scatter", "", "nccl", "scatter"),
        # Coalesced what? The kernel shows it.
        ("coalesced", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "nccl", "reduce_scatter"),
        ("coalesced", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "nccl", "send_recv"),
        (None, "ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)", "nccl", "all_gather"),
        (None, "void ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "nccl", "all_reduce"),
        (None, "ncclDevKernel_AlltoAll_Simple", "nccl", "all_to_all"),
        # RCCL runs everything with one kernel.
        (None, "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "rccl", "rccl"),
        ("_allgather_base", "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "rccl", "all_gather"),
        (None, "void vllm::cross_device_reduce_2stage<float, 2>", "custom", "all_reduce"),
        (None, "kuserbuffers_pushsend", "userbuffers", "userbuffers"),
        (None, "Memcpy PtoP (Device -> Device)", "peer_copy", "peer_copy"),
        (None, "gloo:all_gather", "gloo", "all_gather"),
        (None, "gloo:recvAnySource", "gloo", "recv"),
        (None, "mpi:all_to_all", "mpi", "all_to_all"),
        (None, "ucc:reduce_scatter", "ucc", "reduce_scatter"),
        (None, "c10d::recv_any_source_", "gloo", "recv"),
    ],
)
def test_names(said: str | None, name: str, library: str, expected: str) -> None:
    assert collective_of(Detail(collective=said), name, library) == expected


@pytest.mark.parametrize(
    ("written", "expected", "each"),
    [
        ("Float", "float32", 4),
        ("BFloat16", "bfloat16", 2),
        ("Float8_e4m3fn", "float8_e4m3fn", 1),
        ("Float4_e2m1fn_x2", "float4_e2m1fn_x2", 1),
        ("ComplexHalf", "complex32", 4),
        ("ComplexFloat", "complex64", 8),
        ("Long", "int64", 8),
        ("Byte", "uint8", 1),
        ("UInt16", "uint16", 2),
        ("Bool", "bool", 1),
        ("c10::BFloat16", "bfloat16", 2),
        ("c10::complex<double>", "complex128", 16),
        ("long int", "int64", 8),
        ("int", "int32", 4),
        ("signed char", "int8", 1),
        ("unsigned char", "uint8", 1),
        ("short unsigned int", "uint16", 2),
        ("unsigned int", "uint32", 4),
        ("unsigned long", "uint64", 8),
        ("Bits1x8", "bits1x8", None),
        (None, "", None),
    ],
)
def test_types_of_gpus_and_of_operators(written: str | None, expected: str, each: int | None) -> None:
    assert (type_of(written), element_bytes(written)) == (expected, each)


@pytest.mark.parametrize(
    ("name", "dims", "types", "expected"),
    [
        ("c10d::allreduce_", "[[[6, 4]], [], []]", "['TensorList', '', 'Scalar']", (24, 24, None)),
        ("c10d::allreduce_coalesced_", "[[[3], [5]], []]", "['TensorList', '']", (8, 8, None)),
        ("c10d::_allgather_base_", "[[12, 4], [6, 4], []]", "['float', 'float', '']", (24, 48, "float")),
        ("c10d::allgather_", "[[], [[6, 4]], []]", "['', 'TensorList', '']", (24, None, None)),
        (
            "c10d::allgather_into_tensor_coalesced_",
            "[[[12, 4], [10]], [[6, 4], [5]]]",
            "['TensorList', 'TensorList']",
            (29, 58, None),
        ),
        ("c10d::_reduce_scatter_base_", "[[3, 4], [6, 4]]", "['float', 'float']", (24, 12, "float")),
        ("c10d::reduce_scatter_", "[[[3, 4]], []]", "['TensorList', '']", (None, 12, None)),
        ("c10d::alltoall_base_", "[[6, 4], [2, 4]]", "['float', 'float']", (8, 24, "float")),
        ("c10d::broadcast_", "[[[]]]", "['TensorList']", (1, 1, None)),
        ("c10d::gather_", "[[], [[6, 4]]]", "['', 'TensorList']", (24, None, None)),
        ("c10d::scatter_", "[[[3, 4]], []]", "['TensorList', '']", (None, 12, None)),
        ("c10d::send", "[[[6, 4]], []]", "['TensorList', '']", (24, None, None)),
        ("c10d::recv_", "[[[6, 4]], []]", "['TensorList', '']", (None, 24, None)),
        ("gloo:all_gather", "[[6, 4]]", "['c10::Half']", (24, None, "c10::Half")),
        ("gloo:all_reduce", "[[6, 4]]", "['float']", (24, 24, "float")),
        ("c10d::allreduce_", "[[[6, 4]]]", "['TensorList'", (None, None, None)),
        ("c10d::allreduce_", "[[6, 'x']]", "['TensorList']", (None, None, None)),
        ("c10d::allreduce_", "[[[1000000, 1000000, 1000000]]]", "['TensorList']", (None, None, None)),
        ("c10d::allreduce_", "-" * 100_000, "['TensorList']", (None, None, None)),
        ("c10d::allreduce_", "(" * 1000 + ")" * 1000, "['TensorList']", (None, None, None)),
    ],
)
def test_sizes_of_operators(name: str, dims: str, types: str, expected: tuple[int | None, int | None, str]) -> None:
    found = sizes_of_host(name, Detail(shape=f"{dims} {types}"))
    assert (found.sent, found.received, found.dtype) == expected


def test_what_the_operator_leaves_open_the_span_tells() -> None:
    operator = Detail(shape="[[[3, 4]], []] ['TensorList', '']")
    found = sizes_of_host("c10d::reduce_scatter_", operator, Detail(shape="[[3, 4]] ['c10::BFloat16']"))
    assert found[:1] + found[5:8] == ("c10d::reduce_scatter_", None, 12, "c10::BFloat16")
    assert collective_of(found, "gloo:all_reduce", "gloo") == "reduce_scatter"


def test_a_trace_without_shapes() -> None:
    assert sizes_of_host("gloo:all_reduce", Detail()) == Detail()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[0, 2]", (0, 2)),
        ("[0, 1, ..., 63]", ()),
        ("[0, 1, ...", ()),
        ("7", ()),
        (None, ()),
        ("[0, -1]", ()),
        (f"[{'9' * 30}]", ()),
    ],
)
def test_ranks_of_a_group(written: str | None, expected: tuple[int, ...]) -> None:
    assert group_of("1", Detail(group_ranks=written), None).ranks == expected


def test_the_list_of_groups_knows_more() -> None:
    found = group_of("1", Detail(group_size=2), ProcessGroup("1", "tp", "cuda:nccl", 2, (0, 1)))
    assert (found.title, found.ranks, found.size) == ("1 (tp)", (0, 1), 2)
