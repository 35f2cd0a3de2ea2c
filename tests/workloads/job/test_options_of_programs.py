"""Levers that are options of the program which a command starts: in its words, its files, and what to write."""

import json
from pathlib import Path

import pytest

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_key
from overlap_sweep.workloads.job import command
from tests.workloads.job.commands import measured, point, recorded, recording, refusal, shell
from tests.workloads.job.test_complete import exported

MEGATRON = "job.command=torchrun pretrain_gpt.py --sequence-parallel"
DEEPSPEED = "job.command=python t.py --deepspeed_config ds.json"
BUCKET = "+job.levers.deepspeed.reduce_bucket_size=1000"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    return tmp_path


def test_options_are_in_the_command_that_is_run_and_in_the_one_to_use(folder: Path) -> None:
    made = point(MEGATRON, "+job.levers.megatron.overlap_grad_reduce=true", "+job.levers.megatron.num_workers=4")
    words = ["torchrun", "pretrain_gpt.py", "--sequence-parallel", "--overlap-grad-reduce", "--num-workers", "4"]
    assert workloads.of(made).refusal(made) is None
    assert command.arguments(made, folder / "run") == words
    assert command.command_line(made) == " ".join(words)


def test_a_shells_text_is_given_the_option(folder: Path) -> None:
    shell = "job.command=bash -c 'torchrun --nproc-per-node={ranks} pretrain_gpt.py --x {x}'"
    made = point(shell, "+job.values.x=2", "job.levers.megatron.num_workers=4")
    assert workloads.of(made).refusal(made) is None
    text = "torchrun --nproc-per-node=1 pretrain_gpt.py --x 2 --num-workers 4"
    assert command.arguments(made, folder / "run") == ["bash", "-c", text]
    assert command.command_line(made) == f"bash -c '{text}'"
    assert command.script_name(made) == "pretrain_gpt.py"
    said = refusal("job.command=bash run.sh --x", "job.levers.megatron.num_workers=4")
    assert str(said).startswith("job.levers.megatron.num_workers=4 cannot be applied: run.sh is a shell script")


def test_variables_of_levers_are_in_the_command_to_use() -> None:
    made = point(MEGATRON, "+job.levers.nccl.max_ctas=8", "+job.env.A=1")
    assert command.command_line(made) == "NCCL_MAX_CTAS=8 A=1 torchrun pretrain_gpt.py --sequence-parallel"


def test_a_point_with_an_option_is_another_one() -> None:
    lever = "+job.levers.megatron.overlap_grad_reduce=true"
    assert point_key(point(MEGATRON, lever)) != point_key(point(MEGATRON))


def test_what_cannot_be_applied_is_refused(folder: Path) -> None:
    said = refusal("job.command=python t.py", "+job.levers.transformers.optim=adamw_torch")
    assert said is not None
    assert said.startswith("job.levers.transformers.optim=adamw_torch cannot be applied: Hugging Face's")
    (folder / "t.py").write_text("from transformers import HfArgumentParser")
    assert refusal("job.command=python t.py", "+job.levers.transformers.optim=adamw_torch") is None
    own = ("job.command=python t.py --optim sgd", "+job.levers.transformers.optim=adamw_torch")
    assert "gives --optim itself (sgd); add job.levers_override=true" in str(refusal(*own))
    assert refusal(*own, "job.levers_override=true") is None
    assert command.arguments(point(*own), folder)[1:] == ["t.py", "--optim", "adamw_torch"]


def test_a_tuned_file_becomes_megatrons_arguments(folder: Path) -> None:
    exported(folder / "tuned.yaml", tp_comm_bulk_wgrad=False)
    made = point(MEGATRON, "+job.levers.megatron.tp_comm_overlap=tuned.yaml")
    copy = folder / "run" / "tp_comm_overlap_cfg.yaml"
    switches = ["--disable-tp-comm-bulk-wgrad"]
    words = ["--tp-comm-overlap", "--tp-comm-overlap-cfg", str(copy), *switches]
    assert command.arguments(made, folder / "run")[3:] == words
    assert command.command_line(made).endswith("--tp-comm-overlap --tp-comm-overlap-cfg tuned.yaml " + switches[0])
    assert workloads.of(made).overlap_configs(made)[""] == made.overlap_cfg
    off = point(MEGATRON, "+job.levers.megatron.tp_comm_overlap=none")
    assert command.arguments(off, folder) == ["torchrun", "pretrain_gpt.py", "--sequence-parallel"]
    for given, wanted in {
        ("+job.levers.megatron.tp_comm_overlap=missing.yaml",): "megatron.tp_comm_overlap=missing.yaml is not a file",
        (
            "job.command=torchrun pretrain_gpt.py {o:megatron}",
            "+job.values.o=default",
            "+job.levers.megatron.tp_comm_overlap=default",
        ): "job.command has {o:megatron} and megatron.tp_comm_overlap; Megatron-LM takes one of them.",
    }.items():
        with pytest.raises(UserError, match=r"Megatron-LM|not a file") as raised:
            point(MEGATRON, *given)
        assert wanted in str(raised.value)


def test_deepspeed_runs_with_a_changed_copy(folder: Path) -> None:
    made = point(DEEPSPEED, BUCKET)
    assert workloads.of(made).refusal(made) is None
    run = folder / "run=1"
    run.mkdir()
    command.link_handed(made, run)
    command.write_files(made, run)
    copy = Path(command.arguments(made, run)[-1])
    assert "=" not in str(copy)
    assert json.loads(copy.read_text()) == {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    assert json.loads((folder / "ds.json").read_text()) == {"zero_optimization": {"stage": 2}}
    # The file is the user's to change.
    assert command.command_line(made) == "python t.py --deepspeed_config ds.json"
    assert command.to_write(made) == '{"zero_optimization": {"reduce_bucket_size": 1000}}'
    assert command.json_file(made) == "ds.json"


def test_what_to_write_into_deepspeeds_file_is_one_object() -> None:
    made = point(DEEPSPEED, BUCKET, "+job.levers.ddp.no_sync=true", "+job.levers.deepspeed.overlap_comm=true")
    *lines, last = command.to_write(made).splitlines()
    assert json.loads(last) == {"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": True}}
    assert "no_sync()" in "".join(lines)


def test_a_run_is_given_the_copy(folder: Path) -> None:
    script = f"grep -q 1000 $1 && {recorded(folder / 'made', recording())}"
    levers = {"deepspeed": {"reduce_bucket_size": 1000}}

    found = measured(folder, f"{shell(script)} --deepspeed {folder / 'ds.json'}", levers=levers)

    assert found["objective_us"]
