import json
import math
from pathlib import Path

import pandas as pd
import pytest
import typer

from overlap_sweep.commands.expressions import condition
from overlap_sweep.commands.output import as_json, cell, fail_if
from overlap_sweep.errors import UserError

TYPES = {"slot": "string", "pass": "string", "num_sm": "Int64", "tp_size": "Int64", "launch_bound": "boolean"}


def frame() -> pd.DataFrame:
    """Three rows; the last knows little of itself."""
    columns = {
        "slot": ["fc1_dgrad", "fc2_fprop", None],
        "pass": ["bwd", "fwd", "bwd"],
        "num_sm": [4, 16, None],
        "tp_size": [2, 4, 8],
        "launch_bound": [False, True, None],
        "time_us": [1234.56, 80.0, None],
        "hidden_fraction": [0.25, 0.5, math.nan],
        "default_us": [None, None, None],
    }
    return pd.DataFrame(columns).astype({**TYPES, "default_us": "float64"})


def loose_frame() -> pd.DataFrame:
    """The same as somebody else would make it, without nullable types."""
    return pd.DataFrame({name: list(column.astype(object)) for name, column in frame().items()})


def matching(expression: str, of: pd.DataFrame | None = None) -> list[int]:
    """Positions of the rows."""
    found: list[int] = condition(frame() if of is None else of, expression).mask.nonzero()[0].tolist()
    return found


EXPRESSIONS = {
    "num_sm > 8 and tp_size == 4": [1],
    "num_sm == 4 or tp_size == 8": [0, 2],
    "1 < num_sm < 8": [0],
    "num_sm in [4, 5]": [0],
    "tp_size % 3 in (1, 5, 6)": [1],
    "`num_sm` == 4 and num_sm == `num_sm`": [0],
    "`pass` == 'bwd' and slot != 'a `pass` @ b'": [0],
    "launch_bound": [1],
    "~launch_bound": [0],
    "time_us / tp_size > 100": [0],
    "tp_size % 4 == 0": [1, 2],
    "slot.str.contains('_d')": [0],
    "slot.str.contains('c.')": [],
    "slot.str.startswith('fc2')": [1],
    "num_sm.isna()": [2],
    "slot.notna() and not launch_bound": [0],
    "(num_sm + 1) // 2 - 2 * tp_size < 0": [0],
    "'a' < slot != 'fc1_dgrad'": [1],
    "launch_bound or slot < 'fc2'": [0, 1],
    "slot == '`pass`' or slot == 'a\\\\' or 'fc1_dgrad' == slot": [0],
    # What is missing matches neither a condition nor its opposite.
    "num_sm != 4": [1],
    "not num_sm == 4": [1],
    "num_sm not in []": [0, 1],
    "num_sm + 1 not in [5]": [1],
    "not -num_sm * 2 >= -8": [1],
    "not num_sm > tp_size": [],
    "slot not in ['fc1_dgrad']": [1],
    "not slot < 'fc2'": [1],
    "not slot.str.startswith('fc1')": [1],
    "not (slot.str.endswith('x') and num_sm > 0)": [0, 1],
    "num_sm > 0 or tp_size == 8": [0, 1, 2],
    "hidden_fraction != 0.5": [0],
    "default_us < 3 or tp_size == 8": [2],
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_rows_matching(expression: str) -> None:
    assert matching(expression) == EXPRESSIONS[expression]
    assert matching(expression, loose_frame()) == EXPRESSIONS[expression]


MISTAKES = {
    "": "cannot be understood",
    "num_sms > 8": "Unknown column 'num_sms'. Did you mean num_sm",
    "slot == fc1_dgrad": "Put text in quotes",
    "pass == 'bwd'": "`pass`",
    "`no such` > 1": "Unknown column 'no such'",
    "num_sm = 8": "==",
    "num_sm > 8 and": "cannot be understood",
    "num_sm + 1": "num_sm + 1 is not a condition",
    "tp_size": "tp_size is not a condition",
    "num_sm > 8 and tp_size": "tp_size is not a condition",
    "1 < 2": "is not a condition",
    "num_sm == '8'": "only one of them is text",
    "num_sm in ['8']": "only one of them is text",
    "slot + 1 == 2": "slot is text; only numbers",
    "'a' * 99999999999 == slot": "'a' is text; only numbers",
    "'%99999999999d' % 1 == slot": "is text; only numbers",
    "'fc1' in slot": ".str.contains",
    "num_sm in tp_size": "a list of constants",
    "num_sm in [tp_size]": "a list of constants",
    "num_sm < [4]": "a list of constants",
    "num_sm == None": ".isna()",
    "num_sm is 8": "use == !=",
    "num_sm.str.contains('8')": "string values",
    "slot.str.contains('a', case=num_sm)": "is not allowed",
    "num_sm.isin([4])": "is not allowed",
    "num_sm & tp_size": "is not allowed",
    "num_sm.isna(1)": "is not allowed",
    "`pass` + 1": "pass is text",
}

HOSTILE = [
    "@num_sm > 8",
    "__import__('os').system('true') == 0 and num_sm",
    "num_sm.__class__ == 1",
    "num_sm.to_csv('written') == 1",
    "num_sm in [num_sm.to_csv('written')]",
    "num_sm.isin([num_sm.to_csv('written')])",
    "num_sm.isna(num_sm.to_csv('written'))",
    "(lambda: num_sm)()",
    "[x for x in num_sm]",
    "(num_sm := 3) > 2",
    "num_sm[0] == 1",
    "f'{num_sm}' == 'a'",
    "num_sm ** num_sm > 1",
    "num_sm if launch_bound else tp_size",
    "(" * 300 + "num_sm" + ")" * 300 + " > 1",
    "not " * 5000 + "launch_bound",
    "9" * 5000 + " > num_sm",
    "num_sm\0 > 1",
    "time_us == `__import__('os').abort()`",
    "slot.str.contains.__globals__ == 1",
    "slot.str.contains('x', flags=1)",
    "slot.str.replace('a', 'b') == 'x'",
    "time_us > 1; import os",
]


@pytest.mark.parametrize("expression", [*MISTAKES, *HOSTILE])
def test_a_wrong_expression_is_one_sentence(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for of in (frame(), loose_frame()):
        with pytest.raises(UserError) as error:
            condition(of, expression)
        sentence = str(error.value)
        assert MISTAKES.get(expression, "") in sentence
        assert "\n" not in sentence
        assert len(sentence) < 600
    assert not list(tmp_path.iterdir())


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
