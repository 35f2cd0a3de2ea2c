"""Reads the traces of runs into graphs of their steps, and keeps what is predicted from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from overlap_sweep.cache import code_digest
from overlap_sweep.diagnosis import LISTED, Finding
from overlap_sweep.diagnosis.losses import Seen, seen_of
from overlap_sweep.diagnosis.runs import Run, facts_of_ranks, grouped, read_ranks
from overlap_sweep.predict.graph import StepGraph, graph_of
from overlap_sweep.predict.named import that_mend
from overlap_sweep.predict.picture import Picture, picture_of
from overlap_sweep.predict.predictions import Prediction, in_words, predict
from overlap_sweep.predict.replay import replay_error
from overlap_sweep.trace.files import cache, cached, key_of

MOST_ERROR = 0.001
"""Share of a step by which the replay of a graph may miss it."""

MOST_PICTURES = 3
"""Changes of which a step is drawn: those that gain most, of each name one, without bounds."""

T = TypeVar("T")


class RunGraph(msgspec.Struct):
    """The graph of one run's steps."""

    name: str
    """Common name of the traces, with their directory."""
    graph: StepGraph | None
    """None if no trace could be read."""
    problems: list[str]
    """A sentence for each trace that could not be read."""
    ranks: list[int | None]
    """Numbers of the ranks in the graph; None if unknown."""


class Drawn(msgspec.Struct):
    """The predictions of one run, and the steps of those that gain most."""

    predictions: list[Prediction]
    """The best first; last what cannot be told."""
    pictures: list[Picture]
    ranks: list[int | None]
    """Numbers of the ranks; None if unknown."""


def graphs(paths: Sequence[Path]) -> list[RunGraph]:
    """Returns the graph of each run that these traces are of, in the order of their first trace."""
    read = read_ranks(paths)
    found = []
    for name, own in grouped([one.file for one in read.values()]).items():
        files = [read[path].file for path in own]
        facts = facts_of_ranks(files, read, {})
        problems = [file.problem for file in files if file.problem]
        graph = _graph(seen_of(facts)) if facts else None
        found.append(RunGraph(name, graph, problems, [one.rank for one in facts]))
    return found


def _graph(seen: Seen) -> StepGraph:
    graph = graph_of(seen.views, seen.met)
    return graph if abs(replay_error(graph)) <= MOST_ERROR else graph_of(seen.views, seen.met, held=False)


def predictions_of(paths: Sequence[Path], changes: Sequence[str] = (), seen: Seen | None = None) -> list[Prediction]:
    """Returns the prediction for each change from the traces of one run, without changes for all that apply, the best
    first, which are cached; empty if they cannot be read, or hold no step. `seen`: the ranks, if they are at hand."""

    def made() -> list[Prediction]:
        found = [_graph(seen)] if seen else [run.graph for run in graphs(paths)]
        return [one for graph in found if graph and graph.nodes for one in predict(graph, changes)]

    return _kept("predictions", paths, changes, list[Prediction], made) or []


def _asked_and_all(
    paths: Sequence[Path], changes: Sequence[str], seen: Seen | None
) -> tuple[list[Prediction], list[Prediction]]:
    """Returns the predictions for these changes, and for all that apply, as `predictions_of` does, from one graph."""

    def made() -> tuple[list[Prediction], list[Prediction]]:
        found = [_graph(seen)] if seen else [run.graph for run in graphs(paths)]
        known = [graph for graph in found if graph and graph.nodes]
        asked = [one for graph in known for one in predict(graph, changes)] if changes else []
        return asked, [one for graph in known for one in predict(graph)]

    return _kept("answers", paths, changes, tuple[list[Prediction], list[Prediction]], made) or ([], [])


def drawn(paths: Sequence[Path], changes: Sequence[str]) -> Drawn | None:
    """Returns what is predicted from the traces of one run of these changes and all others that apply, and pictures of
    the best, which are cached; None if they cannot be read, or hold no step."""

    def made() -> Drawn | None:
        run = next((run for run in graphs(paths) if run.graph and run.graph.nodes), None)
        if not run or not run.graph:
            return None
        told = {one.change: one for one in predict(run.graph)}
        for one in predict(run.graph, changes) if changes else ():
            # Those that are listed anyway name values that take as long.
            told.setdefault(one.change, one)
        ordered = sorted(told.values(), key=lambda one: float("inf") if one.gain_us is None else -one.gain_us)
        worth: dict[str, str] = {}
        for one in ordered:
            if one.status == "predicted" and (one.gain_us or 0.0) > 0:
                worth.setdefault(one.change.partition("=")[0], one.change)
        pictures = [picture_of(run.graph, change) for change in [*worth.values()][:MOST_PICTURES]]
        return Drawn(ordered, pictures, run.ranks)

    return _kept("drawn_predictions", paths, changes, Drawn, made)


def _kept(
    kind: str, paths: Sequence[Path], changes: Sequence[str], type_: type[T], make: Callable[[], T | None]
) -> T | None:
    """Returns what `make` returns of these traces and changes, from the cache if it is there."""
    keys = [key_of(path) for path in paths]
    code = " ".join(map(code_digest, (__package__, f"{__package__}.changes", "overlap_sweep.diagnosis")))
    key = f"{code} {list(map(str, paths))} {keys} {list(changes)}" if all(keys) else None
    if key and (kept := cached(kind, key, type_)):
        return kept
    found = make()
    if key and found:
        cache(kind, key, found)
    return found


class Mends(msgspec.Struct):
    """What is predicted of the changes that a run's findings ask for."""

    of_findings: list[Prediction | None]
    """For each finding, of the changes that its advice means the one that is predicted to gain most, or to cost least;
    None where none is predicted. One may answer several findings: its gain is that of the whole step."""
    best: Prediction | None
    """Of all changes the one that is predicted to gain most, without bounds; None if none gains LISTED of a step."""

    @property
    def is_first(self) -> list[bool]:
        """Returns for each finding whether none before it has its change."""
        named = [one.change if one else "" for one in self.of_findings]
        return [name not in named[:place] for place, name in enumerate(named)]

    @property
    def best_in_words(self) -> str:
        """Returns a sentence on the best change; empty if it is that of a finding, which has it."""
        named = [one.change for one in self.of_findings if one]
        if self.best is None or self.best.change in named:
            return ""
        return f"The best of all changes, as predicted: {in_words(self.best)}."


def advice_of(finding: Finding, mend: Prediction | None) -> str:
    """Returns what to try for a finding: as it says, unless the best that is predicted of that costs time."""
    if mend is None or mend.status != "predicted" or (mend.gain_high_us or 0.0) >= 0:
        return finding.try_
    return f"Leave it as it is. What would mend it costs more than it gains, as predicted: {in_words(mend)}."


def mends_of(run: Run) -> Mends:
    """Returns the changes that answer a run's findings, and the best of all."""
    findings = run.found.diagnosis.findings if run.found else []
    wanted = [that_mend([one.cause])[one.cause] if one.changes is None else one.changes for one in findings]
    changes = list(dict.fromkeys(chain.from_iterable(wanted)))
    known, every = _asked_and_all(readable(run), changes, run.seen) if findings else ([], [])
    # The sort is stable: of equal gains the first that was named.
    ordered = sorted((one for one in known if one.gain_us is not None), key=lambda one: -(one.gain_us or 0.0))
    best = next((one for one in every if one.status == "predicted"), None)
    return Mends(
        [next((one for one in ordered if one.change in own), None) for own in wanted],
        best if best and (best.gain_us or 0.0) >= LISTED * best.step_us else None,
    )


def readable(run: Run) -> list[Path]:
    """Returns the traces of a run that could be read."""
    return [file.path for file in run.files if not file.problem]
