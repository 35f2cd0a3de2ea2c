from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a store that is not there yet."""
    return tmp_path / "measurements of the team"
