"""A kernel's GEMM by torch: cuBLAS on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap_sweep.backends import Operand, Problem
from overlap_sweep.backends.torch.overlap import Multiply, multiply_by_matrix


def multiply_by(weight: Operand, scale: Tensor | None) -> Multiply:
    """Multiplication by the transpose of `weight` [n, k], of rows that have this scale: (rows, product) -> None.

    `rows` may be FP8 as bytes, which is how it is communicated.
    """
    matrix = weight.data.t()

    def multiply_fp8(rows: Tensor, product: Tensor) -> None:
        assert scale is not None
        assert weight.scale is not None
        if rows.dim() == 3:
            for part, into in zip(rows, product, strict=True):
                multiply_fp8(part, into)
            return
        # Accumulated fast, as in the forward of FP8 training.
        form: dict[str, Any] = {"out_dtype": product.dtype, "use_fast_accum": True, "out": product}
        torch._scaled_mm(rows.view(weight.data.dtype), matrix, scale_a=scale, scale_b=weight.scale, **form)

    return multiply_by_matrix(matrix) if weight.scale is None else multiply_fp8


def multiplied(problem: Problem, at: int, rows: Tensor, product: Tensor | None = None) -> Tensor:
    """This rank's whole GEMM on `rows`, which belong to that input: into `product`, or newly made."""
    if product is None:
        product = rows.new_empty(rows.shape[0], problem.shape.gemm_shape[1], dtype=problem.out_dtype)
    multiply_by(problem.weight, problem.inputs[at].scale)(rows, product)
    return product


def as_bytes(data: Tensor) -> Tensor:
    """FP8 as what every library communicates; other types as they are."""
    return data.view(torch.uint8) if data.element_size() == 1 else data
