"""Where columns are explained."""

from __future__ import annotations

from tests.golden.columns import COLUMNS_MD, reference


def test_the_reference_is_that_of_the_declared_columns() -> None:
    """Where it is not: `make golden` writes it."""
    assert COLUMNS_MD.read_text() == reference()


def test_every_column_has_a_unit_and_an_explanation() -> None:
    rows = [line.strip("| ").split(" | ", 2) for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert [row for row in rows if len(row) < 3 or row[1] == "number" or not row[2].endswith(".")] == []
