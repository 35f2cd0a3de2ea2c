"""Says whether a known setting was in force, by what ran with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from overlap_sweep.effects import UNSEEN, Difference, Setting, Verdict
from overlap_sweep.effects.differences import queues
from overlap_sweep.effects.fingerprint import Fingerprint, Moved, brief_kernel
from overlap_sweep.scopes import part_for, parts_of

OFF = ("", "none", "null", "false", "0", "no", "off")
"""Values of settings that are off, in lower case."""

_ALGORITHM = re.compile(r"_(RING|TREE|NVLS_TREE|NVLS|PAT|COLLNET\w*?)(?:_|$)")


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `settings.yaml`, which explains the fields."""

    what: str
    names: list[str] = []
    shows: list[str] = []
    always: bool = False
    at_most: Literal["blocks", "threads", ""] = ""
    at_least: Literal["blocks", "threads", ""] = ""
    kernels: dict[str, str] = {}
    runs: str = ""
    fallback: str = ""
    queues: int | None = None
    moves: dict[str, str] = {}
    gpu: bool = False
    unseen: str = ""
    ignored: str = ""


@cache
def known_settings() -> dict[str, Known]:
    return msgspec.yaml.decode(Path(__file__).with_name("settings.yaml").read_bytes(), type=dict[str, Known])


def known(option: str) -> Known | None:
    """Returns the entry of the setting that an option is, such as job.env.NCCL_ALGO; None if it is unknown."""
    wanted = _plain(option.rpartition(".")[2])
    return next((one for name, one in known_settings().items() if wanted in map(_plain, (name, *one.names))), None)


def _plain(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def verdicts(
    options: Mapping[str, tuple[str, str]],
    after: Sequence[Fingerprint],
    found: Sequence[Difference],
    entries: Mapping[str, str],
) -> list[Setting]:
    """Returns the verdict on each option. `options`: values before and after by name; `found`: what differs; `entries`:
    names of the entries of options that have other names, empty for one that traces do not show."""
    found_of: dict[str, tuple[Verdict, str]] = {}
    unknown: list[str] = []
    for option, (_, second) in options.items():
        name = entries.get(option, option)
        if not name:
            found_of[option] = ("cannot be seen", UNSEEN)
        elif entry := known(name):
            found_of[option] = _verdict(entry, second, after, found)
        else:
            unknown.append(option)
    shown = [option for option, (verdict, _) in found_of.items() if verdict in ("in force", "fell back")]
    for option in unknown:
        found_of[option] = _of_unknown(found, [one for one in (*shown, *unknown) if one != option])
    return [
        Setting(name=option, before=first, after=second, verdict=found_of[option][0], evidence=found_of[option][1])
        for option, (first, second) in options.items()
    ]


def _of_unknown(found: Sequence[Difference], others: Sequence[str]) -> tuple[Verdict, str]:
    """`others`: the other settings that may have made what ran differ."""
    if found and others:
        return (
            "cannot be seen",
            f"what ran differs, as {others[0]} may do alone, and it is not known how this one shows",
        )
    if found:
        return "in force", "what ran differs"
    return "cannot be seen", "nothing that ran differs, and it is not known how this setting shows"


def _verdict(
    entry: Known, value: str, after: Sequence[Fingerprint], found: Sequence[Difference]
) -> tuple[Verdict, str]:
    if entry.gpu and not any(one.on_device for one in after):
        return "cannot be seen", "it has a meaning on GPUs, and these traces have none"
    decided = next(_decided(entry, value, after), None)
    if decided:
        return decided
    shown = [one.sentence for one in found if one.aspect in entry.shows]
    if shown:
        return "in force", "; ".join(shown[:2])
    if entry.always:
        why = f" ({entry.ignored})" if entry.ignored else ""
        return "not in force", f"it would show in {' or '.join(entry.shows)}, where nothing differs{why}"
    return "cannot be seen", entry.unseen or f"nothing differs in {' or '.join(entry.shows)}"


def _decided(entry: Known, value: str, after: Sequence[Fingerprint]) -> Iterator[tuple[Verdict, str]]:
    """Yields what the second recording alone shows."""
    is_on = value.strip().lower() not in OFF
    of_groups = [
        (group, one) for group, one in _moved(after) if one.blocks is not None and "userbuffers" not in one.kernel
    ]
    moved = [one for _, one in of_groups]
    for aspect, is_most in ((entry.at_most, True), (entry.at_least, False)):
        limited = [_sizes(part, value, of_groups, aspect) for part in parts_of(value)] if aspect else []
        for scope, wanted, sizes in filter(None, limited):
            # Small buffers take fewer in any case.
            extreme = max(sizes)
            kept = extreme <= wanted if is_most else extreme >= wanted
            whose = f"collectives of process groups {scope}" if scope else "collectives"
            evidence = f"kernels of {whose} have {'at most' if is_most else 'up to'} {extreme} {aspect}"
            yield ("in force" if kept else "not in force"), evidence
    if is_on and (pattern := entry.kernels.get(_plain(value.rpartition(":")[2]))):
        kernels = sorted({one.kernel for one in moved})
        if own := [kernel for kernel in kernels if re.search(rf"_{pattern}(_|$)", kernel)]:
            yield "in force", f"{own[0]} ran"
        elif any(map(_ALGORITHM.search, kernels)):
            yield "fell back", f"{kernels[0]} ran instead"
    if entry.runs and is_on:
        names = _names(after)
        if own := [one for one in names if re.search(entry.runs, one)]:
            yield "in force", f"{brief_kernel(own[0])} ran"
        elif instead := [one for one in names if entry.fallback and re.search(entry.fallback, one)]:
            yield "fell back", f"{instead[0]} ran instead"
        elif any(one.on_device for one in after):
            # On a CPU compiled code may have no operators, and so no names.
            yield "not in force", f"nothing like {entry.runs} ran"
    if entry.queues is not None and (seen := queues(after)):
        one_queue = seen == "one hardware queue"
        if value == str(entry.queues):
            yield ("in force" if one_queue else "not in force"), f"kernels show {seen}"
        elif not one_queue:
            yield "in force", f"kernels show {seen}"


def _sizes(
    part: tuple[str, str], value: str, moved: Iterable[tuple[str, Moved]], aspect: str
) -> tuple[str, int, list[int]] | None:
    """Returns whose part of a value it is, its number, and the sizes of the kernels of those process groups; None if it
    is no number above 0, or nothing shows which groups they are."""
    scope, number = part
    if not number.isdigit() or not int(number):
        return None
    sizes = [getattr(one, aspect) for group, one in moved if part_for(value, group, ()) == part]
    return (scope, int(number), sizes) if sizes else None


def _moved(prints: Iterable[Fingerprint]) -> Iterator[tuple[str, Moved]]:
    """Yields all collectives, each with the label of its process group."""
    return ((one.families[moved.family].group, moved) for one in prints for step in one.steps for moved in step.moved)


def _names(prints: Sequence[Fingerprint]) -> list[str]:
    """Returns the names of all that ran."""
    kinds = [kind for one in prints for step in one.steps for kind in (step.gemms, step.computation)]
    names = {name for kind in kinds for counts in kind.values() for name in counts}
    return sorted(names | {moved.kernel for _, moved in _moved(prints)})
