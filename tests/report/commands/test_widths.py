"""Terminals of any width show everything; where a table has no room, as lines of text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analyze import ROOT, analyze, analyze_process, on_terminal
from tests.golden.made_report import TRACES
from tests.made_sweeps import WINS, write_tuned_sweep
from tests.make_point import implementation, kernel_config, make_point, variant
from tests.report.conftest import Made
from tests.report.terminals import shown

TRACE = str(TRACES / "h200x4_llama3_70b_layer_te_default.json.gz")
NONE = str(TRACES / "h200x4_llama3_70b_layer_none.json.gz")
FILE = "optimal_tp_comm_overlap_cfg_tp4.yaml"
COMMANDS: dict[str, tuple[str, ...]] = {
    "report operators": ("fc1_dgrad", "bulk_sm4", "320.0", "pipeline_sm8_split4", "1.25x", "80%"),
    "report rare_proof": ("0.905 [0.905, 0.905]", "0.6% slower", FILE, "best of each slot, taken"),
    "report long_layer": ("60.000", "20.000", "1.234", "0.900 [0.900, 0.900]", "launch-bound"),
    "report kernels": ("symm_mem fused", "use this", "120.0", "1.67x", "20% above the bound"),
    "report two_kernels": ("torch ring", "1.33x", "150.0"),
    "report training": ("gradient_accumulation=2", "best", "2.100", "88%", "-4.2%"),
    "report copies": ("902.0", "90%"),
    "report stacks": ("autotp zero2", "51,200"),
    "query operators tp_size==2&num_splits==4": (
        *("tp2_fc2_fprop_pipeline_sm8_split4", "150.0", "1.333", "num_splits", "1 row"),
    ),
    f"trace {TRACE}": ("34,251.2", "3,180.9"),
    f"trace {TRACE} --by class --phase bwd": ("cublas", "medians over 2 iterations"),
    f"trace {TRACE} --by stream --phase bwd": ("medians over 2 iterations",),
    f"trace {TRACE} --by kernel --phase bwd": ("transformer_engine::scaled_masked_softmax_warp_backward",),
    "trace ranks/ranks --phase all": ("29,005.3", "14,502.6"),
    "compare compared/old compared/new": ("0.969", "faster"),
    f"compare {NONE} {TRACE}": ("34,346.5", "0.997"),
    "compare compared/cuda compared/rocm": ("1.100", "1,410 MHz"),
    "history store/measurements.sqlite": ("bulk_sm4", "70.0", "0.700", "faster", "2.12.0", "9 measurements"),
}

pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Path:
    """A folder with links to made-up sweeps, and sweeps with long names."""
    directory = tmp_path_factory.mktemp("place")
    for name in ("operators", "kernels", "training", "copies", "stacks", "compared", "ranks", "store"):
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
    told, whole = " ".join(text.split()), "".join(text.split())
    for expected in COMMANDS[command]:
        # Wrapped where it must be, but whole.
        assert expected in told or expected.replace(" ", "") in whole, expected


@pytest.mark.parametrize("columns", [40, 200])
def test_a_real_terminal_shows_as_much(made: Made, columns: int) -> None:
    text = on_terminal(columns, "query", made("operators"))
    assert max(map(len, text.splitlines())) <= columns
    assert text == shown(columns, "query", made("operators"))


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
    command = f"{sys.executable} analyze.py trace {TRACE} --by kernel --format csv | head -c 1"
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
"""Runs one command after the other, and tells what had been imported after each."""


def test_what_is_imported(made: Made, tmp_path: Path) -> None:
    """Help needs nothing that takes long, a trace that was read before no pandas, a comparison no charts, and nothing
    ever torch."""
    analyze("trace", TRACES / "cpu_gloo_tp2_rank0.json.gz")
    cpu, old, new = TRACES / "cpu_gloo_tp2_rank0.json.gz", made("compared") / "old", made("compared") / "new"
    commands = [["--help"], *([name, "--help"] for name in ("report", "compare", "timeline"))]
    commands += [["trace", str(cpu), "--format", "csv"], ["compare", str(old), str(new)]]
    commands += [["compare", str(made("compared") / "cuda"), str(made("compared") / "rocm")]]
    commands += [["compare", TRACE, NONE], ["query", str(made("kernels"))]]
    commands += [["report", str(made("layers")), "--output", str(tmp_path)]]
    command = [sys.executable, "-c", IMPORTS]
    process = subprocess.run(command, cwd=ROOT, input=json.dumps(commands), text=True, capture_output=True, timeout=120)
    after = dict(zip(map(" ".join, commands), json.loads(process.stderr.splitlines()[-1]), strict=True))
    for told, imported in after.items():
        assert "torch" not in imported
        assert not told.endswith("--help") or imported == []
        assert not told.startswith("trace") or "pandas" not in imported
        assert not told.startswith("compare") or not {"altair", "vl_convert"} & set(imported)


def test_a_terminal_too_narrow_for_every_column_of_kernels_says_what_is_missing(made: Made, tmp_path: Path) -> None:
    """The least important columns go first."""

    def of_width(columns: int) -> str:
        return shown(columns, "report", made("kernels"), "--output", tmp_path)

    rule = {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}
    whole = max(
        len(line)
        for line in analyze("report", made("kernels"), "--output", tmp_path).stdout.splitlines()
        if set(line) == rule
    )
    leaving = ["error", "noise us", "GB/s", "hidden"]
    for room, missing in ((0, 0), (-1, 1), (-12, 2), (-22, 3), (-28, 4)):
        text = of_width(whole + room)
        header = next(line for line in text.splitlines() if "implementation  backend" in line)
        assert [name for name in leaving if name not in header] == leaving[:missing]
        assert "time us" in header
        assert ("No room for" in text) == bool(missing)
