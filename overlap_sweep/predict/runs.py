"""Reads the traces of runs into graphs of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from overlap_sweep.cache import code_digest
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.losses import views_of
from overlap_sweep.diagnosis.runs import Run, facts_of_ranks, grouped, read_ranks
from overlap_sweep.predict.graph import StepGraph, graph_of
from overlap_sweep.predict.named import that_mend
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
        problems = [file.problem for file in files if file.problem]
        found.append(RunGraph(name, _graph(facts) if facts else None, problems))
    return found


def _graph(facts: Sequence[RankFacts]) -> StepGraph:
    met = arrivals(facts)
    views = views_of(facts, [exposure_of(one) for one in facts], met)
    graph = graph_of(views, met)
    return graph if abs(replay_error(graph)) <= MOST_ERROR else graph_of(views, met, held=False)


def predictions_of(
    paths: Sequence[Path], changes: Sequence[str], facts: Sequence[RankFacts] = ()
) -> dict[str, Prediction]:
    """Returns the prediction for each change from the traces of one run, which are cached; empty if they cannot be
    read, or hold no step. `facts`: of the ranks, if they are at hand."""
    keys = [key_of(path) for path in paths]
    code = " ".join(map(code_digest, (__package__, f"{__package__}.changes", "overlap_sweep.diagnosis")))
    key = f"{code} {list(map(str, paths))} {keys} {sorted(changes)}" if all(keys) else None
    if key and (kept := cached(_KIND, key, dict[str, Prediction])):
        return kept
    found = {}
    for graph in [_graph(facts)] if facts else [run.graph for run in graphs(paths)]:
        if graph and graph.nodes:
            found = dict(zip(changes, predict(graph, changes), strict=True))
    if key and found:
        cache(_KIND, key, found)
    return found


def mends_of(run: Run) -> dict[str, Prediction]:
    """Returns by cause that was found in a run the change that is predicted to gain most of those that mend it."""
    causes = dict.fromkeys(finding.cause for finding in run.found.diagnosis.findings) if run.found else {}
    changes = that_mend(causes)
    wanted = [change for own in changes.values() for change in own]
    paths = [file.path for file in run.files if not file.problem]
    told = predictions_of(paths, wanted, run.facts) if wanted else {}
    found = {}
    for cause, own in changes.items():
        known = [told[change] for change in own if change in told and (told[change].gain_us or 0.0) > 0]
        if known:
            found[cause] = max(known, key=lambda one: one.gain_us or 0.0)
    return found
