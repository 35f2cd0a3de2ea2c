from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_sweep.commands.expressions import condition, nearest_columns
from overlap_sweep.commands.failing import fail_for, print_warning
from overlap_sweep.commands.output import (
    FormatOption,
    TableFormat,
    check_fail_if,
    fail_if,
    fail_if_option,
    print_rows,
    print_table_of,
)
from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from overlap_sweep.report.section import Sources
    from overlap_sweep.report.table import Table

ALL = "all"
CASE = ("model", "backend", "device", "precision", "tokens")


class Rows(StrEnum):
    """What a table is of."""

    operators = "operators"
    layers = "layers"
    kernels = "kernels"
    training = "training"
    copies = "copies"
    tp_training = "tp-training"


_SECTION = {
    **{
        Rows.operators: "operator",
        Rows.layers: "layer",
        Rows.kernels: "kernel",
        Rows.training: "fsdp",
        Rows.copies: "copy_engine",
    },
    Rows.tp_training: "tp_training",
}
"""The workloads that they are of."""
_ALONE = {
    **{"kernel": Rows.kernels, "fsdp": Rows.training, "copy_engine": Rows.copies},
    "tp_training": Rows.tp_training,
}
"""By workload what is shown unasked where there is nothing else."""


def query(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A date's, a sweep's or one point's directory, or one with points.parquet."),
    ],
    expression: Annotated[
        str | None, typer.Argument(metavar="EXPRESSION", help="Which rows; all of them without it.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="The rows of whole layers instead of operators.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="The rows of kernels; also without it where there is nothing else.")
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="The rows of training runs; also without it where there is nothing else.")
    ] = False,
    copies: Annotated[
        bool,
        typer.Option("--copies", help="The rows of GEMMs beside copies; also without it where there is nothing else."),
    ] = False,
    tp_training: Annotated[
        bool,
        typer.Option(
            "--tp-training", help="The rows of tensor-parallel stacks; also without it where there is nothing else."
        ),
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help=f"What to print, or `{ALL}`. A table shows a few, else all are printed."
        ),
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="NAME,-NAME", help="Sort by these; - from high to low.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print no more rows than these.")] = None,
    format: FormatOption = TableFormat.table,
    fail_expressions: Annotated[list[str] | None, fail_if_option("hidden_fraction < 0.3")] = None,
) -> None:
    """Print the measured points that a condition holds for; --fail-if looks at these.

    Results are read, never written. A point has one row per phase that it overlaps, whose times are those of the
    phase's pass, fwd or bwd: dgrad and wgrad can only be timed together.

    \b
    A condition compares columns: == != < <= > >=, in [1, 2], and, or, not, + - * / // %, parentheses,
    .isna() .notna() .isin([1, 2]), and of text .str.contains('x') .str.startswith('x') .str.endswith('x').
    A missing value makes no condition true. Text needs quotes, and the column `pass` backticks.

    \b
    Examples:
      python analyze.py query multirun/2026-11-20 'num_sm > 8 and tp_size == 8'
      python analyze.py query multirun/2026-11-20 "status != 'ok'" --columns config_id,error
      python analyze.py query multirun/2026-11-20 'speedup > 1' --sort slot,-speedup --limit 10
      python analyze.py query multirun/2026-11-20 "slot == 'fc1_dgrad'" --format csv > fc1_dgrad.csv
      python analyze.py query multirun/2026-11-20 --layers 'ratio < 1' --fail-if 'ratio_high >= 1'
      python analyze.py query multirun/2026-11-20 --kernels 'm == 8192 and not independent' --sort kernel,time_us
      python analyze.py query multirun/2026-11-20 --training 'forward_prefetch > 0' --sort=-samples_per_s
      python analyze.py query multirun/2026-11-20 --copies "direction == 'device_to_host' and hidden_fraction < 0.5"
      python analyze.py query multirun/2026-11-20 --tp-training 'tp_size == 4' --sort=-tokens_per_s_per_gpu

    \b
    Columns:
      text           point directory config_id model backend device precision
                     operator phase slot pass method status error not_profiled_because note
      whole numbers  tokens tp_size num_sm num_splits cga_size repeats num_gemm_events num_comm_events
      true, false    aggregate set_sm_margin use_ce atomic_gemm fp8_buf launch_bound profiled
      microseconds   time_us q1_us q3_us none_us floor_us default_us tp1_us
      plain numbers  hidden_fraction speedup relative_error
    \b
    Columns from traces, microseconds and ratios, all of one iteration of the slowest rank (docs/traces.md); of points
    that were profiled, else not_profiled_because says why:
      forward_gemm_time_us forward_comm_time_us forward_overlap_time_us forward_overlap_ratio
      forward_e2e_time_us forward_exposed_comm_us forward_wait_us forward_idle_us
      backward_gemm_time_us backward_comm_time_us backward_overlap_time_us backward_overlap_ratio
      backward_e2e_time_us backward_exposed_comm_us backward_wait_us backward_idle_us
      operator_e2e_time_us total_overlap_ratio
    \b
    Columns with --layers, one row per variant:
      text           point directory model backend device precision kind attention_backend
                     variant reference status error
      whole numbers  tokens tp_size num_replicas rounds
      true, false    training differs launch_bound
      microseconds   fwd_us bwd_us step_us all_us
      plain numbers  ratio ratio_low ratio_high coverage hidden_fraction relative_error
    \b
    Columns with --kernels, one row per implementation, those left out too:
      text           point directory model operator kernel precision device backend
                     implementation method other_knobs status error
      whole numbers  m n k tp_size num_sm num_splits cga_size repeats
      true, false    aggregate set_sm_margin use_ce atomic_gemm fp8_buf independent launch_bound chosen
      microseconds   time_us q1_us q3_us sequential_us gemm_only_us comm_only_us bound_us
      plain numbers  tflops link_gb_per_s hidden_fraction speedup over_bound relative_error
    \b
    Columns with --training, one row per point:
      text           point directory model device strategy precision setting backward_prefetch reshard_after_forward
                     reduce_dtype status error compiled
      whole numbers  ranks turned batch_size gradient_accumulation forward_prefetch replicas repeats samples_per_step
                     parameters
      true, false    limit_all_gathers enable_overlap compile launch_bound chosen
      microseconds   step_us noise_us q1_us q3_us none_us floor_us host_us comm_us exposed_us us_per_sample
      plain numbers  bucket_cap_mb speedup hidden_fraction samples_per_s tokens_per_s peak_memory_gb first_loss loss
    \b
    Columns with --copies, one row per point:
      text           point directory device direction dtype status error
      whole numbers  matrix_size gemms copies repeats
      true, false    launch_bound
      microseconds   gemm_us copy_us sequential_us overlapped_us saving_us saving_noise_us ideal_us
      plain numbers  copy_mb saving_share hidden_fraction slowdown tflops_alone tflops_overlapped gb_per_s_alone
                     gb_per_s_overlapped
    \b
    Columns with --tp-training, one row per point:
      text           point directory model device dtype impl setting status error
      whole numbers  num_layers seq_length batch_size gradient_accumulation_steps tp_size dp_size ranks repeats
                     parameters tokens_per_step samples_per_step
      true, false    losses_agree launch_bound chosen
      microseconds   step_us noise_us q1_us q3_us host_ahead_us comm_us hidden_comm_us exposed_comm_us comm_wait_us
      plain numbers  forward_pct backward_pct optimizer_pct other_pct tokens_per_s tokens_per_s_per_gpu samples_per_s
                     tflops_per_gpu mfu_pct memory_allocated_gb memory_peak_gb hidden_comm_fraction loss loss_difference

    Exit status: 0 fine, also where no row matches, 1 an error, 2 wrong usage, 3 a --fail-if holds.
    """
    given = {
        **{Rows.layers: layers, Rows.kernels: kernels, Rows.training: training, Rows.copies: copies},
        Rows.tp_training: tp_training,
    }
    asked_rows = [one for one, is_given in given.items() if is_given]
    if len(asked_rows) > 1:
        raise typer.BadParameter(f"{' and '.join(f'--{one}' for one in asked_rows)}: give only one.")
    table, rows, problems = _table(directory, asked_rows[0] if asked_rows else None)
    wanted = condition(table, expression) if expression is not None else None
    matching = table[wanted.mask] if wanted else table
    check_fail_if(fail_expressions, matching)
    if sort is not None:
        matching = _sorted(matching, sort)
    shown = matching.head(limit) if limit else matching
    asked = [] if columns is None or columns == ALL else _names(columns)
    _check_columns(asked, table)
    if format is TableFormat.table and columns is None:
        asked = _telling(shown, rows, wanted.columns if wanted else [])
    if matching.empty and format is TableFormat.table:
        print(f"No row matches, of {len(table)}.", file=sys.stderr)
    else:
        chosen = shown[asked] if asked else shown

        def print_table(console: Console) -> None:
            print_table_of(_without_folders(chosen), console)
            found = f"{len(matching)} row{'s' if len(matching) > 1 else ''}"
            console.print(f"{len(shown)} of {found}" if len(shown) < len(matching) else found, style="dim")

        print_rows(chosen, format, print_table=print_table)
    fail_for(problems)
    fail_if(fail_expressions, matching, "matching rows" if expression else "rows")


def _table(directory: Path, rows: Rows | None) -> tuple[pd.DataFrame, Rows, list[str]]:
    """All rows, what they are of, and a sentence for each file that cannot be read. Where nothing was asked for, of
    operators, unless there are only kernels, only training runs, only tensor-parallel stacks, or only
    copies."""
    from overlap_sweep.config import AnalysisConfig
    from overlap_sweep.workloads.sections import read_sources

    try:
        sources = read_sources(directory, AnalysisConfig())
    except UserError:
        tables = {one: (directory / f"{table.name}.parquet", table.types) for one, table in _tables().items()}
        there = [one for one, (path, _) in tables.items() if path.is_file()]
        rows = rows or (there[0] if len(there) == 1 and there[0] in _ALONE.values() else Rows.operators)
        if rows not in there:
            raise
        return _written(*tables[rows]), rows, []
    workloads = {point.workload for point in sources.reading.points}
    rows = rows or (_ALONE.get(workloads.pop(), Rows.operators) if len(workloads) == 1 else Rows.operators)
    return _of_section(rows, sources)


def _of_section(rows: Rows, sources: Sources) -> tuple[pd.DataFrame, Rows, list[str]]:
    """Returns the rows of a workload's section, and a sentence for each file that cannot be read."""
    from overlap_sweep.report.table import to_frame
    from overlap_sweep.workloads import section_module

    module = section_module(_SECTION[rows])
    section = module.section(sources)
    reading = sources.reading
    for warning in section.warnings if section else ():
        print_warning(warning)
    problems = [*reading.problems, *reading.trace_problems, *(section.problems if section else ())]
    return to_frame(section.records if section else [], module.TABLE.types), rows, problems


def _tables() -> dict[Rows, Table[Any]]:
    """Returns the tables of points of the workloads with sections."""
    from overlap_sweep.workloads import section_module

    return {rows: section_module(workload).TABLE for rows, workload in _SECTION.items()}


def _written(path: Path, types: dict[str, str]) -> pd.DataFrame:
    """What an analysis wrote elsewhere, away from the run directories."""
    import pandas as pd
    from pyarrow import ArrowException

    from overlap_sweep.results.checks import check_place

    check_place(path, path.parent)
    try:
        frame = pd.read_parquet(path)
        return frame.reindex(columns=list(types)).astype(types)
    except (OSError, ValueError, TypeError, ArithmeticError, ArrowException) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path} cannot be read ({reason}); analyse the results again.") from None


def _names(listed: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in listed.split(",")))


def _check_columns(names: Sequence[str], table: pd.DataFrame) -> None:
    for name in names:
        if name not in table.columns:
            raise UserError(f"{name or 'An empty name'} is no column; the nearest are {nearest_columns(name, table)}.")


def _sorted(frame: pd.DataFrame, sort: str) -> pd.DataFrame:
    """What is missing comes last either way."""
    keys = _names(sort)
    names = [key.removeprefix("-") for key in keys]
    _check_columns(names, frame)
    return frame.sort_values(names, ascending=[not key.startswith("-") for key in keys], kind="stable")


def _telling(rows: pd.DataFrame, of: Rows, mentioned: Sequence[str]) -> list[str]:
    """Columns that people look for: the case where there are several, what has a value in any row, and what was asked
    about; why the rows are not ok where none is."""
    is_ok = rows["status"] == "ok"
    why = ["error"] if len(rows) and not is_ok.any() else []
    # A point that was not measured doesn't know its GPU, only that there was to be one.
    known = {"device": rows["device"].where(is_ok) if is_ok.any() else rows["device"]}
    usual = [name for name in _tables()[of].told if name not in CASE]
    in_question = [name for name in CASE if name in rows and name not in usual]
    cases = [name for name in in_question if known.get(name, rows[name]).nunique() > 1]
    named = [name for name in (*cases, *usual, *why) if rows[name].notna().any()]
    if not rows["launch_bound"].fillna(False).any():
        named = [name for name in named if name != "launch_bound"]
    return list(dict.fromkeys([*named, *mentioned]))


def _without_folders(rows: pd.DataFrame) -> pd.DataFrame:
    """`file:best.yaml` of the variant `file:/a/b/best.yaml`, unless another's would be called the same."""
    if "variant" not in rows:
        return rows
    from overlap_sweep.overlap.overlap_cfg import without_folders

    return rows.assign(variant=rows["variant"].replace(without_folders(rows["variant"].dropna().unique())))
