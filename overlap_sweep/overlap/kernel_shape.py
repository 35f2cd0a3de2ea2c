"""Shapes of the GEMM and the collective whose implementations `workload=kernel` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_sweep.overlap.models import LinearShape

KERNELS = {
    "ag_gemm": "all-gather of the input, then the GEMM",
    "gemm_rs": "the GEMM, then the reduce-scatter of its output",
    "gemm_ar": "the GEMM, then the all-reduce of its output",
}

CUSTOM = "custom"
"""Stands for a model's name if the sizes were given."""

SEQUENTIAL = "sequential"
"""The baseline: torch's GEMM and NCCL (or gloo), one after the other."""
GEMM_ONLY = "gemm_only"
COMM_ONLY = "comm_only"
BASELINES = (SEQUENTIAL, GEMM_ONLY, COMM_ONLY)
"""Measured with every implementation."""

_INPUT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_OUTPUT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
"""The output of an FP8 GEMM is bf16."""
PRECISION_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
"""Our names of the input types, by torch's."""


@dataclass(frozen=True)
class KernelShape:
    """Global shape of `y = x W^T`: x [m, k], W [n, k], y [m, n].

    ag_gemm: a rank holds x [m / tp, k] and W [n / tp, k], gathers x, and computes y [m, n / tp].
    gemm_rs: a rank holds x [m, k / tp] and W [n, k / tp], and gets its part y [m / tp, n] of the sum over the ranks.
    gemm_ar: the same, but every rank gets the whole sum y [m, n].
    """

    kernel: str
    m: int
    n: int
    k: int
    tp_size: int

    @classmethod
    def of(cls, point: Mapping[str, Any]) -> KernelShape:
        """Returns the shape of a resolved point's kernel."""
        return cls(*(point[name] for name in ("kernel", "m", "n", "k", "tp_size")))

    @property
    def gathers(self) -> bool:
        return self.kernel == "ag_gemm"

    @property
    def _linear(self) -> LinearShape:
        return LinearShape("column" if self.gathers else "row", self.m, self.k, self.n, self.tp_size)

    @property
    def input_shape(self) -> tuple[int, int]:
        return self._linear.input_shape

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self._linear.weight_shape

    @property
    def output_shape(self) -> tuple[int, int]:
        return (self.m, self.n) if self.kernel == "gemm_ar" else self._linear.output_shape

    @property
    def gemm_shape(self) -> tuple[int, int, int]:
        """Returns m, n, k of one rank's GEMM."""
        return self.m, *self.weight_shape

    @property
    def flops(self) -> int:
        """Returns one rank's floating-point operations, counting multiplications and additions."""
        return 2 * self.m * self.n * self.k // self.tp_size

    def link_bytes(self, precision: str) -> float:
        """Returns the fewest bytes that a rank can send and receive: (tp - 1) / tp of the tensor, twice that for an
        all-reduce. nccl-tests' bus bandwidth counts the same."""
        whole = self.m * (self.k * _INPUT_BYTES[precision] if self.gathers else self.n * _OUTPUT_BYTES[precision])
        return whole * (self.tp_size - 1) / self.tp_size * (2 if self.kernel == "gemm_ar" else 1)

    def refusal(self) -> str | None:
        """Returns why these sizes cannot be cut into `tp_size` equal parts, or None."""
        for name in {"ag_gemm": "mn", "gemm_rs": "km", "gemm_ar": "k"}[self.kernel]:
            if getattr(self, name) % self.tp_size:
                return f"{self.kernel}: {name}={getattr(self, name)} is not divisible by tp_size={self.tp_size}"
        return None
