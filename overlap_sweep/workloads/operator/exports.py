"""Writes a configuration in the form of each library: Megatron-LM, Megatron-Bridge, Transformer Engine.

The formats are those of Megatron-LM 0.19.2 (training/arguments.py, training/initialize.py), Megatron-Bridge
0.6.2 (training/comm_overlap.py, config.py and initialize.py) and Transformer Engine 2.20 (pytorch/module/base.py,
pytorch/transformer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import FLAGS, SWITCH_DEFAULTS, OverlapConfig, no_switches, scatters_dgrad
from overlap_sweep.report.numbers import comments

DONT_OVERLAP = "Keep overlap off: leave --tp-comm-overlap out. Nothing else in this file has an effect then."
SET_IN_MEGATRON = "Set in Megatron-Core's configuration (or on Megatron-LM's command line):"
_LEFT_OUT = "gets Transformer Engine's default overlap, unless a switch turns it off."

_BRIDGE_MODULE = "megatron.bridge.training.comm_overlap"
_BRIDGE_CLASSES = {
    "bulk": "BulkOverlapCfg",
    "ring_exchange": "RingExchangeOverlapCfg",
    "pipeline": "PipelineOverlapCfg",
}
_NO_DEFAULT = object()
_BRIDGE_FIELDS: dict[str, dict[str, Any]] = {
    "bulk": {"num_sm": _NO_DEFAULT, "cga_size": _NO_DEFAULT, "set_sm_margin": _NO_DEFAULT},
    "ring_exchange": {
        "aggregate": False,
        "num_sm": 1,
        "cga_size": 1,
        "set_sm_margin": False,
        "fp8_buf": False,
        "atomic_gemm": False,
    },
    "pipeline": {
        "num_sm": _NO_DEFAULT,
        "cga_size": _NO_DEFAULT,
        "num_splits": _NO_DEFAULT,
        "set_sm_margin": _NO_DEFAULT,
        # Its default is `(False,)`: a tuple, thus true, which would reduce in FP8.
        "fp8_buf": _NO_DEFAULT,
        "atomic_gemm": False,
    },
}
"""Fields of Megatron-Bridge's classes and their defaults. `method` is also a field, always at its default."""


def megatron_yaml(config: OverlapConfig, head: Sequence[str]) -> str:
    """Returns the text for Megatron-LM's --tp-comm-overlap-cfg: `head` and the switches to set in comments, then the
    slots. `overlap_cfg.read` returns the same configuration from it."""
    slots = yaml.safe_dump(config.slots, sort_keys=False)
    return comments([*no_switches(head), "", *_megatron_switches(config)]) + slots


def _megatron_switches(config: OverlapConfig) -> list[str]:
    switches = _all_switches(config)
    named = {"tp_comm_overlap"} | {name for name, on in switches.items() if on != SWITCH_DEFAULTS[name]}
    if scatters_dgrad(config.slots):
        # `overlap_cfg.read` assumes that it is on for such slots unless the file names it.
        named.add("tp_comm_overlap_rs_dgrad")
    if not switches["tp_comm_overlap"]:
        return [DONT_OVERLAP] + [f"  {name}: {str(on).lower()}" for name, on in switches.items() if name in named]
    lines = [SET_IN_MEGATRON]
    for name, on in switches.items():
        if name in named:
            lines.append(f"  {name}: {str(on).lower()}  ({_how_to_set(name, on)})")
    return [*lines, "", f"A slot that is missing from this file {_LEFT_OUT}"]


def _how_to_set(name: str, on: bool) -> str:
    if name != "tp_comm_overlap" and on == SWITCH_DEFAULTS[name]:
        return "its default"
    return FLAGS.get(name, "no command line option; a field of TransformerConfig")


def megatron_bridge_preset(config: OverlapConfig, head: Sequence[str], name: str) -> str:
    """Returns a Python module for Megatron-Bridge that defines `name`, with usage in comments.

    Megatron-Bridge drops the slots that are None and passes the others to initialize_ub with every field of their
    class. So an unset knob is written out if the class has another default than Transformer Engine has for the slot.
    Knobs that the classes lack are listed in a comment.
    """
    used = sorted({_BRIDGE_CLASSES[_method(slot, setting)] for slot, setting in config.slots.items()})
    imported = "".join(f"    {known},\n" for known in [*used, "TransformerLayerTPOverlapCfg"])
    lines = [*head, "", *_bridge_use(config, name)]
    if _all_switches(config)["tp_comm_overlap"]:
        lines += ["", f"A slot that is None {_LEFT_OUT}", *_bridge_losses(config)]
    # Every slot is a field without a default.
    fields = (
        f"    {slot}={_bridge_setting(slot, config.slots[slot]) if slot in config.slots else None},\n"
        for slot, methods in space.SLOTS.items()
        if methods
    )
    return (
        f"{comments(lines)}\nfrom {_BRIDGE_MODULE} import (\n{imported})\n\n"
        f"{name} = TransformerLayerTPOverlapCfg(\n{''.join(fields)})\n"
    )


def _bridge_use(config: OverlapConfig, name: str) -> list[str]:
    """Returns lines on how to apply the preset. Statements are one line each and begin with two blanks.

    CommOverlapConfig turns the overlap on and off and takes the slots; the other switches are fields of the model's
    configuration, which it does not touch.
    """
    switches = _all_switches(config)
    imported = f"  from {_BRIDGE_MODULE} import CommOverlapConfig"
    if not switches["tp_comm_overlap"]:
        return [
            f"Keep overlap off. In the recipe, where cfg is the ConfigContainer, without {name}:",
            imported,
            "  cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)",
        ]
    return [
        "In the recipe, where cfg is the ConfigContainer:",
        imported,
        *(f"  cfg.model.{switch} = {on}" for switch, on in switches.items() if on != SWITCH_DEFAULTS[switch]),
        f"  cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True, tp_comm_overlap_cfg={name})",
        "If it already has a CommOverlapConfig, set these two fields of that one. Leave the model's other tp_comm",
        "switches at their defaults. With sequence_parallel off or a TP size of 1, Megatron-Bridge turns the overlap",
        "off, with only a warning.",
    ]


def _bridge_setting(slot: str, setting: Mapping[str, Any]) -> str:
    method = _method(slot, setting)
    wanted = {**_defaults(slot, method), **setting}
    fields = {
        knob: wanted[knob]
        for knob, default in _BRIDGE_FIELDS[method].items()
        if knob in setting or wanted[knob] != default
    }
    arguments = ", ".join(f"{knob}={value!r}" for knob, value in fields.items())
    return f"{_BRIDGE_CLASSES[method]}({arguments})"


def _bridge_losses(config: OverlapConfig) -> list[str]:
    """Returns lines on knobs without a field in Megatron-Bridge's classes that differ from the defaults."""
    lost = []
    for slot, setting in config.slots.items():
        method = _method(slot, setting)
        known = {"method", *_BRIDGE_FIELDS[method]}
        set_otherwise = setting.items() - _defaults(slot, method).items()
        lost += [f"  {slot}: {knob}={value!r}" for knob, value in set_otherwise if knob not in known]
    if not lost:
        return []
    return [
        "",
        "Megatron-Bridge's classes (0.6.2) have no fields for these knobs, so they are lost:",
        *sorted(lost),
        "To keep them, set cfg.model.tp_comm_overlap to True and cfg.model.tp_comm_overlap_cfg to the YAML for",
        "Megatron-LM, and leave cfg.comm_overlap None, since it would overwrite both.",
    ]


def ub_cfgs_json(config: OverlapConfig) -> str:
    """Returns the slots as JSON for Transformer Engine's `initialize_ub(ub_cfgs=json.load(file))`, without switches.

    null if overlap is to stay off: initialize_ub must not be called then, since an empty map gives every slot the
    library's default.
    """
    slots = config.slots if _all_switches(config)["tp_comm_overlap"] else None
    return json.dumps(slots, indent=2) + "\n"


def _all_switches(config: OverlapConfig) -> dict[str, bool]:
    """Returns all switches; those that the configuration does not name have their defaults."""
    return {**SWITCH_DEFAULTS, **config.switches}


def _method(slot: str, setting: Mapping[str, Any]) -> str:
    """Returns the setting's method, or the slot's default if it names none."""
    operator, phase = slot.split("_")
    if phase != "fprop" and space.OPERATORS[operator] == "column":
        usual = "bulk"
    else:
        usual = "ring_exchange" if space.gathers(operator, phase, "ring_exchange") else "pipeline"
    return str(setting.get("method", usual))


def _defaults(slot: str, method: str) -> dict[str, Any]:
    """Returns initialize_ub's defaults for the unset knobs of a slot, as far as each is one value.

    They depend on the slot's default method, not on `method`, except for a dgrad that scatters its output.
    """
    operator, phase = slot.split("_")
    deciding_method = method if phase == "dgrad" else _method(slot, {})
    ring = deciding_method == "ring_exchange"
    return {
        "is_reduce_scatter": not space.gathers(operator, phase, method),
        "num_sm": 1 if ring else 16,
        "cga_size": 1 if ring else 2,
        "set_sm_margin": not ring,
        **({} if ring else {"num_splits": 4}),
        "aggregate": False,
        "atomic_gemm": False,
        "use_ce": True,
        "fp8_buf": False,
        "gemm_priority": 0,
        "pipeline_rs_overlap_first_gemm": False,
    }
