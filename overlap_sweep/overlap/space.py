"""The search space: slots, methods and knobs, their valid combinations, and the names of settings.

Vocabulary and rules are Transformer Engine 2.x's: a slot is an operator and a phase (`fc1_dgrad`), and the
communication that the slot carries decides which methods it takes.
"""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from overlap_sweep.config import MOST_SMS, TensorParallelPoint

OPERATORS = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
"""The linear operators of a transformer layer, column or row parallel."""

LAYER_KINDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("proj",),
    "layernorm_linear": ("qkv",),
    "layernorm_mlp": ("fc1", "fc2"),
    "multihead_attention": ("qkv", "proj"),
    "transformer_layer": tuple(OPERATORS),
}
"""Kinds of layers that are made of these operators, with those that each has."""
MOE_KIND = "moe"
"""The layer with a mixture of experts in the place of the MLP."""

PHASES = ("fprop", "dgrad", "wgrad")
PASSES = ("fwd", "bwd")
PASS_OF_PHASE = {"fprop": "fwd", "dgrad": "bwd", "wgrad": "bwd"}
"""The pass whose time a phase's setting changes: dgrad and wgrad can only be timed together."""

_OVERLAPS = ("bulk", "ring_exchange", "pipeline")
METHODS = ("none", *_OVERLAPS)
KNOBS: Mapping[str, tuple[str, ...]] = {
    "num_sm": _OVERLAPS,
    "aggregate": ("ring_exchange",),
    "num_splits": ("pipeline",),
    "cga_size": _OVERLAPS,
    "set_sm_margin": _OVERLAPS,
    "use_ce": ("ring_exchange",),
    "atomic_gemm": ("ring_exchange", "pipeline"),
    "fp8_buf": ("ring_exchange", "pipeline"),
    "comm_priority": _OVERLAPS,
    "gemm_priority": _OVERLAPS,
    "pipeline_rs_overlap_first_gemm": ("pipeline",),
}
"""The knobs, with the methods that each belongs to."""
MOST_OF = {"num_sm": MOST_SMS, "num_splits": 1024, "cga_size": 16}
COUNTS = tuple(MOST_OF)
"""The knobs that are positive integers."""
PRIORITIES = ("comm_priority", "gemm_priority")
"""The knobs that are priorities of CUDA streams; all but these and COUNTS are true or false."""
HIGHEST_PRIORITY = -5
"""The highest priority that any GPU has; a worker checks against its own. The lowest is 0."""
NUMBERS = (*COUNTS, *PRIORITIES)

_METHODS_OF_PHASE = {
    ("column", "fprop"): ("ring_exchange",),
    ("column", "dgrad"): ("bulk", "ring_exchange", "pipeline"),
    ("column", "wgrad"): ("bulk",),
    ("row", "fprop"): ("ring_exchange", "pipeline"),
    ("row", "dgrad"): ("ring_exchange",),
    ("row", "wgrad"): (),
}

_NEED_OF_KNOB = {
    "aggregate": "needs an all-gather in chunks",
    "fp8_buf": "needs a reduce-scatter that can be in FP8",
    "pipeline_rs_overlap_first_gemm": "needs a reduce-scatter by pipeline",
}

_USUAL = {"gemm_priority": 0, "pipeline_rs_overlap_first_gemm": False}
"""Knobs at the value that userbuffers give them if they are left out. Settings leave them out, so that a setting is the
same as before there were these knobs."""

KnobValue = bool | int | str
"""The value of a knob, or a method."""
Setting = dict[str, KnobValue]
"""The setting of one slot: `method` and the knobs that apply to it. Slots without overlap have none."""
Asked = Mapping[str, KnobValue | None]
"""The setting that a point asks for; null: the default of a knob, or one that the backend lacks."""


def method_of(setting: Asked) -> str:
    """Returns the setting's method; `none` if it names none."""
    return str(setting.get("method", "none"))


def num_sm_of(setting: Setting) -> int:
    """Returns the SMs of the setting's communication; 0 if it names none."""
    return int(setting.get("num_sm", 0))


@dataclass(frozen=True, kw_only=True)
class SlotSetting:
    """A setting's method and knobs as attributes; None: left to the library, and without overlap all of them."""

    method: str | None = None
    num_sm: int | None = None
    aggregate: bool | None = None
    num_splits: int | None = None
    cga_size: int | None = None
    set_sm_margin: bool | None = None
    use_ce: bool | None = None
    atomic_gemm: bool | None = None
    fp8_buf: bool | None = None
    comm_priority: int | None = None
    gemm_priority: int | None = None
    pipeline_rs_overlap_first_gemm: bool | None = None

    @classmethod
    def of(cls, setting: Mapping[str, Any]) -> Self:
        """Returns those of a setting, which may have further keys."""
        return cls(**{name: value for name, value in setting.items() if name in ("method", *KNOBS)})


class Requested(Protocol):
    """A point of workload=operator, as asked or completed. It has the knobs, too."""

    operator: str
    phase: str
    method: str
    phases: Mapping[str, Asked] | None


class OperatorPoint(Requested, TensorParallelPoint, Protocol):
    """A completed point of workload=operator."""

    with_cublasmp: bool | None


def slot(operator: str, phase: str) -> str:
    return f"{operator}_{phase}"


def methods_of(operator: str, phase: str) -> tuple[str, ...]:
    """Returns the overlapping methods that the slot takes; `none` is valid everywhere and not listed."""
    return _METHODS_OF_PHASE[OPERATORS[operator], phase]


SLOTS = {slot(operator, phase): methods_of(operator, phase) for operator in OPERATORS for phase in PHASES}
"""The overlapping methods of every slot; empty if it cannot be configured."""


def slots_of_pass(operator: str, pass_name: str) -> list[str]:
    """Returns the slots of one pass that can be configured."""
    slots = {slot(operator, phase): phase for phase in PHASES if methods_of(operator, phase)}
    return [name for name, phase in slots.items() if PASS_OF_PHASE[phase] == pass_name]


def gathers(operator: str, phase: str, method: str) -> bool:
    """Returns whether the slot overlaps an all-gather under this method; otherwise a reduce-scatter."""
    if phase == "dgrad" and OPERATORS[operator] == "column":
        return method == "bulk"
    return (OPERATORS[operator], phase) in {("column", "fprop"), ("row", "dgrad")}


def knobs_of(operator: str, phase: str, method: str) -> tuple[str, ...]:
    """Returns the knobs that have an effect in this slot under this method."""
    absent = set() if gathers(operator, phase, method) else {"aggregate"}
    # FP8 activations are always gathered in FP8, and a ring exchange of dgrad's own output is never in FP8:
    # Transformer Engine 2.20 ignores the knob there.
    if gathers(operator, phase, method) or (phase, method) == ("dgrad", "ring_exchange"):
        absent.add("fp8_buf")
    return tuple(knob for knob, methods in KNOBS.items() if method in methods and knob not in absent)


def settings(point: Requested) -> dict[str, Setting]:
    """Returns the settings of the slots that the point overlaps; empty for `none` and for invalid points.

    With `phase=all` every phase of the operator that takes the method gets it. This is also the content of
    tp_comm_overlap_cfg.yaml.
    """
    return slots_of(point.operator, requested_by_phase(point))


def slots_of(operator: str, by_phase: Mapping[str, Asked]) -> dict[str, Setting]:
    """Returns the settings of the operator's slots that take what is requested by phase, with the knobs that have an
    effect."""
    slots = {}
    for phase, requested in by_phase.items():
        method = method_of(requested)
        if method in methods_of(operator, phase):
            asked = ((knob, requested.get(knob)) for knob in knobs_of(operator, phase, method))
            knobs = {knob: value for knob, value in asked if value is not None}
            slots[slot(operator, phase)] = without_usual({"method": method, **knobs})
    return slots


def without_usual(setting: Setting) -> Setting:
    """Returns the setting without the knobs that are as if they were left out."""
    return {name: value for name, value in setting.items() if name not in _USUAL or value != _USUAL[name]}


def requested_by_phase(point: Requested) -> dict[str, Asked]:
    """Returns the requested method and knobs by phase, valid or not."""
    if point.phases:
        return {phase: point.phases[phase] for phase in PHASES if phase in point.phases}
    setting = {name: getattr(point, name) for name in ("method", *KNOBS)}
    return dict.fromkeys(PHASES if point.phase == "all" else (point.phase,), setting)


def phases_mistake(phases: object) -> str | None:
    """Returns what is wrong with a point's `phases`, or None."""
    if not isinstance(phases, Mapping) or not phases:
        return f"phases={phases} is not a map; give one such as phases={{fprop: {{method: ring_exchange}}}}"
    for phase, setting in phases.items():
        if phase not in PHASES:
            return f"phases: {phase} is not known; choose one of {', '.join(PHASES)}"
        given = setting if isinstance(setting, Mapping) else {}
        if mistake := setting_mistake({"method": None, **given}, f"phases.{phase}"):
            return mistake
    return None


def setting_mistake(setting: Mapping[str, object], name: str, *, in_file: bool = False) -> str | None:
    """Returns what is wrong with the values of a setting, or None. In files none is null, but flags may be 0 and 1, and
    there may be Transformer Engine's `is_reduce_scatter`."""
    if setting.get("method", "none") not in METHODS:
        return f"{name}.method must be one of {', '.join(METHODS)}"
    if unknown := sorted(set(map(str, setting)) - {"method", *KNOBS, *(["is_reduce_scatter"] if in_file else [])}):
        return f"{name} has no knob {', '.join(unknown)}; choose among {', '.join(KNOBS)}"
    for knob, value in setting.items():
        if knob == "method" or (value is None and not in_file):
            continue
        is_number = knob in NUMBERS
        is_of_type = isinstance(value, bool) != is_number or (in_file and not is_number)
        if not (isinstance(value, int) and is_of_type and is_possible(knob, value)):
            valid = "an integer of at least 1" if knob in COUNTS else "true or false"
            valid = f"an integer from {HIGHEST_PRIORITY} to 0" if knob in PRIORITIES else valid
            # With YAML aliases a short file can hold a huge value.
            shown = reprlib.repr(value).strip("'")
            return f"{name}.{knob}={shown} must be {valid}"
    return None


def is_possible(knob: str, value: int) -> bool:
    """Returns whether a number, or a flag as one, is a value that the knob can have on some GPU."""
    return HIGHEST_PRIORITY <= value <= 0 if knob in PRIORITIES else value >= (knob in COUNTS)


def refusal(point: OperatorPoint) -> str | None:
    """Returns why the point is invalid on any backend, or None."""
    operator, slots, requested = point.operator, settings(point), requested_by_phase(point)
    methods = {phase: method for phase, setting in requested.items() if (method := method_of(setting)) != "none"}
    if not methods:
        return None
    if point.tp_size == 1:
        return "tp_size=1 has no communication to overlap; set method=none"
    misfits = [phase for phase, method in methods.items() if slot(operator, phase) not in slots]
    if misfits and (point.phases or not slots):
        where = "" if len(misfits) == len(PHASES) else f"_{misfits[0]}"
        taken = (
            f"{slot(operator, phase)} takes {', '.join(('none', *methods_of(operator, phase)))}" for phase in PHASES
        )
        return f"{methods[misfits[0]]} does not fit {operator}{where}: {'; '.join(taken)}"
    if reason := wgrad_refusal(operator, slots):
        return reason
    for knob, need in _NEED_OF_KNOB.items():
        if any(r.get(knob) for r in requested.values()) and not any(knob in setting for setting in slots.values()):
            used = ", ".join(dict.fromkeys(map(method_of, slots.values())))
            return f"{knob} {need}; {used} on {', '.join(slots)} has none"
    return None


def scatters_dgrad(operator: str, slots: Mapping[str, Setting]) -> bool:
    """Returns whether the operator's dgrad overlaps the reduce-scatter of its own output, not an all-gather in bulk."""
    method = method_of(slots.get(slot(operator, "dgrad"), {}))
    return OPERATORS[operator] == "column" and method != "none" and not gathers(operator, "dgrad", method)


def wgrad_refusal(operator: str, slots: Mapping[str, Setting]) -> str | None:
    """Returns why the operator's wgrad and dgrad settings exclude each other, or None."""
    if scatters_dgrad(operator, slots) and slot(operator, "wgrad") in slots:
        method = slots[slot(operator, "dgrad")]["method"]
        return (
            f"{operator}_wgrad must have no overlap if {operator}_dgrad overlaps by {method}, "
            "which leaves it no communication"
        )
    return None


def passes(point: Requested) -> tuple[str, ...]:
    """Returns the passes under test."""
    phases = [name.partition("_")[2] for name in settings(point)] or requested_by_phase(point)
    touched = {PASS_OF_PHASE[phase] for phase in phases}
    return tuple(p for p in PASSES if p in touched)


DEFAULT_TOLERANCE = 2e-2
"""For fp16 and bf16, which round each partial sum. A wrong chunk has an error of 1."""


def tolerance(point: OperatorPoint) -> float:
    """Returns the largest allowed relative error of an operator point."""
    sums_fp8 = any(setting.get("fp8_buf") for setting in settings(point).values())
    # FP8 has two or three bits of mantissa.
    return allowed_error(point, 0.2 if sums_fp8 else None)


def allowed_error(point: TensorParallelPoint, usual: float | None = None) -> float:
    """Returns the largest allowed relative error: the user's, else `usual`, else that of one GEMM in the point's
    precision."""
    if usual is None:
        usual = 1e-4 if point.precision == "fp32" else DEFAULT_TOLERANCE
    given: float | None = point.workload.tolerance
    return usual if given is None else given


_SHORT_KNOBS = {
    **{"aggregate": "agg", "num_sm": "sm", "num_splits": "split", "cga_size": "cga", "set_sm_margin": "margin"},
    **{"use_ce": "ce", "atomic_gemm": "atomic", "fp8_buf": "fp8buf"},
    **{"comm_priority": "commprio", "gemm_priority": "gemmprio", "pipeline_rs_overlap_first_gemm": "first"},
}


def setting_name(setting: Setting | None) -> str:
    """Returns the name of a setting: `none`, `bulk_sm4`, `ring_agg0`, `pipeline_sm8_split4`."""
    if not setting or (method := method_of(setting)) == "none":
        return "none"
    parts = [method.removesuffix("_exchange")]
    parts += [f"{short}{int(setting[knob])}" for knob, short in _SHORT_KNOBS.items() if setting.get(knob) is not None]
    return "_".join(parts)


def setting_of(name: str) -> Setting | None:
    """Returns the setting of that name, with its knobs in any order; None if it is not a name or a knob is out of
    range."""
    method = next((m for m in METHODS[1:] if re.match(rf"{m.removesuffix('_exchange')}(_|$)", name)), None)
    if method is None:
        return None
    setting: Setting = {"method": method}
    knob_of = {short: knob for knob, short in _SHORT_KNOBS.items()}
    for part in name.removeprefix(method.removesuffix("_exchange")).split("_")[1:]:
        found = re.fullmatch(r"([a-z0-9]*[a-z])(0|-?[1-9][0-9]{0,3})", part)
        knob = knob_of.get(found[1]) if found else None
        if found is None or knob is None or knob in setting:
            return None
        value = int(found[2])
        if value > MOST_OF.get(knob, 1) or not is_possible(knob, value):
            return None
        setting[knob] = value if knob in NUMBERS else value == 1
    return setting


USERBUFFERS_DEFAULTS: dict[str, Setting] = {
    "none": {},
    "bulk": {"cga_size": 2, "set_sm_margin": True},
    "ring_exchange": {"aggregate": False, "cga_size": 1, "set_sm_margin": False, "use_ce": True},
    "pipeline": {"num_splits": 4, "cga_size": 2, "set_sm_margin": True},
}
"""Transformer Engine 2.20's default knobs by method. They are always passed explicitly: initialize_ub takes a missing
knob from the slot's default, which may belong to another method."""


def userbuffers_default(method: str) -> Setting:
    """Returns Transformer Engine's default setting of a slot whose default method this is."""
    return {"method": method, "num_sm": 1 if method == "ring_exchange" else 16, **USERBUFFERS_DEFAULTS[method]}


USERBUFFERS_DEFAULT_SETTINGS: dict[str, Setting] = {
    slot: userbuffers_default(method)
    for method, slots in {
        "ring_exchange": ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"),
        "pipeline": ("proj_fprop", "fc2_fprop"),
        "bulk": ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"),
    }.items()
    for slot in slots
}
"""Transformer Engine 2.20's default settings by slot. Knobs missing from a slot's setting also come from here."""

USERBUFFERS_MOST_SMS = 32
"""Its kernels signal the other ranks after this number of blocks: with more they may signal too early."""
USERBUFFERS_RANKS = (2, 4, 8)
"""Group sizes that its bulk and pipeline kernels are compiled for; with others it silently launches nothing. A ring
exchange copies between neighbours and works with any size."""


def brief_name(setting: Setting | None) -> str:
    """Returns the short name of a setting, without the knobs at the method's defaults."""
    if not setting:
        return "none"
    usual = USERBUFFERS_DEFAULTS[method_of(setting)]
    always = ("method", "aggregate", "num_splits")
    return setting_name({name: v for name, v in setting.items() if name in always or usual.get(name) != v})


def absent_knobs(backend: str | None, *, aggregate: object) -> set[str]:
    """Returns the knobs set by default (num_sm, aggregate=false) that the backend lacks: they change neither the point
    nor its name."""
    if backend != "symm_mem":
        return set()
    return {"num_sm"} if aggregate else {"num_sm", "aggregate"}


def without_idle_knobs(setting: Setting) -> Setting:
    """Returns the setting with knobs without effect at their defaults, so that equivalent settings are equal."""
    by_copy_engines = method_of(setting) == "ring_exchange" and setting.get("use_ce")
    return without_usual({**setting, "num_sm": 1} if by_copy_engines else setting)


def settings_name(settings: Mapping[str, Setting]) -> str:
    """Returns the name of one pass's settings: `none`, `ring_agg0`, `dgrad bulk_sm4`, or for two slots
    `dgrad bulk_sm4 + wgrad bulk_sm2`. The phase is included if the setting could belong to either slot of the pass.
    """
    if len(settings) < 2 and "bulk" not in map(method_of, settings.values()):
        return next(map(brief_name, settings.values()), "none")
    return " + ".join(f"{slot.partition('_')[2]} {brief_name(setting)}" for slot, setting in settings.items())
