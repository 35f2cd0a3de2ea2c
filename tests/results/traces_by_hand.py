"""Traces with numbers that one can compute with by hand."""

from pathlib import Path
from typing import Any

from tests.trace.conftest import HandMadeTrace


def write_trace(path: Path, rank: int | None, gemm_us: list[float], comm_us: float, **kernels: str) -> Path:
    """For each iteration a GEMM of such a length on one stream, and from its start a communication on another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = HandMadeTrace(path)
    for number, length_us in enumerate(gemm_us):
        at = number * 1000.0
        made.annotation(f"ProfilerStep#{number}", at, at + 900)
        for correlation, (name, end, stream) in enumerate(
            [
                (kernels.get("gemm", "nvjet_tst_a"), length_us, 7),
                (kernels.get("comm", "ncclDevKernel_AllGather_RING_LL()"), comm_us, 23),
            ],
            start=10 * number + 1,
        ):
            made.launch(at + 1, correlation)
            made.kernel(name, at + 5, at + 5 + end, correlation, stream)
    document: dict[str, Any] = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    return made.write(**document)
