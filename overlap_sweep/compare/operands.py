"""Finds what the command line asks to compare: paths, with labels or without."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.errors import UserError


class Kind(StrEnum):
    """Kind of content of an operand; only operands of the same kind are compared."""

    results = "results"
    traces = "traces"
    telemetry = "telemetry"


WITH_RUNS = {Kind.telemetry, Kind.results}
"""The kinds that a directory of training runs may have."""


class Operand(NamedTuple):
    """One of the directories or traces to compare."""

    label: str
    path: Path
    kind: Kind
    traces: list[Path]
    """The trace files; empty for other kinds."""


def find_operands(written: Sequence[str]) -> list[Operand]:
    """Returns the operands. UserError where one is missing, not results, telemetry or traces, or repeats a label."""
    parsed = [label_and_path(one) for one in written]
    paths = [path for _, path in parsed]
    short = short_names([path for label, path in parsed if not label])
    labels = [label or short.pop(0) for label, _ in parsed]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise UserError(
                f"{paths[labels.index(label)]} and {paths[i]} are both called {label}; "
                f"give them labels, as in a={paths[labels.index(label)]} b={paths[i]}."
            )
    return [Operand(label, path, *_content(path)) for label, path in zip(labels, paths, strict=True)]


def label_and_path(written: str) -> tuple[str | None, Path]:
    """Returns an operand's label, if any, and path: run directories may have `=` in their names."""
    label, equals, path = written.partition("=")
    # Path.exists raises for a label that is longer than any path.
    if os.path.exists(written) or not equals or "/" in label:  # noqa: PTH110
        return None, Path(written)
    if not label or not path:
        raise UserError(f"{written} is not LABEL=PATH; write it as in new=multirun/2026-11-21.")
    return label, Path(path)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Returns the part of each path that distinguishes it: its name, or the folder where they part, such as `r4` and
    `r6` for `/a/r4/tp4` and `/a/r6/tp4`."""
    whole = [path.resolve() for path in paths]
    names = [path.name.removesuffix(".gz").removesuffix(".json") for path in whole]
    levels = zip(*(path.parts for path in whole), strict=False)
    return next((list(level) for level in (names, *levels) if len(set(level)) == len(level)), names)


def _content(path: Path) -> tuple[Kind, list[Path]]:
    """Returns the kind of a path's content, and its traces. A file is a trace; a directory is telemetry of training
    runs if it has any, else results, else traces. UserError where there is neither."""
    from overlap_sweep.results.run_directory import find_points, find_telemetry
    from overlap_sweep.trace.disk import find_traces, refused_links

    if not path.exists():
        raise UserError(f"{path} does not exist; give a directory with results or traces.")
    if path.is_file():
        if path.name.endswith("_metrics.jsonl"):
            raise UserError(f"{path} is the telemetry of one rank; give its directory: {path.parent}.")
        if not path.name.endswith((".json", ".json.gz")):
            raise UserError(f"{path} is neither results nor a trace; give a directory, or .json or .json.gz files.")
        return Kind.traces, [path]
    if find_telemetry(path):
        return Kind.telemetry, []
    if find_points(path):
        return Kind.results, []
    if refused := refused_links(path):
        raise UserError(refused[0])
    if traces := find_traces(path):
        return Kind.traces, traces
    raise UserError(f"{path} holds neither results nor traces; give a directory that launch.py wrote, or traces.")


def only_kind(operands: Sequence[Operand]) -> Kind:
    """Returns the kind of all operands. UserError where they are of several kinds."""
    first = operands[0]
    for other in operands:
        if other.kind != first.kind:
            found = f"{first.path} holds {first.kind} and {other.path} holds {other.kind}"
            hint = ", and copy the rank_<r>_metrics.jsonl files too" if {first.kind, other.kind} == WITH_RUNS else ""
            raise UserError(f"{found}; compare like with like{hint}.")
    return first.kind


def reference_and_candidate(
    reference: str | None, candidate: str | None, operands: Sequence[Operand]
) -> tuple[str, str | None]:
    """Returns the labels of both, each named by its label or path. The default reference is the first that is not the
    candidate; no candidate means all others. UserError for an unknown name, or the same name for both."""
    candidate_label = None if candidate is None else _label_of("--candidate", candidate, operands)
    if reference is None:
        others = (operand.label for operand in operands if operand.label != candidate_label)
        reference_label = next(others, operands[0].label)
    else:
        reference_label = _label_of("--reference", reference, operands)
    if reference_label == candidate_label:
        raise UserError(f"--candidate {candidate} is also the reference; choose another.")
    return reference_label, candidate_label


def _label_of(option: str, wanted: str, operands: Sequence[Operand]) -> str:
    for operand in operands:
        if wanted in (operand.label, str(operand.path)) or Path(wanted).resolve() == operand.path.resolve():
            return operand.label
    labels = ", ".join(operand.label for operand in operands)
    raise UserError(f"{option} {wanted} is not among the operands; choose one of {labels}.")
