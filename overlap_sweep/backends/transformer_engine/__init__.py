"""Transformer Engine's userbuffers: under its own modules, and under Megatron-Core's parallel linear layers with
`tp_comm_overlap`, the modules that Megatron-LM trains with (`backend=megatron`)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
from packaging.specifiers import SpecifierSet

from overlap_sweep.backends import (
    KnobsPoint,
    LayerPoint,
    LinearPoint,
    ParallelLayer,
    ParallelLinear,
    Purpose,
    lacks_cublasmp,
    lacks_precision,
    needs_gpus,
)
from overlap_sweep.backends.installed import attention_backend, attention_warnings, cuda_major, unusable
from overlap_sweep.config import TensorParallelPoint
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.recipes import RECIPES
from overlap_sweep.overlap.space import KnobValue, OperatorPoint, Setting, SlotSetting

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure import Ranks

PRECISIONS = ("bf16", *RECIPES)

LAYER_HAS_DEFAULT = True

CUBLASMP_KNOBS = ("num_sm",)
CUBLASMP_PRECISIONS = ("bf16", "fp8_delayed", "fp8_current")
"""FP8 with one scale per tensor."""


def refusal(point: LinearPoint, operator: str, settings: Mapping[str, Setting]) -> str | None:
    megatron_reason = unusable("megatron.core") if point.backend == "megatron" else None
    if reason := unusable() or megatron_reason or _userbuffers_refusal(point, operator, settings):
        return reason
    if any(s.get("comm_priority") == 0 and not s.get("gemm_priority") for s in settings.values()):
        return (
            "Transformer Engine replaces comm_priority=0 with gemm_priority=0 by its defaults, the GPU's highest "
            "and lowest; give one of them below 0"
        )
    return None


def _userbuffers_refusal(point: LinearPoint, operator: str, settings: Mapping[str, Setting]) -> str | None:
    if reason := needs_gpus(point) or lacks_precision(point, PRECISIONS):
        return reason
    shape = models.operator_shape(point, operator)
    recipe = RECIPES.get(point.precision)
    if recipe and (reason := recipe.sizes_refusal(shape)):
        return reason
    if point.with_cublasmp and (reason := _cublasmp_refusal(settings, point)):
        return reason
    reasons = (_setting_refusal(slot, setting, point, shape) for slot, setting in settings.items())
    return next(filter(None, reasons), None) or overlap_cfg.slots_refusal(settings)


def _cublasmp_refusal(settings: Mapping[str, Setting], point: LinearPoint) -> str | None:
    """Returns why cuBLASMp cannot overlap these slots, or None. As in Transformer Engine 2.20 (module/base.py and
    common/comm_gemm_overlap)."""
    if point.backend == "megatron":
        return lacks_cublasmp(point)
    if point.precision not in CUBLASMP_PRECISIONS:
        return f"cuBLASMp has no precision={point.precision}; it has {', '.join(CUBLASMP_PRECISIONS)}"
    for slot, setting in settings.items():
        method = space.method_of(setting)
        if method == "bulk":
            return f"{slot}: cuBLASMp has no bulk overlap; it has ring_exchange and pipeline"
        if method == "pipeline" and not point.runtime.multicast:
            return f"{slot}: cuBLASMp's pipeline is NVLink multicast, which is off; use ring_exchange"
        usual = {**dict.fromkeys(space.KNOBS, False), **space.USERBUFFERS_DEFAULTS[method]}
        known = {"method", *CUBLASMP_KNOBS}
        if ignored := sorted(knob for knob in setting.keys() & usual.keys() - known if setting[knob] != usual[knob]):
            return f"{slot}: cuBLASMp ignores {', '.join(ignored)}; of the knobs it has {', '.join(CUBLASMP_KNOBS)}"
    return None


def _setting_refusal(slot: str, setting: Setting, point: TensorParallelPoint, shape: LinearShape) -> str | None:
    recipe, phase = RECIPES.get(point.precision), slot.partition("_")[2]
    knobs, tp_size = SlotSetting.of(setting), point.tp_size
    if recipe and (reason := recipe.overlap_refusal(slot, setting, shape)):
        return reason
    if knobs.method != "ring_exchange" and tp_size not in space.USERBUFFERS_RANKS:
        return f"userbuffers have no kernels for {knobs.method} on tp_size={tp_size}, only for 2, 4 and 8 ranks"
    if knobs.aggregate and tp_size % 2:
        return f"aggregate requires an even tp_size, not {tp_size}"
    if knobs.atomic_gemm:
        if not recipe:
            return "Transformer Engine: atomic GEMM overlap is supported for FP8 GEMMs only"
        if not recipe.scaled_per_tensor:
            return f"Transformer Engine: atomic GEMM requires one scale per tensor, unlike precision={recipe.precision}"
        if (cuda := cuda_major()) and cuda >= 13:
            return f"Transformer Engine: atomic GEMM requires CUDA >=12.2.0 and <13.0.0, but this is CUDA {cuda}"
        # Other methods only overlap less if kernels start in another order than they were launched in.
        if (connections := point.runtime.max_connections or 1) != 1:
            return (
                f"atomic_gemm requires runtime.max_connections=1, not {connections}: its GEMM waits on the GPU for "
                "kernels that must have started before it"
            )
        if knobs.pipeline_rs_overlap_first_gemm:
            return "pipeline_rs_overlap_first_gemm has no effect on an atomic GEMM; leave out one of them"
    if knobs.fp8_buf:
        if not recipe:
            return "fp8_buf requires an FP8 precision"
        if recipe.precision != "fp8_delayed":
            return "Transformer Engine: a reduce-scatter in FP8 (fp8_buf) requires precision=fp8_delayed"
    if knobs.num_splits:
        # The pipeline splits the GEMM along the weight's rows, or for dgrad along its columns.
        cut = shape.in_features if phase == "dgrad" else shape.out_features
        chunk, rest = divmod(cut, knobs.num_splits)
        if rest or (recipe and chunk % recipe.split):
            return f"{slot}: {cut} columns cannot be split into num_splits={knobs.num_splits} equal parts" + (
                f" divisible by {recipe.split}" if recipe else ""
            )
    return None


class _WrongNumbers(msgspec.Struct, frozen=True):
    """An entry of wrong_numbers.yaml. None: it holds for everything."""

    package: str
    versions: str
    setting: Setting
    reason: str
    multicast: bool | None = None
    precisions: list[str] | None = None
    phases: list[str] | None = None

    def holds(self, point: LinearPoint, phase: str, setting: Setting) -> bool:
        return (
            self.multicast in (None, point.runtime.multicast)
            and (self.precisions is None or point.precision in self.precisions)
            and (self.phases is None or phase in self.phases)
            and self.setting.items() <= setting.items()
        )


@cache
def _wrong_numbers() -> list[_WrongNumbers]:
    """Returns what versions of Transformer Engine are known to compute wrongly."""
    text = resources.files(__package__).joinpath("wrong_numbers.yaml").read_text()
    return msgspec.yaml.decode(text, type=list[_WrongNumbers])


def known_wrong(point: LinearPoint, slot: str, setting: Setting, environment: Mapping[str, Any]) -> str | None:
    """Returns why a slot's setting computes wrong numbers on a machine with this recorded environment, or None."""
    if point.with_cublasmp:
        # It is another implementation of the same methods.
        return None
    for entry in _wrong_numbers():
        version = environment.get("packages", {}).get(entry.package)
        has_it = version and SpecifierSet(entry.versions).contains(version, prereleases=True)
        if has_it and entry.holds(point, slot.partition("_")[2], setting):
            return f"wrong numbers with {entry.package} {version}: {entry.reason}"
    return None


def knobs(point: KnobsPoint) -> Collection[str]:
    return CUBLASMP_KNOBS if point.with_cublasmp else space.KNOBS


def default_knobs(method: str) -> Mapping[str, KnobValue]:
    return space.USERBUFFERS_DEFAULTS[method]


def has_default(point: OperatorPoint) -> bool:
    if point.tp_size not in space.USERBUFFERS_RANKS:
        return False
    return _switched_on_refusal(point, OverlapConfig(), [point.operator]) is None


def _switched_on_refusal(point: TensorParallelPoint, config: OverlapConfig, operators: Collection[str]) -> str | None:
    for slot, methods in overlap_cfg.methods_allowed(config.switches).items():
        operator, default = slot.partition("_")[0], space.USERBUFFERS_DEFAULT_SETTINGS[slot]
        if not methods or operator not in operators:
            continue
        setting = {**default, **config.slots.get(slot, {})}
        if reason := _setting_refusal(slot, setting, point, models.operator_shape(point, operator)):
            return reason
    return None


def parameter_shapes(point: TensorParallelPoint, shape: LinearShape) -> Mapping[str, tuple[int, ...]]:
    model = point.model
    shapes: dict[str, tuple[int, ...]] = {"weight": shape.weight_shape}
    if model.bias:
        shapes["bias"] = shape.weight_shape[:1]
    if shape.parallel == "column":
        shapes["layer_norm_weight"] = (shape.in_features,)
        if model.normalization == "LayerNorm":
            shapes["layer_norm_bias"] = (shape.in_features,)
    return shapes


def prepare(point: OperatorPoint, purpose: Purpose) -> None:
    from overlap_sweep.backends.transformer_engine import userbuffers

    settings = space.settings(point) if purpose == "point" else {}
    if settings or purpose == "default":
        userbuffers.initialize_for(point, settings)


def build(point: OperatorPoint, purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    from overlap_sweep.backends.transformer_engine import modules

    return modules.build(point, purpose, ranks, parameters)


def close() -> None:
    # Importing it would load Transformer Engine, which many points do not need.
    userbuffers = sys.modules.get(f"{__name__}.userbuffers")
    if userbuffers:
        userbuffers.destroy()


def layer_refusal(point: LayerPoint, config: OverlapConfig, operators: Collection[str]) -> str | None:
    if point.tp_size not in space.USERBUFFERS_RANKS:
        return f"userbuffers have no kernels for tp_size={point.tp_size}, only for 2, 4 and 8 ranks"
    if config.switches["tp_comm_overlap_disable_fc1"] and "fc1" in operators:
        return "Transformer Engine's layers do not support tp_comm_overlap_disable_fc1"
    if reason := overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config, operators):
        return reason
    reasons = (
        _userbuffers_refusal(point, operator, space.slots_of(operator, {phase: setting}))
        for slot, setting in config.slots.items()
        for operator, _, phase in [slot.partition("_")]
        if operator in operators and "method" in setting
    )
    return next(filter(None, reasons), None) or _switched_on_refusal(point, config, operators)


def build_layer(point: LayerPoint, purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.transformer_engine import modules

    return modules.build_layer(point, purpose, config, ranks, seed)


def attention(point: LayerPoint, ranks: Ranks) -> tuple[str | None, list[str]]:
    backend = attention_backend()
    return backend, attention_warnings(backend)
