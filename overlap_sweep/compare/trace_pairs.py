"""The traces of several runs, and which of them belong beside each other: those of the same rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep.errors import UserError
from overlap_sweep.trace.files import TraceFile, of_startup, read_trace_files


@dataclass(frozen=True)
class TraceDataset:
    """One operand, read: the traces of one run, one per rank."""

    label: str
    path: Path
    files: list[TraceFile]
    """Those that could be analysed."""
    problems: list[str]
    warnings: list[str]

    @property
    def has_ranks(self) -> bool:
        """Whether the traces tell which of them is whose."""
        ranks = [file.rank for file in self.files]
        return None not in ranks and len(set(ranks)) == len(ranks)

    def by_rank(self) -> dict[int, TraceFile]:
        return {file.rank: file for file in self.files if file.rank is not None}


@dataclass(frozen=True)
class Pair:
    """One trace beside the reference's of the same rank."""

    rank: int | None
    """Of both; None where they are matched by their order, or only one of each is there."""
    ours: TraceFile
    theirs: TraceFile


def read_trace_dataset(label: str, path: Path, files: Sequence[Path]) -> TraceDataset:
    """Read the traces, those of `path`. UserError when none can be analysed."""
    read = read_trace_files(files)
    problems = [file.problem for file in read if file.problem]
    good = [file for file in read if not file.problem]
    if not good:
        raise UserError(problems[0] if problems else f"{path} holds no traces; give files of torch.profiler.")
    good.sort(key=lambda file: (file.rank is None, file.rank or 0))
    warnings = [*(warning for file in good for warning in file.warnings), *of_startup(good)]
    return TraceDataset(label, path, good, problems, warnings)


def pairs_of(dataset: TraceDataset, base: TraceDataset) -> tuple[list[Pair], list[str]]:
    """By rank, where both tell them; one trace of each is a pair whosever they are. With a sentence for each of the two
    that has more. UserError where no rank is in both."""
    if len(dataset.files) == len(base.files) == 1:
        (one,), (other,) = dataset.files, base.files
        return [Pair(one.rank if one.rank == other.rank else None, one, other)], []
    if not (dataset.has_ranks and base.has_ranks):
        missing = [_fewer(dataset, base)] if len(dataset.files) != len(base.files) else []
        return [Pair(None, one, other) for one, other in zip(dataset.files, base.files, strict=False)], missing
    ours, theirs = dataset.by_rank(), base.by_rank()
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UserError(
            f"{dataset.label} has traces of {_named(ours)}, {base.label} of {_named(theirs)}: no rank is in both; "
            "compare one file with one."
        )
    missing = [
        f"{one.label} has traces of {_named(only)}, {other.label} has not: left out."
        for one, other in ((base, dataset), (dataset, base))
        if (only := one.by_rank().keys() - other.by_rank().keys())
    ]
    return [Pair(rank, ours[rank], theirs[rank]) for rank in common], missing


def _fewer(dataset: TraceDataset, base: TraceDataset) -> str:
    return (
        f"{dataset.label} has {len(dataset.files)} traces, {base.label} {len(base.files)}: they don't tell their ranks "
        "and are matched by their order."
    )


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
