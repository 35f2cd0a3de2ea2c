"""Real scripts that begin with the recorder, by PYTHONPATH or `python -m overlap_sweep.attach`: they notice
nothing, and their steps are recorded."""

import importlib.util
import os
import socket
import subprocess
import sys
import venv
from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.errors import PointFailed
from overlap_sweep.program import environment_with_recorder
from overlap_sweep.recorder.recording import Recording, Wanted, read_recordings
from overlap_sweep.startup.sitecustomize import NEEDED
from overlap_sweep.startup.sitecustomize import VARIABLE as RECORD_VARIABLE
from overlap_sweep.workloads import Here
from overlap_sweep.workloads.job import run as job_run
from tests.analyze import ROOT
from tests.workloads.job.commands import job_point

ATTACH = ("-m", "overlap_sweep.attach")

LOOKS = """
import json, sys
import inspect, pickle

import __main__
here: int = 1


class Thing:
    pass


def source():
    return 1


spec = __spec__ and (__spec__.name, __spec__.origin, __spec__.parent)
print(sys.argv, sys.path[0], __file__, __name__, __package__, __cached__, spec, sep="\\n")
print(type(__loader__).__name__, bool(__builtins__), __main__.__dict__ is globals(), __annotations__, __doc__)
print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, inspect.getsource(source), source.__code__.co_filename)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "pandas", "hydra")))
"""

TRAINING = """
import gc, os, sys, time
{before}
# A fifth of what such a process computes is to look among torch's objects for garbage.
gc.disable()
import torch
import torch.distributed as dist


def main(*arguments):
    if arguments:
        rank, port = arguments
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        {each}
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads outlive it: one that still holds a tensor when Python ends aborts the process.
        time.sleep(0.5)


if __name__ == "__main__":
    {start}
    print("trained")
"""


def training(folder: Path, start: str = "main()", each: str = "", before: str = "") -> Path:
    """A script that trains twelve steps."""
    path = folder / "train.py"
    path.write_text(TRAINING.format(start=start, each=each, before=before))
    return path


def run(
    words: Sequence[str | Path],
    folder: Path,
    wanted: Wanted | None = None,
    variables: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
    output: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Runs Python, which begins with the recorder if it is to record and ATTACH is not among the words."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", RECORD_VARIABLE)
    }
    recorded = wanted.as_environment() if wanted else {}
    # After what the script finds first.
    environment = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **recorded, **(variables or {})}
    if wanted and ATTACH[1] not in words:
        environment = environment_with_recorder(environment)
    command = [str(python), *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.run(command, cwd=folder, env=environment, text=True, stdout=output, stderr=pipe, timeout=120)


def few(directory: Path, steps: int = 4, profile_steps: int = 0) -> Wanted:
    return Wanted(directory=str(directory), skip_steps=2, steps=steps, profile_steps=profile_steps)


def only(directory: Path) -> Recording:
    (found,) = read_recordings(directory)
    return found


@pytest.mark.parametrize("door", [[], ATTACH], ids=str)
def test_a_line_is_written_at_once(tmp_path: Path, door: Sequence[str]) -> None:
    """Ranks write to the same log: of lines in parts those of one would be among another's."""
    (tmp_path / "prints.py").write_text("print('tps:', 7, 'of', 8)\nprint('loss:', 9)\nimport os; os._exit(0)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        run([*door, "prints.py"], tmp_path, few(tmp_path), {"PYTHONUNBUFFERED": "1"}, output=theirs.fileno())
        theirs.close()
        assert [ours.recv(100) for _ in range(2)] == [b"tps: 7 of 8\n", b"loss: 9\n"]


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Scripts that print how they see themselves."""
    package = tmp_path / "code" / "package"
    package.mkdir(parents=True)
    for path in (package / "look.py", package / "__main__.py", package.parent / "look.py"):
        path.write_text(LOOKS)
    (package / "__init__.py").write_text("import sys; print('package', sys.argv)")
    (tmp_path / "link.py").symlink_to(package.parent / "look.py")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["code/look.py", "--lr", "0.1", "-m", "it's"], "."),
        (["./code/../code/look.py"], "."),
        (["look.py"], "code"),
        (["link.py"], "."),
        (["-m", "package.look", "-x", "1"], "code"),
        (["-m", "package", "1"], "code"),
        (["-m", "look"], "code"),
    ],
    ids=" ".join,
)
def test_a_script_sees_itself_as_python_runs_it(scripts: Path, words: list[str], folder: str) -> None:
    plain = run(words, scripts / folder)
    assert plain.returncode == 0, plain.stderr
    for door in ([], ATTACH):
        recorded = run([*door, *words], scripts / folder, few(scripts))
        assert (recorded.stdout, recorded.returncode, recorded.stderr) == (plain.stdout, 0, "")


@pytest.mark.parametrize("words", [["code/look.py", "1"], ["-m", "package", "1"]], ids=" ".join)
def test_a_rank_that_a_launcher_puts_in_front_is_the_scripts(scripts: Path, words: list[str]) -> None:
    folder = scripts if words[0] != "-m" else scripts / "code"
    # As deepspeed and torch.distributed.launch order them with and without `--module`.
    plain = run([*words, "--local_rank=1"], folder)
    attached = run([*ATTACH, "--local_rank=1", *words], folder, few(scripts))
    assert attached.stdout == plain.stdout
    assert (attached.returncode, attached.stderr) == (0, "")


def test_without_the_variable_the_script_runs_and_one_line_says_that_nothing_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(1); sys.exit(3)")
    ran = run([*ATTACH, "script.py"], tmp_path)
    assert (ran.returncode, ran.stdout) == (3, "1\n")
    (line,) = ran.stderr.splitlines()
    assert "nothing is recorded" in line


@pytest.mark.parametrize("words", [[], ["-m"], ["--help"], ["no_script.py"], ["."]])
def test_what_cannot_be_run_is_said_in_one_line(tmp_path: Path, words: list[str]) -> None:
    ran = run([*ATTACH, *words], tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == 1


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """A Python with nothing but its own library, as the one of a training may be."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def made_torch(tmp_path: Path) -> Path:
    """A script that trains by what looks like torch, as far as recording looks."""
    for name in ("torch", "torch/optim", "torch/_dynamo"):
        (tmp_path / name).mkdir()
    (tmp_path / "torch" / "_dynamo" / "__init__.py").write_text("def disable(function): return function")
    (tmp_path / "torch" / "__init__.py").write_text("import torch.optim.optimizer, torch._dynamo")
    optimizer = "hooks = []\nregister_optimizer_step_post_hook = hooks.append"
    (tmp_path / "torch" / "optim" / "optimizer.py").write_text(optimizer)
    (tmp_path / "train.py").write_text(
        "import torch\nfor step in range(9):\n    for hook in torch.optim.optimizer.hooks: hook(None, (), {})\n"
        "print('trained', len(torch.optim.optimizer.hooks), 'tps: 5 ' * 9)"
    )
    return tmp_path / "train.py"


@pytest.mark.parametrize("door", [[], ATTACH], ids=str)
def test_a_python_without_what_recording_needs_says_so_and_trains(
    tmp_path: Path, other_python: Path, made_torch: Path, door: Sequence[str]
) -> None:
    install = f"this Python lacks what recording needs; run {other_python} -m pip install "
    install += "isal msgspec omegaconf nvidia-ml-py pyyaml"
    ran = run([*door, made_torch], tmp_path, few(tmp_path), python=other_python)
    assert (ran.returncode, ran.stdout[:9]) == (0, "trained 1")
    assert ran.stderr == f"overlap_sweep: nothing is recorded: {install}\n"
    command = " ".join(map(str, [other_python, *door, made_torch]))
    here = Here(environment={"PYTHONPATH": str(ROOT)}, limit_s=60.0)
    with pytest.raises(PointFailed) as failed:
        job_run.run(job_point(command, attach=True), tmp_path, here)
    assert (str(failed.value), failed.value.final) == (f"nothing is recorded: {install}", True)
    # What the program prints is enough.
    assert job_run.run(job_point(command, attach=True, metric="tps: (.)"), tmp_path, here)["measured"]


def test_an_error_of_the_recorder_s_is_one_line(tmp_path: Path, made_torch: Path) -> None:
    ran = run([made_torch], tmp_path, few(tmp_path), {RECORD_VARIABLE: "{"})
    assert (ran.returncode, ran.stdout[:9]) == (0, "trained 0")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("overlap_sweep: nothing is recorded: JSONDecodeError")


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("os.environ.clear()", None),
        ("sys.stderr.close()", '{"directory": "/nonexistent"}'),
        ("sys.stderr.close()", "1"),
    ],
)
def test_whatever_a_program_has_closed_or_cleared_it_trains(
    tmp_path: Path, made_torch: Path, before: str, wanted: str | None
) -> None:
    late = f"import torch, os, sys\n{before}\n" if wanted is None else f"import os, sys\n{before}\n"
    made_torch.write_text(late + made_torch.read_text())
    ran = run([made_torch], tmp_path, few(tmp_path), {RECORD_VARIABLE: wanted} if wanted else None)
    assert (ran.returncode, ran.stdout[:7]) == (0, "trained"), ran.stderr


def test_what_it_is_told_to_install_is_enough(tmp_path: Path, other_python: Path, made_torch: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    # antlr4 comes with omegaconf, and _yaml with pyyaml.
    for name in (*NEEDED, "_yaml", "antlr4"):
        if spec := importlib.util.find_spec(name):
            place = Path(str(spec.origin))
            found = place.parent if place.stem == "__init__" else place
            (packages / found.name).symlink_to(found)
    (tmp_path / "script.py").write_text("import overlap_sweep\nfor _ in range(8): overlap_sweep.step()")
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
    ran = run(["script.py"], tmp_path, few(tmp_path), path, other_python)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(only(tmp_path).host_us) == 4
    # What is imported only at the end is missed at the first step, too.
    (packages / "omegaconf").unlink()
    ran = run([made_torch], tmp_path, few(tmp_path), path, other_python)
    assert ran.stderr.endswith(f"lacks what recording needs; run {other_python} -m pip install omegaconf\n")
    assert ran.stdout.startswith("trained 1")


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise ValueError(7)", 1), ("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 15)", -15)],
)
def test_a_script_ends_as_it_would(tmp_path: Path, code: str, status: int) -> None:
    (tmp_path / "script.py").write_text(f"def end():\n    {code}\n\nend()\n")
    plain, attached = run(["script.py"], tmp_path), run([*ATTACH, "script.py"], tmp_path, few(tmp_path))
    assert (plain.returncode, attached.returncode) == (status, status)
    assert attached.stderr.splitlines()[-5:] == plain.stderr.splitlines()[-5:]
    ours = [line for line in attached.stderr.splitlines() if "attach.py" in line]
    assert len(ours) <= 1


def test_a_training_is_recorded_and_imports_torch_itself(tmp_path: Path) -> None:
    script = training(tmp_path, each="sys.exit(3) if step == 9 else None", before="assert 'torch' not in sys.modules")
    ran = run([script], tmp_path, few(tmp_path))
    assert ran.returncode == 3, ran.stderr
    found = only(tmp_path)
    assert (len(found.host_us), found.calls_per_step, found.problems) == (4, 1, [])


@pytest.mark.end_to_end
def test_a_script_that_raises_has_recorded_the_steps_before(tmp_path: Path) -> None:
    ran = run([training(tmp_path, each="assert step < 7")], tmp_path, few(tmp_path, steps=10))
    assert ran.returncode == 1
    assert "AssertionError" in ran.stderr
    found = only(tmp_path)
    # The eighth step has ended, too.
    assert len(found.host_us) == 6
    assert found.problems == [
        "The script ended after 8 steps, but job.skip_steps=2 job.steps=10 job.profile_steps=0 takes 12: let it train "
        "longer, or give job.steps=6."
    ]


def test_steps_are_marked_without_attach(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Its first step does not wait for what only writing needs.
    looks = "overlap_sweep.step()\nprint({'torch', 'omegaconf'} & {*sys.modules})"
    script.write_text(f"import sys, overlap_sweep\n{looks}\nfor _ in range(7): overlap_sweep.step()")
    assert run([script], tmp_path).stdout == "set()\n"
    assert read_recordings(tmp_path) == []
    assert run([script], tmp_path, few(tmp_path, profile_steps=1)).stdout == "set()\n"
    found = only(tmp_path)
    assert (found.marked_by, len(found.host_us), found.device) == ("step", 4, "cpu")
    assert found.problems == ["torch is not imported, so there is no trace."]


@pytest.mark.end_to_end
def test_torch_compile_leaves_the_hooks_alone(tmp_path: Path) -> None:
    script = training(tmp_path)
    text = script.read_text().replace("optimizer.step()", "compiled()")
    text = text.replace("    for step", "    compiled = torch.compile(optimizer.step, backend='eager')\n    for step")
    script.write_text(text + "    print(torch._dynamo.utils.counters['frames']['total'])")
    plain, attached = run([script], tmp_path), run([script], tmp_path, few(tmp_path, profile_steps=1))
    assert len(only(tmp_path).host_us) == 4
    frames, with_hooks = (int(ran.stdout.split()[-1]) for ran in (plain, attached))
    assert with_hooks < frames + 20


@pytest.mark.end_to_end
def test_ranks_of_torchrun_are_recorded_and_their_traces_diagnosed(tmp_path: Path) -> None:
    script = training(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = run([*torchrun, script], tmp_path, few(tmp_path, profile_steps=2))
    assert ran.stdout.count("trained") == 2, ran.stderr
    found = read_recordings(tmp_path)
    assert [(one.rank, one.world_size, len(one.host_us), one.trace) for one in found] == [
        (rank, 2, 4, f"trace_rank{rank}.json.gz") for rank in (0, 1)
    ]
    (run_,) = read_runs([tmp_path / str(one.trace) for one in found])
    assert run_.found
    assert {step.step for step in run_.found.diagnosis.steps} == {1, 2}
    assert {file.problem for file in run_.files} == {None}


@pytest.mark.end_to_end
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_ranks_that_a_script_starts_are_recorded(tmp_path: Path, method: str) -> None:
    start = f"torch.multiprocessing.start_processes(main, (29{os.getpid() % 1000:03},), 2, start_method={method!r})"
    ran = run([training(tmp_path, start=start)], tmp_path, few(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert [(one.rank, one.world_size, len(one.host_us)) for one in read_recordings(tmp_path)] == [(0, 2, 4), (1, 2, 4)]


STARTS = """
import os, socket, subprocess, sys

if "RANK" not in os.environ:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
"""
ISOLATED = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy._run_module_as_main('overlap_sweep.attach')"
"""What `python -E -m overlap_sweep.attach` does where the package is installed."""


@pytest.mark.end_to_end
@pytest.mark.parametrize("program", ["script", "attached", "isolated", "both", "shell"])
def test_ranks_that_a_rank_starts_by_the_same_command_are_recorded(tmp_path: Path, program: str) -> None:
    """As Lightning starts them: the first rank starts the others. A program that is not Python starts Pythons, too."""
    script = training(tmp_path, before=STARTS)
    words = {
        "script": [sys.executable, script],
        "attached": [sys.executable, *ATTACH, script],
        "isolated": [sys.executable, "-E", "-c", ISOLATED, script],
        "both": [sys.executable, *ATTACH, script],
        "shell": ["/bin/sh", "-c", f"{sys.executable} {script}"],
    }[program]
    at_start = environment_with_recorder({"PYTHONPATH": str(ROOT)}) if program == "both" else {}
    ran = run(words[1:], tmp_path, few(tmp_path), at_start, python=words[0])
    assert ran.returncode == 0, ran.stderr
    assert [(one.rank, one.world_size, len(one.host_us)) for one in read_recordings(tmp_path)] == [(0, 2, 4), (1, 2, 4)]
    assert {one.calls_per_step for one in read_recordings(tmp_path)} == {1}


def test_the_environment_s_own_sitecustomize_runs_and_the_path_is_as_without_ours(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own', __name__, __file__)")
    words = ["-c", "import sys, sitecustomize; print(sys.path, sitecustomize.__file__)"]
    search_path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    plain = run(words, tmp_path, variables=search_path)
    ours = run(words, tmp_path, few(tmp_path), search_path)
    assert (ours.stdout, ours.stderr) == (plain.stdout, "")
    assert "own sitecustomize" in plain.stdout


def test_a_python_that_imports_no_torch_imports_nothing_for_the_recorder(tmp_path: Path) -> None:
    words = ["-c", "import sys; print(sorted(sys.modules))"]
    plain, recorded = (set(literal_eval(run(words, tmp_path, wanted).stdout)) for wanted in (None, few(tmp_path)))
    assert recorded - plain == {"sitecustomize"}
    assert list(tmp_path.iterdir()) == []


OWN = """
import atexit, os, sys

atexit.register(lambda: print(sys.argv[0], any(name.startswith("overlap_sweep") for name in sys.modules), flush=True))
"""
LOADS = """
class Names(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, place):
        return [name for name in sys.modules if name.startswith("overlap_sweep")]


def loaded():
    print(*torch.utils.data.DataLoader(Names(), num_workers=1, multiprocessing_context="spawn"))
"""


@pytest.mark.end_to_end
def test_the_recorder_is_loaded_by_ranks_alone(tmp_path: Path) -> None:
    """Not by torchrun and loaders, which import torch, too."""
    (tmp_path / "sitecustomize.py").write_text(OWN)
    script = training(tmp_path, start="main()\n    loaded()")
    script.write_text(script.read_text().replace("def main(", f"{LOADS}\n\ndef main("))
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ran = run(["-m", "torch.distributed.run", "--standalone", script], tmp_path, few(tmp_path), path)
    assert len(only(tmp_path).host_us) == 4
    *others, of_torchrun = ran.stdout.splitlines()
    assert sorted(others) == sorted(["[]", "trained", f"{script} False", f"{script} True"])
    assert of_torchrun.endswith("run.py False")
