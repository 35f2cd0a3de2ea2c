import json
import math
from pathlib import Path

import pandas as pd
import pytest
import typer

from overlap_sweep.commands.output import as_json, cell, fail_if
from overlap_sweep.errors import UserError
from tests.golden import expressions
from tests.golden.command_lines import answers
from tests.golden.expressions import frame

ANSWERS = answers(expressions.FILE)
HOSTILE = [
    "",
    "(" * 300 + "num_sm" + ")" * 300 + " > 1",
    "not " * 5000 + "launch_bound",
    "9" * 5000 + " > num_sm",
    "num_sm\0 > 1",
]


@pytest.mark.parametrize("expression", ANSWERS)
def test_an_expression_matches_rows_or_is_one_sentence(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the answer has changed, and should have: `make golden`."""
    monkeypatch.chdir(tmp_path)
    assert expressions.answer(expression) == ANSWERS[expression]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("expression", HOSTILE)
def test_a_hostile_expression_is_one_sentence(expression: str) -> None:
    assert expressions.answer(expression).startswith("error: ")


def test_json_has_no_numbers_that_json_has_not() -> None:
    rows = pd.DataFrame({"relative_error": [math.inf, math.nan, 0.5], "names": [["a"], [], None]})
    assert json.loads(as_json(rows)) == [
        {"relative_error": None, "names": ["a"]},
        {"relative_error": None, "names": []},
        {"relative_error": 0.5, "names": None},
    ]


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("time_us", 1234567.89, "1,234,568"),
        ("relative_error", 1.2e-7, "1.2e-07"),
        ("relative_error", 0.0, "0"),
        ("num_sm", 4.0, "4"),
        ("error", "first line\nsecond", "first line"),
        ("error", "[bold]not markup", "[bold]not markup"),
        ("flag", None, "-"),
    ],
)
def test_cell(column: str, value: object, shown: str) -> None:
    assert cell(column, value) == shown


@pytest.mark.parametrize("expression", ["default_us < 1", "default_us < 1 or tp_size == 2", "not default_us > 1"])
def test_a_check_that_could_never_fail_is_an_error(expression: str) -> None:
    with pytest.raises(UserError, match="default_us has no value in any of the rows"):
        fail_if([expression], frame(), "rows")


def test_asking_whether_values_are_missing_needs_none() -> None:
    fail_if(["default_us.notna()"], frame(), "rows")
    with pytest.raises(typer.Exit):
        fail_if(["default_us.isna()"], frame(), "rows")


def test_a_wrong_expression_is_an_error_before_any_that_holds_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError):
        fail_if(["tp_size == 4", "tp_sizes == 4"], frame(), "rows")
    assert capsys.readouterr().err == ""
