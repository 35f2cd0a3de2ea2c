"""The classes of Flux 1.1.1 that its extension module flux_ths_pybind binds, over torch.distributed's collectives.

Names of the arguments that are given are those of its src/pybind/ag_gemm.cc, gemm_rs.cc and ths_op.cc, checked against
the byte-flux 1.1.1 source distribution. What is checked of the tensors, and what it says then, is what the
operators check before they launch anything.
"""

from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

ALLOCATED: list[object] = []
"""Objects that hold memory which ranks share."""
CALLS: list[str] = []
_groups: list[dist.ProcessGroup] = []


class NotCompiled:
    """In place of what a build leaves out."""


class AGRingMode(Enum):
    All2All = 0
    Ring1D = 1
    Ring2D = 2


class AllGatherOption:
    __slots__ = ("fuse_sync", "input_buffer_copied", "mode", "use_cuda_core_ag", "use_cuda_core_local", "use_read")

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, None)


def init_flux_shm(pg: dist.ProcessGroup) -> None:
    assert not _groups, "NVSHMEM is initialised once"
    _groups.append(pg)


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(f"/flux/src/fake.cc:1 Check failed: condition. {text}\n")


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def _check_compiled(dtype: torch.dtype, transpose_weight: bool) -> None:
    _check(_arch() in (80, 89, 90), f"unsupported arch: {_arch()}")
    compiled = dtype in (torch.float16, torch.bfloat16) or (_is_fp8(dtype) and _arch() == 89 and not transpose_weight)
    _check(compiled, f"No registered hparams found for meta:GemmMeta(dtype={dtype},arch=Sm{_arch()})")


def _product(
    rows: Tensor, weight: Tensor, transpose_weight: bool, input_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    """In float32."""
    _check_compiled(rows.dtype, transpose_weight)
    _check(rows.is_contiguous() and weight.is_contiguous(), "not contiguous")
    _check(rows.dtype == weight.dtype, "weight type mismatch")
    _check(_is_fp8(rows.dtype) or (input_scale is None and weight_scale is None), "!input_scale.has_value()")
    product = rows.float() @ (weight.float() if transpose_weight else weight.float().t())
    for scale in (input_scale, weight_scale):
        product = product if scale is None else product * scale
    return product


class AGKernel:
    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        nnodes: int,
        full_m: int,
        n_dim: int,
        k_dim: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        assert _groups, "nvshmem not initialized"
        assert nnodes == 1
        self._group, self._shape, self._dtype = tp_group, (full_m, n_dim, k_dim), input_dtype
        # The one buffer that all calls gather into.
        self._gathered = torch.zeros(full_m, k_dim, dtype=input_dtype)
        ALLOCATED.append(self)

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        output: Tensor,
        input_scale: Tensor | None,
        weight_scale: Tensor | None,
        transpose_weight: bool,
        all_gather_option: AllGatherOption,
    ) -> Tensor:
        option = all_gather_option
        _check(option.mode is not AGRingMode.All2All or not option.use_cuda_core_ag, "unsupported for input_dtype=FP16")
        rows = input.shape[0] * self._group.size()
        _check(rows <= self._shape[0], "m-dim greater than maximum possible value")
        assert weight.shape == (self._shape[2:0:-1] if transpose_weight else self._shape[1:]), (
            "not the shape it was made for"
        )
        gathered = self._gathered[:rows]
        dist.all_gather_into_tensor(gathered.view(torch.uint8), input.view(torch.uint8), group=self._group)
        product = _product(gathered, weight, transpose_weight, input_scale, weight_scale)
        out_dtype = torch.bfloat16 if _is_fp8(input.dtype) else input.dtype
        _check(output.shape == product.shape and output.dtype == out_dtype, "output shape or type")
        CALLS.append(f"{option.mode.name} cuda_core={option.use_cuda_core_ag} transposed={transpose_weight}")
        return output.copy_(product)


class GemmRS:
    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        nnodes: int,
        max_m: int,
        n_dim: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
        transpose_weight: bool = False,
        fuse_reduction: bool = False,
    ) -> None:
        assert _groups, "nvshmem not initialized"
        assert nnodes == 1
        if fuse_reduction and input_dtype != torch.float16:
            raise RuntimeError("Fuse reduction only support float16 type on SM80 due to instruction limitation.")
        self._group, self._max_m, self._n, self._dtype = tp_group, max_m, n_dim, input_dtype
        self._output_dtype = output_dtype or input_dtype
        self._transposed, self._fused = transpose_weight, fuse_reduction
        ALLOCATED.append(self)

    def forward(
        self, input: Tensor, weight: Tensor, *, input_scale: Tensor | None, weight_scale: Tensor | None
    ) -> Tensor:
        ranks, tile = self._group.size(), 256
        padded = -(-input.shape[0] // (ranks * tile)) * ranks * tile if _arch() == 90 else input.shape[0]
        _check(padded <= self._max_m, "m-dim greater than maximum possible value")
        _check(weight.shape[1 if self._transposed else 0] == self._n, "n-dim != expected n_dim")
        product = _product(input, weight, self._transposed, input_scale, weight_scale)
        dist.all_reduce(product, group=self._group)
        output = product.chunk(ranks)[self._group.rank()].to(self._output_dtype)
        CALLS.append(f"fused={self._fused} transposed={self._transposed}")
        return output.unsqueeze(0) if self._fused and _arch() < 90 else output
