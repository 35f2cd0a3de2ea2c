from pathlib import Path

import pytest

from tests.golden.cases import CASES, Case
from tests.golden.outputs import EXPECTED, declared, expected, outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_that_a_user_sees_has_changed(case: Case, tmp_path: Path) -> None:
    """Where it has, and should have: `make golden`, and the diff is what to review."""
    found, wanted = outputs(case, tmp_path), expected(case)
    assert found.keys() == wanted.keys()
    for name, text in found.items():
        assert text == wanted[name], f"{case.name}/{name} changed; if it should have: make golden"


def test_what_is_written_from_declarations_is_as_declared() -> None:
    """Where it is not: `make golden` writes it."""
    assert {path: path.read_text() for path in declared()} == declared()


def test_every_golden_file_is_of_a_case() -> None:
    found = {path.parent.relative_to(EXPECTED).as_posix() for path in EXPECTED.rglob("commands.txt")}
    assert found == {case.name for case in CASES}
