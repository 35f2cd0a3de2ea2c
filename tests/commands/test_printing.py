"""Every command prints the same rows in every format, and on terminals of any width all of them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.commands.frames import PARTS, PHASES, RANKS
from overlap_sweep.compare import history, sweep_report, trace_report
from overlap_sweep.report import diagnosis
from overlap_sweep.workloads.copy_engine import section as copies
from overlap_sweep.workloads.fsdp import compare as telemetry
from overlap_sweep.workloads.fsdp import tables as training
from overlap_sweep.workloads.fsdp.runs import QUANTITIES
from overlap_sweep.workloads.kernel import section as kernels
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.operator import section as operators
from overlap_sweep.workloads.tp_training import study as tp_training
from tests.analyze import ROOT, analyze, analyze_process, on_terminal, shown
from tests.golden.declared_pages import columns
from tests.made_sweeps import WINS, write_tuned_sweep
from tests.make_point import implementation, kernel_config, make_point, variant
from tests.report.conftest import BUILDERS, Made

DEFAULT, NONE = (f"traces/h200x4_llama3_70b_layer_{name}.json.gz" for name in ("te_default", "none"))
pytestmark = pytest.mark.usefixtures("no_page")
CPU = "traces/cpu_gloo_tp2_rank0.json.gz"
FSDP2 = " ".join(f"traces/h200x2_fsdp2_checkpoint_rank{rank}.json.gz" for rank in (0, 1))


def of_medians(fields: Sequence[str]) -> list[str]:
    """Columns of medians: the number of iterations instead of which one, and of start-up."""
    numbers = {"iteration": "iterations", "startup": "startup_iterations"}
    return [numbers.get(name, name) for name in fields]


TABLES: dict[str, Sequence[str]] = {
    "report operators": list(operators.ANSWERS.types),
    "report layers": list(layers.TABLE.types),
    "report kernels": list(kernels.ANSWERS.types),
    "report training": list(training.ANSWERS.types),
    "report stacks": list(tp_training.ANSWERS.types),
    "report copies": list(copies.TABLE.types),
    "query operators": list(operators.TABLE.types),
    "query operators tp_size==16": list(operators.TABLE.types),
    "query tuned --layers": list(layers.TABLE.types),
    "query kernels": list(kernels.TABLE.types),
    "query training": list(training.TABLE.types),
    "query copies": list(copies.TABLE.types),
    "query stacks": list(tp_training.TABLE.types),
    f"trace {DEFAULT} {CPU}": list(PHASES.types),
    f"trace {DEFAULT} --median": of_medians(list(PHASES.types)),
    f"trace {DEFAULT} --median --by kernel --phase all --top 3": of_medians(list(PARTS.types)),
    f"trace {DEFAULT} --by kernel --phase bwd": list(PARTS.types),
    "trace ranks/ranks --by rank": list(RANKS.types),
    "compare compared/old compared/new": list(sweep_report.POINTS.types),
    "compare compared/old compared/new --by slot": list(sweep_report.SLOTS.types),
    f"compare {NONE} {DEFAULT}": list(trace_report.QUANTITIES.types),
    f"compare {NONE} {DEFAULT} --by rank": list(trace_report.QUANTITIES.types),
    f"compare {NONE} {DEFAULT} --by class": list(trace_report.PARTS.types),
    f"compare {NONE} {DEFAULT} --by kernel": list(trace_report.PARTS.types),
    f"compare {NONE} {DEFAULT} --by stream": list(trace_report.PARTS.types),
    "compare compared/cuda compared/rocm": list(telemetry.ROWS.types),
    "history store/measurements.sqlite": list(history.ROWS.types),
    f"diagnose {FSDP2}": list(diagnosis.FINDINGS.types),
    f"diagnose {FSDP2} --by group": list(diagnosis.GROUPS.types),
    f"diagnose {FSDP2} --by step": list(diagnosis.STEPS.types),
}
NOT_LISTED = {"measurements", "reference_measurements", "iterations"}
"""Columns that no list of a help names."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Path:
    """A folder with links to made-up sweeps and recorded traces, and sweeps with long names."""
    directory = tmp_path_factory.mktemp("place")
    for name in BUILDERS:
        (directory / name).symlink_to(made(name))
    variants = {
        "none": variant([60_000.0] * 6, step_us=1234.0),
        f"file:{FILE}": variant([54_000.0] * 6, step_us=1234.0, launch_bound=True),
    }
    make_point("layer", directory / "long_layer", variants=variants)
    for n in (4096, 8192):
        measured = {"ring": implementation(150.0)}
        make_point("kernel", directory / "two_kernels", kernel_config(n=n), implementations=measured)
    write_tuned_sweep(directory / "rare_proof", ratios={**WINS, "default": 0.9})
    return directory


@pytest.mark.parametrize("command", TABLES)
def test_every_format_has_the_same_rows_and_nothing_else(
    place: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    arguments, columns = command.split(), TABLES[command]
    if arguments[0] == "report":
        arguments += ["--output", str(tmp_path)]
    parquet = pd.read_parquet(io.BytesIO(analyze(*arguments, "--format", "parquet").stdout_bytes))
    assert list(parquet.columns) == list(columns)
    types = parquet.dtypes.to_dict()
    text = analyze(*arguments, "--format", "csv").stdout
    # CSV cannot tell an empty text from none.
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text), dtype=types), parquet.replace("", pd.NA))
    found = analyze(*arguments, "--format", "json").rows
    assert all(list(row) == list(columns) for row in found)
    pd.testing.assert_frame_equal(pd.DataFrame(found, columns=list(columns)).astype(types), parquet)
    assert parquet.empty == ("tp_size==16" in command)


@pytest.mark.parametrize("command", ["report", "query", "trace", "compare", "history", "diagnose"])
def test_help_names_every_column(command: str) -> None:
    # What copies answer is the rows that query shows.
    asked = (command, "query") if command == "report" else (command,)
    words = {word for one in asked for word in analyze(one, "--help").stdout.split()}
    columns = {column for line, named in TABLES.items() if line.startswith(f"{command} ") for column in named}
    assert columns - words <= NOT_LISTED
    assert command != "compare" or words >= QUANTITIES.keys()


# Terminals: where a table has no room, lines of text.

FILE = "optimal_tp_comm_overlap_cfg_tp4.yaml"
COMMANDS: dict[str, tuple[str, ...]] = {
    "report operators": ("fc1_dgrad", "bulk_sm4", "320.0", "pipeline_sm8_split4", "1.25x", "80%"),
    "report rare_proof": ("0.903", "0.6% slower", FILE),
    "report long_layer": ("60,000", "20,000", "1,234.0", "0.898", "launch-bound"),
    "report kernels": ("symm_mem fused", "use this", "120.0", "1.67x", "20% above the bound"),
    "report two_kernels": ("torch ring", "1.33x", "150.0"),
    "report training": ("gradient_accumulation=2", "best", "2,100.0", "88%", "-4.2%"),
    "report copies": ("902.0", "90%"),
    "report stacks": ("zero_stage=2", "51,200"),
    "query operators num_splits==4": (*("tp2_fc2_fprop_pipeline_sm8_split4", "150.0", "1.333", "num_splits", "1 row"),),
    f"trace {DEFAULT}": ("34,252", "3,180.9"),
    f"trace {DEFAULT} --by class --phase bwd": ("cublas", "medians", "11,953"),
    f"trace {DEFAULT} --by stream --phase bwd": ("medians",),
    f"trace {DEFAULT} --by kernel --phase bwd": ("transformer_engine::scaled_masked_softmax_warp_backward",),
    "trace ranks/ranks --phase all": ("19,141", "9,570.4"),
    "compare compared/old compared/new": ("0.969", "faster"),
    f"compare {NONE} {DEFAULT}": ("34,347.2", "0.997"),
    "compare compared/cuda compared/rocm": ("1.100", "Step time: 1 worse"),
    "history store/measurements.sqlite": (
        "bulk_sm4",
        "70.0",
        "0.700",
        "faster",
        "2.12.0",
        "9 measurements",
        "1 launch-bound",
    ),
}


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_terminals_of_any_width_show_everything(
    place: Path, tmp_path: Path, command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words = command.split()
    output = ["--output", str(tmp_path)] if words[0] == "report" else []
    text = shown(columns, *words, *output).partition("\nWritten to")[0]
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    spaced, whole = " ".join(text.split()), "".join(text.split())
    for expected in COMMANDS[command]:
        # Wrapped where it must be, but whole.
        assert expected in spaced or expected.replace(" ", "") in whole, expected


def test_a_real_terminal_shows_as_much(made: Made) -> None:
    assert on_terminal(40, "query", made("operators")) == shown(40, "query", made("operators"))


def test_a_terminal_gets_no_parquet(made: Made, tmp_path: Path) -> None:
    text = on_terminal(80, "report", made("operators"), "--format", "parquet", "--output", tmp_path / "out")
    assert text.startswith("error: parquet is binary")
    assert not (tmp_path / "out").exists()


def test_a_process_has_the_exit_status_and_one_error() -> None:
    process = analyze_process("nowhere")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("error: nowhere does not exist")
    assert process.stderr.count("\n") == 1


def test_a_pipe_that_closes_is_no_error(made: Made) -> None:
    trace = made("traces") / Path(DEFAULT).name
    command = f"{sys.executable} analyze.py trace {trace} --by kernel --format csv | head -c 1"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=60, env=environment)
    assert (process.stdout, process.stderr) == (b"f", b"")


IMPORTS = """
import json, sys
from analyze import main
heavy, found = ("torch", "pandas", "pyarrow", "numpy", "hydra", "altair", "vl_convert"), []
for arguments in json.loads(sys.stdin.read()):
    sys.argv = ["analyze.py", *arguments]
    try:
        main()
    except SystemExit as exit:
        assert not exit.code, arguments
    found.append([name for name in heavy if name in sys.modules])
print(json.dumps(found), file=sys.stderr)
"""
"""Runs one command after the other and prints what had been imported after each."""


def test_what_is_imported(made: Made, tmp_path: Path) -> None:
    """Help imports nothing slow, a table for people no pandas, a comparison no charts, and nothing torch."""
    cpu, default, none = (made("traces") / Path(path).name for path in (CPU, DEFAULT, NONE))
    compared = made("compared")
    analyze("trace", cpu)
    commands = [["--help"], *([name, "--help"] for name in ("report", "compare", "timeline", "diagnose"))]
    commands += [["diagnose", str(default)], ["levers"]]
    commands += [["trace", str(cpu), "--format", "csv"], ["compare", f"{compared}/old", f"{compared}/new"]]
    commands += [["compare", f"{compared}/cuda", f"{compared}/rocm"], ["compare", str(default), str(none)]]
    commands += [["query", str(made("kernels"))], ["report", str(made("layers")), "--output", str(tmp_path)]]
    command = [sys.executable, "-c", IMPORTS]
    process = subprocess.run(command, cwd=ROOT, input=json.dumps(commands), text=True, capture_output=True, timeout=120)
    for words, found in zip(commands, json.loads(process.stderr.splitlines()[-1]), strict=True):
        heavy = {"compare": {"vl_convert"}, "diagnose": {"pandas"}, "levers": {"pandas"}}.get(words[0], set())
        assert not {"torch", *heavy} & set(found), words
        assert "--help" not in words or found == [], words


def test_a_narrow_terminal_leaves_out_the_least_important_columns(made: Made, tmp_path: Path) -> None:
    report = ("report", made("kernels"), "--output", tmp_path)
    rule = {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}
    whole = max(len(line) for line in analyze(*report).stdout.splitlines() if set(line) == rule)
    optional = ["error", "noise us", "GB/s", "hidden"]
    for room, missing in ((0, 0), (-1, 1), (-12, 2), (-22, 3), (-28, 4)):
        text = shown(whole + room, *report)
        header = next(line for line in text.splitlines() if "implementation  backend" in line)
        assert [name for name in optional if name not in header] == optional[:missing]
        assert "time us" in header
        sentence = f"Hidden columns: {', '.join(reversed(optional[:missing]))}. A wider terminal shows them."
        assert (sentence in " ".join(text.split())) == ("Hidden columns:" in text) == bool(missing)


def test_help_of_one_table_has_its_columns_only() -> None:
    with_flag, whole = (analyze("query", *flags, "--help").stdout for flags in (["--kernels"], []))
    assert "Columns with --kernels," in with_flag
    assert "Columns with --training," in whole
    assert "Columns with --training," not in with_flag


def test_every_column_has_a_unit_and_an_explanation() -> None:
    rows = [line.strip("| ").split(" | ", 2) for line in columns().splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert [row for row in rows if len(row) < 3 or row[1] == "number" or not row[2].endswith(".")] == []
