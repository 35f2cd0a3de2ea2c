"""As much of Transformer Engine as userbuffers.py imports, and how it behaves: module/base.py of 2.20."""

import enum
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# What is first imported within the block would be imported anew after it, and then exist twice.
import overlap_sweep.backends.communicator
import overlap_sweep.overlap.recipes  # noqa: F401
from overlap_sweep.backends import transformer_engine

LAYERS = "transformer_engine.pytorch"
PACKAGES = (
    *("transformer_engine", LAYERS, f"{LAYERS}.module", f"{LAYERS}.cpp_extensions", "transformer_engine_torch"),
    *(f"{LAYERS}.tensor", f"{LAYERS}.tensor.storage", f"{LAYERS}.tensor.storage.float8_tensor_storage"),
)
OF_KERNELS = {f"{LAYERS}.cpp_extensions": "general_gemm", PACKAGES[-1]: "Float8TensorStorage"}
"""Nothing here uses them."""


class Mode(enum.Enum):
    NONE = "none"
    FP8 = "fp8"


class FakeBase(ModuleType):
    """`transformer_engine.pytorch.module.base`: notes what is called and bootstraps as the real one does."""

    UserBufferQuantizationMode = Mode

    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch.module.base")
        self.calls: list[str] = []
        self.given: list[dict[str, Any]] = []
        """Arguments of every initialize_ub."""
        self.groups: list[tuple[Any, Any]] = []
        """World and tensor-parallel group of every initialize_ub."""
        self.destroyed_s: list[float] = []
        self.resets: list[None] = []
        """Of torch.compiler."""
        self.initialized = False
        self.fails_with: Exception | None = None
        self.built_with_cublasmp = True

    def initialize_ub(
        self,
        shape: list[int],
        tp_size: int,
        use_fp8: bool = False,
        quantization_modes: list[Mode] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        ub_cfgs: dict[str, dict[str, Any]] | None = None,
        bootstrap_backend: str | None = None,
        with_cublasmp: bool = False,
    ) -> None:
        self.calls.append("initialize")
        given = {**locals(), "ub_cfgs": ub_cfgs and {slot: dict(setting) for slot, setting in ub_cfgs.items()}}
        self.given.append(given)
        if self.initialized:
            raise RuntimeError("UB communicators are already initialized.")
        # From here on the real one refuses to initialise again, also when it fails below.
        self.initialized = True
        world = dist.new_group(backend=bootstrap_backend)
        replicas = dist.get_world_size(world) // tp_size
        domain = world
        if replicas > 1:
            domains = [list(range(i * tp_size, (i + 1) * tp_size)) for i in range(replicas)]
            domain, _ = dist.new_subgroups_by_enumeration(domains, backend=bootstrap_backend)
        self.groups.append((world, domain))
        ranks = torch.ones(1)
        dist.all_reduce(ranks, group=domain)
        assert ranks.item() == tp_size
        if self.fails_with:
            raise self.fails_with
        for setting in (ub_cfgs or {}).values():
            setting["fp8_buf"] = "the library's"

    def destroy_ub(self) -> None:
        self.calls.append("destroy")
        self.destroyed_s.append(time.monotonic())
        self.initialized = False
        torch.compiler.reset()


@contextmanager
def fake_library() -> Iterator[FakeBase]:
    """In this process, for the length of the block; where there is no GPU to wait for."""
    base = FakeBase()
    modules = {name: ModuleType(name) for name in PACKAGES}
    modules[f"{LAYERS}.module"].base = base  # type: ignore[attr-defined]
    for name, used in OF_KERNELS.items():
        setattr(modules[name], used, None)
    library = modules["transformer_engine_torch"]
    library.get_stream_priority_range = lambda: (0, -5)  # type: ignore[attr-defined]
    library.nvte_built_with_cublasmp = lambda: base.built_with_cublasmp  # type: ignore[attr-defined]
    with (
        patch.dict(sys.modules, {**modules, base.__name__: base}),
        patch.object(torch.cuda, "synchronize", lambda *_: base.calls.append("synchronize")),
        patch.object(torch.compiler, "reset", lambda: base.resets.append(None)),
    ):
        # It is imported anew, and knows nothing of another block.
        sys.modules.pop(f"{transformer_engine.__name__}.userbuffers", None)
        vars(transformer_engine).pop("userbuffers", None)
        yield base
