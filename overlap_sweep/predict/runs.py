"""Reads the traces of runs into graphs of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from overlap_sweep.cache import code_digest
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.losses import views_of
from overlap_sweep.diagnosis.runs import facts_of_ranks, grouped, read_ranks
from overlap_sweep.predict.graph import StepGraph, graph_of
from overlap_sweep.predict.predictions import Prediction, predict
from overlap_sweep.predict.replay import replay_error
from overlap_sweep.trace.files import cache, cached, key_of

_KIND = "predictions"

MOST_ERROR = 0.001
"""Share of a step by which the replay of a graph may miss it."""


class RunGraph(msgspec.Struct):
    """The graph of one run's steps."""

    name: str
    """Common name of the traces, with their directory."""
    directory: Path
    graph: StepGraph | None
    """None if no trace could be read."""
    problems: list[str]
    """A sentence for each trace that could not be read."""


def graphs(paths: Sequence[Path]) -> list[RunGraph]:
    """Returns the graph of each run that these traces are of, in the order of their first trace."""
    read = read_ranks(paths)
    found = []
    for name, own in grouped([one.file for one in read.values()]).items():
        files = [read[path].file for path in own]
        facts = facts_of_ranks(files, read, {})
        graph = None
        if facts:
            met = arrivals(facts)
            views = views_of(facts, [exposure_of(one) for one in facts], met)
            graph = graph_of(views, met)
            if abs(replay_error(graph)) > MOST_ERROR:
                graph = graph_of(views, met, held=False)
        found.append(RunGraph(name, own[0].parent, graph, [file.problem for file in files if file.problem]))
    return found


def predictions_of(paths: Sequence[Path], changes: Sequence[str]) -> dict[str, Prediction]:
    """Returns the prediction for each change from the traces of one run, which are cached; empty if they cannot be
    read, or hold no step."""
    keys = [key_of(path) for path in paths]
    code = " ".join(map(code_digest, (__package__, "overlap_sweep.diagnosis")))
    key = f"{code} {list(map(str, paths))} {keys} {sorted(changes)}" if all(keys) else None
    if key and (kept := cached(_KIND, key, dict[str, Prediction])):
        return kept
    found = {}
    for run in graphs(paths):
        if run.graph and run.graph.nodes:
            found = dict(zip(changes, predict(run.graph, changes), strict=True))
    if key and found:
        cache(_KIND, key, found)
    return found
