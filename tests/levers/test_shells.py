"""Options of levers in commands that a shell runs: they reach the program, in real shells, or the lever is refused."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_sweep.levers import levers, programs, shells

LEVERS = levers()
PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([os.environ.get("A"), *sys.argv[1:]]))
"""


def made(**values: object) -> dict[str, programs.Change]:
    """The changes of levers, given as family_name or as family and name with two underscores."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return {name: programs.change(LEVERS[name], value) for name, value in named.items()}  # type: ignore[arg-type]


STAGE = '{"zero_optimization": {"stage": 2}}'
WORKERS = made(megatron__num_workers=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("torchrun", "pretrain_gpt.py"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def received(words: list[str]) -> list[str]:
    """What the program is started with."""
    found: list[str] = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "torchrun pretrain_gpt.py",
        "  torchrun pretrain_gpt.py --data 'a  b;c' \"d && e\" f\\ g h#i '$A' ''  ",
        "A=1 exec torchrun pretrain_gpt.py --num-layers 2",
        "A='1 2' torchrun pretrain_gpt.py --x 2>/dev/null --y",
        "torchrun pretrain_gpt.py --flag 2> log",
        "torchrun pretrain_gpt.py --flag 2>&1",
        "torchrun \\\n  pretrain_gpt.py \\\n  --x 1\n",
        "torchrun ./pretrain_gpt.py --glob *.none --home ~/x",
        "./pretrain_gpt.py --x",
        "export A=1; torchrun pretrain_gpt.py --x",
        "export B='a;b' A=2 &&\n  torchrun pretrain_gpt.py 2> log --x",
        "export B=\nexport A=3\nA=4 torchrun pretrain_gpt.py",
    ],
)
@pytest.mark.parametrize(
    "shell", ["bash -c", "sh -c", "bash -euo pipefail -c", "/bin/bash --norc -ec", "env B=1 bash -c"]
)
def test_an_option_reaches_the_program_of_a_shells_text(shell: str, text: str) -> None:
    words = [*shell.split(), text]
    assert shells.refusal(WORKERS, words, {}, override=False) == ""
    with_option = shells.changed(words, WORKERS.values())
    assert received(with_option) == [*received(words), "--num-workers", "4"]
    assert shells.changed(words, []) == words


def test_words_after_the_text_stay_where_they_are() -> None:
    words = ["bash", "-c", "torchrun pretrain_gpt.py", "name", "word"]
    assert shells.changed(words, WORKERS.values())[3:] == ["name", "word"]


def test_what_the_text_gives_itself_is_seen_and_replaced_if_asked() -> None:
    words = ["bash", "-c", "torchrun pretrain_gpt.py --num-workers '2' --data 'a b'"]
    said = shells.refusal(WORKERS, words, {}, override=False)
    assert "the command gives --num-workers itself (2); add job.levers_override=true" in said
    assert shells.refusal(WORKERS, words, {}, override=True) == ""
    replaced = shells.changed(words, WORKERS.values())
    assert received(replaced)[1:] == ["pretrain_gpt.py", "--data", "a b", "--num-workers", "4"]


def test_options_in_front_of_the_script_and_in_files_are_put_into_the_text(folder: Path) -> None:
    launched = ["bash", "-c", "accelerate launch --use_fsdp train.py --x 'a b'"]
    prefetch = made(accelerate__fsdp_forward_prefetch=True)
    assert shells.refusal(prefetch, launched, {}, override=False) == ""
    inserted = "accelerate launch --fsdp_forward_prefetch true --use_fsdp train.py --x 'a b'"
    assert shells.changed(launched, prefetch.values()) == ["bash", "-c", inserted]
    bucket = made(deepspeed__reduce_bucket_size=7)
    words = ["sh", "-c", "python t.py --deepspeed_config 'my ds.json' > log"]
    assert shells.refusal(bucket, words, {"my ds.json": STAGE}, override=False) == ""
    copied = shells.changed(words, bucket.values(), "/run dir/ds.json")
    assert copied == ["sh", "-c", "python t.py --deepspeed_config '/run dir/ds.json' > log"]


@pytest.mark.parametrize(
    ("text", "found"),
    {
        "cd x && torchrun pretrain_gpt.py": "(&&)",
        "torchrun pretrain_gpt.py | tee log": "(|)",
        "torchrun pretrain_gpt.py; echo done": "(pretrain_gpt.py;)",
        "torchrun pretrain_gpt.py &": "(&)",
        "torchrun pretrain_gpt.py $ARGS": "($ARGS)",
        "export A=$B; torchrun pretrain_gpt.py": "(A=$B;)",
        "export A=1; torchrun pretrain_gpt.py; echo done": "(pretrain_gpt.py;)",
        "export A=1;": "command; give",
        'torchrun pretrain_gpt.py "$@"': '("$@")',
        "torchrun pretrain_gpt.py `cat args`": "(`cat)",
        "torchrun pretrain_gpt.py # --x": "(#)",
        "torchrun pretrain_gpt.py\necho done": "(several lines)",
        "(torchrun pretrain_gpt.py)": "((torchrun)",
        "torchrun pretrain_gpt.py <<E\nE": "(<<E)",
        "": "command; give",
    }.items(),
)
def test_a_text_of_more_than_a_simple_command_is_refused(text: str, found: str) -> None:
    words = ["bash", "-c", text]
    said = shells.refusal(WORKERS, words, {}, override=False)
    assert said.startswith("megatron.num_workers cannot be applied: what the shell is given is not one simple command")
    assert found in said
    assert "give the command that it runs as job.command" in said
    assert shells.recognised(words, {}) == []


@pytest.mark.parametrize(
    "line", ["bash run.sh", "sh -x ./run.sh --x", "./run.sh", "bash -c 'bash run.sh'", "bash launch"]
)
def test_a_script_of_a_shell_is_refused_with_what_to_do(line: str) -> None:
    text = 'exec torchrun pretrain_gpt.py "$@"  # HfArgumentParser'
    texts = dict.fromkeys(("run.sh", "./run.sh", "launch"), text)
    for changes in (WORKERS, made(transformers__optim="adamw_torch"), made(accelerate__fsdp_forward_prefetch=True)):
        said = shells.refusal(changes, shlex.split(line), texts, override=True)
        assert (
            "is a shell script, in which no program is recognised; give the command that it runs as job.command" in said
        )


def test_torchtitans_script_has_to_pass_its_words_on() -> None:
    changes, words = made(torchtitan__gc_freq=500), ["bash", "run_train.sh"]
    assert shells.refusal(changes, words, {}, override=False) == ""
    texts = {"run_train.sh": "torchrun -m torchtitan.train --x"}
    assert shells.refusal(changes, words, texts, override=False) == (
        "torchtitan.gc_freq cannot be applied: run_train.sh does not pass its words on, so that no option reaches the "
        'program; put "$@" behind its own'
    )
    texts = {"run_train.sh": 'torchrun -m torchtitan.train --x "$@"'}
    assert shells.refusal(changes, words, texts, override=False) == ""
    assert shells.changed(words, changes.values()) == [*words, "--training.gc_freq", "500"]


def test_a_file_that_the_whole_command_names_is_replaced_whatever_the_shell_does() -> None:
    bucket = made(deepspeed__reduce_bucket_size=7)
    words = ["sh", "-c", 'python t.py "$@" | tee log', "--", "--deepspeed", "ds.json"]
    assert shells.refusal(bucket, words, {"ds.json": STAGE}, override=False) == ""
    assert shells.changed(words, bucket.values(), "new.json") == [*words[:-1], "new.json"]
