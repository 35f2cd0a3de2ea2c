"""What is said of a wrong command line: in one line what to type instead; for another tool's spelling, ours."""

import re
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from typer.main import get_command

from overlap_sweep import workloads
from overlap_sweep.commands.command_line import app
from overlap_sweep.declared import has_key
from overlap_sweep.errors import UserError, nearest
from overlap_sweep.hydra_adapter.mistakes import flags_first, spellings, unknown_option
from overlap_sweep.runtime import point
from overlap_sweep.runtime.resolvers import point_name, register
from tests.composed import configuration
from tests.golden.command_lines import answer, answers
from tests.sweeps import ROOT, launch_here


@pytest.mark.parametrize("typed", answers())
def test_a_mistake_is_one_line_with_what_to_type_instead_and_leaves_nothing(tmp_path: Path, typed: str) -> None:
    """Where the answer has changed, and should have: `make golden`."""
    assert answer(typed, tmp_path) == answers()[typed]
    assert re.fullmatch(r"error: .+\nexit status [12]\n", answers()[typed])
    assert not list(tmp_path.iterdir())


def test_flags_may_follow_options() -> None:
    assert launch_here("tp_size=8", "--cfg", "job", "num_sm=37").stdout.count("num_sm: 37") == 1


@pytest.mark.parametrize(
    ("workload", "typed", "same"),
    [
        ("operator", "precision=bfloat16", "precision=bf16"),
        ("kernel", "dtype=bf16", "dtype=bfloat16"),
        ("kernel", "dtype=fp8", "dtype=float8_e4m3fn"),
        ("copy_engine", "copy_engine.dtype=fp16", "copy_engine.dtype=float16"),
        ("fsdp", "fsdp.reduce_dtype=bfloat16", "fsdp.reduce_dtype=bf16"),
        ("fsdp", "training.mixed_precision=float32", "training.mixed_precision=none"),
        ("tp_training", "tp_training.dtype=fp32", "tp_training.dtype=float32"),
    ],
)
def test_a_type_has_two_names_and_is_one_point(workload: str, typed: str, same: str) -> None:
    points, names = [], []
    for each in (typed, same):
        given = [f"workload={workload}", each, "runtime.device=cpu"]
        config = configuration(*given)
        points.append(point.resolve(config))
        names.append(point_name(config, given))
    assert points[0] == points[1]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("num_smm", "num_sm"),
        ("warmpu", "workload.warmup"),
        ("launcher", "hydra/launcher"),
        ("fc3", None),
        ("", None),
    ],
)
def test_nearest(name: str, near: str | None) -> None:
    assert nearest(name, ["num_sm", "workload.warmup", "hydra/launcher", "fc1"]) == near


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
        compare = get_command(app).get_command(None, "compare")  # type: ignore[attr-defined]
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
