"""Evaluates conditions on the rows of a table, for `--fail-if` and `query`, node by node: only comparisons of columns
can run, everything else is refused. A missing value makes no condition true."""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

ABOUT_MISSING, ABOUT_TEXT = ("isna", "notna"), ("contains", "startswith", "endswith")
METHODS = ".isna() .notna() .str.startswith('x') .str.endswith('x') .str.contains('x')"
# No powers: those of constants may take forever.
ARITHMETIC: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
COMPARISONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`(?P<quoted>[^`]*)`""")


@dataclass(frozen=True)
class Condition:
    text: str
    columns: list[str]
    """The columns that it mentions, once each."""
    needed: list[str]
    """The columns that must have a value for it to be true; not those tested only by .isna() or .notna()."""
    mask: NDArray[np.bool_]
    """True for the matching rows."""


def nearest_columns(name: str, frame: pd.DataFrame) -> str:
    return ", ".join(difflib.get_close_matches(name, list(map(str, frame.columns)), n=3, cutoff=0.0))


def condition(frame: pd.DataFrame, expression: str) -> Condition:
    """Returns which rows match the expression. UsageError where it is not a condition on the columns."""
    text = " ".join(expression.split())
    try:
        return _condition(frame, text)
    except UsageError:
        raise
    except Exception as error:  # Errors of the parser, pandas, numpy and pyarrow.
        reason = " ".join(str(getattr(error, "msg", error)).split())[:200] or type(error).__name__
        example = "write it as in \"tp_size == 8 and `pass` == 'bwd'\""
        raise UsageError(f"{text[:200]}: cannot be understood ({reason}); {example}.") from None


def names_in(expression: str) -> set[str]:
    """Returns the columns that the expression mentions; none if it is none, of which `condition` says what is wrong."""
    try:
        return {node.id for node in ast.walk(_parsed(" ".join(expression.split()))) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _parsed(text: str) -> ast.expr:
    quoted: dict[str, str] = {}

    def as_python(token: re.Match[str]) -> str:
        if token["quoted"] is None:
            return token[0]
        stand_in = f"column_in_backticks_{len(quoted)}"
        quoted[stand_in] = token["quoted"]
        return stand_in

    tree = ast.parse(_TOKEN.sub(as_python, text), mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = quoted.get(node.id, node.id)
    return tree


def _condition(frame: pd.DataFrame, text: str) -> Condition:
    tree = _parsed(text)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    columns = list(dict.fromkeys(node.id for node in names))
    holds = _Evaluation(_values(columns, frame)).condition(tree)
    tested = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ABOUT_MISSING]
    needed = dict.fromkeys(node.id for node in names if node not in tested)
    return Condition(text, columns, list(needed), holds.fillna(False).to_numpy(dtype=bool))


def _values(columns: list[str], frame: pd.DataFrame) -> dict[str, pd.Series]:
    for column in columns:
        if column not in frame:
            nearest = nearest_columns(column, frame)
            raise UsageError(f"Unknown column '{column}'. Did you mean {nearest}? Put text in quotes.")
    used = frame[columns].convert_dtypes(dtype_backend="numpy_nullable")
    # Comparing text of pyarrow returns pyarrow's booleans, which do not combine with others.
    used = used.astype(dict.fromkeys(used.select_dtypes("string"), "string[python]"))
    return {column: used[column] for column in columns}


@dataclass(frozen=True)
class _Evaluation:
    values: Mapping[str, pd.Series]
    """Columns by name."""

    def condition(self, node: ast.expr) -> pd.Series:
        """Returns per row whether the condition holds, or NA. UsageError where the expression is not a condition."""
        value = self.value(node)
        if isinstance(node, ast.BinOp) or getattr(value, "dtype", None) != "boolean":
            raise UsageError(f"{ast.unparse(node)} is not a condition; compare it, as in '{ast.unparse(node)} > 0'.")
        return value

    def value(self, node: ast.expr) -> Any:
        """Returns a column or a constant. UsageError for anything else."""
        match node:
            case ast.BoolOp(sign, parts):
                combine = operator.and_ if isinstance(sign, ast.And) else operator.or_
                return reduce(combine, map(self.condition, parts))
            case ast.UnaryOp(ast.Not() | ast.Invert(), operand):
                return ~self.condition(operand)
            case ast.Name(name):
                return self.values[name]
            case ast.Constant(bool() | int() | float() | str() as constant):
                return constant
            case ast.UnaryOp(ast.USub() as sign, operand):
                return ARITHMETIC[type(sign)](self.number(operand))
            case ast.BinOp(left, sign, right) if type(sign) in ARITHMETIC:
                return ARITHMETIC[type(sign)](self.number(left), self.number(right))
            case ast.Compare(first, signs, others):
                sides = zip([first, *others], signs, others, strict=False)
                return reduce(operator.and_, (self.compared(*side) for side in sides))
            case ast.Call(ast.Attribute(ast.Name(name), method), [], []) if method in ABOUT_MISSING:
                return getattr(self.values[name], method)().astype("boolean")
            case ast.Call(ast.Attribute(ast.Attribute(ast.Name(name), "str"), method), [ast.Constant(str(part))], []):
                if method in ABOUT_TEXT:
                    literal = {"regex": False} if method == "contains" else {}
                    return getattr(self.values[name].str, method)(part, **literal)
        raise UsageError(f"{ast.unparse(node)} is not allowed; only columns, constants and {METHODS} are.")

    def number(self, node: ast.expr) -> Any:
        """Returns a number or numbers. UsageError for text: multiplied or formatted it could fill the memory."""
        if _is_text(value := self.value(node)):
            raise UsageError(f"{ast.unparse(node)} is text; only numbers can be used in arithmetic.")
        return value

    def compared(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> pd.Series:
        """Returns the comparison of two values, or of one with a list of constants."""
        listed = right.elts if isinstance(right, ast.List | ast.Tuple) else None
        value, others = self.value(left), [self.value(node) for node in ([right] if listed is None else listed)]
        if listed is None:
            fits = type(sign) in COMPARISONS
        else:
            fits = isinstance(sign, ast.In | ast.NotIn) and not any(hasattr(other, "dtype") for other in others)
        if not fits:
            raise UsageError(
                f"{ast.unparse(right)} cannot be compared like this; use == != < <= > >= with a value, in or not in "
                "with a list of constants such as [1, 2], and .str.contains('x') for part of a text."
            )
        if len({_is_text(one) for one in (value, *others)}) > 1:
            sides = f"{ast.unparse(left)} with {ast.unparse(right)}"
            raise UsageError(f"Cannot compare {sides}: only one of them is text.")
        if listed is None:
            return COMPARISONS[type(sign)](value, others[0])
        # pandas counts missing values as not in the list, so `not in` would hold for them.
        found = value.isin(others).astype("boolean").where(value.notna())
        return found if isinstance(sign, ast.In) else ~found


def _is_text(value: object) -> bool:
    return isinstance(value, str) or getattr(value, "dtype", None) == "string"
