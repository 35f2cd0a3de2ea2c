"""Traces with numbers that one can compute with by hand."""

from pathlib import Path

from tests.timeline import Timeline


def write_trace(path: Path, rank: int | None, gemm_us: list[float], comm_us: float, **kernels: str) -> Path:
    """For each iteration a GEMM of such a length on one stream, and from its start a communication on another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Timeline(rank)
    for number, length_us in enumerate(gemm_us):
        at = number * 1000.0
        made.step(number, at, at + 900)
        made.kernel(at + 5, at + 5 + length_us, kernels.get("gemm", "nvjet_tst_a"), launch=at + 1)
        comm = kernels.get("comm", "ncclDevKernel_AllGather_RING_LL()")
        made.kernel(at + 5, at + 5 + comm_us, comm, launch=at + 1, stream=23)
    return made.write(path)
