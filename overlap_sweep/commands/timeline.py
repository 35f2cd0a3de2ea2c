import gzip
import re
from pathlib import Path
from typing import Annotated

import typer

from overlap_sweep.commands.output import print_warning
from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import counted, some_of
from overlap_sweep.results.run_directory import find_points, write_atomically
from overlap_sweep.trace.disk import find_traces, is_timeline, refused_links
from overlap_sweep.trace.nsight_files import file_of, paths_in

ALL = "all"
FEW = 3


def timeline(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE...", help="Directory of a point, or the traces of its ranks.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write; compressed if it ends in .gz.")] = Path(
        "timeline.json.gz"
    ),
    iteration: Annotated[str, typer.Option(metavar="N|all", help="Only this iteration.")] = ALL,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file even if it is not a timeline.")] = False,
) -> None:
    """Merge the traces of all ranks into one timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    Each rank is a process with tracks for iterations and passes, GEMMs, other computation, communication, waits,
    copies, and the overlap of GEMMs and communication. Ranks are aligned by their clock if they share one, else at the
    start of the first iteration in common.

    \b
    Examples:
      python analyze.py timeline multirun/2026-11-20/21-14-03/llama3_8b_tp4_fc1_bulk_sm4
      python analyze.py timeline trace_rank0.json.gz trace_rank1.json.gz --output both.json.gz
      python analyze.py timeline traces/ --iteration 3
    """
    from overlap_sweep.report.timeline import build, read_rank

    if iteration != ALL and not re.fullmatch(r"\d+", iteration):
        raise typer.BadParameter(f"{iteration} is not a number; give one, or all.", param_hint="--iteration")
    if output.is_dir():
        raise UserError(f"{output} is a directory; give a file with --output.")
    if output.exists() and not force and not is_timeline(output):
        raise UserError(
            f"{output} exists and is not a timeline; choose another with --output, or overwrite it with --force."
        )
    traces = {one.resolve(): one for path in paths for one in _traces_of(path)}
    ranks = [read_rank(path) for path in traces.values()]
    for warning in (warning for rank in ranks for warning in rank.trace.warnings):
        print_warning(warning)
    made = build(ranks, None if iteration == ALL else int(iteration))
    for note in made.notes:
        print_warning(note)
    # mtime=0: the same traces make the same file.
    packed = gzip.compress(made.content, compresslevel=6, mtime=0) if output.suffix == ".gz" else made.content
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, packed)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); give another with --output.") from None
    content = ", ".join(
        [counted(len(ranks), "rank"), counted(len(made.iterations), "iteration"), f"{made.spans:,} spans"]
    )
    typer.echo(f"Written to {output}: {content}. Open it in https://ui.perfetto.dev.")


def _traces_of(path: Path) -> list[Path]:
    """Returns the traces at the path. UserError where there are none or several points."""
    if not file_of(path).exists():
        raise UserError(f"{path} does not exist; give the directory of a point, or traces.")
    if not path.is_dir():
        return paths_in(path)
    points = find_points(path)
    if len(points) > 1:
        names = some_of((point.name for point in points), FEW)
        raise UserError(f"{path} has {len(points)} points; give one of them: {names}.")
    directory = points[0] if points else path
    traces = find_traces(directory)
    for refused in refused_links(directory):
        print_warning(refused)
    if not traces:
        raise UserError(f"{directory} holds no traces; measure the point again with profile=all, or give the traces.")
    # An operator may have traces of no overlap next to its own; a layer has traces of its variants.
    own = [trace for trace in traces if re.match(r"(?!trace_.+_rank\d)", trace.name)]
    variants = sorted({trace.name.rpartition("_rank")[0] for trace in traces})
    if not own and len(variants) > 1:
        example = directory / f"{variants[0]}_rank*.json.gz"
        raise UserError(f"{directory} has traces of {', '.join(variants)}; give those of one: {example}.")
    return own or traces
