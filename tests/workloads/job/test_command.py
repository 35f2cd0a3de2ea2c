"""The command, the environment and the working folder of a point; and what of them cannot be used."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_sweep import workloads
from overlap_sweep.runtime.group_config import environment_of
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.template import Filling, filled, split
from tests.sweeps import ROOT
from tests.workloads.job.commands import COMMAND, point

ALL = (
    "job.command=torchrun --nproc-per-node={ranks} t.py -b {b} --lr {lr} {flag} --ok={ok} {no} --to {run}/{repetition}",
    *("job.ranks=2", "+job.values.b=25", "+job.values.lr=0.5", "+job.values.ok=true", "+job.values.no=null"),
    *("+job.values.flag=--compile --mode max", "repetition=3"),
)


def test_the_command_is_filled_in_and_otherwise_as_it_was_given(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert command.arguments(point(*ALL), directory) == [
        *("torchrun", "--nproc-per-node=2", "t.py", "-b", "25", "--lr", "0.5"),
        *("--compile", "--mode", "max", "--ok=true", "--to", f"{directory}/3"),
    ]


def test_run_directories_are_handed_over_by_names_that_programs_do_not_parse(tmp_path: Path) -> None:
    names = ["t.py_bucket=4", "t.py_bucket,4", "t.py_bucket=4+", "a b", "t.py_bucket-4"]
    handed = [command.handed(tmp_path / name) for name in names]
    assert len({*handed}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in handed)
    assert handed[-1] == tmp_path / names[-1]
    assert {path.parent for path in handed[:-1]} == {tmp_path / ".run"}


def test_environment_and_folder_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = point(
        *(COMMAND, "job.directory={b}/x", "+job.values.b=2", '+job.env.A="{b}-{run}"', "+job.env.B=null"),
        *("+job.env.CUDA_DEVICE_MAX_CONNECTIONS=8", "+job.env.D=false"),
    )
    run = tmp_path / "run"
    environment = {"A": f"2-{run}", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "D": "false"}
    assert command.environment(made, run) == environment
    assert command.working_folder(made, run) == tmp_path / "2" / "x"
    workers = workloads.of(made).workers(made, run)
    assert dict(workers.environment) == environment
    assert workers.max_connections is None


def test_the_recorder_is_found_whatever_the_python_path_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    package = str(ROOT)
    for typed, own in (((), "theirs"), (("+job.env.PYTHONPATH=ours:x",), "ours:x")):
        assert environment_of(point(COMMAND, *typed))["PYTHONPATH"] == f"{own}:{package}"


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ((), None),
        (("job.samples_per_step=64",), 64.0),
        (("job.samples_per_step={b} * {ranks}*4", "+job.values.b=8", "job.ranks=2"), 64.0),
        (("job.samples_per_step=1,024 * 0.5",), 512.0),
    ],
)
def test_the_amount_of_work_is_a_product(given: tuple[str, ...], value: float | None) -> None:
    assert command.amount(point(COMMAND, *given), "samples_per_step") == value


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("torchrun a/train.py b.py", "train.py"),
        ("torchrun {script}", "b.py"),
        ("accelerate launch --x 1 a/train.py --y 2", "train.py"),
        ("python -m torch.distributed.run -m pkg.train b.py", "pkg.train"),
        ("deepspeed --module overlap_sweep.attach a/train.py", "train.py"),
        ("bash run.sh", "run.sh"),
        ("/opt/bin/train a", "train"),
        ("trl sft", "trl"),
    ],
)
def test_a_job_is_called_as_what_it_runs(words: str, name: str) -> None:
    scripts = ("+job.values.script=a/b.py",) if "{" in words else ()
    assert point(f"job.command={words}", *scripts).model.name == name


def test_profile_none_means_no_profiled_steps() -> None:
    assert point(COMMAND, "profile=none").job == point(COMMAND, "profile=none", "job.profile_steps=0").job
    assert point(COMMAND).job.profile_steps == 3


def test_settings_run_the_same_if_nothing_of_them_reaches_the_command() -> None:
    def key(*typed: str) -> str:
        found = point("job.command=python t.py {a} {b}", *typed)
        return workloads.of(found).searchable.same_point(found)

    plain = key("+job.values.a=x", "+job.values.b=null")
    assert plain == key("+job.values.a=null", "+job.values.b=x")
    assert plain == key("+job.values.a=x", "+job.values.b=null", "+job.env.A=null")
    others = [("+job.env.A=1",), ("job.steps=7",), ("runtime.max_connections=1",), ("job.tokens_per_step=3",)]
    keys = {plain, *(key("+job.values.a=x", "+job.values.b=null", *other) for other in others)}
    assert len(keys) == 1 + len(others)


VALUES = {"a": "1", "several": "--x 2  --y", "none": "", "hostile": """it's {"a": "$HOME"}; \\ | rm"""}
FILLINGS = {name: Filling(value, tuple(value.split())) for name, value in VALUES.items()}
FILLINGS["whole"] = Filling("a b", ("a b",))

TEMPLATES = [
    "python t.py --x={a} --y {a}{a}",
    "python   t.py\t--x  --y",
    "python t.py {several} --z{several}z",
    'python t.py "{several}" {none} "{none}" x{none}y --e={none}',
    "python t.py '{a} \"b\" \\ c' \"{a} 'b' \\\" \\\\ \\c\" d\\ e\\'f",
    'python "t"\'.p\'y ""',
    "python t.py \\\n --x \\\n{a} a\\\nb",
    'python t.py "{hostile}" "x{hostile}"',
    "python t.py 'a;b' 'a && b' '$HOME' '`x`' '~/x' '>' \"\\$HOME\" \\$HOME a\\;",
    "python t.py http://x?a=1#b @x %y ^z",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_words_are_those_of_a_shell_whose_variables_are_the_placeholders(template: str) -> None:
    """A placeholder in single quotes is filled in, too: there a shell would not."""
    as_shell = template.replace("'{a} \"b\" \\ c'", '"$a \\"b\\" \\\\ c"')
    for name in VALUES:
        as_shell = as_shell.replace(f"{{{name}}}", f"${{{name}}}")
    script = f"set -f; words() {{ {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"; }}; "
    shell = subprocess.run(["bash", "-c", f"{script} words {as_shell}"], env=VALUES, capture_output=True, check=True)
    assert split(template, FILLINGS, "job.command") == json.loads(shell.stdout)


def test_what_is_one_word_stays_one_and_braces_are_written_twice() -> None:
    assert split("python {whole}/x {{a}} '{{\"k\": {a}}}'", FILLINGS, "job.command") == [
        *("python", "a b/x", "{a}", '{"k": 1}'),
    ]
    assert filled("{a}/{{{whole}}}", FILLINGS, "job.directory") == "1/{a b}"
