"""docs/columns.md, written from where columns are declared."""

from pathlib import Path

from overlap_sweep.commands import compare, frames, history, query, report
from overlap_sweep.report import diagnosis

COLUMNS_MD = Path(__file__).parent.parent.parent / "docs" / "columns.md"
HEAD = """\
# Columns

What `--format csv`, `json` and `parquet` print, and what an expression may ask for. Written by `make golden`.
"""


def reference() -> str:
    """Returns docs/columns.md."""
    parts = [HEAD]
    tables_of = {
        "query": query.headed(),
        "report": report.tables(),
        "trace": frames.TRACE_TABLES,
        "diagnose": diagnosis.TABLES,
        "compare": compare.tables(),
        "history": history.TABLES,
    }
    for command, tables in tables_of.items():
        for heading, table in tables.items():
            parts.append(f"## `{command}` {heading}\n\n{table.rows[0].upper()}{table.rows[1:]}.\n")
            rows = [
                f"| `{column.name}` | {column.unit} | {column.about.replace('|', chr(92) + '|')} |\n"
                for column in table.written
            ]
            parts.append("".join(["| column | unit or type | what it is |\n|---|---|---|\n", *rows]))
    return "\n".join(parts)
