from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from overlap_sweep.commands import output
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.report.console import print_table
from overlap_sweep.report.predictions import PREDICTIONS
from overlap_sweep.report.table import Listing, Row

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_sweep.predict.graph import StepGraph
    from overlap_sweep.predict.predictions import Prediction
    from overlap_sweep.predict.runs import RunGraph

TABLES = {"predictions": PREDICTIONS}
Command = output.with_columns(lambda: TABLES)


def predict(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Traces of a run's ranks, of Kineto or Nsight Systems, or the directory of a run each.",
        ),
    ],
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change", metavar="NAME=VALUE", help="What to change; several joined by + are one change. Repeatable."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="DIR", help="A recording with the change made, to compare with."),
    ] = None,
    format: output.FormatOption = output.TableFormat.table,
) -> None:
    """Predict what a change would gain, from one recording.

    The recorded steps are replayed with something changed: sizes of buckets, hooks, prefetching, resharding, hardware
    queues, synchronisation, equal ranks. The interval holds what the recording leaves open. What it cannot tell is
    said. Without --change all changes that apply, best first. The traces of all ranks are needed where ranks wait for
    each other.

    \b
    Examples:
      python analyze.py predict traces/
      python analyze.py predict traces/ --change ddp.bucket_cap_mb=25 --change env.CUDA_DEVICE_MAX_CONNECTIONS=8
      python analyze.py predict traces/ --change fsdp2.prefetch=2+fsdp2.reshard_after_forward=false --format json
      python analyze.py predict before/ --change ddp.bucket_cap_mb=25 --against after/

    Exit status: 0 success, 1 error, 2 wrong usage.
    """
    if against is not None and not change:
        raise UsageError("--against is a recording with a change made; name that with --change.")
    rows, names, problems = predicted_rows(paths, change or [], against)

    def show(console: Console) -> None:
        for name in names:
            own = [row for row in rows if row["run"] == name]
            if own:
                print_table(name, Listing(PREDICTIONS, own).columns, own, console)
            else:
                console.print(f"{name}: no change that this program knows applies.", highlight=False)

    if names:
        output.print_rows(lambda: PREDICTIONS.frame(rows), format, show)
    output.fail_for(problems)


def predicted_rows(
    paths: Sequence[Path], change: Sequence[str], against: Path | None = None
) -> tuple[list[Row], list[str], list[str]]:
    """Returns the rows of PREDICTIONS, the names of the runs, and a sentence for each trace that cannot be read."""
    from overlap_sweep.commands.frames import find_traces
    from overlap_sweep.predict.runs import graphs

    refused = {each: reason for each in change if (reason := _refused(each))}
    if refused and len(refused) == len(set(change)):
        raise UsageError(next(iter(refused.values())))
    traces, problems = find_traces(paths)
    runs = graphs(traces)
    other = None if against is None else _only(graphs(find_traces([against])[0]), against)
    known = [(run.name, run.graph) for run in runs if run.graph]
    rows = [
        {"run": name, **msgspec.structs.asdict(one), **_compared(one, other)}
        for name, graph in known
        for one in _predictions(graph, change, refused)
    ]
    return rows, [name for name, _ in known], [*problems, *(problem for run in runs for problem in run.problems)]


def _predictions(graph: StepGraph, wanted: Sequence[str], refused: Mapping[str, str]) -> list[Prediction]:
    """Returns the predictions of the changes that are wanted, or of all, of those that are refused why."""
    from overlap_sweep.predict.predictions import predict, unpredicted

    known = predict(graph, [each for each in wanted if each not in refused])
    if not refused:
        return known
    left = iter(known)
    return [unpredicted(graph, each, refused[each]) if each in refused else next(left) for each in wanted]


def _refused(change: str) -> str:
    """Returns why a change that has a lever, or its value, is not predicted; empty if it is. UsageError if something
    in it is neither a change nor a lever."""
    from overlap_sweep.levers import levers
    from overlap_sweep.levers.programs import text
    from overlap_sweep.predict.named import CHANGES, parsed, refusal, singles

    predicted = {name: one.change or one.at_most for name, one in levers().items() if one.change or one.at_most}
    for each in singles(change):
        name, _, value = each.partition("=")
        lever = None if name in CHANGES else levers().get(name)
        if not lever:
            continue
        if name not in predicted:
            return f"What {name} gains is not predicted: leave it out, and measure that lever."
        instead = predicted[name].replace("{value}", value or text(lever.values[0]))
        gains = "is predicted as" if lever.change else "gains at most what is predicted of"
        return f"{name} {gains} {instead}; give that instead."
    parsed(change, also=predicted)
    values = (each.partition("=") for each in singles(change))
    return next(filter(None, (refusal(name, value) for name, _, value in values)), "")


def rows_that_apply(paths: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Returns the rows of PREDICTIONS of all changes that apply to each run, which are cached, and a sentence for each
    trace that cannot be read."""
    from overlap_sweep.commands.frames import read_runs_of_nodes
    from overlap_sweep.predict.runs import predictions_of, readable

    runs, problems, _ = read_runs_of_nodes(paths, None)
    rows = [
        {"run": run.name, **msgspec.structs.asdict(one), **_compared(one, None)}
        for run in runs
        if run.found
        for one in predictions_of(readable(run), seen=run.seen)
    ]
    return rows, problems


def _only(runs: list[RunGraph], directory: Path) -> StepGraph:
    graphs = [run.graph for run in runs if run.graph]
    if len(graphs) != 1:
        raise UserError(f"--against {directory} has {len(graphs)} runs; give the traces of one.")
    return graphs[0]


def _compared(one: Prediction, other: StepGraph | None) -> dict[str, object]:
    from overlap_sweep.predict.predictions import where_wrong
    from overlap_sweep.predict.replay import recorded, step_us

    found: dict[str, object] = dict.fromkeys(("measured_us", "error_share", "within", "wrong"))
    if other is not None:
        measured_us = found["measured_us"] = step_us(other, recorded(other))
        if one.predicted_us is not None and one.low_us is not None and one.high_us is not None:
            found["error_share"] = one.predicted_us / measured_us - 1
            found["within"] = one.low_us <= measured_us <= one.high_us
            found["wrong"] = where_wrong(one, other)
    return found
