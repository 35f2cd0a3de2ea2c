"""Where columns are explained."""

from __future__ import annotations

from tests.golden.columns import COLUMNS_MD, reference


def test_the_reference_is_that_of_the_declared_columns() -> None:
    """Where it is not: `make golden` writes it."""
    assert COLUMNS_MD.read_text() == reference()
