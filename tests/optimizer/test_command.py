"""How a user's command becomes job.command."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import overlap_sweep
from overlap_sweep.commands.optimize import main, missing_dashes, resumed
from overlap_sweep.errors import UserError
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.optimizer import as_template, as_typed
from overlap_sweep.optimizer.first_runs import check_folder
from overlap_sweep.runtime import own_command
from overlap_sweep.workloads.job.command import arguments
from tests.make_point import make_point
from tests.workloads.job.commands import point


@pytest.mark.parametrize(
    ("words", "template"),
    [
        (["torchrun", "train.py", "--name", "my run"], "torchrun train.py --name 'my run'"),
        (["train.py", '{"a": {"b": 1}}'], """train.py '{{"a": {{"b": 1}}}}'"""),
        (["train.py", "--out={run}/out", "{node}", "{bucket}"], "train.py '--out={run}/out' '{node}' '{{bucket}}'"),
        (["bash", "-c", "train.py --a ${A}"], "bash -c 'train.py --a ${{A}}'"),
    ],
)
def test_braces_are_the_commands_own_but_for_places_of_a_run(words: list[str], template: str) -> None:
    assert as_template(words) == template
    assert as_typed(as_template(words)) == shlex.join(words)


def test_the_command_that_runs_is_the_one_that_was_typed() -> None:
    words = ["torchrun", "train.py", '{"a": 1}', "it's", "--out={run}", "a b"]
    found = point(f"job.command={override_value(as_template(words))}")
    assert arguments(found, Path("/runs/1")) == [word.replace("{run}", "/runs/1") for word in words]


@pytest.mark.parametrize(
    "typed",
    [
        ["--minutes", "3", "--output", "old", "job.steps=8"],
        ["--output=old", "--minutes", "3", "job.steps=8"],
        ["--resume", "--minutes", "3", "hydra.sweep.dir=old", "job.steps=8"],
        ["--minutes", "3", "job.steps=8"],
    ],
)
def test_the_command_that_goes_on_is_one_of_optimize(typed: list[str]) -> None:
    command = ["--", "train.py", "--output", "own", "--resume"]
    again = resumed([*typed, *command], Path("multirun/1"))
    assert again == [
        "overlap-sweep",
        "optimize",
        "--resume",
        "--output",
        "multirun/1",
        "--minutes",
        "3",
        "job.steps=8",
        *command,
    ]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["torchrun", "--nproc-per-node=2", "a b.py"], "-- torchrun --nproc-per-node=2 'a b.py'"),
        (
            ["--minutes", "3", "--resume", "--ranks=2", "job.steps=8", "bash"],
            "--minutes 3 --resume --ranks=2 job.steps=8 -- bash",
        ),
    ],
)
def test_a_command_without_dashes_is_shown_with_them(typed: list[str], line: str) -> None:
    assert missing_dashes(typed, OPTIONS).endswith(f": overlap-sweep optimize {line}")


OPTIONS = {"--minutes": True, "--ranks": True, "--resume": False}


@pytest.mark.parametrize(
    "typed",
    [
        ["--minutes", "3", "job.steps=8", "--", "torchrun", "train.py"],
        ["--help"],
        # What is not known may have a value: it is refused as such.
        ["--mins", "3", "torchrun"],
    ],
)
def test_other_command_lines_are_left_to_the_parser(typed: list[str]) -> None:
    assert missing_dashes(typed, OPTIONS) == ""


def test_a_word_that_is_no_option_before_the_dashes_is_named() -> None:
    assert missing_dashes(["ddp", "--", "torchrun"], OPTIONS).startswith("ddp is no option KEY=VALUE")


def test_a_directory_of_another_command_is_refused_from_python_and_stays_as_it_was(tmp_path: Path) -> None:
    earlier = as_template(["python", "my train.py", "{a}"])
    make_point("job", tmp_path, point(f"job.command={override_value(earlier)}"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"is of another command: python 'my train.py' '\{a\}'; give that one"):
        overlap_sweep.optimize("python other.py", overrides=["runtime.device=cpu"], output_dir=tmp_path, quiet=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_is_of_one_command_and_one_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("first")
    command = f"job.command='python {script}'"
    make_point("job", tmp_path, point(command))
    check_folder(tmp_path, point(command, "job.steps=8", "job.ranks=4"))
    with pytest.raises(UserError, match=r"is of job\.metric=null; give another"):
        check_folder(tmp_path, point(command, "job.metric='a: ([0-9]+)'"))
    script.write_text("second")
    with pytest.raises(UserError, match="is of the script before it was changed"):
        check_folder(tmp_path, point(command))


def test_a_directory_of_another_workload_is_refused_and_one_of_failures_is_not(tmp_path: Path) -> None:
    make_point("job", tmp_path / "failed", point("job.command='python a.py'"), status="failed")
    check_folder(tmp_path / "failed", point("job.command='python b.py'"))
    make_point("copy_engine", tmp_path / "other")
    with pytest.raises(UserError, match="has points of workload=copy_engine"):
        check_folder(tmp_path / "other", point("job.command='python b.py'"))


@pytest.mark.parametrize("levers", ["loader,ddp", ["loader", "ddp"]])
def test_levers_are_text_or_a_sequence(
    levers: str | list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: Sequence[str], *, quiet: bool) -> None:
        assert command[command.index("--levers") + 1] == "loader,ddp"
        raise UserError("seen")

    monkeypatch.setattr(own_command, "run", run)
    with pytest.raises(UserError, match="seen"):
        overlap_sweep.optimize([sys.executable, "train.py"], levers=levers, output_dir=tmp_path)


@pytest.mark.parametrize(
    ("typed", "status", "said"),
    [
        (["--minutes", "0"], 2, "'--minutes': must be greater than or equal to 0.1."),
        (["--minutes", "inf"], 2, "'--minutes': must be less than or equal to 100000."),
        (["--allow", "nonsense"], 2, "'--allow': 'nonsense' is not one of 'exact', 'rounding', 'training'."),
        (["--resume", "--output", "nowhere"], 1, "nowhere has nothing to resume; leave out --resume to begin there"),
    ],
)
def test_wrong_options_are_refused_in_plain_words(
    typed: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["optimize", *typed, "--", "python", "train.py"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == status
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
