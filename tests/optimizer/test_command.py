"""How a user's command becomes job.command."""

from pathlib import Path

import pytest

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
