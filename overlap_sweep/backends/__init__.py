"""The backends, which overlap. Each is a folder here, imported only when a point asks for it.

A backend offers these functions. Only `build`, `build_layer`, `attention`, `prepare` and `close` may import torch: the
others are called where there is no torch and no GPU.

`refusal(point) -> str | None`
    Returns why it cannot run the point, or None: decided from the resolved configuration alone, before any process
    starts.

`default_knobs(method) -> Mapping[str, Any]`
    Returns the values of knobs that the user left null, so that a setting is complete.

`knobs(point) -> Collection[str]`
    Returns the knobs that it has where the point runs.

`has_default(point) -> bool`
    Returns whether the library has a default overlap of its own to compare with.

`parameter_shapes(point, shape) -> Mapping[str, tuple[int, ...]]`
    Returns the shapes of the operator's parameters on this rank.

`prepare(point, purpose) -> None`
    Prepares the communication of what is built for `purpose`: before it is built, and before it is called again after
    another purpose or point was prepared. Collective.

`build(point, purpose, ranks, parameters) -> ParallelLinear`
    Returns the operator as `purpose` says. Collective: every rank builds alike.

`close() -> None`
    Frees what it holds, before the process group ends. Collective.

It may have `MAX_CONNECTIONS`, the CUDA_DEVICE_MAX_CONNECTIONS that training with it uses, where that is not 1.

Backends in `LAYERS` have whole layers, too:

`LAYER_HAS_DEFAULT: bool`
    Whether a slot that is switched on and not configured overlaps as the library does by default. If so, that is what
    `none` is compared with unasked.

`layer_refusal(point, config, operators) -> str | None`
    Returns why a layer with these operators cannot overlap as this OverlapConfig says, beside each `refusal`.

`build_layer(point, purpose, config, ranks, seed) -> ParallelLayer`
    Returns the layer of the point's kind: overlapped as `config` says if `purpose` is `point`, else `none` or `floor`.
    Weights are drawn from torch's generators, seeded with `seed`. Collective. Refused where the library does not take
    `config`.

`attention(point, ranks) -> tuple[str | None, list[str]]`
    Returns which library computes attention in a layer that ran, and a sentence for whatever slows it down.

A backend that has kernels, one GEMM with one collective, has them in a module of its own, which is in `KERNELS`, or
which another package names in its entry points of the group `overlap_sweep.kernels`: `mine = "my_package.kernels"` is
`backend=mine`. It offers what follows. Only `build` and `close` import torch.

`refusal(point) -> str | None`
    Returns why it cannot run the point's kernel, or None: not installed (and how to install it), or no such kernel.

`implementations(point) -> Mapping[str, Setting]`
    Returns by name what it measures by default for the point's kernel, simplest first. A setting has a `method` and
    knobs where those of `space` fit, and may have any other.

`named(point, name) -> Setting | None`
    Returns the setting of another name that the user gives, such as `pipeline_sm12`; None if there is none.

`build(point, setting, problem, ranks) -> Callable[[int], Outputs]`
    Returns the implementation on `problem`'s tensors: called with the number of an input, it enqueues the work on the
    current stream and returns `Outputs`, which the next call may overwrite. Collective. May raise Refused.

`close() -> None`
    Frees what it holds. Called on all ranks after every point, but for one in which a rank raised something else than
    Refused: then the process ends. Collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.kernel_shape import KernelShape
from overlap_sweep.results.identity import installed_version

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

BACKENDS = {
    "torch": "overlap_sweep.backends.torch",
    "transformer_engine": "overlap_sweep.backends.transformer_engine",
    "megatron": "overlap_sweep.backends.transformer_engine",
    "symm_mem": "overlap_sweep.backends.symm_mem",
}
LAYERS = ("torch", "transformer_engine", "symm_mem")
KERNELS = {
    "torch": "overlap_sweep.backends.torch.kernels",
    "transformer_engine": "overlap_sweep.backends.transformer_engine.kernels",
    "symm_mem": "overlap_sweep.backends.symm_mem.kernels",
    "flux": "overlap_sweep.backends.flux",
}
KERNELS_GROUP = "overlap_sweep.kernels"
"""The group of other packages' entry points."""
_KERNEL_FUNCTIONS = ("refusal", "implementations", "named", "build", "close")

Purpose = Literal["point", "default", "none", "floor", "tp1"]
"""`point`: overlapped as the point's settings say, its other slots not at all; `default`: every slot as the library
overlaps it unasked; `none`: not overlapped; `floor`: the same GEMMs without communication; `tp1`: the whole operator
on one rank."""


@dataclass(frozen=True)
class ParallelLinear:
    """One rank's part of a linear operator."""

    forward: Callable[[Tensor], Tensor]
    """Differentiable in its input and in `parameters`."""
    parameters: Mapping[str, Tensor]
    """Leaves, by name: `weight`, and what else there is."""
    input_shape: tuple[int, int]
    output_shape: tuple[int, int]


@dataclass(frozen=True)
class ParallelLayer:
    """One rank's part of a whole layer, or of a part of one, and how it is run."""

    module: Module
    """Its parameters are the layer's weights."""
    forward: Callable[[Module, Tensor, bool], Tensor]
    """(`module` or what wraps it, input, whether its weights are others than in the last call) -> output."""
    input_shape: tuple[int, ...]
    prepare: Callable[[], None] | None = None
    """Untimed, before each of its turns: make ready what it communicates with. Collective."""
    calibrate: Callable[[Callable[[], object]], None] | None = None
    """Once, before all else: given a step, a forward with new weights and its backward, run it as often as it takes to
    find what the layer computes with. Collective."""


@dataclass(frozen=True)
class Operand:
    """A matrix that a GEMM multiplies."""

    data: Tensor
    """In the GEMM's own type."""
    scale: Tensor | None = None
    """Of FP8, a float32 scalar: the values are `data * scale`."""


@dataclass(frozen=True)
class Problem:
    """One rank's tensors of a kernel, which all implementations share."""

    shape: KernelShape
    precision: str
    inputs: Sequence[Operand]
    """[input_shape] each, to be taken in turn."""
    whole: Sequence[Operand]
    """What belongs to each input for those that only multiply or only communicate: of ag_gemm the gathered input
    [m, k], of the others this rank's product [m, n]."""
    weight: Operand
    """[weight_shape]: the GEMM multiplies by its transpose."""

    @property
    def out_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.weight.scale is not None else self.weight.data.dtype


class Outputs(NamedTuple):
    """What one call of an implementation computed."""

    output: Tensor
    """[output_shape]"""
    moved: Tensor | None = None
    """Only of an independent implementation of ag_gemm, whose output does not show it: the gathered input [m, k]."""
    product: Tensor | None = None
    """Only of an independent implementation of the others: this rank's product [m, n]."""


def needs_gpus(point: Mapping[str, Any]) -> str | None:
    """Returns why a backend that runs on GPUs alone cannot run the point, or None."""
    device = point["runtime"]["device"]
    return None if device == "cuda" else f"backend={point['backend']} needs GPUs; backend=torch runs on {device}"


def lacks_precision(point: Mapping[str, Any], precisions: Sequence[str]) -> str | None:
    """Returns why a backend that computes in these precisions cannot run the point, or None."""
    if point["precision"] in precisions:
        return None
    return f"backend={point['backend']} has no precision={point['precision']}; it has {', '.join(precisions)}"


def kernels_provider(name: str) -> str | None:
    """Returns the package and version that a backend's kernels come from, where other results don't record it.

    None for our own, and where it is not installed.
    """
    if name == "flux":
        names = ("byte-flux", "flux")
        return next((f"{p} {found}" for p in names if (found := installed_version(p))), None)
    entry = registered_kernels().get(name) if name not in KERNELS else None
    return f"{entry.dist.name} {entry.dist.version}" if entry and entry.dist else None


def names() -> list[str]:
    """Returns every backend's name, also of those that have nothing but kernels."""
    return sorted({*BACKENDS, *KERNELS, *registered_kernels()})


def load(name: str) -> Any:
    """Returns the backend's module. UserError for an unknown name."""
    if name not in BACKENDS and (name in KERNELS or name in registered_kernels()):
        raise UserError(f"backend={name} has nothing but kernels; add workload=kernel, or choose another.")
    if name not in BACKENDS:
        raise UserError(f"backend={name} is not known; choose one of auto, {', '.join(BACKENDS)}.")
    return import_module(BACKENDS[name])


def registered_kernels() -> dict[str, EntryPoint]:
    """Returns the entry points of the backends whose kernels other packages bring, by name."""
    return {entry.name: entry for entry in entry_points(group=KERNELS_GROUP)}


def load_kernels(name: str) -> Any:
    """Returns the module of a backend's kernels. UserError for an unknown name, or a package that cannot be used."""
    if name in KERNELS:
        return import_module(KERNELS[name])
    registered = registered_kernels()
    if name not in registered:
        raise UserError(
            f"backend={name} has no kernels; choose one of auto, {', '.join([*KERNELS, *sorted(registered)])}."
        )
    value = registered[name].value
    try:
        module = registered[name].load()
    except Exception as error:
        # Of somebody else's code, whatever it fails with when it is run for the first time.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"backend={name} cannot be loaded from {value} ({reason}); mend or uninstall it.") from error
    lacking = [function for function in _KERNEL_FUNCTIONS if not callable(getattr(module, function, None))]
    if lacking:
        raise UserError(f"backend={name}: {value} has no {', '.join(lacking)}; docs/kernels.md says what it needs.")
    return module


def max_connections(name: str) -> int:
    """Returns the CUDA_DEVICE_MAX_CONNECTIONS that training with the backend uses."""
    return getattr(import_module(BACKENDS[name]), "MAX_CONNECTIONS", 1) if name in BACKENDS else 1


def close_all() -> None:
    """Closes every backend that this process has loaded. Collective."""
    for path in dict.fromkeys(BACKENDS.values()):
        if path in sys.modules:
            sys.modules[path].close()


def chosen(point: Mapping[str, Any]) -> str:
    """Returns the point's backend. `auto` stands for Megatron-LM's way to overlap where it can be measured."""
    if point["backend"] != "auto":
        return str(point["backend"])
    on_gpu = point["runtime"]["device"] == "cuda"
    return "transformer_engine" if on_gpu and load("transformer_engine").missing() is None else "torch"
