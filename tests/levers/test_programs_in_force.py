"""Options of programs in trainings on a CPU: they are in force, and do what the lines that one would write do."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.effects.differences import differences
from overlap_sweep.effects.fingerprint import Fingerprint
from overlap_sweep.effects.runs import read_prints
from overlap_sweep.workloads.job import command
from tests import start_ranks
from tests.workloads.job.commands import job_point, measured

pytestmark = pytest.mark.end_to_end

DEEPSPEED = """
import argparse, deepspeed, torch
from torch import nn
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
# It would be compiled first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
engine, *_ = deepspeed.initialize(parser.parse_args(), model, torch.optim.AdamW(model.parameters()))
for _ in range(100):
    engine.backward(engine(torch.ones(4, 128)).square().mean())
    engine.step()
"""
ZERO = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokens = torch.arange(16)
data = [{"input_ids": tokens, "labels": tokens}] * 10_000
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=128, n_layer=3, n_head=4))
Trainer(model, arguments, train_dataset=data).train()
"""
RANKS = f"{sys.executable} {start_ranks.__file__} 2"


def ran(folder: Path, words: str, **levers: dict[str, Any]) -> list[Fingerprint]:
    """What both ranks did in the profiled steps."""
    folder.mkdir()
    asked = {"attach": True, "ranks": 2, "skip_steps": 2, "steps": 3, "profile_steps": 2, "levers": levers}
    assert measured(folder, words, 200.0, **asked)["objective_us"]
    prints = read_prints(sorted((folder / "run").glob("trace_rank*"))).values()
    return [one.print for one in prints if one.print]


def aspects(before: list[Fingerprint], after: list[Fingerprint]) -> set[str]:
    return {one.aspect for one in differences(before, after)}


@pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed")
def test_deepspeeds_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    script, own, changed = tmp_path / "train.py", tmp_path / "ds.json", tmp_path / "changed.json"
    script.write_text(DEEPSPEED)
    own.write_text(json.dumps(ZERO))
    words = f"{RANKS} {script} --deepspeed --deepspeed_config"
    levers = {"reduce_bucket_size": 20_000, "contiguous_gradients": False}
    to_write = json.loads(command.to_write(job_point(f"{words} {own}", levers={"deepspeed": levers})))
    changed.write_text(json.dumps(ZERO | {"zero_optimization": {"stage": 2} | to_write["zero_optimization"]}))

    plain, lever = (
        ran(tmp_path / "plain", f"{words} {own}"),
        ran(tmp_path / "lever", f"{words} {own}", deepspeed=levers),
    )

    assert {"calls", "copies"} <= aspects(plain, lever)
    assert aspects(lever, ran(tmp_path / "by_hand", f"{words} {changed}")) == set()


@pytest.mark.skipif(not (find_spec("accelerate") and find_spec("transformers")), reason="The Trainer is not installed")
def test_the_trainers_options(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    words = f"{RANKS} {script} --use_cpu --report_to none --output_dir {tmp_path / 'out'}"
    levers = {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": False}
    with_levers = job_point(words, levers={"transformers": levers})
    by_hand = command.command_line(with_levers)
    assert shlex.split(by_hand) == shlex.split(f"{words} --ddp_bucket_cap_mb 1 --ddp_find_unused_parameters false")

    plain, lever = ran(tmp_path / "plain", words), ran(tmp_path / "lever", words, transformers=levers)

    assert "calls" in aspects(plain, lever)
    assert aspects(lever, ran(tmp_path / "by_hand", by_hand)) == set()
