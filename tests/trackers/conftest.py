"""Each tracker in a folder of its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trackers.stores import MlflowStore, Store, WandbStore

TRACKERS = ["mlflow", "wandb"]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@contextmanager
def in_environment(name: str, folder: Path, empty_database: Path) -> Iterator[Store]:
    """The tracker that this process then uses."""
    store: Store = MlflowStore(folder, empty_database) if name == "mlflow" else WandbStore(folder)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in store.variables.items():
            patch.setenv(variable, value)
        # MLflow keeps files where it was started.
        patch.chdir(folder)
        yield store
        store.end()


@pytest.fixture(params=TRACKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path, empty_database: Path) -> Iterator[Store]:
    (tmp_path / "tracker").mkdir()
    with in_environment(request.param, tmp_path / "tracker", empty_database) as found:
        yield found
