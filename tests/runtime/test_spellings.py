"""Who types another tool's spelling is asked for ours, and docs/coming_from.md has each."""

from __future__ import annotations

import re

import pytest
from hydra._internal.utils import get_args_parser
from typer.main import get_command

from overlap_sweep import workloads
from overlap_sweep.commands.command_line import app
from overlap_sweep.declared import has_key
from overlap_sweep.errors import UserError
from overlap_sweep.hydra_adapter.mistakes import flags_first, spellings, unknown_option
from overlap_sweep.runtime.resolvers import register
from tests.sweeps import ROOT

SPELLINGS = [(tool, theirs, ours) for tool, found in spellings().items() for theirs, ours in found.items()]
register()
PAGE = (ROOT / "docs/coming_from.md").read_text()


def error(theirs: str) -> str:
    """What is said of the flag with the value 3, or of the key."""
    if not theirs.startswith("--"):
        return unknown_option(theirs)
    with pytest.raises(UserError) as refused:
        flags_first(["-m", theirs, "3", "num_sm=1"])
    return str(refused.value)


@pytest.mark.parametrize(("tool", "theirs", "ours"), SPELLINGS)
def test_each_spelling_yields_an_option_that_there_is(tool: str, theirs: str, ours: str) -> None:
    said = error(theirs)
    value = "3" if theirs.startswith("--") else "..."
    assert said.startswith(f"Unknown {'flag' if theirs.startswith('--') else 'option'} {theirs}. ")
    assert (f"{ours}{value}" if ours.endswith("=") else ours) in said
    for other in {theirs.replace("_", "-"), f"--{theirs.lstrip('-').replace('-', '_')}"} if theirs[:2] == "--" else ():
        assert error(other).partition(". ")[2].replace(other, theirs) == said.partition(". ")[2]
    hydras = {name for action in get_args_parser()._actions for name in action.option_strings}
    schemas = [workloads.schema(name) for name in workloads.names()]
    if ours.startswith("analyze.py compare"):
        compare = get_command(app).commands["compare"]  # type: ignore[attr-defined]
        flags = {name for each in compare.params for name in each.opts}
        assert {word for word in ours.split() if word.startswith("--")} <= flags
        return
    for word in ours.split():
        key = word.partition("=")[0]
        assert (
            key in hydras
            or key == "+experiment"
            or key.startswith("hydra.sweep.")
            or any(has_key(schema, key) for schema in schemas)
        )


@pytest.mark.parametrize("tool", spellings())
def test_the_page_has_each_spelling_and_what_it_is(tool: str) -> None:
    section = PAGE.partition(f"## {tool}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    said = {spelling: row[1] for row in rows for spelling in re.findall(r"`([^`]+)`", row[0])}
    assert {theirs for theirs in spellings()[tool] if theirs not in said} == set()
    assert {
        (theirs, ours) for theirs, ours in spellings()[tool].items() if ours and f"`{ours}`" not in said[theirs]
    } == set()
    flags = {spelling for spelling in said if re.fullmatch(r"--[a-z_-]+", spelling)}
    assert flags <= {*spellings()[tool], "--nproc-per-node"}


def test_dotted_keys_and_options_of_another_workload() -> None:
    assert unknown_option("tp_training.model_name") == (
        "Unknown option tp_training.model_name. Did you mean model=hf model.name=...?"
    )
    assert unknown_option("dtype") == "dtype requires workload=kernel. Did you mean tp_training.dtype=...?"
    with pytest.raises(UserError, match=r"Did you mean operator=qkv,proj\?"):
        flags_first(["--operators", "qkv", "proj", "-m"])
    with pytest.raises(UserError, match="Leave out --override: options are given as option=value"):
        flags_first(["--override", "training.max_steps=100"])
