"""Where columns are explained."""

from tests.golden.declared_pages import columns


def test_every_column_has_a_unit_and_an_explanation() -> None:
    rows = [line.strip("| ").split(" | ", 2) for line in columns().splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert [row for row in rows if len(row) < 3 or row[1] == "number" or not row[2].endswith(".")] == []
