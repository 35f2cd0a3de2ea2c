"""How a user's command becomes job.command."""

from pathlib import Path

import pytest

from overlap_sweep.commands.optimize import resumed
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.optimizer import as_template
from overlap_sweep.workloads.job.command import arguments
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
