"""The search space: slots, methods and knobs, what is valid together, and what a point is called.

Vocabulary and rules are Transformer Engine 2.x's: a slot is an operator and a phase (`fc1_dgrad`), and the
communication that the slot carries decides which methods it takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from overlap_sweep.config import MOST_SMS

OPERATORS = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
"""The linear operators of a transformer layer and the dimension of the weight that tensor parallelism cuts."""

LAYER_KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "multihead_attention", "transformer_layer")

PHASES = ("fprop", "dgrad", "wgrad")
PASSES = ("fwd", "bwd")
PASS_OF_PHASE = {"fprop": "fwd", "dgrad": "bwd", "wgrad": "bwd"}
"""The pass whose time a phase's setting changes: dgrad and wgrad can only be timed together."""

METHODS = ("none", "bulk", "ring_exchange", "pipeline")

KNOBS = ("num_sm", "aggregate", "num_splits", "cga_size", "set_sm_margin", "use_ce", "atomic_gemm", "fp8_buf")
MOST_OF = {"num_sm": MOST_SMS, "num_splits": 1024, "cga_size": 16}
COUNTS = tuple(MOST_OF)
"""The knobs that are numbers; the others are on or off."""

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
    """Returns the overlapping methods that the slot takes; `none` is valid everywhere and not listed."""
    return _METHODS_OF_PHASE[OPERATORS[operator], phase]


SLOTS = {slot(operator, phase): methods_of(operator, phase) for operator in OPERATORS for phase in PHASES}
"""The overlapping methods of every slot; none at all where nothing about it can be chosen."""


def gathers(operator: str, phase: str, method: str) -> bool:
    """Returns whether the slot overlaps an all-gather under this method (otherwise a reduce-scatter)."""
    if phase == "dgrad" and OPERATORS[operator] == "column":
        return method == "bulk"
    return (OPERATORS[operator], phase) in {("column", "fprop"), ("row", "dgrad")}


def knobs_of(operator: str, phase: str, method: str) -> tuple[str, ...]:
    """Returns the knobs that change anything in this slot under this method."""
    absent = set()
    if not gathers(operator, phase, method):
        absent.add("aggregate")
    # FP8 activations are always gathered as they are, and a ring exchange of dgrad's own output is never in FP8
    # (Transformer Engine 2.20 leaves out the knob there).
    if gathers(operator, phase, method) or (phase, method) == ("dgrad", "ring_exchange"):
        absent.add("fp8_buf")
    return tuple(knob for knob in _KNOBS_OF_METHOD[method] if knob not in absent)


def settings(point: Mapping[str, Any]) -> dict[str, Setting]:
    """Returns the settings of the slots that the point overlaps; empty for `none` and for invalid points.

    With `phase=all` every phase of the operator that takes the method gets it. This is also the content of
    tp_comm_overlap_cfg.yaml.
    """
    operator, given = point["operator"], {}
    for phase, asked in _asked(point).items():
        method = asked["method"]
        if method in methods_of(operator, phase):
            knobs = {k: asked[k] for k in knobs_of(operator, phase, method) if asked.get(k) is not None}
            given[slot(operator, phase)] = {"method": method, **knobs}
    return given


def point_of_slot(point: Mapping[str, Any], slot: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point of one operator that overlaps this slot alone, by this setting."""
    operator, _, phase = slot.partition("_")
    unset = {**dict.fromkeys(KNOBS), "phases": None}
    return {**point, **unset, **setting, "operator": operator, "phase": phase}


def _asked(point: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns by phase the method and knobs that are asked for, whether they are valid there or not."""
    if point.get("phases"):
        return {phase: point["phases"][phase] for phase in PHASES if phase in point["phases"]}
    return dict.fromkeys(PHASES if point["phase"] == "all" else (point["phase"],), point)


def phases_mistake(phases: Any) -> str | None:
    """Returns what is wrong with a point's `phases`, or None."""
    if not isinstance(phases, Mapping) or not phases:
        return f"phases={phases} is no map of phases; give phases={{fprop: {{method: ring_exchange}}}}"
    for phase, asked in phases.items():
        if phase not in PHASES:
            return f"phases: {phase} is not known; choose among {', '.join(PHASES)}"
        if not isinstance(asked, Mapping) or asked.get("method") not in METHODS:
            return f"phases.{phase}.method is not one of {', '.join(METHODS)}; give it one"
        if unknown := sorted(set(map(str, asked)) - {"method", *KNOBS}):
            return f"phases.{phase}: {', '.join(unknown)} is no knob; choose among {', '.join(KNOBS)}"
        for knob in (knob for knob in asked if knob != "method" and asked[knob] is not None):
            value, wanted = asked[knob], "a whole number from 1 on" if knob in COUNTS else "true or false"
            if isinstance(value, bool) == (knob in COUNTS) or not isinstance(value, int) or value < (knob in COUNTS):
                return f"phases.{phase}.{knob}={value} is wrong; give {wanted}"
    return None


def refusal(point: Mapping[str, Any]) -> str | None:
    """Returns why the point is invalid on any backend, or None."""
    operator, given, asked = point["operator"], settings(point), _asked(point)
    methods = {phase: setting["method"] for phase, setting in asked.items() if setting["method"] != "none"}
    if not methods:
        return None
    if point["tp_size"] == 1:
        return "tp_size=1 communicates nothing that could overlap; its only method is none"
    misfits = [phase for phase, method in methods.items() if slot(operator, phase) not in given]
    if misfits and (point.get("phases") or not given):
        where = "" if len(misfits) == len(PHASES) else f"_{misfits[0]}"
        return f"{methods[misfits[0]]} does not fit {operator}{where}: {describe_methods(operator)}"
    if reason := wgrad_refusal(operator, given):
        return reason
    for knob, what in _KNOBS_OF_SOME.items():
        if any(a.get(knob) for a in asked.values()) and not any(knob in setting for setting in given.values()):
            used = ", ".join(dict.fromkeys(setting["method"] for setting in given.values()))
            return f"{knob} {what}, and {used} on {', '.join(given)} has none"
    return None


def scatters_dgrad(operator: str, slots: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether the operator's dgrad reduces and scatters its own output instead of gathering beside its GEMM."""
    method = slots.get(slot(operator, "dgrad"), {}).get("method")
    return OPERATORS[operator] == "column" and method is not None and not gathers(operator, "dgrad", method)


def wgrad_refusal(operator: str, slots: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns why the operator's wgrad cannot have its setting beside its dgrad's, or None."""
    if scatters_dgrad(operator, slots) and slot(operator, "wgrad") in slots:
        method = slots[slot(operator, "dgrad")]["method"]
        return (
            f"{operator}_wgrad cannot be configured beside {operator}_dgrad by {method}, "
            "which leaves nothing for it to overlap"
        )
    return None


def describe_methods(operator: str) -> str:
    """Returns one line that says which methods each slot of the operator takes."""
    slots = (f"{slot(operator, phase)} takes {', '.join(('none', *methods_of(operator, phase)))}" for phase in PHASES)
    return "; ".join(slots)


def passes(point: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the passes whose time the point is about."""
    touched = {PASS_OF_PHASE[name.rsplit("_", 1)[1]] for name in settings(point)}
    if not touched:
        touched = {PASS_OF_PHASE[phase] for phase in _asked(point)}
    return tuple(p for p in PASSES if p in touched)


FP32_TOLERANCE = 1e-4
DEFAULT_TOLERANCE = 2e-2
"""Of fp16 and bf16, which round each partial sum. A wrong chunk is off by 1."""
FP8_SUM_TOLERANCE = 0.2
"""Where partial sums are rounded to FP8 (two or three bits of mantissa) before they are added."""


def tolerance(point: Mapping[str, Any]) -> float:
    """Returns the largest relative error at which an operator point still counts as right."""
    sums_fp8 = any(setting.get("fp8_buf") for setting in settings(point).values())
    return allowed_error(point, FP8_SUM_TOLERANCE if sums_fp8 else None)


def allowed_error(point: Mapping[str, Any], usual: float | None = None) -> float:
    """Returns the relative error that a point allows: the user's, else `usual`, else that of one GEMM in its
    precision."""
    if usual is None:
        usual = FP32_TOLERANCE if point["precision"] == "fp32" else DEFAULT_TOLERANCE
    given: float | None = point["workload"].get("tolerance")
    return usual if given is None else given


_SHORT_KNOBS = {
    **{"aggregate": "agg", "num_sm": "sm", "num_splits": "split", "cga_size": "cga", "set_sm_margin": "margin"},
    **{"use_ce": "ce", "atomic_gemm": "atomic", "fp8_buf": "fp8buf"},
}


def setting_name(setting: Mapping[str, Any] | None) -> str:
    """Returns a slot's setting in a word: `none`, `bulk_sm4`, `ring_agg0`, `pipeline_sm8_split4`."""
    if not setting or setting["method"] == "none":
        return "none"
    parts = [setting["method"].removesuffix("_exchange")]
    parts += [f"{short}{int(setting[knob])}" for knob, short in _SHORT_KNOBS.items() if setting.get(knob) is not None]
    return "_".join(parts)


def setting_of(name: str) -> Setting | None:
    """Returns the setting of that `setting_name`, its knobs in any order; None if there is none, or a knob is out of
    range."""
    method = next((m for m in METHODS[1:] if re.match(rf"{m.removesuffix('_exchange')}(_|$)", name)), None)
    if method is None:
        return None
    setting: Setting = {"method": method}
    knob_of = {short: knob for knob, short in _SHORT_KNOBS.items()}
    for part in name.removeprefix(method.removesuffix("_exchange")).split("_")[1:]:
        found = re.fullmatch(r"([a-z0-9]*[a-z])(0|[1-9][0-9]{0,3})", part)
        knob = knob_of.get(found[1]) if found else None
        if found is None or knob is None or knob in setting:
            return None
        value, most = int(found[2]), MOST_OF.get(knob, 1)
        if value > most or (knob in COUNTS and value < 1):
            return None
        setting[knob] = value if knob in COUNTS else value == 1
    return setting


USERBUFFERS_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "bulk": {"cga_size": 2, "set_sm_margin": True},
    "ring_exchange": {"aggregate": False, "cga_size": 1, "set_sm_margin": False, "use_ce": True},
    "pipeline": {"num_splits": 4, "cga_size": 2, "set_sm_margin": True},
}
"""What Transformer Engine 2.20 gives to a method by default. They are always given explicitly: initialize_ub takes a
missing knob from the default of the slot, which may be that of another method."""

USERBUFFERS_DEFAULT_SETTINGS: dict[str, Setting] = {
    slot: {"method": method, "num_sm": 1 if method == "ring_exchange" else 16, **USERBUFFERS_DEFAULTS[method]}
    for method, slots in {
        "ring_exchange": ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"),
        "pipeline": ("proj_fprop", "fc2_fprop"),
        "bulk": ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"),
    }.items()
    for slot in slots
}
"""How Transformer Engine 2.20 overlaps a slot that it is told nothing of. A slot that it is told something of takes the
rest from here, too."""

COPY_ENGINE_SMS = 1
"""The num_sm of a ring exchange by copy engines, which makes nothing of it."""

USERBUFFERS_MOST_SMS = 32
"""Its kernels count their blocks up to this number and tell the other ranks then: more blocks may tell too early."""
USERBUFFERS_RANKS = (2, 4, 8)
"""The sizes of group that its kernels for bulk and pipeline are compiled for; with another nothing is launched at all,
without a word. A ring exchange copies between neighbours and takes any."""

_ALWAYS_SHOWN = ("method", "aggregate", "num_splits")


def brief_name(setting: Mapping[str, Any] | None) -> str:
    """Returns a slot's setting in a word for tables, without the knobs that have the method's defaults."""
    if not setting:
        return "none"
    usual = USERBUFFERS_DEFAULTS[setting["method"]]
    told = {name: v for name, v in setting.items() if name in _ALWAYS_SHOWN or usual.get(name) != v}
    return setting_name(told)


WITHOUT_KNOBS = ("symm_mem",)
"""Backends whose methods have no knobs."""


def absent_knobs(backend: str | None, asked: Mapping[str, Any]) -> set[str]:
    """Returns the knobs among those that every point has by default, num_sm and aggregate=0, that the backend lacks: a
    point is the same whatever they are, and has the same name."""
    if backend not in WITHOUT_KNOBS:
        return set()
    return {"num_sm"} if asked.get("aggregate") else {"num_sm", "aggregate"}


def without_idle_knobs(setting: Setting) -> Setting:
    """Returns the setting with every knob that changes nothing at its usual value, so that equal settings are equal."""
    by_copy_engines = setting["method"] == "ring_exchange" and setting.get("use_ce")
    return {**setting, "num_sm": COPY_ENGINE_SMS} if by_copy_engines else setting


def settings_name(settings: Mapping[str, Setting]) -> str:
    """Returns the settings of one pass in words: `none`, `ring_agg0`, `dgrad bulk_sm4`, and of two slots `dgrad
    bulk_sm4 + wgrad bulk_sm2`.

    The phase is named wherever the pass has two slots that the setting could be of.
    """
    if len(settings) < 2 and not any(setting["method"] == "bulk" for setting in settings.values()):
        return next(map(brief_name, settings.values()), "none")
    return " + ".join(f"{slot.partition('_')[2]} {brief_name(setting)}" for slot, setting in settings.items())
