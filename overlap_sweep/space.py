"""The search space: slots, methods and knobs, what is valid together, and what a point is called.

Vocabulary and rules are Transformer Engine 2.x's: a slot is an operator and a phase (`fc1_dgrad`), and the
communication that the slot carries decides which methods it takes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

OPERATORS = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
"""The linear operators of a transformer layer and the dimension of the weight that tensor parallelism cuts."""

LAYER_KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "multihead_attention", "transformer_layer")

PHASES = ("fprop", "dgrad", "wgrad")
PASSES = ("fwd", "bwd")
PASS_OF_PHASE = {"fprop": "fwd", "dgrad": "bwd", "wgrad": "bwd"}
"""The pass whose time a phase's setting changes: dgrad and wgrad can only be timed together."""

METHODS = ("none", "bulk", "ring_exchange", "pipeline")

PRECISIONS = ("fp32", "fp16", "bf16", "fp8_delayed", "fp8_current")

KNOBS = ("num_sm", "aggregate", "num_splits", "cga_size", "set_sm_margin", "use_ce", "atomic_gemm", "fp8_buf")

_GATHER = ("ring_exchange",)
_SCATTER = ("ring_exchange", "pipeline")
_METHODS_OF_PHASE = {
    ("column", "fprop"): _GATHER,
    ("column", "dgrad"): ("bulk", *_SCATTER),
    ("column", "wgrad"): ("bulk",),
    ("row", "fprop"): _SCATTER,
    ("row", "dgrad"): _GATHER,
    ("row", "wgrad"): (),
}

_KNOBS_OF_METHOD = {
    "none": (),
    "bulk": ("num_sm", "cga_size", "set_sm_margin"),
    "ring_exchange": ("num_sm", "aggregate", "cga_size", "set_sm_margin", "use_ce", "atomic_gemm", "fp8_buf"),
    "pipeline": ("num_sm", "num_splits", "cga_size", "set_sm_margin", "atomic_gemm", "fp8_buf"),
}

_KNOBS_OF_SOME = {
    "aggregate": "joins the chunks of an all-gather",
    "fp8_buf": "is for a reduce-scatter that can be in FP8",
}

Setting = dict[str, Any]
"""What one slot is given: `method` and the knobs that apply to it. A slot without overlap has none at all."""


def slot(operator: str, phase: str) -> str:
    return f"{operator}_{phase}"


def methods_of(operator: str, phase: str) -> tuple[str, ...]:
    """Overlapping methods that the slot takes; `none` is valid everywhere and not listed."""
    return _METHODS_OF_PHASE[OPERATORS[operator], phase]


SLOTS = {slot(operator, phase): methods_of(operator, phase) for operator in OPERATORS for phase in PHASES}
"""The overlapping methods of every slot; none at all where nothing about it can be chosen."""


def gathers(operator: str, phase: str, method: str) -> bool:
    """Whether the slot overlaps an all-gather under this method (otherwise a reduce-scatter)."""
    if phase == "dgrad" and OPERATORS[operator] == "column":
        return method == "bulk"
    return (OPERATORS[operator], phase) in {("column", "fprop"), ("row", "dgrad")}


def knobs_of(operator: str, phase: str, method: str) -> tuple[str, ...]:
    """Knobs that change anything in this slot under this method."""
    absent = set()
    if not gathers(operator, phase, method):
        absent.add("aggregate")
    # FP8 activations are always gathered as they are, and a ring exchange of dgrad's own output is never in FP8
    # (Transformer Engine 2.20 leaves out the knob there).
    if gathers(operator, phase, method) or (phase, method) == ("dgrad", "ring_exchange"):
        absent.add("fp8_buf")
    return tuple(knob for knob in _KNOBS_OF_METHOD[method] if knob not in absent)


def settings(point: Mapping[str, Any]) -> dict[str, Setting]:
    """The slots that the point overlaps and what each is given; empty for `none` and for senseless points.

    With `phase=all` every phase of the operator that takes the method gets it. This is also the content of
    tp_comm_overlap_cfg.yaml.
    """
    operator, method = point["operator"], point["method"]
    phases = PHASES if point["phase"] == "all" else (point["phase"],)
    given = {}
    for phase in phases:
        if method in methods_of(operator, phase):
            knobs = {k: point[k] for k in knobs_of(operator, phase, method) if point.get(k) is not None}
            given[slot(operator, phase)] = {"method": method, **knobs}
    return given


def refusal(point: Mapping[str, Any]) -> str | None:
    """Why the point makes no sense on any backend, or None."""
    operator, phase, method = point["operator"], point["phase"], point["method"]
    if method == "none":
        return None
    if point["tp_size"] == 1:
        return "tp_size=1 communicates nothing that could overlap; its only method is none"
    given = settings(point)
    if not given:
        return f"{method} does not fit {operator}{'' if phase == 'all' else '_' + phase}: {describe_methods(operator)}"
    for knob, what in _KNOBS_OF_SOME.items():
        if point.get(knob) and not any(knob in setting for setting in given.values()):
            return f"{knob} {what}, and {method} on {', '.join(given)} has none"
    return None


def describe_methods(operator: str) -> str:
    """One line that says which methods each slot of the operator takes."""
    slots = (f"{slot(operator, phase)} takes {', '.join(('none', *methods_of(operator, phase)))}" for phase in PHASES)
    return "; ".join(slots)


def passes(point: Mapping[str, Any]) -> tuple[str, ...]:
    """The passes whose time the point is about, and whose sum is its objective."""
    touched = {PASS_OF_PHASE[name.rsplit("_", 1)[1]] for name in settings(point)}
    if not touched:
        touched = set(PASSES) if point["phase"] == "all" else {PASS_OF_PHASE[point["phase"]]}
    return tuple(p for p in PASSES if p in touched)


def setting_name(setting: Mapping[str, Any] | None) -> str:
    """A slot's setting in a word: `none`, `bulk_sm4`, `ring_agg0`, `pipeline_sm8_split4`."""
    if not setting or setting["method"] == "none":
        return "none"
    parts = [setting["method"].removesuffix("_exchange")]
    shown = {"aggregate": "agg", "num_sm": "sm", "num_splits": "split", "cga_size": "cga", "set_sm_margin": "margin"}
    shown |= {"use_ce": "ce", "atomic_gemm": "atomic", "fp8_buf": "fp8buf"}
    parts += [f"{short}{int(setting[knob])}" for knob, short in shown.items() if setting.get(knob) is not None]
    return "_".join(parts)


def world_size(point: Mapping[str, Any]) -> int:
    """Ranks that the point runs on."""
    replicas = point["layer"]["num_replicas"] if point["workload"]["name"] == "layer" else 1
    return int(point["tp_size"] * replicas)


USERBUFFERS_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "bulk": {"cga_size": 2, "set_sm_margin": True},
    "ring_exchange": {"aggregate": False, "cga_size": 1, "set_sm_margin": False, "use_ce": True},
    "pipeline": {"num_splits": 4, "cga_size": 2, "set_sm_margin": True},
}
"""What Transformer Engine 2.20 gives to a method by default. They are always given explicitly: initialize_ub takes a
missing knob from the default of the slot, which may be that of another method."""

USERBUFFERS_MOST_SMS = 32
"""Its kernels count their blocks up to this number and tell the other ranks then: more blocks may tell too early."""
USERBUFFERS_RANKS = (2, 4, 8)
"""The sizes of group that its kernels for bulk and pipeline are compiled for; with another nothing is launched at all,
without a word. A ring exchange copies between neighbours and takes any."""

_ALWAYS_SHOWN = ("method", "aggregate", "num_splits")


def brief_name(setting: Mapping[str, Any] | None) -> str:
    """A slot's setting in a word for tables, without the knobs that are as the method has them by default."""
    if not setting:
        return "none"
    usual = USERBUFFERS_DEFAULTS[setting["method"]]
    told = {name: v for name, v in setting.items() if name in _ALWAYS_SHOWN or usual.get(name) != v}
    return setting_name(told)


LONGEST_NAME = 160
"""File systems take 255 bytes; a longer name ends in a digest of itself."""

_NAMED = {"model", "model.name", "tp_size"}
_NAMED_OF_OPERATOR = {"workload", "operator", "phase", "method", *KNOBS}
_NAMED_OF_LAYER = {"workload", "layer", "layer.num_replicas"}


def point_name(point: Mapping[str, Any], overrides: list[str]) -> str:
    """The name of a point's run directory: short, stable, and different for every point of a sweep.

    `overrides` are the command line's; those that the fixed part of the name does not show are appended.
    """
    model = str(point["model"]["name"]).rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
    setting = {"method": point["method"], **{k: point[k] for k in KNOBS if point.get(k) is not None}}
    parts = [model, f"tp{point['tp_size']}"]
    if point["workload"]["name"] == "layer":
        layer, named = point["layer"], _NAMED | _NAMED_OF_LAYER
        parts += [layer["kind"]] + ([f"dp{layer['num_replicas']}"] if layer["num_replicas"] > 1 else [])
    else:
        named = _NAMED | _NAMED_OF_OPERATOR
        parts += [point["operator"]]
        parts += [point["phase"]] if point["phase"] != "all" else []
        parts += ["none" if point["method"] == "none" else setting_name(setting)]
        if point["method"] == "none":
            parts += [f"sm{point['num_sm']}"] if any(o.startswith("num_sm=") for o in overrides) else []
    others = (o.lstrip("+~") for o in overrides if o.lstrip("+~").partition("=")[0] not in named)
    parts += [o for o in others if not o.startswith(("hydra", "experiment="))]
    name = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", "_".join(parts)).removesuffix(".json")
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}_{digest}"
