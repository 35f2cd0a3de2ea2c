"""The files to train with at one TP size: the YAML that Megatron-LM reads as tp_comm_overlap_cfg and passes to
Transformer Engine as ub_cfgs, and the same configuration for Megatron-Bridge and as JSON for Transformer Engine.

Their heads say where the settings come from and how much they gain. Async TP is a switch and reads no file: its
settings are written for this package's own layers only.

The formats are those of Megatron-LM 0.19.2 (training/arguments.py, training/initialize.py), Megatron-Bridge
0.6.2 (training/comm_overlap.py, config.py and initialize.py) and Transformer Engine 2.20 (pytorch/module/base.py,
pytorch/transformer.py).
"""

import json
from collections.abc import Mapping, Sequence

import yaml

from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import (
    ASYNC_TP_BACKEND,
    FLAGS,
    SWITCH_DEFAULTS,
    USERBUFFER_BACKENDS,
    OverlapConfig,
    named,
    no_switches,
    scatters_dgrad,
)
from overlap_sweep.report.numbers import as_sentence, as_us, comments
from overlap_sweep.results.provenance import describe_machine, launch_commands, machines, measured_when, multicast
from overlap_sweep.workloads.operator.advice import (
    async_tp_advice,
    file_name,
    is_async_tp,
    operators_in_sum,
    transfer_warning,
)
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.proof import Proof

_LEFT_OUT = "gets Transformer Engine's default overlap, unless a switch turns it off."

_BRIDGE_MODULE = "megatron.bridge.training.comm_overlap"
_NO_DEFAULT = object()
_BRIDGE_FIELDS: dict[str, dict[str, object]] = {
    "bulk": dict.fromkeys(("num_sm", "cga_size", "set_sm_margin"), _NO_DEFAULT),
    "ring_exchange": {
        **{"aggregate": False, "num_sm": 1, "cga_size": 1, "set_sm_margin": False},
        **{"fp8_buf": False, "atomic_gemm": False},
    },
    "pipeline": {
        # The default of fp8_buf is `(False,)`: a tuple, thus true, which would reduce in FP8.
        **dict.fromkeys(("num_sm", "cga_size", "num_splits", "set_sm_margin", "fp8_buf"), _NO_DEFAULT),
        "atomic_gemm": False,
    },
}
"""Fields of Megatron-Bridge's classes and their defaults. `method` is also a field, always at its default."""


def training_files(case: CaseAnalysis, tp_size: int, command: str) -> dict[str, str]:
    """Returns the text of each file by name; first the YAML for Megatron-LM, or its substitute."""
    config, name = case.config(tp_size), f"tp_comm_overlap_tp{tp_size}"
    lines = [
        *_origin(case, tp_size, command),
        *(["", *case.applies_to] if case.applies_to else []),
        *_gain(case, tp_size),
    ]
    if slots := ", ".join(f"{one.slot} ({one.runs})" for one in case.unmeasured(tp_size)):
        lines += ["", f"Slots not measured on their own: {slots}."]

    def head(reader: str) -> list[str]:
        return [f"Communication overlap at TP={tp_size}, for {reader}.", *lines]

    if is_async_tp(case):
        here = head(f"workload=layer with backend={ASYNC_TP_BACKEND} (layer.tp_comm_overlap_cfg=<this file>)")
        return {file_name(tp_size): comments([*no_switches(here), ""]) + overlap_cfg.text(config)}
    megatron = head("Megatron-LM's --tp-comm-overlap-cfg and Transformer Engine's ub_cfgs")
    bridge = head("Megatron-Bridge's TransformerLayerTPOverlapCfg")
    return {
        file_name(tp_size): megatron_yaml(config, megatron),
        f"megatron_bridge_preset_tp{tp_size}.py": megatron_bridge_preset(config, bridge, name),
        f"ub_cfgs_tp{tp_size}.json": ub_cfgs_json(config),
    }


def _origin(case: CaseAnalysis, tp_size: int, command: str) -> list[str]:
    """Returns the case, the machine and the commands of the measurements."""
    points = [*case.points, *(proof.trial.point for proof in case.proofs.values() if proof.trial.point)]
    lines = [
        f"{case.case}",
        f"Measured {measured_when(points)} on {describe_machine(machines(case.points)[0])}",
        *(f"  {line}" for line in dict.fromkeys([*launch_commands(points), command])),
        *overlap_cfg.set_in_training(case.case.process_wide),
    ]
    if case.case.backend not in USERBUFFER_BACKENDS:
        return [*lines, transfer_warning(case), *([async_tp_advice(case, tp_size)] if is_async_tp(case) else [])]
    proof = case.proofs.get(tp_size)
    if transport := multicast([proof.trial.point] if proof and proof.trial.point else case.points):
        lines.append(
            f"Measured with NVLink multicast {transport} (runtime.multicast=true turns it on, UB_SKIPMC=1 off); "
            "Transformer Engine's default is on."
        )
    return lines


def _gain(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns the gain of the configuration: summed over operators if it has their best settings, and on whole layers
    that ran with it."""
    outcome, plan = case.outcomes.get(tp_size), case.plans.get(tp_size)
    as_planned = plan and plan.config == case.config(tp_size) and case.tried(tp_size)
    lines = ["", operators_in_sum(case, tp_size)] if as_planned else []
    lines += ["", as_sentence(outcome.verdict)] if outcome else []
    if not isinstance(outcome, Proof):
        return lines
    layer, backend = outcome.layer, case.case.backend
    measured = as_sentence(outcome.trial.part.removeprefix("the "))
    recommended = named(outcome.recommended, backend)
    lines.append(f"{measured} in {layer.rounds} interleaved rounds; this file is '{recommended}':")
    for label, row in outcome.trial.rows.items():
        ratio = f"{row.gain.ratio:.3f} of {layer.reference} ({row.gain.low:.3f} to {row.gain.high:.3f})"
        lines.append(f"  {named(label, backend)}: {as_us(row.whole.time_us)} us, {ratio}")
    return [*lines, *layer.cautions, *outcome.trial.warnings]


def megatron_yaml(config: OverlapConfig, head: Sequence[str]) -> str:
    """Returns the text for Megatron-LM's --tp-comm-overlap-cfg: `head` and the switches to set in comments, then the
    slots. `overlap_cfg.read` returns the same configuration from it."""
    switches = {**SWITCH_DEFAULTS, **config.switches}
    overlaps, lines = switches["tp_comm_overlap"], []
    for name, on in switches.items():
        changed = on != SWITCH_DEFAULTS[name]
        # `overlap_cfg.read` assumes that it is on for such slots unless the file names it.
        decides = name == "tp_comm_overlap_rs_dgrad" and scatters_dgrad(config.slots)
        if changed or decides or name == "tp_comm_overlap":
            flag = FLAGS.get(name, "no command line option; a field of TransformerConfig")
            how = flag if changed or name == "tp_comm_overlap" else "its default"
            lines.append(f"  {name}: {str(on).lower()}{f'  ({how})' if overlaps else ''}")
    if overlaps:
        lines = [
            "Set in Megatron-Core's configuration (or on Megatron-LM's command line):",
            *lines,
            "",
            f"A slot that is missing from this file {_LEFT_OUT}",
        ]
    else:
        lines.insert(0, "Keep overlap off: leave --tp-comm-overlap out. Nothing else in this file has an effect then.")
    return comments([*no_switches(head), "", *lines]) + yaml.safe_dump(config.slots, sort_keys=False)


def megatron_bridge_preset(config: OverlapConfig, head: Sequence[str], name: str) -> str:
    """Returns a Python module for Megatron-Bridge that defines `name`, with usage in comments.

    Megatron-Bridge drops the slots that are None and passes the others to initialize_ub with every field of their
    class. So an unset knob is written out if the class has another default than Transformer Engine has for the slot.
    Knobs that the classes lack are listed in a comment.
    """
    switches = {**SWITCH_DEFAULTS, **config.switches}
    used = sorted({_bridge_class(_method(slot, setting)) for slot, setting in config.slots.items()})
    imported = "".join(f"    {known},\n" for known in [*used, "TransformerLayerTPOverlapCfg"])
    lines = [*head, "", *_bridge_use(switches, name)]
    if switches["tp_comm_overlap"]:
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


def _bridge_use(switches: Mapping[str, bool], name: str) -> list[str]:
    """Returns lines on how to apply the preset. Statements are one line each and begin with two blanks.

    CommOverlapConfig turns the overlap on and off and takes the slots; the other switches are fields of the model's
    configuration, which it does not touch.
    """
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


def _bridge_class(method: str) -> str:
    return f"{method.title().replace('_', '')}OverlapCfg"


def _bridge_setting(slot: str, setting: space.Setting) -> str:
    method = _method(slot, setting)
    wanted = {**_defaults(slot, method), **setting}
    arguments = ", ".join(
        f"{knob}={wanted[knob]!r}"
        for knob, default in _BRIDGE_FIELDS[method].items()
        if knob in setting or wanted[knob] != default
    )
    return f"{_bridge_class(method)}({arguments})"


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
    slots = config.slots if config.switches.get("tp_comm_overlap", True) else None
    return json.dumps(slots, indent=2) + "\n"


def _method(slot: str, setting: space.Setting) -> str:
    return str(setting.get("method", space.USERBUFFERS_DEFAULT_SETTINGS[slot]["method"]))


def _defaults(slot: str, method: str) -> space.Setting:
    """Returns initialize_ub's defaults for the unset knobs of a slot, as far as each is one value.

    They depend on the slot's default method, not on `method`, except for a dgrad that scatters its output.
    """
    operator, phase = slot.split("_")
    deciding_method = method if phase == "dgrad" else _method(slot, {})
    unset = dict.fromkeys(("aggregate", "atomic_gemm", "fp8_buf", "pipeline_rs_overlap_first_gemm"), False)
    return {
        **{"is_reduce_scatter": not space.gathers(operator, phase, method), "use_ce": True, "gemm_priority": 0},
        **({} if deciding_method == "ring_exchange" else {"num_splits": 4}),
        **unset,
        **space.userbuffers_default(deciding_method),
    }
