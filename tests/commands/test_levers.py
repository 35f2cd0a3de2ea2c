"""`analyze.py levers`, beside what golden files hold of it."""

import shutil
from pathlib import Path

import pytest

from overlap_sweep.levers import levers
from tests.analyze import analyze, rows
from tests.golden.cases import TRACES

SCRIPT = "from transformers import HfArgumentParser, TrainingArguments\n"


def test_all_are_listed() -> None:
    assert [row["lever"] for row in rows("levers")] == [*levers()]
    assert {row["applies"] for row in rows("levers")} == {None}


def test_a_command_s_script_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(SCRIPT)
    line = "torchrun run.py --optim sgd"

    found = {row["lever"]: row["applies"] for row in rows("levers", "--for", line)}

    assert found["transformers.ddp_bucket_cap_mb"] == "yes"
    assert found["transformers.optim"].startswith("no: the command gives --optim itself (sgd)")
    assert found["megatron.ddp_bucket_size"].startswith("no: Megatron-LM is not found in the command")
    assert found["ddp.bucket_cap_mb"] == "if it uses ddp"
    (tmp_path / "run.py").write_text("import argparse\n")
    assert "none is found" in analyze("levers", "transformers", "ddp", "--for", line).stdout


def test_levers_for_found_causes_come_first(tmp_path: Path) -> None:
    for rank in (0, 1):
        shutil.copy(TRACES / f"h200x2_fsdp2_checkpoint_rank{rank}.json.gz", tmp_path / f"trace_rank{rank}.json.gz")

    shown = analyze("levers", "--for", tmp_path).stdout.splitlines()

    first, *rest = [line.split()[0] for line in shown if "." in line.split(" ")[0] and "trace_rank" not in line]
    assert "fsdp2.prefetch" in (first, *rest)
    assert not any(name.startswith(("ddp.", "deepspeed.")) for name in rest)
    mending = [bool(row["mends"]) for row in rows("levers", first, rest[-1], "--for", tmp_path)]
    assert mending[0] >= mending[1]


def test_a_trace_without_gpus_has_no_levers_of_gpus() -> None:
    found = {row["lever"]: row["applies"] for row in rows("levers", "--for", TRACES / "cpu_gloo_tp2_rank0.json.gz")}
    assert found["nccl.max_ctas"] == "no: it has a meaning on GPUs, and the trace has none"
