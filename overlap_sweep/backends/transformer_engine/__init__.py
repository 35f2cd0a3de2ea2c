"""Transformer Engine's userbuffers: under its own modules, and under Megatron-Core's parallel linear layers with
`tp_comm_overlap`, the modules that Megatron-LM trains with (`backend=megatron`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from packaging.specifiers import SpecifierSet

from overlap_sweep.backends import (
    LayerPoint,
    LinearPoint,
    ParallelLayer,
    ParallelLinear,
    Purpose,
    lacks_cublasmp,
    lacks_precision,
    needs_gpus,
)
from overlap_sweep.config import TensorParallelPoint
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.overlap.recipes import RECIPES
from overlap_sweep.overlap.space import OperatorPoint, Setting
from overlap_sweep.results.identity import installed_version

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure import Ranks

PRECISIONS = ("bf16", *RECIPES)

LAYER_HAS_DEFAULT = True

MEGATRON_NAMES = {
    f"ub_{name}": f"tp_comm_{name}"
    for name in ("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad")
}

Switches = dict[str, bool]

DEFAULTS: Switches = {ours: SWITCH_DEFAULTS[theirs] for ours, theirs in MEGATRON_NAMES.items()}
"""Defaults of Megatron-Core and of `te.TransformerLayer`."""

SWITCHES_OF_PARALLEL = {
    "column": ("ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    "row": ("ub_overlap_ag", "ub_overlap_rs"),
}

CUBLASMP_KNOBS = ("num_sm",)
CUBLASMP_PRECISIONS = ("bf16", "fp8_delayed", "fp8_current")
"""FP8 with one scale per tensor."""

OLDEST = {"transformer_engine": ("transformer-engine", (2, 15)), "megatron.core": ("megatron-core", (0, 16))}
"""Distribution and oldest supported version of each package."""

_CUDNN = re.compile(r"(/\S*)/libcudnn[^/\s]*\.so\S*$", re.MULTILINE)


@cache
def missing(package: str = "transformer_engine") -> str | None:
    """Returns why the package cannot be used here, or None."""
    parent = package.partition(".")[0]
    if find_spec(parent) is None or find_spec(package) is None:
        return f"{package} is not installed; pip install --no-build-isolation 'overlap-sweep[gpu]'"
    return None


def unusable(package: str = "transformer_engine") -> str | None:
    """Returns why the package is missing or too old, or None."""
    distribution, oldest = OLDEST[package]
    if reason := missing(package):
        return reason
    installed = installed_version(distribution)
    # None on PYTHONPATH but not installed, as Megatron-LM's sources in some images.
    if installed and tuple(map(int, re.findall(r"\d+", installed)[:2])) < oldest:
        return f"{distribution} {installed} is too old; overlap_sweep requires {'.'.join(map(str, oldest))} or later"
    return None


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
    method, tp_size = setting["method"], point.tp_size
    if recipe and (reason := recipe.overlap_refusal(slot, setting, shape)):
        return reason
    if method != "ring_exchange" and tp_size not in space.USERBUFFERS_RANKS:
        return f"userbuffers have no kernels for {method} on tp_size={tp_size}, only for 2, 4 and 8 ranks"
    if setting.get("aggregate") and tp_size % 2:
        return f"aggregate requires an even tp_size, not {tp_size}"
    if setting.get("atomic_gemm"):
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
        if setting.get("pipeline_rs_overlap_first_gemm"):
            return "pipeline_rs_overlap_first_gemm has no effect on an atomic GEMM; leave out one of them"
    if setting.get("fp8_buf"):
        if not recipe:
            return "fp8_buf requires an FP8 precision"
        if recipe.precision != "fp8_delayed":
            return "Transformer Engine: a reduce-scatter in FP8 (fp8_buf) requires precision=fp8_delayed"
    if num_splits := int(setting.get("num_splits", 0)):
        # The pipeline splits the GEMM along the weight's rows, or for dgrad along its columns.
        cut = shape.in_features if phase == "dgrad" else shape.out_features
        chunk, rest = divmod(cut, num_splits)
        if rest or (recipe and chunk % recipe.split):
            return f"{slot}: {cut} columns cannot be split into num_splits={num_splits} equal parts" + (
                f" divisible by {recipe.split}" if recipe else ""
            )
    return None


@cache
def cuda_major() -> int | None:
    """Returns the major version of CUDA that Transformer Engine was built for, from its package's name."""
    return next((major for major in (12, 13) if installed_version(f"transformer-engine-cu{major}")), None)


@cache
def _wrong_numbers() -> list[dict[str, Any]]:
    """Returns what versions of Transformer Engine are known to compute wrongly."""
    text = resources.files(__package__).joinpath("wrong_numbers.yaml").read_text()
    entries: list[dict[str, Any]] = yaml.safe_load(text)
    return entries


def known_wrong(point: LinearPoint, slot: str, setting: Setting, environment: Mapping[str, Any]) -> str | None:
    """Returns why a slot's setting computes wrong numbers on a machine with this recorded environment, or None."""
    for entry in _wrong_numbers():
        installed = environment.get("packages", {}).get(entry["package"])
        # cuBLASMp is another implementation of the same methods.
        if (
            installed
            and not point.with_cublasmp
            and SpecifierSet(entry["versions"]).contains(installed, prereleases=True)
            and entry.get("multicast", point.runtime.multicast) == point.runtime.multicast
            and point.precision in entry.get("precisions", [point.precision])
            and slot.partition("_")[2] in entry.get("phases", [slot.partition("_")[2]])
            and entry["setting"].items() <= setting.items()
        ):
            return f"wrong numbers with {entry['package']} {installed}: {entry['reason']}"
    return None


def knobs(point: LinearPoint) -> Collection[str]:
    return CUBLASMP_KNOBS if point.with_cublasmp else space.KNOBS


def default_knobs(method: str) -> Mapping[str, Any]:
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


def operator_switches(operator: str, purpose: Purpose, settings: Mapping[str, Setting]) -> Switches:
    """Returns the switches of one operator's layer: on for its slots in `settings`, or all at their default."""
    names = SWITCHES_OF_PARALLEL[space.OPERATORS[operator]]
    if purpose == "default":
        return {name: DEFAULTS[name] for name in names}
    if purpose != "point":
        return dict.fromkeys(names, False)
    method = {phase: settings.get(space.slot(operator, phase), {}).get("method") for phase in space.PHASES}
    if space.OPERATORS[operator] == "row":
        return {"ub_overlap_ag": bool(method["dgrad"]), "ub_overlap_rs": bool(method["fprop"])}
    return {
        "ub_overlap_ag": bool(method["fprop"]),
        "ub_overlap_rs_dgrad": method["dgrad"] in ("ring_exchange", "pipeline"),
        "ub_bulk_dgrad": method["dgrad"] == "bulk",
        "ub_bulk_wgrad": method["wgrad"] == "bulk",
    }


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


def attention_backend() -> str | None:
    """Returns the attention backend that Transformer Engine last chose in this process; None if no attention ran."""
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    if chosen["attention_params"] is None:
        return None
    if chosen["use_flash_attention"]:
        return f"flash ({chosen['flash_attention_backend']})"
    if chosen["use_fused_attention"]:
        # cuDNN 9 returns 91900 for 9.19.0.
        major, rest = divmod(torch.backends.cudnn.version() or 0, 10_000)
        return f"fused (cuDNN {major}.{rest // 100}.{rest % 100})"
    return "unfused"


def attention_warnings(backend: str | None, maps: str | None = None) -> list[str]:
    """Returns a sentence for each reason why attention is slower than it should be.

    `maps`: text of a process's /proc/<pid>/maps, by default of this process.
    """
    directories = sorted(set(_CUDNN.findall(Path("/proc/self/maps").read_text() if maps is None else maps)))
    warnings = []
    if len(directories) > 1:
        warnings.append(
            f"Two cuDNN libraries are loaded, from {' and '.join(directories)}, so that Transformer Engine may "
            "silently refuse fused attention. Set CUDNN_HOME to the one that torch uses."
        )
    if backend == "unfused":
        warnings.append(
            "Attention ran unfused and much slower than in training, so communication looks smaller than it is. "
            "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows why flash and fused attention were refused."
        )
    return warnings
