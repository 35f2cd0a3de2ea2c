"""Commands and regular expressions are typed as they are, however odd; whatever is printed can be pasted."""

import shlex
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from overlap_sweep.hydra_adapter.overrides import quoted_for_hydra
from overlap_sweep.results.run_directory import LOG_FILE
from tests.composed import configuration
from tests.sweeps import Launch, launch_here

PRINTS = """\
import json, sys
print(json.dumps(sys.argv[1:]))
for _ in range(12):
    print("loss: 0.5, tps: 1,000.5 (x)", flush=True)
"""
METRIC = (
    *("workload=job", "runtime.device=cpu", "runtime.retries=0", "job.attach=false", "job.finish=true"),
    *(r"job.metric=^loss: [^,]+, tps: ([0-9.,]+) \(x\)$", "job.skip_steps=2", "job.steps=8"),
)


@settings(max_examples=100)
@given(st.text(alphabet="ab \\\"'${},[]=:()|;~#\n", min_size=1).filter(lambda text: text.strip()))
@example("torchrun --x={ranks} a.py")
@example(r"^tps: ([0-9.]+)$")
@example("a \\")
@example("a \\${x} \\\\${y}\\")
def test_what_is_typed_is_what_is_meant(text: str) -> None:
    # In quotes as a whole it is Hydra's.
    assume(text[0] not in "'\"" or text[-1] != text[0])
    assert meant_by(text) == (text, True)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("'/a b/python' t.py 'c, d'", "'/a b/python' t.py 'c, d'"),
        ("'a' 'b'", "'a' 'b'"),
        ("'python t.py, x'", "python t.py, x"),
        (r"'python \'t.py\' ${x}'", "python 't.py' ${x}"),
        (r'"python \"t.py\" \${x}"', 'python "t.py" ${x}'),
    ],
)
def test_what_is_in_quotes_as_a_whole_is_hydras(typed: str, meant: str) -> None:
    assert meant_by(typed) == (meant, True)


def meant_by(typed: str) -> tuple[str, bool]:
    """Returns the command that is composed, and whether what is printed of it means the same when it is pasted."""
    command = configuration("workload=job", f"job.command={typed}").job.command
    # Hydra knows the options from here on.
    printed = quoted_for_hydra([f"job.command={typed}"])
    return command, quoted_for_hydra(printed) == printed


def sweep(folder: Path, *typed: str) -> tuple[str, dict[str, str]]:
    """What a sweep prints, and the words that each of its points was given, as JSON."""
    (folder / "t.py").write_text(PRINTS)
    done = launch_here("-m", *METRIC, *typed, f"job.directory={folder}", f"hydra.sweep.dir={folder / 'sweep'}")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = sorted((folder / "sweep").glob(f"*/{LOG_FILE}"))
    return done.stdout, {log.parent.name: log.read_text().splitlines()[0] for log in logs}


def test_odd_values_reach_the_command_and_have_directories_of_their_own(tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    values = """+job.values.x='a b','a-b',"it's",'{"k": 1}',a/b.yaml,--c,true,null,1e-3"""
    printed, words = sweep(tmp_path, f'job.command={python} t.py "{{x}}"', values)
    expected = {'["a b"]', '["a-b"]', '["it\'s"]', '["{\\"k\\": 1}"]', '["a/b.yaml"]', '["--c"]', '["true"]', '[""]'}
    assert {*words.values()} == expected | {'["0.001"]'}
    assert "9 ok; next: " in printed
    assert all(name.startswith("t.py_ranks1_x=") for name in words)
    assert any(name.startswith("t.py_ranks1_x=a-b.yaml_") for name in words)
    # All of them are known again.
    printed, _ = sweep(tmp_path, f'job.command={python} t.py "{{x}}"', values)
    assert "already measured: 9 of 9 points" in printed


def test_commands_are_swept_in_quotes_and_an_experiment_may_hold_one(tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /workload: job\n"
        f"job:\n  command: >-\n    {python} t.py --x={{x}}\n    '\\${{{{HOME}}}}'\n  values:\n    x: 1\n"
    )
    mine = ("--config-dir", str(tmp_path / "conf"), "+experiment=mine")
    _, words = sweep(tmp_path, *mine, "job.values.x=1,2")
    assert list(words.values()) == ['["--x=1", "${HOME}"]', '["--x=2", "${HOME}"]']
    commands = f"""job.command='{python} t.py {{x}} "a, b"',"{python} t.py '$y;'{{x}}\""""
    _, words = sweep(tmp_path, *mine, commands)
    assert {*words.values()} >= {'["1", "a, b"]', '["$y;1"]'}


@pytest.mark.end_to_end
def test_a_stopped_sweep_is_resumed_by_the_line_that_it_prints(tmp_path: Path) -> None:
    """The launcher is stopped after the first of two points."""
    (tmp_path / "t.py").write_text(PRINTS.replace("for _", "__import__('time').sleep(0.5)\nfor _"))
    launch = Launch(tmp_path / "sweep")
    command = f"job.command={shlex.quote(sys.executable)} t.py '$x, \"y\"' {{x}} \\\\"
    process = launch.start("-m", *METRIC, command, "+job.values.x=1,2,3", f"job.directory={tmp_path}")
    assert process.stdout
    while "[1/3] ok" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    resume = next(line for line in (stdout + stderr).splitlines() if "resume with: " in line).partition("with: ")[2]
    done = launch_here(*shlex.split(resume)[2:])
    assert done.returncode == 0, done.stderr
    assert "already measured: " in done.stdout
    assert {result.status for result in launch.results().values()} == {"ok"}
    assert len(launch.results()) == 3
