"""Settings of process groups in the forms that frameworks and NCCL read, with what each form cannot say."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import yaml
from msgspec.structs import replace

from overlap_sweep.nccl.settings import ALGORITHMS, MOST_CTAS, WITH_MULTICAST, Collective, GroupSetting, is_older

PER_COLLECTIVE_SINCE = (2, 31)
CALLS: Mapping[Collective, str] = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}
"""NCCL's names of collectives, which its variables and its tuner plugin read in small letters."""
VARIABLES = {
    "high_priority": "TORCH_NCCL_HIGH_PRIORITY",
    "cga_cluster_size": "NCCL_CGA_CLUSTER_SIZE",
    "max_ctas": "NCCL_MAX_CTAS",
    "min_ctas": "NCCL_MIN_CTAS",
    "cta_policy": "NCCL_CTA_POLICY",
    "algorithm": "NCCL_ALGO",
    "protocol": "NCCL_PROTO",
}
FIELDS = {"cga_cluster_size": "cgaClusterSize", "max_ctas": "maxCTAs", "min_ctas": "minCTAs", "cta_policy": "CTAPolicy"}
"""Members of ncclCollConfig_t."""


@dataclass(frozen=True)
class Written:
    """The settings in one form."""

    form: str
    file: str
    text: str
    """Of the file; empty if the form can say nothing of the settings."""
    left_out: list[str]
    """What the form cannot say, and why."""
    warnings: list[str]
    """What to know before the file is used."""


@dataclass(frozen=True)
class Form:
    """What a form can say, and how."""

    file: str
    knobs: tuple[str, ...]
    """Those that it has a place for."""
    refusal: Callable[[GroupSetting], str]
    """Why it can say nothing of a setting; empty if it can."""
    key: Callable[[GroupSetting], Hashable]
    """Equal for settings that it cannot tell apart."""
    text: Callable[[Sequence[GroupSetting]], str]
    warnings: tuple[str, ...]


def written(
    settings: Sequence[GroupSetting], forms: Sequence[str] = (), *, multicast: bool = False, nccl: str = ""
) -> list[Written]:
    """Returns the settings in each of the forms (names of FORMS; all by default). Without `multicast` no algorithm that
    uses NVLink multicast is written; `nccl` is the version that will read them, empty if unknown."""
    return [_written(name, FORMS[name], settings, multicast, nccl) for name in forms or FORMS]


def _written(name: str, form: Form, given: Sequence[GroupSetting], multicast: bool, nccl: str) -> Written:
    kept: list[GroupSetting] = []
    left_out: list[str] = []
    too_old = is_older(nccl, PER_COLLECTIVE_SINCE)
    for setting in _serving_all(given) if name == "environment" else given:
        unsaid = [knob for knob in setting.knobs if knob not in form.knobs]
        said = replace(setting, **dict.fromkeys(unsaid))
        reason = form.refusal(said) if said.knobs else ""
        if setting.algorithm in WITH_MULTICAST and not multicast:
            reason = f"{setting.algorithm} uses NVLink multicast, which only runtime.multicast=true allows"
        elif name == "per_collective" and too_old:
            reason = f"needs NCCL 2.31, not {nccl or 'an unknown one'}"
        elif not reason and (other := next((one for one in kept if _contradicts(form, one, said)), None)):
            reason = f"cannot be told apart from {other.label}, which has other values"
        if reason or unsaid:
            left_out.append(f"{setting.label}: {reason or 'no place for ' + ', '.join(unsaid)}.")
        if said.knobs and not reason:
            kept.append(said)
    return Written(name, form.file, form.text(kept) if kept else "", left_out, [*form.warnings] if kept else [])


def _contradicts(form: Form, one: GroupSetting, other: GroupSetting) -> bool:
    """Returns whether the form would give a value of one setting to what the other one is for."""
    asked = one.knobs.keys() & other.knobs.keys() if one.group == other.group else one.knobs.keys() | other.knobs.keys()
    differ = any(one.knobs.get(knob) != other.knobs.get(knob) for knob in asked)
    return differ and form.key(one) == form.key(other) and one.overlaps(other)


def _serving_all(settings: Sequence[GroupSetting]) -> Sequence[GroupSetting]:
    """Returns settings for all groups instead of equal ones of several groups."""
    by_group: dict[str, list[GroupSetting]] = {}
    for setting in settings:
        of_all = replace(setting, description="", ranks=(), size=None, nodes=None)
        by_group.setdefault(setting.group, []).append(of_all)
    groups = [*by_group.values()]
    return groups[0] if len(groups) > 1 and all({*one} == {*groups[0]} for one in groups) else settings


def _merged(settings: Sequence[GroupSetting], key: Callable[[GroupSetting], str]) -> dict[str, dict[str, int | str]]:
    found: dict[str, dict[str, int | str]] = {}
    for setting in settings:
        found.setdefault(key(setting), {}).update(setting.knobs)
    return found


def _whole_groups_only(setting: GroupSetting) -> str:
    is_part = setting.collective or not setting.is_any_size
    return "the form is for all collectives of a group, of any size" if is_part else ""


def _named_groups_only(setting: GroupSetting) -> str:
    return _whole_groups_only(setting) or ("" if setting.megatron_name else "not a group that Megatron-Core names")


def _megatron(settings: Sequence[GroupSetting]) -> str:
    spelled = {"high_priority": "is_high_priority_stream"}
    groups = _merged(settings, lambda one: str(one.megatron_name))
    tree = {group: {spelled.get(knob, knob): value for knob, value in knobs.items()} for group, knobs in groups.items()}
    text: str = yaml.safe_dump(tree, sort_keys=False)
    return f"# --nccl-communicator-config-path of Megatron-LM\n{text}"


def _pytorch(settings: Sequence[GroupSetting]) -> str:
    lines = ["import torch.distributed as dist", "", "pg_options = {}"]
    for group, knobs in _merged(settings, lambda one: one.group).items():
        options = f"pg_options[{group!r}]"
        call = f"dist.new_group(..., pg_options={options})"
        if group == "default_pg":
            call = f"dist.init_process_group(..., pg_options={options})"
        elif group == "all groups":
            call = f"dist.init_process_group and every dist.new_group(..., pg_options={options})"
        elif group.startswith("mesh_"):
            call = f"init_device_mesh(..., backend_override={{{group.removeprefix('mesh_')!r}: {options}}})"
        if "min_ctas" in knobs:
            # NCCL refuses it alone.
            knobs.setdefault("max_ctas", max(MOST_CTAS, int(knobs["min_ctas"])))
        priority = f"is_high_priority_stream={knobs.pop('high_priority')}" if "high_priority" in knobs else ""
        lines += ["", f"# {call}", f"{options} = dist.ProcessGroupNCCL.Options({priority})"]
        lines += [f"{options}.config.{knob} = {value}" for knob, value in knobs.items()]
    return "\n".join(lines) + "\n"


def _all_groups_only(setting: GroupSetting) -> str:
    if not setting.is_for_all_groups or not setting.is_any_size:
        return "variables are for all process groups and sizes"
    by_collective = setting.collective and not {*setting.knobs} <= {"algorithm", "protocol"}
    return "only algorithm and protocol can be set for one collective" if by_collective else ""


def _environment(settings: Sequence[GroupSetting]) -> str:
    """Returns lines for a shell. In a list, what is for all collectives comes first: NCCL needs that."""
    found: dict[str, dict[str, None]] = {}
    for setting in sorted(settings, key=lambda one: -len(one.collectives)):
        for knob, value in setting.knobs.items():
            words = [str(value).replace("_", "") if isinstance(value, str) else str(int(value))]
            if isinstance(value, str) and len(setting.collectives) < len(ALGORITHMS):
                words = [f"{CALLS[one].lower()}:{words[0]}" for one in setting.collectives]
            found.setdefault(VARIABLES[knob], {}).update(dict.fromkeys(words))
    return "".join(f"export {name}={shlex.quote(';'.join(words))}\n" for name, words in found.items())


def _complete_rows_only(setting: GroupSetting) -> str:
    if setting.algorithm is None or setting.protocol is None:
        return "a row needs an algorithm and a protocol"
    is_unknown = setting.group_size is None and not setting.is_for_all_groups
    return "a row needs the number of ranks of the group" if is_unknown else ""


def _tuner(settings: Sequence[GroupSetting]) -> str:
    """Returns rows, of which the first that matches wins. Channels without max_ctas are 0, for NCCL's own number: for
    -1 the plugin answers 1. Comments are cut, since what comes after 255 characters is another row to the plugin."""
    lines = ["# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks"]
    for setting in sorted(settings, key=lambda one: (one.group_size is None, one.nodes is None)):
        lines += [f"# {setting.label}"[:200]]
        for one in setting.collectives:
            of_size = f"{CALLS[one].lower()},{setting.min_bytes},{setting.last_byte}"
            values = f"{setting.algorithm},{setting.protocol},{setting.max_ctas or 0}"
            lines += [f"{of_size},{values},{setting.nodes or -1},{setting.group_size or -1}"]
    return "\n".join(lines) + "\n"


def _documented_names_only(setting: GroupSetting) -> str:
    is_known = setting.algorithm in (None, "ring", "tree", "pat", "nvls")
    return "" if is_known else f"NCCL does not document how {setting.algorithm} is spelled there"


def _per_collective(settings: Sequence[GroupSetting]) -> str:
    lines = ["#include <nccl.h>"]
    for number, setting in enumerate(settings):
        call = CALLS[setting.collective] if setting.collective else "*"
        lines += ["", f"// {setting.label}: nccl{call}Config(..., &config)"]
        lines += [f"static inline ncclCollConfig_t nccl_config_{number}(void) {{"]
        lines += ["  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;"]
        lines += [f"  config.{FIELDS[knob]} = {value};" for knob, value in setting.knobs.items() if knob in FIELDS]
        lines += [f'  config.algSelection = "{setting.algorithm}";'] if setting.algorithm else []
        lines += ["  return config;", "}"]
    return "\n".join(lines) + "\n"


_OF_GROUPS = ("high_priority", "cga_cluster_size", "max_ctas", "min_ctas")
_ENVIRONMENT_WINS = "Variables of the environment, such as NCCL_MAX_CTAS, win over these."
FORMS: Mapping[str, Form] = {
    "megatron": Form(
        file="nccl_communicator_config.yaml",
        knobs=_OF_GROUPS,
        refusal=_named_groups_only,
        key=lambda one: one.megatron_name,
        text=_megatron,
        warnings=(_ENVIRONMENT_WINS,),
    ),
    "pytorch": Form(
        file="pg_options.py",
        knobs=(*_OF_GROUPS, "cta_policy"),
        refusal=_whole_groups_only,
        key=lambda one: one.group,
        text=_pytorch,
        warnings=(_ENVIRONMENT_WINS,),
    ),
    "environment": Form(
        file="nccl_environment.sh",
        knobs=tuple(VARIABLES),
        refusal=_all_groups_only,
        key=lambda one: one.collectives,
        text=_environment,
        warnings=("Variables are for all process groups, also for those without a setting here.",),
    ),
    "tuner": Form(
        file="nccl_tuner.csv",
        knobs=("max_ctas", "algorithm", "protocol"),
        refusal=_complete_rows_only,
        key=lambda one: (one.group_size, one.nodes),
        text=_tuner,
        warnings=(
            "NCCL's example plugin (up to 2.32) answers 1 channel for what matches no row: add what is missing.",
            "Take the plugin of NCCL 2.30 or newer: that of 2.27 to 2.29 crashes at the first row that matches.",
            "A row is for every group of so many ranks, not for the named one alone.",
        ),
    ),
    "per_collective": Form(
        file="nccl_coll_config.h",
        knobs=(*FIELDS, "algorithm"),
        refusal=_documented_names_only,
        key=lambda one: one.label,
        text=_per_collective,
        warnings=(
            "For programs that call NCCL themselves, with equal values on every rank; PyTorch has no such call.",
        ),
    ),
}
"""By name, the forms in which settings can be written."""
