from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_sweep.commands.failing import fail_for, print_aside, print_warning
from overlap_sweep.commands.output import FormatOption, TableFormat, check_fail_if, fail_if, fail_if_option, print_rows
from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from overlap_sweep.report.section import Analysis


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A date's, a sweep's or one point's directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="analysis.NAME=VALUE", help="objective, tp_scaling_tolerance, ...: see below."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the files there instead of into DIR.")] = None,
    plots: Annotated[bool, typer.Option("--plots", help="Write the charts of report.html as PNGs, too.")] = False,
    format: FormatOption = TableFormat.table,
    fail_expressions: Annotated[list[str] | None, fail_if_option("hidden_fraction < 0.3")] = None,
) -> None:
    """Choose the best overlap of every slot; write YAML, JSON, text and tables.

    \b
    analysis.objective=time              time (default), or overlap_ratio: highest overlap in the traces
    analysis.tp_scaling_tolerance=0.2    a TP size scales up to (1 + this) x the time of TP=1 / TP size
    analysis.overlap_threshold=0.5       from this overlap ratio on an overlap is called effective
    analysis.unmeasured=off              slots never measured: off (default), or default: the library's own overlap

    With --format csv, json or parquet the answers go to stdout as rows, one per TP size and slot, and nothing else
    does. These rows are also what --fail-if looks at. Where there are no operators, they are one per variant of whole
    layers, with the columns of query --layers; or one per kernel and shape: the implementation to use there; or one per
    model, ranks and device that was trained: the best setting; or one per model, tensor- and data-parallel size that
    stacks were compared on: the fastest of them; or one per point of GEMMs beside copies.

    \b
      model backend device precision tokens tp_size slot operator phase pass
      setting method num_sm aggregate num_splits cga_size set_sm_margin use_ce atomic_gemm fp8_buf
      time_us noise_us none_us default_us floor_us hidden_fraction speedup overlap_ratio
      measured reason final_setting proven recommended layer_ratio layer_ratio_low layer_ratio_high
    \b
    of kernels:
      kernel m n k tp_size precision device backend implementation method num_sm aggregate num_splits cga_size
      set_sm_margin use_ce atomic_gemm fp8_buf other_knobs time_us noise_us sequential_us gemm_only_us comm_only_us
      bound_us tflops link_gb_per_s hidden_fraction speedup over_bound relative_error reason
    \b
    of training runs:
      model ranks device strategy precision setting overrides turned batch_size gradient_accumulation forward_prefetch
      backward_prefetch limit_all_gathers reshard_after_forward replicas reduce_dtype enable_overlap bucket_cap_mb
      compile step_us noise_us none_us floor_us host_us speedup hidden_fraction hidden_noise comm_us exposed_us
      us_per_sample samples_per_step samples_per_s tokens_per_s peak_memory_gb parameters loss compiled launch_bound
      baseline_launch_bound reference gain proven reason
    \b
    of tensor-parallel stacks:
      model num_layers device dtype seq_length batch_size gradient_accumulation_steps tp_size dp_size ranks impl setting
      step_us noise_us q1_us q3_us repeats forward_pct backward_pct optimizer_pct other_pct tokens_per_s
      tokens_per_s_per_gpu samples_per_s tflops_per_gpu mfu_pct memory_allocated_gb memory_peak_gb host_ahead_us comm_us
      hidden_comm_us exposed_comm_us hidden_comm_fraction comm_wait_us loss losses_agree loss_difference parameters
      tokens_per_step samples_per_step launch_bound tied next over_next over_next_low over_next_high over_slowest
      deviating best_of_all

    \b
    Examples:
      python analyze.py multirun/2026-11-20
      python analyze.py multirun/2026-11-20 --output results --format csv > answers.csv
      python analyze.py multirun/2026-11-20 --fail-if 'hidden_fraction < 0.3' --fail-if 'not proven'

    Exit status: 0 fine, 1 an error, 2 wrong usage, 3 a --fail-if holds.
    """
    from overlap_sweep.config import analysis_config
    from overlap_sweep.report import text
    from overlap_sweep.report.console import console_for
    from overlap_sweep.report.files import write_reports
    from overlap_sweep.workloads.sections import analyse

    try:
        config = analysis_config(overrides or [])
    except UserError as error:
        raise typer.BadParameter(str(error)) from None
    analysis = analyse(directory, config, shlex.join(["python", "analyze.py", *sys.argv[1:]]))
    answers = _answers(analysis, format)
    check_fail_if(fail_expressions, answers)
    problems = list(analysis.problems)
    if analysis.sources.reading.points:
        print_rows(answers, format, print_table=lambda console: text.print_answers(analysis, console))
        try:
            written = write_reports(analysis, output or directory, with_plots=plots)
            console = console_for(sys.stdout if format is TableFormat.table else sys.stderr)
            text.print_written(written, console, analysis.sections)
        except UserError as error:
            problems.append(str(error))
    for warning in analysis.warnings:
        print_warning(warning)
    fail_for(problems)
    fail_if(fail_expressions, answers, "answers")


def _answers(analysis: Analysis, format: TableFormat) -> pd.DataFrame:
    """Returns the answers of the first section as rows; operators come first, then layers, kernels, training runs,
    copies and tensor-parallel stacks."""
    from overlap_sweep import workloads
    from overlap_sweep.report.table import to_frame

    if not analysis.sections:
        return to_frame([], workloads.section_module(workloads.names()[0]).TABLE.types)
    told, *others = analysis.sections
    if format is not TableFormat.table:
        for other in others:
            print_aside(f"These are the answers about {told.what}; those about {other.what} are in {other.file}.")
    return to_frame(told.answered.records, told.answered.table.types)
