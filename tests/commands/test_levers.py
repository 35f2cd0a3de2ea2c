"""`analyze.py levers`, beside what golden files hold of it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap_sweep.levers import levers
from tests.analyze import analyze, rows
from tests.golden.cases import TRACES
from tests.make_point import job_config, make_point

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

    first, *rest = _names(shown)
    assert "fsdp2.prefetch" in (first, *rest)
    assert not any(name.startswith(("ddp.", "deepspeed.")) for name in rest)
    mending = [bool(row["mends"]) for row in rows("levers", first, rest[-1], "--for", tmp_path)]
    assert mending[0] >= mending[1]


def _names(shown: Sequence[str]) -> list[str]:
    return [name for line in shown if (name := line.split(" ")[0]) in levers()]


@pytest.mark.parametrize("target", ["", "torchrun train.py", str(TRACES / "h200x2_ddp_rank0.json.gz")])
def test_the_list_has_room_on_a_terminal_of_120_columns(target: str) -> None:
    shown = analyze("levers", *(["--for", target] if target else [])).stdout.splitlines()

    assert max(map(len, shown)) <= 120
    assert len(_names(shown)) > 30
    if not target:
        assert _names(shown) == [*levers()]


def test_the_whole_name_of_a_lever_prints_all_about_it() -> None:
    shown = analyze("levers", "+job.levers.fsdp2.prefetch").stdout

    (row,) = rows("levers", "fsdp2.prefetch")
    said = " ".join(shown.split())
    for value in (row["what"], row["values"], row["results"], row["causes"], row["write"], row["note"]):
        assert " ".join(str(value or "").split()) in said
    assert "job.levers.fsdp2.prefetch=1,2,3" in shown
    assert "fsdp2.prefetch_" not in shown


@pytest.mark.parametrize(
    ("line", "recognised"),
    {
        "bash -c 'torchrun run.py --optim sgd'": "Hugging Face's TrainingArguments.",
        "bash -c 'cd x && torchrun run.py'": "none is found; what the shell is given is not one simple command (&&)",
        "bash run.sh": "none is found; run.sh is a shell script, in which no program is recognised; give",
        "torchrun nowhere.py": "none is found; nowhere.py is not there to be read.",
    }.items(),
)
def test_what_is_recognised_in_a_command_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, recognised: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(SCRIPT)

    said = analyze("levers", "--for", line).stdout

    assert said.startswith(f"Programs whose options are levers: {recognised}")


def _measured(
    directory: Path, name: str, command: str, chosen: dict[str, object], *, traced: bool = False, **changes: object
) -> None:
    """Writes a point of workload=job as launch.py does."""
    config = job_config({}, **{"job.command": command, "job.levers": chosen, "runtime.device": "cuda"} | changes)
    traces = ["trace_rank0.json.gz"] if traced else []
    point = make_point("job", directory, config, name=name, traces=traces)
    for trace in traces:
        shutil.copy(TRACES / "h200x2_ddp_rank0.json.gz", point / trace)


def test_a_sweep_of_jobs_has_a_command_and_traces(tmp_path: Path) -> None:
    command = "torchrun pretrain_gpt.py --num-workers 2"
    env = {"job.env": {"NCCL_MAX_CTAS": 4}}
    _measured(tmp_path, "a_workers", command, {"megatron": {"num_workers": 4}}, traced=True, **env)
    _measured(tmp_path, "plain", command, {"megatron": {"num_workers": None}}, traced=True, **env)

    found = {row["lever"]: row["applies"] for row in rows("levers", "--for", tmp_path)}

    assert found["megatron.overlap_grad_reduce"] == "yes"
    assert found["megatron.num_workers"].startswith("no: the command gives --num-workers itself (2)")
    assert found["transformers.optim"].startswith("no: Hugging Face's TrainingArguments is not found in the command")
    assert found["nccl.max_ctas"] == "no: job.env.NCCL_MAX_CTAS sets the same"
    assert found["ddp.bucket_cap_mb"] == found["nccl.min_ctas"] == "yes"
    assert found["fsdp2.prefetch"] == "no: the trace shows no fsdp2"
    said = analyze("levers", "--for", tmp_path).stdout.splitlines()
    assert "/plain/" in said[0]
    assert said[1] == "Programs whose options are levers: Megatron-LM."


def test_a_sweep_of_jobs_without_traces_has_its_command(tmp_path: Path) -> None:
    _measured(tmp_path, "plain", "torchrun pretrain_gpt.py", {})
    found = {row["lever"]: row["applies"] for row in rows("levers", "--for", tmp_path)}
    assert found["megatron.num_workers"] == "yes"
    assert found["ddp.bucket_cap_mb"] == "if it uses ddp"
    _measured(tmp_path / "cpu", "plain", "torchrun pretrain_gpt.py", {}, **{"runtime.device": "cpu"})
    found = {row["lever"]: row["applies"] for row in rows("levers", "--for", tmp_path / "cpu")}
    assert found["nccl.max_ctas"] == "no: it has a meaning on GPUs, and it ran with runtime.device=cpu"


def test_a_directory_of_several_commands_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _measured(tmp_path, name, f"torchrun {name}.py", {})
    done = analyze("levers", "--for", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"error: --for {tmp_path} has 2 commands (a, b); give the directory of one.\n"


def test_a_trace_without_gpus_has_no_levers_of_gpus() -> None:
    found = {row["lever"]: row["applies"] for row in rows("levers", "--for", TRACES / "cpu_gloo_tp2_rank0.json.gz")}
    assert found["nccl.max_ctas"] == "no: it has a meaning on GPUs, and the trace has none"
