"""The names that `layer.variants` knows, and the overlap configuration that each stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep import backends
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.variants import FILE
from overlap_sweep.results.run_directory import settings_file

NOT_OVERLAPPED = ("none", "floor")
PRESETS = ("default", "bulk", "ring_exchange", "pipeline", "split", "rs_dgrad", "atomic")

_OFF = {**dict.fromkeys(overlap_cfg.SWITCH_DEFAULTS, False), "tp_comm_overlap": True}


def names(point: Mapping[str, Any]) -> list[str]:
    """What is measured, in order: `floor` always last, `none` as well unless the user's own list leaves it out.

    UserError where two options say different things of what overlaps.
    """
    layer = point["layer"]
    given = layer["variants"]
    asked = [name for name in ("variants", "tp_comm_overlap_cfg", "ub_overlap_rs_dgrad") if layer[name]]
    if layer["comm_overlap"] and len(asked) > 1:
        raise UserError(
            f"layer.{asked[0]} and layer.{asked[1]} both say how the layer overlaps; give one of them "
            "(in layer.variants a file is file:<path>)."
        )
    if given is None:
        given = ["none", *_unasked(point)] if layer["comm_overlap"] else ["none"]
    elif not layer["comm_overlap"]:
        given = [name for name in given if name in NOT_OVERLAPPED]
    others = [name for name in given if name != "floor"] or ["none"]
    return [*dict.fromkeys(others), "floor"]


def _unasked(point: Mapping[str, Any]) -> list[str]:
    """The one configuration that runs beside `none` when no list is given; the library's default if it has one."""
    layer = point["layer"]
    if layer["tp_comm_overlap_cfg"]:
        return [FILE + str(layer["tp_comm_overlap_cfg"])]
    if layer["ub_overlap_rs_dgrad"]:
        return ["rs_dgrad"]
    return ["default"] if backends.load(point["backend"]).LAYER_HAS_DEFAULT else []


def configurations(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """By name, the configuration of every variant that overlaps. UserError for a name or a file that is none."""
    overlapped = [name for name in names(point) if name not in NOT_OVERLAPPED]
    written = {settings_file(name): name for name in overlapped}
    for name in overlapped:
        if (other := written[settings_file(name)]) != name:
            raise UserError(f"layer.variants: files of {name} and {other} would have one name; rename one of the two.")
    return {name: _configuration(name, point) for name in overlapped}


def _configuration(name: str, point: Mapping[str, Any]) -> OverlapConfig:
    if name.startswith(FILE):
        return overlap_cfg.read(Path(name.removeprefix(FILE)).expanduser())
    if name not in PRESETS:
        known = ", ".join((*NOT_OVERLAPPED, *PRESETS, FILE + "<path>"))
        raise UserError(f"layer.variants: {name} is not known; choose among {known}.")
    if name == "default":
        return OverlapConfig()
    if name == "rs_dgrad":
        slots = {slot: {"method": "ring_exchange"} for slot in ("qkv_dgrad", "fc1_dgrad")}
        return OverlapConfig(slots, {**overlap_cfg.SWITCH_DEFAULTS, "tp_comm_overlap_rs_dgrad": True})
    if name == "split":
        slots = _slots_of("ring_exchange", point, "fprop", ("qkv", "fc1"))
        slots |= _slots_of("ring_exchange", point, "dgrad", ("proj", "fc2"))
        slots |= _slots_of("pipeline", point, "fprop", ("proj", "fc2"))
        return OverlapConfig(slots, {**_OFF, "tp_comm_overlap_ag": True, "tp_comm_overlap_rs": True})
    if name == "atomic":
        slots = _slots_of("ring_exchange", {**point, "atomic_gemm": True}, "fprop", tuple(space.OPERATORS))
        return OverlapConfig(slots)
    return _method_everywhere(name, point)


def _method_everywhere(method: str, point: Mapping[str, Any]) -> OverlapConfig:
    """Every slot that takes the method gets it with the point's knobs; the others are switched off."""
    slots = _slots_of(method, point, "all", tuple(space.OPERATORS))
    if method == "bulk":
        on = {"tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad"}
    else:
        on = {"tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad"}
        on |= {"tp_comm_overlap_ag"} if method == "ring_exchange" else set()
    return OverlapConfig(slots, {**_OFF, **dict.fromkeys(on, True)})


def _slots_of(
    method: str, point: Mapping[str, Any], phase: str, operators: tuple[str, ...]
) -> dict[str, space.Setting]:
    slots: dict[str, space.Setting] = {}
    given = {knob: point[knob] for knob in space.KNOBS if point[knob] is not None}
    defaults = backends.load(point["backend"]).default_knobs(method)
    complete = {**point, **defaults, **given, "method": method, "phase": phase, "phases": None}
    for operator in operators:
        slots |= space.settings({**complete, "operator": operator})
    return slots
