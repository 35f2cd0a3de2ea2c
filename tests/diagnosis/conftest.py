from pathlib import Path

import pytest

from tests.diagnosis.planted import ARCHIVES, archives, unpack


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The unpacked recordings of each archive of planted causes."""
    found = {archive: tmp_path_factory.mktemp(archive) for archive in archives()}
    for archive, directory in found.items():
        unpack(ARCHIVES / f"{archive}.tar.xz", directory)
    return found
