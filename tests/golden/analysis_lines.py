"""analysis_lines.txt: command lines of analyze.py that fail, or that --fail-if makes fail, and what each is answered.

A new one is its line with `$ `; `make golden` writes the answers.
"""

import os
import re
import shlex
import shutil
import tempfile
from contextlib import chdir
from itertools import product
from pathlib import Path
from unittest import mock

from overlap_sweep.store import Store
from tests import made_sweeps
from tests.analyze import analyze, files_below
from tests.golden import command_lines
from tests.golden.made_report import TRACES, write_compared, write_ranks
from tests.make_point import make_point, operator_config
from tests.store.measured import result, write_history
from tests.workloads.fsdp.telemetry_logs import write_run

FILE = Path(__file__).with_suffix(".txt")
PARTLY = b"\x1b[2J is no record\n"


def build(folder: Path) -> None:
    """Writes what the command lines are about: what is whole, what is something else, and what is damaged in part."""
    made_sweeps.write_sweep(folder / "operators")
    made_sweeps.write_tuned_sweep(folder / "tuned")
    write_compared(folder / "compared")
    write_ranks(folder / "ranks")
    write_history(folder / "store.sqlite")
    for name in ("cpu_gloo_tp2_rank0", "h200x4_llama3_70b_layer_none", "h200x4_llama3_70b_layer_te_default"):
        shutil.copy(TRACES / f"{name}.json.gz", folder / f"{name.rpartition('layer_')[2]}.json.gz")
    for name, rank in product(("fsdp2_checkpoint", "cuda_graph"), (0, 1)):
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(TRACES / f"h200x2_{name}_rank{rank}.json.gz", folder / name / f"trace_rank{rank}.json.gz")
    for name in ("empty", "results", "reports", "variants"):
        (folder / name).mkdir()
    (folder / "notes.txt").write_text("hello")
    (folder / "cut.json").write_text("")
    (folder / "no.json").write_text('{"schemaVersion": 1}')
    (folder / "mine.json.gz").write_text("mine")
    (folder / "results" / "result.json").touch()
    (folder / "reports" / "points.parquet").write_bytes(b"PAR1")
    for number in range(1, 6):
        point = operator_config(2, "fc1", "all", "bulk", num_sm=number)
        make_point("operator", folder / "five", point, name=f"bulk_sm{number}")
    make_point("fsdp", folder / "bare")
    for name in ("none", "default"):
        shutil.copy(TRACES / "cpu_gloo_tp2_rank0.json.gz", folder / "variants" / f"trace_{name}_rank0.json.gz")
    damaged = folder / "damaged"
    for name in ("sweep", "whole"):
        made_sweeps.write_sweep(damaged / name)
    (damaged / "sweep" / "cut").mkdir()
    (damaged / "sweep" / "cut" / "result.json").write_text("{")
    write_run(damaged / "cuda")
    log = write_run(damaged / "rocm") / "rank_1_metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], PARTLY, *lines[5:]]))
    with Store(damaged / "store.sqlite") as kept:
        kept.add(result(4, 100.0, 1), damaged)
    (file,) = (damaged / "store.sqlite.d").iterdir()
    file.write_bytes(b"{}\n" + file.read_bytes())


def answer(typed: str, folder: Path) -> str:
    """Returns what is said of the command line in the folder, whether rows are printed or files written, and how it
    ends. What is in the folder must stay as it is."""
    before = files_below(folder)
    without_page = mock.patch("overlap_sweep.report.files.page_files", return_value=())
    with chdir(folder), without_page, mock.patch.dict(os.environ, {"COLUMNS": "120"}):
        ran = analyze(*shlex.split(typed))
    after = files_below(folder)
    assert before == {path: after[path] for path in before}, typed
    shutil.rmtree(folder / "out", ignore_errors=True)
    assert files_below(folder) == before, typed
    did = [", with output" * bool(ran.stdout), ", with files" * (after != before)]
    # A store's files are named by the host, the process and chance.
    said = re.sub(r"(?<=\.sqlite\.d/)[^/ ]+(?=\.jsonl)", "(file)", ran.stderr.lstrip("\n"))
    return f"{said}exit status {ran.returncode}{''.join(did)}\n"


def write() -> None:
    """Writes the present answers into the file."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        command_lines.write(FILE, lambda typed: answer(typed, Path(folder)))
