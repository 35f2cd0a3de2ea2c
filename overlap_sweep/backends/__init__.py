"""The backends: libraries that overlap.

Each is a module here with the functions of `Backend`, imported only when a point uses it. It may have
`known_wrong(point, slot, setting, environment) -> str | None`: why the version of the library in the recorded
environment computes wrong numbers with the slot's setting. Searches leave such settings out.

A backend's kernels, each a GEMM with a collective, are in a separate module with the functions of `Kernels`, listed in
`KERNELS` or named by another package in its entry points of the group `overlap_sweep.kernels`: `mine =
"my_package.kernels"` is `backend=mine`. It may have `SPANS_NODES = True`: its kernels also run on ranks of several
machines, as collectives of NCCL and gloo do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

from overlap_sweep.backends import installed
from overlap_sweep.config import PointConfig, Runtime, TensorParallelPoint
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.models import KernelPoint, KernelShape, LinearShape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import KnobValue, OperatorPoint, Setting
from overlap_sweep.results.identity import installed_version

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from overlap_sweep.measure import Ranks

BACKENDS = {
    "torch": "overlap_sweep.backends.torch",
    "transformer_engine": "overlap_sweep.backends.transformer_engine",
    "megatron": "overlap_sweep.backends.transformer_engine",
    "symm_mem": "overlap_sweep.backends.symm_mem",
}
"""Modules by name. Megatron-Core's linear operators overlap by Transformer Engine's userbuffers; its layers with
experts, which are no backend's, are in `overlap_sweep.backends.megatron`."""
LAYERS = ("torch", "transformer_engine", "symm_mem")
KERNELS = {
    "torch": "overlap_sweep.backends.torch.kernels",
    "transformer_engine": "overlap_sweep.backends.transformer_engine.kernels",
    "symm_mem": "overlap_sweep.backends.symm_mem.kernels",
    "flux": "overlap_sweep.backends.flux",
}
KERNELS_GROUP = "overlap_sweep.kernels"
"""Group of the entry points of other packages."""
_KERNEL_FUNCTIONS = ("refusal", "implementations", "named", "build", "close")

Purpose = Literal["point", "default", "none", "floor", "tp1"]
"""`point`: overlapped by the point's settings, other slots not at all; `default`: every slot by the library's default;
`none`: no overlap; `floor`: the same GEMMs without communication; `tp1`: the whole operator on one rank."""


@dataclass(frozen=True)
class ParallelLinear:
    """One rank's part of a linear operator."""

    forward: Callable[[Tensor], Tensor]
    """Differentiable in its input and in `parameters`."""
    parameters: Mapping[str, Tensor]
    """Leaf tensors by name: `weight`, and possibly others."""
    input_shape: tuple[int, int]
    output_shape: tuple[int, int]


@dataclass(frozen=True)
class ParallelLayer:
    """One rank's part of a layer or of a part of it, and how to run it."""

    module: Module
    """Its parameters are the layer's weights."""
    forward: Callable[[Module, Tensor, bool], Tensor]
    """Takes `module` or its wrapper, the input, and whether the weights changed since the last call. Returns the
    output."""
    input_shape: tuple[int, ...]
    prepare: Callable[[], None] | None = None
    """Prepares its communication, untimed, before each of its turns. Collective."""
    calibrate: Callable[[Callable[[], object]], None] | None = None
    """Called once at the start with a step (forward with new weights, and backward): runs it until the layer's FP8
    scales have settled. Collective."""


@dataclass(frozen=True)
class Operand:
    """A matrix, in the type that the GEMM multiplies."""

    data: Tensor
    scale: Tensor | None = None
    """Float32 scalar, only for FP8: the values are `data * scale`."""


@dataclass(frozen=True)
class Problem:
    """One rank's tensors of a kernel, shared by all implementations."""

    shape: KernelShape
    precision: str
    inputs: Sequence[Operand]
    """Inputs of [input_shape], used in turn."""
    whole: Sequence[Operand]
    """The tensor of each input for baselines that only multiply or only communicate: for ag_gemm the gathered input
    [m, k], for the others this rank's product [m, n]."""
    weight: Operand
    """Weight of [weight_shape]; the GEMM multiplies by its transpose."""

    @property
    def out_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.weight.scale is not None else self.weight.data.dtype


class Outputs(NamedTuple):
    """The results of one call of an implementation."""

    output: Tensor
    """Output of [output_shape]."""
    moved: Tensor | None = None
    """Gathered input [m, k]; only for an independent implementation of ag_gemm, whose output does not depend on it."""
    product: Tensor | None = None
    """This rank's product [m, n]; only for an independent implementation of the other kernels."""


class KnobsPoint(Protocol):
    """A point of workload=operator or layer, as asked or completed."""

    runtime: Runtime
    backend: str
    with_cublasmp: bool | None


class LinearPoint(KnobsPoint, TensorParallelPoint, Protocol):
    """A completed point of workload=operator or layer."""


class MoeOptions(Protocol):
    ep_size: int | None
    grouped_gemm: bool | None


class LayerOptions(Protocol):
    kind: str
    num_replicas: int
    micro_batch_size: int
    training: bool

    @property
    def moe(self) -> MoeOptions: ...


class LayerPoint(LinearPoint, Protocol):
    """A completed point of workload=layer."""

    @property
    def layer(self) -> LayerOptions: ...


class Backend(Protocol):
    """The module of a backend. Only `build`, `build_layer`, `attention`, `prepare` and `close` may import torch: the
    others are also called without torch and without a GPU. Whole layers are only asked of those in `LAYERS`."""

    LAYER_HAS_DEFAULT: bool
    """Whether a slot of a layer that is switched on but not configured overlaps by the library's default. If so, that
    default is compared with `none` in every layer point."""

    def refusal(self, point: LinearPoint, operator: str, settings: Mapping[str, Setting]) -> str | None:
        """Returns why it cannot run the operator with these settings of its slots, by the resolved configuration."""

    def default_knobs(self, method: str) -> Mapping[str, KnobValue]:
        """Returns the values of knobs that the user left null."""

    def knobs(self, point: KnobsPoint) -> Collection[str]:
        """Returns the knobs that it supports on the point's device, with the point's library."""

    def has_default(self, point: OperatorPoint) -> bool:
        """Returns whether the library has a default overlap to compare with."""

    def parameter_shapes(self, point: TensorParallelPoint, shape: LinearShape) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the operator's parameters on this rank."""

    def prepare(self, point: OperatorPoint, purpose: Purpose) -> None:
        """Prepares the communication, before `build` and before a call that follows another purpose or point.
        Collective."""

    def build(
        self, point: OperatorPoint, purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]
    ) -> ParallelLinear:
        """Returns the operator. Collective."""

    def close(self) -> None:
        """Frees its buffers before the process group ends. Collective."""

    def layer_refusal(self, point: LayerPoint, config: OverlapConfig, operators: Collection[str]) -> str | None:
        """Returns why a layer with these operators cannot overlap as configured, in addition to `refusal`."""

    def build_layer(
        self, point: LayerPoint, purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int
    ) -> ParallelLayer:
        """Returns the layer of the point's kind, overlapped as `config` says if `purpose` is `point`, else `none` or
        `floor`. Weights are drawn from torch's generators, seeded with `seed`. Collective. Raises Refused if the
        library does not accept `config`."""

    def attention(self, point: LayerPoint, ranks: Ranks) -> tuple[str | None, list[str]]:
        """Returns the library that computes attention in a layer that ran, and a warning for anything that slows it
        down."""


class Kernels(Protocol):
    """The module of a backend's kernels, in which only `build` and `close` import torch."""

    def refusal(self, point: KernelPoint) -> str | None:
        """Returns why it cannot run the point's kernel; if it is not installed, with how to install it."""

    def implementations(self, point: KernelPoint) -> Mapping[str, Setting]:
        """Returns those of the point's kernel that are measured by default, by name, simplest first. A setting has a
        `method` and knobs, those of `space` where they fit."""

    def named(self, point: KernelPoint, name: str) -> Setting | None:
        """Returns the setting of another name given by the user, such as `pipeline_sm12`."""

    def build(self, point: KernelPoint, setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
        """Returns the implementation on `problem`'s tensors: called with the index of an input, it enqueues the work on
        the current stream and returns `Outputs`, which the next call may overwrite. Collective. May raise Refused."""

    def close(self) -> None:
        """Frees its buffers. Called on all ranks after every point, unless a rank raised an error other than Refused:
        then the process ends. Collective."""


def needs_gpus(point: TensorParallelPoint) -> str | None:
    """Returns why a backend that requires GPUs cannot run the point, or None."""
    device = point.runtime.device
    return None if device == "cuda" else f"backend={point.backend} requires GPUs; backend=torch runs on {device}"


def lacks_precision(point: TensorParallelPoint, precisions: Sequence[str]) -> str | None:
    """Returns why a backend with these precisions cannot run the point, or None."""
    if point.precision in precisions:
        return None
    return f"backend={point.backend} has no precision={point.precision}; it has {', '.join(precisions)}"


def lacks_cublasmp(point: LinearPoint) -> str | None:
    """Returns why a backend without cuBLASMp cannot run the point, or None."""
    name = point.backend
    return f"backend={name} has no with_cublasmp; use backend=transformer_engine" if point.with_cublasmp else None


def default_knobs(point: KnobsPoint, method: str) -> dict[str, KnobValue]:
    """Returns the values of knobs that the user left null, of those that the point's backend supports."""
    backend = load(point.backend)
    supported = backend.knobs(point)
    return {knob: value for knob, value in backend.default_knobs(method).items() if knob in supported}


def kernels_provider(name: str) -> str | None:
    """Returns the package and version of a backend's kernels that is not otherwise recorded; None for our own kernels,
    and for a package that is not installed."""
    if name == "flux":
        names = ("byte-flux", "flux")
        return next((f"{p} {found}" for p in names if (found := installed_version(p))), None)
    entry = registered_kernels().get(name) if name not in KERNELS else None
    return f"{entry.dist.name} {entry.dist.version}" if entry and entry.dist else None


def names() -> list[str]:
    """Returns the names of all backends, including those that only have kernels."""
    return sorted({*BACKENDS, *KERNELS, *registered_kernels()})


def load(name: str) -> Backend:
    """Returns the backend's module. UserError for an unknown name."""
    if name in BACKENDS:
        return cast(Backend, import_module(BACKENDS[name]))
    if name in KERNELS or name in registered_kernels():
        raise UserError(f"backend={name} only has kernels; add workload=kernel, or choose another backend.")
    raise UserError(f"backend={name} is not known; choose one of auto, {', '.join(BACKENDS)}.")


def registered_kernels() -> dict[str, EntryPoint]:
    """Returns the entry points of other packages' kernels, by name of the backend."""
    return {entry.name: entry for entry in entry_points(group=KERNELS_GROUP)}


def load_kernels(name: str) -> Kernels:
    """Returns the module of a backend's kernels. UserError for an unknown name or an unusable package."""
    if name in KERNELS:
        return cast(Kernels, import_module(KERNELS[name]))
    registered = registered_kernels()
    if name not in registered:
        raise UserError(
            f"backend={name} has no kernels; choose one of auto, {', '.join([*KERNELS, *sorted(registered)])}."
        )
    value = registered[name].value
    try:
        module = registered[name].load()
    except Exception as error:
        # Code of another package may raise anything when it is first run.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"backend={name} cannot be loaded from {value} ({reason}); fix or uninstall it.") from error
    lacking = [function for function in _KERNEL_FUNCTIONS if not callable(getattr(module, function, None))]
    if lacking:
        raise UserError(f"backend={name}: {value} has no {', '.join(lacking)}; docs/kernels.md lists what it requires.")
    return cast(Kernels, module)


def close_all() -> None:
    """Closes every backend that this process has loaded. Collective."""
    for path in dict.fromkeys(BACKENDS.values()):
        if path in sys.modules:
            sys.modules[path].close()


def chosen(point: PointConfig) -> str:
    """Returns the point's backend. `auto` is transformer_engine, as in Megatron-LM, where it can run, else torch."""
    if point.backend != "auto":
        return point.backend
    on_gpu = point.runtime.device == "cuda"
    return "transformer_engine" if on_gpu and installed.missing() is None else "torch"
