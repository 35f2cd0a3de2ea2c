"""Conditions on the rows of a table, as `--fail-if` and `query` take them. pandas evaluates them, and would run any
method of a column, so what is not listed here is refused before. A missing value makes no condition true."""

from __future__ import annotations

import ast
import difflib
import keyword
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

ABOUT_MISSING, ABOUT_TEXT = ("isna", "notna"), ("contains", "startswith", "endswith")
METHODS = ".isna() .notna() .isin([1, 2]) .str.startswith('x') .str.endswith('x') .str.contains('x', case=, regex=)"
# Without powers: those of constants may take forever.
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
ANYWHERE = (*ARITHMETIC, ast.BinOp, ast.UnaryOp, ast.unaryop, ast.boolop, ast.cmpop, ast.Name, ast.Load)
BEFORE_A_LIST = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
BEFORE_A_VALUE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`(?P<quoted>[^`]*)`|[&|@]""")


@dataclass(frozen=True)
class Condition:
    text: str
    columns: list[str]
    """Those that it mentions, once each."""
    needed: list[str]
    """Those of which it needs a value to be true: not those that it only asks whether they are missing."""
    mask: Any
    """A numpy array, true for the rows that it holds for."""


def nearest_columns(name: str, frame: pd.DataFrame) -> str:
    """Those that the name may have been meant for."""
    return ", ".join(difflib.get_close_matches(name, list(map(str, frame.columns)), n=3, cutoff=0.0))


def condition(frame: pd.DataFrame, expression: str) -> Condition:
    """UserError in one line where the expression cannot be understood or is no condition."""
    text = " ".join(expression.split())
    if not text:
        raise UserError("The expression is empty; give a condition such as 'tp_size == 8'.")
    try:
        return _condition(frame, text)
    except UserError:
        raise
    except Exception as error:  # Whatever the parser, pandas, numpy, pyarrow and re have to say.
        raise UserError(f"{text[:200]}: {_mistake(text, frame, error)}.") from None


def _condition(frame: pd.DataFrame, text: str) -> Condition:
    import pandas as pd

    quoted: dict[str, str] = {}

    def as_python(token: re.Match[str]) -> str:
        if token[0] == "@":
            raise UserError(f"{text[:200]}: @ is not allowed; only columns and constants are.")
        if token["quoted"] is None:
            return {"&": " and ", "|": " or "}.get(token[0], token[0])
        quoted[f"column_in_backticks_{len(quoted)}"] = token["quoted"]
        return f"column_in_backticks_{len(quoted) - 1}"

    tree = ast.parse(_TOKEN.sub(as_python, text), mode="eval").body
    names = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Name)), key=lambda node: node.col_offset)
    if not names:
        raise UserError(f"{text[:200]} mentions no column; give a condition such as 'tp_size == 8'.")
    values = _values({name.id: quoted.get(name.id, name.id) for name in names}, frame)
    _Gate(values).check(tree)
    # Escaped, because pandas looks for backticks even where they are within a text.
    code = ast.unparse(tree).replace("`", r"\x60")
    holds: Any = pd.eval(code, engine="python", local_dict={}, global_dict={}, resolvers=[dict(values)])
    asked = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ABOUT_MISSING]
    columns = dict.fromkeys(values[name.id].name for name in names)
    needed = dict.fromkeys(values[name.id].name for name in names if name not in asked)
    return Condition(text, list(columns), list(needed), holds.fillna(False).to_numpy(dtype=bool))


def _values(columns: dict[str, str], frame: pd.DataFrame) -> dict[str, Any]:
    """By the name in the expression, of types that know what is missing."""
    import pandas as pd

    class Column(pd.Series):
        _constructor = property(lambda self: Column)

        def isin(self, values: Any) -> Any:
            """To pandas, what is missing is not in any list; so `!= 'text'`, which it evaluates by this, would hold."""
            return super().isin(values).astype("boolean").where(self.notna())

    for column in columns.values():
        if column not in frame and (frame == column).any(axis=None):
            raise UserError(f"{column} is no column but one of the values; write it in quotes: '{column}'.")
        if column not in frame:
            raise UserError(f"{column} is no column; the nearest are {nearest_columns(column, frame)}.")
    used = frame[list(dict.fromkeys(columns.values()))].convert_dtypes(dtype_backend="numpy_nullable")
    # Comparisons of pyarrow's text are pyarrow's booleans, which do not go with others.
    used = used.astype(dict.fromkeys(used.select_dtypes("string"), "string[python]"))
    return {name: Column(used[column]) for name, column in columns.items()}


def _mistake(text: str, frame: pd.DataFrame, error: Exception) -> str:
    bare = _TOKEN.sub("''", text)
    for word in filter(keyword.iskeyword, re.findall(r"\w+", bare)):
        if word in frame:
            return f"{word} is a word of Python's; write `{word}`, in backticks, and single quotes around all"
    if isinstance(error, SyntaxError) and re.search(r"(?<![=!<>:])=(?!=)", bare):
        return "write == to compare"
    reason = " ".join(str(getattr(error, "msg", error)).split())[:200] or type(error).__name__
    return f"cannot be understood ({reason}); write it as in 'tp_size == 8 and num_sm > 8'"


class _Gate:
    """UserError for whatever is not listed here."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def check(self, tree: ast.expr) -> None:
        self._check_condition(tree)
        accepted: list[ast.AST] = []
        for node in ast.walk(tree):
            match node:
                case ast.BoolOp(_, operands):
                    for operand in operands:
                        self._check_condition(operand)
                case ast.UnaryOp(ast.Not() | ast.Invert(), operand):
                    self._check_condition(operand)
                case ast.Compare(left, signs, others):
                    for sides in zip([left, *others], signs, others, strict=False):
                        self._check_comparison(*sides)
                    accepted += [other for other in others if isinstance(other, ast.List | ast.Tuple)]
                case ast.Call(ast.Attribute(ast.Name(), attr) as method, [], []) if attr in ABOUT_MISSING:
                    accepted += [method]
                case ast.Call(ast.Attribute(of, "isin") as method, [ast.List() | ast.Tuple() as values], []):
                    self._check_comparison(of, ast.In(), values)
                    accepted += [method, values]
                case ast.Call(
                    ast.Attribute(ast.Attribute(ast.Name(), "str") as of, attr) as method, [ast.Constant(str())]
                ):
                    accepted += [method, of] if attr in ABOUT_TEXT else []
                case ast.Constant(bool() | int() | float() | str()):
                    pass
                case ast.keyword("case" | "regex", ast.Constant(bool())):
                    pass
                case _ if node not in accepted and not isinstance(node, ANYWHERE):
                    raise UserError(f"{self._text(node)} is not allowed; only columns, constants and {METHODS} are.")

    def _check_condition(self, node: ast.expr) -> None:
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert)
        is_column = isinstance(node, ast.Name) and self._values[node.id].dtype == "boolean"
        if isinstance(node, ast.BinOp | ast.Name | ast.Constant | ast.UnaryOp) and not (is_not or is_column):
            raise UserError(f"{self._text(node)} is no condition; compare it, as in '{self._text(node)} > 0'.")

    def _check_comparison(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> None:
        match right:
            case ast.List(values) | ast.Tuple(values):
                has_columns = any(isinstance(node, ast.Name) for node in ast.walk(right))
                fits = isinstance(sign, BEFORE_A_LIST) and not has_columns
            case _:
                values, fits = [right], isinstance(sign, BEFORE_A_VALUE)
        if not fits:
            raise UserError(
                f"{self._text(right)} cannot be compared so; write == != < <= > >= before a value, in or not in "
                "before a list of constants such as [1, 2], and .str.contains('x') for a part of a text."
            )
        if len({self._is_text(node) for node in [left, *values]}) > 1:
            raise UserError(f"Of {self._text(left)} and {self._text(right)} only one is text; compare like with like.")

    def _is_text(self, node: ast.expr) -> bool:
        is_column = isinstance(node, ast.Name) and self._values[node.id].dtype == "string"
        return is_column or (isinstance(node, ast.Constant) and isinstance(node.value, str))

    def _text(self, node: ast.AST) -> str:
        return re.sub(r"column_in_backticks_\d+", lambda name: f"`{self._values[name[0]].name}`", ast.unparse(node))
