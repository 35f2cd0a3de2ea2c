"""YAML files that Megatron-LM reads as tp_comm_overlap_cfg: slots with their methods and knobs.

Such a file does not turn overlaps on or off; Megatron-Core's switches do. Files that `analyze.py` writes name the
switches to set in their comments, and `read` reads those too.
"""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import yaml

from overlap_sweep.config import PointConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space

SWITCH_DEFAULTS = {
    "tp_comm_overlap": True,
    "tp_comm_overlap_ag": True,
    "tp_comm_overlap_rs": True,
    "tp_comm_overlap_rs_dgrad": False,
    "tp_comm_bulk_dgrad": True,
    "tp_comm_bulk_wgrad": True,
    "tp_comm_overlap_disable_qkv": False,
    "tp_comm_overlap_disable_fc1": False,
}
"""Megatron-Core's defaults, except the first: without it nothing overlaps and no such file is read."""

MEGATRON_NAMES = {
    f"ub_{name}": f"tp_comm_{name}"
    for name in ("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad")
}
"""Megatron-Core's switches by those of Transformer Engine's layers, which have the same defaults."""
SWITCHES_OF_PARALLEL = {
    "column": ("ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    "row": ("ub_overlap_ag", "ub_overlap_rs"),
}
"""Switches that a linear operator has."""

FLAGS = {
    "tp_comm_overlap": "--tp-comm-overlap",
    "tp_comm_overlap_ag": "--disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "--disable-tp-comm-overlap-rs",
    "tp_comm_overlap_rs_dgrad": "--tp-comm-overlap-rs-dgrad",
    "tp_comm_bulk_dgrad": "--disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "--disable-tp-comm-bulk-wgrad",
}
"""The command line options of Megatron-LM that change a switch from its default; the others have none."""

NONE, DEFAULT, TUNED, FLOOR = "none", "default", "tuned", "floor"
NONE_IN_WORDS = "no overlap"
"""Variants of a whole layer: no overlap; the library's own; the tuner's; the same GEMMs without communication."""
FILE = "file:"
"""Prefix of the name of a variant that is configured by a file; the path follows."""
ASYNC_TP_BACKEND = "symm_mem"
"""The backend whose default overlap is PyTorch's async TP."""
USERBUFFER_BACKENDS = ("transformer_engine", "megatron")
"""The backends whose settings Megatron-LM can run."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
CUBLASMP = "with_cublasmp=True"
"""Settings of whole processes, which such files cannot have: a variable of the environment, and an argument of
Transformer Engine's initialize_ub."""

USUAL_CONNECTIONS = {ASYNC_TP_BACKEND: 8}
"""CUDA_DEVICE_MAX_CONNECTIONS in training with a backend, if not 1. With one connection, two streams of symm_mem wait
for each other: a fused GEMM and reduce-scatter took 21 % longer (8192x8192x8192, two H200s)."""

NO_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""Exceptions of PyYAML for text that is not YAML, such as IndexError for `!!int ""`."""

_SCATTER = frozenset({"ring_exchange", "pipeline"})
_GATHER = frozenset({"ring_exchange"})
_BULK = frozenset({"bulk"})
_OFF: frozenset[str] = frozenset()

_SWITCH_COMMENT = re.compile(r"^#\s+(tp_comm_\w+):\s+(true|false)\b", re.MULTILINE)


@dataclass(frozen=True)
class OverlapConfig:
    """How a layer overlaps."""

    slots: dict[str, space.Setting] = field(default_factory=dict)
    """Settings by slot, as in initialize_ub's `ub_cfgs`; other slots run at the library's default, if there is one and
    the slot's switch is on."""
    switches: dict[str, bool] = field(default_factory=lambda: dict(SWITCH_DEFAULTS))
    """Values of Megatron-Core's switches. Empty for a single operator, whose other slots are not overlapped."""


def read(path: Path) -> OverlapConfig:
    """Returns the configuration in a file. UserError if it is not a tp_comm_overlap_cfg."""
    try:
        text = path.read_text()
        slots = yaml.safe_load(text)
    except (OSError, *NO_YAML) as error:
        raise UserError(
            f"{path} cannot be read ({' '.join(str(error).split())}); give a tp_comm_overlap_cfg."
        ) from None
    slots = {} if slots is None else slots
    if not isinstance(slots, dict) or not all(isinstance(setting, dict) for setting in slots.values()):
        raise UserError(
            f"{path} is not a tp_comm_overlap_cfg: it must map slots, such as fc1_dgrad, to their settings."
        )
    if mistake := _mistake(slots):
        raise UserError(f"{path}: {mistake}.")
    named = {name: value == "true" for name, value in _SWITCH_COMMENT.findall(text) if name in SWITCH_DEFAULTS}
    switches = {**SWITCH_DEFAULTS, **named}
    if scatters_dgrad(slots) and "tp_comm_overlap_rs_dgrad" not in named:
        switches["tp_comm_overlap_rs_dgrad"] = True
    return OverlapConfig(slots, switches)


def no_switches(comments: Iterable[str]) -> list[str]:
    """Returns the lines, with quotes around those that `read` would take for switches: user-chosen names may look like
    one."""
    lines = (line for entry in comments for line in entry.splitlines() or [""])
    return [f"'{line.strip()}'" if _SWITCH_COMMENT.match(f"# {line}") else line for line in lines]


def text(config: OverlapConfig) -> str:
    """Returns the text of the file, which `read` can read."""
    head = [
        "Settings passed to the backend (Transformer Engine: ub_cfgs of initialize_ub).",
        "Slots that are not listed ran at the library's default if their switch is on."
        if config.switches
        else "Slots of the operator that are not listed were not overlapped.",
        *(f"  {name}: {str(on).lower()}" for name, on in config.switches.items()),
    ]
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(config.slots, sort_keys=False)


def _mistake(slots: Mapping[str, space.Setting]) -> str | None:
    """Returns what is wrong with a file's slots, knobs or values, or None."""
    for slot, setting in slots.items():
        if slot not in space.SLOTS:
            known = ", ".join(name for name, methods in space.SLOTS.items() if methods)
            return f"{slot} is not a slot; choose among {known}"
        if not space.SLOTS[slot]:
            return f"{slot} follows its dgrad and cannot be configured; leave it out"
        if mistake := space.setting_mistake(setting, slot, in_file=True):
            return mistake
    return None


def slots_refusal(slots: Mapping[str, space.Setting]) -> str | None:
    """Returns why Transformer Engine would not take these slots, or None."""
    if reason := methods_refusal(slots):
        return reason
    for slot, setting in slots.items():
        if (num_sm := space.num_sm_of(setting)) > space.USERBUFFERS_MOST_SMS:
            return f"{slot}: num_sm={num_sm} is more than the {space.USERBUFFERS_MOST_SMS} that userbuffers support"
    return None


def methods_refusal(slots: Mapping[str, space.Setting]) -> str | None:
    """Returns why no library could overlap these slots by these methods, or None."""
    for slot, setting in slots.items():
        method = setting.get("method")
        if method is not None and method not in space.SLOTS[slot]:
            return f"{slot} takes {', '.join(space.SLOTS[slot])}, not {method}"
    return next(filter(None, (space.wgrad_refusal(operator, slots) for operator in space.OPERATORS)), None)


def methods_allowed(switches: Mapping[str, bool]) -> dict[str, frozenset[str]]:
    """Returns the overlapping methods that each slot can have under these switches; empty if it is off.

    A slot that is on cannot run without overlap.

    As in Megatron-Core 0.16.1 (core/extensions/transformer_engine.py) and Transformer Engine 2.20
    (pytorch/module/linear.py, layernorm_linear.py). Megatron-Core's comments on tp_comm_bulk_dgrad and
    tp_comm_bulk_wgrad are interchanged; the code does what the names say.
    """
    on = {name: on and switches["tp_comm_overlap"] for name, on in switches.items()}
    allowed = {}
    for operator in ("qkv", "fc1"):
        # Turns off the overlap with the operator's own GEMMs; the bulk overlaps stay on.
        disabled = switches[f"tp_comm_overlap_disable_{operator}"]
        own_scatter = on["tp_comm_overlap_rs_dgrad"] and not disabled
        allowed[f"{operator}_fprop"] = _GATHER if on["tp_comm_overlap_ag"] and not disabled else _OFF
        allowed[f"{operator}_dgrad"] = _SCATTER if own_scatter else _BULK if on["tp_comm_bulk_dgrad"] else _OFF
        allowed[f"{operator}_wgrad"] = _BULK if on["tp_comm_bulk_wgrad"] and not own_scatter else _OFF
    for operator in ("proj", "fc2"):
        allowed[f"{operator}_fprop"] = _SCATTER if on["tp_comm_overlap_rs"] else _OFF
        allowed[f"{operator}_dgrad"] = _GATHER if on["tp_comm_overlap_ag"] else _OFF
    return allowed


def scatters_dgrad(slots: Mapping[str, space.Setting]) -> bool:
    """Returns whether any dgrad overlaps the reduce-scatter of its own output instead of an all-gather in bulk."""
    return any(space.scatters_dgrad(operator, slots) for operator in space.OPERATORS)


def switches_refusal(config: OverlapConfig, operators: Collection[str] = tuple(space.OPERATORS)) -> str | None:
    """Returns why a layer that has these operators cannot run these slots under these switches, or None."""
    switches = config.switches
    if not switches["tp_comm_overlap"]:
        return None
    for operator in (operator for operator in ("qkv", "fc1") if operator in operators):
        scatters = space.scatters_dgrad(operator, config.slots)
        off = f"tp_comm_overlap_disable_{operator}"
        wanted = switches["tp_comm_overlap_rs_dgrad"] and not switches[off]
        if wanted and not scatters:
            return (
                f"tp_comm_overlap_rs_dgrad applies to qkv and fc1 alike, but {operator}_dgrad is not set to "
                "ring_exchange or pipeline"
            )
        if scatters and not wanted and switches["tp_comm_bulk_dgrad"]:
            switch = f"{off} is on" if switches[off] else "tp_comm_overlap_rs_dgrad is off"
            return (
                f"{switch}, so {operator}_dgrad overlaps by bulk, but its buffers are set up for "
                f"{config.slots[f'{operator}_dgrad']['method']}"
            )
    return None


def overlaps(config: OverlapConfig, operators: Collection[str]) -> bool:
    """Returns whether any overlap of a layer that has these operators is switched on."""
    allowed = methods_allowed(config.switches)
    return any(allowed.get(space.slot(operator, phase)) for operator in operators for phase in space.PHASES)


def megatron_arguments(config: OverlapConfig, tp_size: int, file: str = "") -> list[str]:
    """Returns Megatron-LM's command line arguments for the configuration, whose slots are in `file`; empty if overlap
    is off. Megatron-LM refuses the overlap without sequence parallelism."""
    lines = overlap_arguments(config, file)
    if not lines:
        return []
    return [
        f"--tensor-model-parallel-size {tp_size} --sequence-parallel {lines[0]}",
        *lines[1:],
        *(f"# no option, set in TransformerConfig: {name}={on}" for name, on in switches_without_flag(config).items()),
    ]


def overlap_arguments(config: OverlapConfig, file: str = "") -> list[str]:
    """Returns the lines of `megatron_arguments` that are about the overlap alone, without the switches that have no
    argument; empty if overlap is off."""
    changed = (name for name, on in config.switches.items() if on != SWITCH_DEFAULTS[name])
    if not config.switches.get("tp_comm_overlap"):
        return []
    return [
        FLAGS["tp_comm_overlap"],
        *([f"--tp-comm-overlap-cfg {shlex.quote(file)}"] if file else []),
        *(FLAGS[name] for name in changed if name in FLAGS),
    ]


def switches_without_flag(config: OverlapConfig) -> dict[str, bool]:
    """Returns the switches that differ from their defaults and have no argument of Megatron-LM, with their values."""
    return {name: on for name, on in config.switches.items() if on != SWITCH_DEFAULTS[name] and name not in FLAGS}


def process_wide(config: PointConfig) -> str:
    """Returns what a point sets for whole processes, which no file for Megatron-LM can set, as it is spelled there:
    `CUDA_DEVICE_MAX_CONNECTIONS=8, with_cublasmp=True`. Empty if that is as usual."""
    connections = config.runtime.max_connections if config.runtime.device != "cpu" else None
    usual = connections in (None, USUAL_CONNECTIONS.get(config.backend, 1))
    found = [] if usual else [f"{CONNECTIONS}={connections}"]
    return ", ".join([*found, *([CUBLASMP] if getattr(config, "with_cublasmp", None) else [])])


def set_in_training(process_wide: str) -> list[str]:
    """Returns sentences on what training must set besides a file: `process_wide` of the measured points' case."""
    return [
        "Measured with cuBLASMp: initialize_ub(with_cublasmp=True), which Megatron-LM cannot set."
        if setting == CUBLASMP
        else f"Set {setting} in training, as measured; no file sets it. Megatron-LM accepts other values than 1 from "
        "Blackwell on."
        for setting in filter(None, process_wide.split(", "))
    ]


def named(variant: str, backend: str) -> str:
    """Returns a variant's name in tables and charts."""
    return "async TP" if variant == DEFAULT and backend == ASYNC_TP_BACKEND else variant


def spoken(variant: str, backend: str) -> str:
    """Returns a variant's name in a sentence: `no overlap`, `the default`, `async TP`."""
    return {NONE: NONE_IN_WORDS, DEFAULT: "the default"}.get(named(variant, backend), named(variant, backend))


def without_folders(variants: Iterable[str]) -> dict[str, str]:
    """Returns short names by variant, such as `file:best.yaml` for `file:/a/b/best.yaml`. Files of equal names keep
    their folders."""
    short = {one: FILE + PurePath(one.removeprefix(FILE)).name if one.startswith(FILE) else one for one in variants}
    count = Counter(short.values())
    return {variant: name if count[name] == 1 else variant for variant, name in short.items()}


def operator_switches(operator: str, purpose: str, settings: Mapping[str, space.Setting]) -> dict[str, bool]:
    """Returns the switches of one operator's layer: for purpose `point` on for its slots in
    `settings`, for `default` at their default, else off."""
    names = SWITCHES_OF_PARALLEL[space.OPERATORS[operator]]
    if purpose == "default":
        return {name: SWITCH_DEFAULTS[MEGATRON_NAMES[name]] for name in names}
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
