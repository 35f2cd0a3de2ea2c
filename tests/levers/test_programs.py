"""Levers that are options of programs: by what a program is recognised, and how its command is changed."""

import json
import shlex
from collections.abc import Mapping

import pytest

from overlap_sweep.diagnosis.facts import LIBRARIES
from overlap_sweep.errors import UserError
from overlap_sweep.levers import Value, chosen, levers, programs, written_together
from overlap_sweep.levers.programs import Command

MEGATRON = "torchrun --nproc-per-node 2 pretrain_gpt.py --bf16 --use-distributed-optimizer"
TITAN = "torchrun -m torchtitan.train --module llama3 --config llama3_8b"
ACCELERATE = "accelerate launch --use_fsdp --num_processes 2 train.py --lr 1"
DEEPSPEED = "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json"
TRAINER = "torchrun run.py --output_dir out"
DS = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True}}
TEXTS = {
    "run.py": "from transformers import HfArgumentParser, TrainingArguments",
    "train.py": "import argparse",
    "ds.json": json.dumps(DS),
}


def command(line: str, texts: Mapping[str, str] = TEXTS) -> Command:
    return Command(shlex.split(line), texts)


def changes(**values: Value) -> dict[str, programs.Change]:
    """By lever: `megatron__ddp_bucket_size`."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return {name: programs.change(levers()[name], value) for name, value in named.items()}


def changed(line: str, **values: Value) -> str:
    given = command(line)
    return shlex.join(programs.changed(given.words, changes(**values).values()))


def refusal(line: str, *, override: bool = False, texts: Mapping[str, str] = TEXTS, **values: Value) -> str:
    return programs.refusal(changes(**values), command(line, texts), override=override)


@pytest.mark.parametrize(
    ("line", "program", "texts"),
    [
        (MEGATRON, "megatron", {}),
        (MEGATRON, "megatron", {"pretrain_gpt.py": "from megatron.training import pretrain"}),
        (TITAN, "torchtitan", {}),
        ("./run_train.sh --compile.enable", "torchtitan", {}),
        ("torchrun torchtitan/train.py", "torchtitan", {}),
        (ACCELERATE, "accelerate", {}),
        ("python -m accelerate.commands.launch train.py", "accelerate", {}),
        ("/env/bin/accelerate-launch train.py", "accelerate", {}),
        (DEEPSPEED, "deepspeed", TEXTS),
        ("torchrun train.py --deepspeed=ds.json", "deepspeed", TEXTS),
        ("accelerate launch --use_deepspeed --deepspeed_config_file ds.json train.py", "deepspeed", TEXTS),
        (TRAINER, "transformers", TEXTS),
        ("trl sft --model_name_or_path m", "transformers", {}),
        ("torchrun -m trl.scripts.sft --output_dir out", "transformers", {}),
    ],
)
def test_programs_are_recognised(line: str, program: str, texts: dict[str, str]) -> None:
    assert programs.is_recognised(program, command(line, texts))


@pytest.mark.parametrize(
    ("line", "program", "texts"),
    [
        ("bash -c 'python pretrain_gpt.py'", "megatron", {}),
        ("bash examples/train_gpt3.sh", "megatron", {}),
        (MEGATRON, "megatron", {"pretrain_gpt.py": "import argparse"}),
        ("torchrun train.py", "torchtitan", {}),
        ("bash run_train.sh", "torchtitan", {"run_train.sh": "python mine.py"}),
        ("torchrun train.py launch", "accelerate", {}),
        ("torchrun train.py --deepspeed", "deepspeed", TEXTS),
        ("torchrun train.py --deepspeed other.json", "deepspeed", TEXTS),
        ("torchrun train.py --deepspeed ds.json", "deepspeed", {"ds.json": "{ // a comment\n}"}),
        ("torchrun train.py", "transformers", TEXTS),
        ("torchrun run.py", "transformers", {}),
        ("sh -c 'python run.py'", "transformers", TEXTS),
    ],
)
def test_what_is_another_program_is_not_recognised(line: str, program: str, texts: dict[str, str]) -> None:
    assert not programs.is_recognised(program, command(line, texts))


@pytest.mark.parametrize(
    ("line", "values", "wanted"),
    [
        (MEGATRON, {"megatron__overlap_grad_reduce": True}, f"{MEGATRON} --overlap-grad-reduce"),
        (MEGATRON, {"megatron__overlap_grad_reduce": False}, MEGATRON),
        (f"{MEGATRON} --overlap-grad-reduce", {"megatron__overlap_grad_reduce": False}, MEGATRON),
        (f"{MEGATRON} --ddp-bucket-size=5", {"megatron__ddp_bucket_size": 7}, f"{MEGATRON} --ddp-bucket-size 7"),
        (MEGATRON, {"megatron__tp_comm_overlap": "default"}, f"{MEGATRON} --tp-comm-overlap"),
        (
            f"{MEGATRON} --tp-comm-overlap --tp-comm-overlap-cfg a.yaml",
            {"megatron__tp_comm_overlap": "default"},
            f"{MEGATRON} --tp-comm-overlap",
        ),
        (TITAN, {"torchtitan__compile": True}, f"{TITAN} --compile.enable"),
        (f"{TITAN} --compile.enable", {"torchtitan__compile": False}, f"{TITAN} --compile.no-enable"),
        (
            ACCELERATE,
            {"accelerate__fsdp_forward_prefetch": True},
            "accelerate launch --fsdp_forward_prefetch true --use_fsdp --num_processes 2 train.py --lr 1",
        ),
        (
            "accelerate launch --fsdp-forward-prefetch false -m pack.train --fsdp_forward_prefetch x",
            {"accelerate__fsdp_forward_prefetch": True},
            "accelerate launch --fsdp_forward_prefetch true -m pack.train --fsdp_forward_prefetch x",
        ),
        (f"{TRAINER} --optim=adamw_torch", {"transformers__optim": "a"}, f"{TRAINER} --optim a"),
        (
            TRAINER,
            {"transformers__torch_compile": True, "transformers__dataloader_num_workers": 4},
            f"{TRAINER} --torch_compile true --dataloader_num_workers 4",
        ),
    ],
)
def test_options_are_given_as_their_program_takes_them(line: str, values: dict[str, Value], wanted: str) -> None:
    assert changed(line, **values) == wanted


def test_deepspeed_is_given_a_changed_file() -> None:
    made = changes(deepspeed__reduce_bucket_size=1000, deepspeed__communication_data_type="bf16")
    given = command(DEEPSPEED)
    words = programs.changed(given.words, made.values(), "/run/deepspeed.json")
    assert words == [*shlex.split(DEEPSPEED)[:-1], "/run/deepspeed.json"]
    joined = command("torchrun x_ds.json train.py --deepspeed=ds.json")
    assert programs.changed(joined.words, made.values(), "/a")[1:] == [
        *("x_ds.json", "train.py", "--deepspeed=/a"),
    ]
    zero = {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True}
    assert json.loads(programs.changed_json(TEXTS["ds.json"], made.values())) == {
        **{"train_batch_size": 8, "zero_optimization": zero, "communication_data_type": "bf16"},
    }


@pytest.mark.parametrize(
    ("line", "values", "said"),
    [
        (
            "torchrun train.py",
            {"megatron__ddp_bucket_size": 5},
            "Megatron-LM is not found in the command (pretrain_*.py)",
        ),
        (
            f"{MEGATRON} --ddp_bucket_size 5 --overlap-grad-reduce",
            {"megatron__ddp_bucket_size": 7},
            "the command gives --ddp-bucket-size itself (5); add job.levers_override=true to replace it",
        ),
        (MEGATRON, {"megatron__overlap_param_gather": True}, "it needs --overlap-grad-reduce"),
        (
            f"{MEGATRON} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-cfg a.yaml",
            {"megatron__tp_comm_overlap": "default"},
            "the command gives --tp-comm-overlap itself (true, a.yaml)",
        ),
        (
            f"{MEGATRON} --overlap-grad-reduce --ddp-num-buckets 4",
            {"megatron__ddp_bucket_size": 7},
            "it does not go with --ddp-num-buckets",
        ),
        (
            f"{TITAN} --compile.enable",
            {"torchtitan__compile": False},
            "the command gives --compile.enable itself (true)",
        ),
        ("accelerate launch train.py", {"accelerate__fsdp_forward_prefetch": True}, "it needs --use_fsdp"),
        (
            ACCELERATE.replace("--use_fsdp", "--use_fsdp --fsdp_version=2"),
            {"accelerate__fsdp_forward_prefetch": True},
            "it does not go with --fsdp_version=2",
        ),
        (
            DEEPSPEED,
            {"deepspeed__overlap_comm": False},
            "the command gives zero_optimization.overlap_comm itself (true)",
        ),
        (DEEPSPEED, {"deepspeed__stage3_prefetch_bucket_size": 5}, "it needs zero_optimization.stage=3"),
        (
            f"{TRAINER} --dataloader_num_workers 0",
            {"transformers__dataloader_prefetch_factor": 2},
            "it needs --dataloader",
        ),
        (f"{TRAINER} --deepspeed ds.json", {"transformers__ddp_bucket_cap_mb": 1}, "it does not go with --deepspeed"),
        (f"{TRAINER} --fsdp full_shard", {"transformers__ddp_static_graph": True}, "it does not go with --fsdp"),
    ],
)
def test_what_cannot_be_applied_is_refused_with_the_reason(line: str, values: dict[str, Value], said: str) -> None:
    (name,) = values
    reason = refusal(line, **values)
    assert reason.startswith(f"{name.replace('__', '.')} cannot be applied: {said}"), reason


def test_what_can_be_applied_is_not_refused() -> None:
    assert refusal(MEGATRON, megatron__overlap_grad_reduce=True, megatron__overlap_param_gather=True) == ""
    assert refusal(f"{MEGATRON} --ddp-bucket-size 5 --overlap-grad-reduce", megatron__ddp_bucket_size=5) == ""
    assert refusal(f"{DEEPSPEED}", deepspeed__reduce_bucket_size=5, deepspeed__overlap_comm=True) == ""
    assert refusal(DEEPSPEED, deepspeed__overlap_comm=False, override=True) == ""
    assert refusal(MEGATRON, megatron__tp_comm_overlap="none") == ""


def test_accelerates_configuration_counts_as_its_options() -> None:
    line = "accelerate launch --config_file my.yaml train.py"
    config = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_backward_prefetch: BACKWARD_PRE}"
    texts = {"my.yaml": config}
    assert refusal(line, texts=texts, accelerate__fsdp_forward_prefetch=True) == ""
    said = refusal(line, texts=texts, accelerate__fsdp_backward_prefetch="BACKWARD_POST")
    assert "the command gives --fsdp_backward_prefetch itself (BACKWARD_PRE)" in said
    assert "needs --use_fsdp" in refusal(line, texts={"my.yaml": ": {"}, accelerate__fsdp_forward_prefetch=True)
    assert programs.files_of(shlex.split(line)) == ["train.py", "my.yaml"]


def test_levers_of_one_argument_are_one_line() -> None:
    """DistributedDataParallel ignores bucket_cap_mb beside a list, so that two lines would not be what was measured."""
    both = written_together({"ddp.bucket_cap_mb": 4, "ddp.first_bucket_mb": 25, "ddp.static_graph": True})

    assert both == [
        "DistributedDataParallel(model, bucket_cap_mb_list=[25, 4])",
        "DistributedDataParallel(model, static_graph=True)",
    ]
    assert written_together({"ddp.bucket_cap_mb": 4}) == ["DistributedDataParallel(model, bucket_cap_mb=4)"]


def test_what_to_write_is_the_option_itself() -> None:
    known = levers()
    assert known["megatron.overlap_grad_reduce"].written(True) == "--overlap-grad-reduce"
    assert known["megatron.overlap_grad_reduce"].written(False) == "no --overlap-grad-reduce"
    assert known["megatron.tp_comm_overlap"].written("a.yaml") == "--tp-comm-overlap --tp-comm-overlap-cfg a.yaml"
    assert known["torchtitan.compile"].written(False) == "--compile.no-enable"
    assert known["deepspeed.overlap_comm"].written(True) == '{"zero_optimization": {"overlap_comm": true}}'


def test_the_trainers_parser_takes_all_of_its_levers() -> None:
    transformers = pytest.importorskip("transformers")
    mine = {name: one for name, one in levers().items() if one.program == "transformers"}
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    for name, lever in mine.items():
        for value in lever.values:
            parsed = parser.parse_args([*programs.change(lever, value).words])
            assert getattr(parsed, lever.argument.removeprefix("--")) == value, name


OPTIONS = {name: one for name, one in levers().items() if one.way == "argument"}


@pytest.mark.parametrize("name", OPTIONS)
def test_entries_say_what_there_is(name: str) -> None:
    one = OPTIONS[name]
    family, _, option = name.partition(".")
    assert family == one.program
    assert {*one.of} <= LIBRARIES.keys()
    # A first value that is the default would try nothing.
    assert one.values[0] != one.default
    for value in (*one.values, *one.choices, *([] if one.default is None else [one.default])):
        assert chosen({family: {option: value}}) == {name: value}


def test_values_of_programs_are_checked() -> None:
    for given, said in {
        ("megatron", "ddp_bucket_size", "big"): "job.levers.megatron.ddp_bucket_size=big is not an integer",
        ("torchtitan", "fsdp_reshard_after_forward", "sometimes"): "is not one of default, always, never",
        ("transformers", "ddp_bucket_cap", 1): "Did you mean transformers.ddp_bucket_cap_mb?",
    }.items():
        with pytest.raises(UserError) as raised:
            chosen({given[0]: {given[1]: given[2]}})
        assert said in str(raised.value)
