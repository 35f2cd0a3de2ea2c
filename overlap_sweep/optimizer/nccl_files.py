"""What was found for NCCL, in the forms that frameworks read (`nccl.written`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.levers import lever_named
from overlap_sweep.nccl.settings import GroupSetting
from overlap_sweep.nccl.written import CALLS, written
from overlap_sweep.optimizer.groups import Purpose
from overlap_sweep.scopes import parts_of

KNOBS = {"algo": "algorithm", "proto": "protocol"}
"""Fields of GroupSetting that are not named as the lever."""
FAMILIES = ("nccl", "group")


def settings_of(levers: Mapping[str, object], purposes: Sequence[Purpose]) -> list[GroupSetting]:
    """Returns what values of levers set, for each process group that is named; without what no form has a place for."""
    found: dict[GroupSetting, dict[str, Any]] = {}
    for name, text in levers.items():
        family, _, option = name.partition(".")
        field = KNOBS.get(option, option)
        if family in FAMILIES and field in GroupSetting.__struct_fields__:
            for scope, value in parts_of(str(text)):
                collective = next((one for one in CALLS if lever_named(name).is_for(one, str(text))), None)
                groups = [GroupSetting(collective=collective)] if collective else _groups(scope, purposes)
                for group in groups:
                    found.setdefault(group, {})[field] = _typed(value)
    groups = [GroupSetting(**{**_as_fields(group), **knobs}) for group, knobs in found.items()]
    return sorted(groups, key=lambda one: (one.is_for_all_groups, one.label))


def _groups(scope: str, purposes: Sequence[Purpose]) -> Iterator[GroupSetting]:
    """Yields the groups that a scope stands for, without settings; those of one description and size are one."""
    if not scope:
        yield GroupSetting()
    own = next((one for one in purposes if scope in one.scopes), None)
    for description, ranks in own.groups if own else ():
        yield GroupSetting(description=description, ranks=() if description else ranks, size=len(ranks) or None)


def _as_fields(setting: GroupSetting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in setting.__struct_fields__}


def _typed(value: str) -> int | bool | str:
    lowered = value.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    return int(value) if value.isdigit() else lowered


def write(
    directory: Path, levers: Mapping[str, object], purposes: Sequence[Purpose], nccl: str, *, multicast: bool
) -> Iterator[str]:
    """Writes the files of the forms that can say something of what was found, and yields a line for each. `nccl`: the
    version that was recorded."""
    settings = settings_of(levers, purposes)
    for one in written(settings, multicast=multicast, nccl=nccl) if settings else ():
        if one.text:
            (directory / one.file).write_text(one.text)
            yield f"{directory / one.file} ({one.form}): {' '.join([*one.left_out, *one.warnings])}"
