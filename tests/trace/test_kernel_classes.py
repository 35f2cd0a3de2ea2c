"""Names of many libraries' kernels, parameters and template arguments shortened, and what is left of them."""

import csv
import time
from pathlib import Path

import pytest

from overlap_sweep.trace.kernel_classes import classify, function_name

NAMES = Path(__file__).parent.parent / "data" / "kernel_names.tsv"


def known_names() -> list[list[str]]:
    """[category, kind, library, name] of each line."""
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    return list(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize(("category", "kind", "library", "name"), known_names())
def test_class_of(category: str, kind: str, library: str, name: str) -> None:
    assert classify(category, name) == (kind, library)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_gemm>(Params)", "cutlass::Kernel2"),
        ("void (anonymous namespace)::fill<int, f(int)::{lambda()#1}>(int)", "anonymous::fill"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<g<int> >(int)", "internal::gemvx::kernel"),
        ("void scale<8, &(float silu<float, float>(float, Empty const&))>(float*)", "scale"),
        ("void at::native::cut_off<at::native::in_the<middle, of", "at::native::cut_off"),
        ("_Z21kuserbuffers_pushrecviiiiPiS_", "kuserbuffers_pushrecv"),
        ("_ZN2at6native12_GLOBAL__N_16kernelIfEEvT_", "at::native::anonymous::kernel"),
        ("_ZN12_GLOBAL__N_111elementwiseEi", "anonymous::elementwise"),
        ("triton_poi_fused_0", "triton_poi_fused_0"),
        ("", ""),
    ],
)
def test_function_name(kernel: str, function: str) -> None:
    assert function_name(kernel) == function


@pytest.mark.parametrize(
    "name",
    [
        *(bit * 10**6 for bit in ("<", "<>", "a::", "gemm", " ", "nccl", "(", "\0\n", "void ")),
        "_Z" + "L0" * 10**6,
        "_ZN" + "9" * 10**5,
        "_Z99999999999a",
    ],
)
def test_long_names_take_no_time(name: str) -> None:
    begin_s = time.process_time()
    for category in ("kernel", "cpu_op", "user_annotation"):
        classify(category, name)
    assert len(function_name(name)) <= len(name)
    assert time.process_time() - begin_s < 20.0
