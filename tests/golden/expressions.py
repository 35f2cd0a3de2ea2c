"""expressions.txt: conditions of queries and of --fail-if, which of three rows each matches, or what is wrong with it.

A new one is its line with `$ `; `make golden` writes the answers.
"""

import math
import re
from pathlib import Path

import pandas as pd

from overlap_sweep.commands.expressions import condition
from overlap_sweep.errors import UserError
from tests.golden import command_lines

FILE = Path(__file__).with_suffix(".txt")
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


def answer(expression: str) -> str:
    """Returns the numbers of the matching rows, or the error; of either frame it is the same."""
    found = set()
    for of in (frame(), loose_frame()):
        try:
            found.add(f"rows {condition(of, expression).mask.nonzero()[0].tolist()}\n")
        except UserError as error:
            # What Python and pandas say differs between their versions.
            found.add(re.sub(r"(?<=cannot be understood) \(.*\)(?=; )", "", f"error: {error}\n"))
    (said,) = found
    assert said.count("\n") == 1
    assert len(said) < 600
    return said


def write() -> None:
    """Writes the present answers into the file."""
    command_lines.write(FILE, answer)
