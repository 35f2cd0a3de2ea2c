"""MLflow: a run for each point, nested below the run of its sweep. Where its server or file is, and the experiment, are
said by MLflow's own variables of the environment: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from overlap_sweep.trackers import PROJECT, Run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as Stored

V = TypeVar("V")

KEY = "overlap_sweep.key"
"""Tag by which a run is found again."""
MOST_PARAMS = 100
"""Most parameters of one request."""
LONGEST = 5000
"""Longest text of a tag or parameter, in characters."""
_NOT_ALLOWED = re.compile(r"[^\w. :/-]")
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


def connect() -> Mlflow:
    """Returns the tracker. Nothing is written or asked yet."""
    return Mlflow()


@contextmanager
def _soon() -> Iterator[None]:
    """Has requests give up after seconds: by default MLflow waits minutes for a server that is not there."""
    usual = os.environ.get(RETRIES)
    os.environ[RETRIES] = usual or "2"
    try:
        yield
    finally:
        if usual is None:
            del os.environ[RETRIES]


class Mlflow:
    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        """MLflow's ids of the sweeps' runs, by key."""

    @cached_property
    def _client(self) -> MlflowClient:
        # It is sent when the package is imported, to its makers and not to the tracker.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        # It has set its own level, at which it would report each table that it makes.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        return MlflowClient()

    @cached_property
    def _experiment_id(self) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    @property
    def place(self) -> str:
        name = self._client.get_experiment(self._experiment_id).name
        return f"{self._client.tracking_uri}, experiment {name}"

    def start_sweep(self, sweep: Run) -> None:
        with _soon():
            stored = self._stored(sweep)
            self._client.update_run(stored.info.run_id, status="RUNNING")
            self._ids[sweep.key] = stored.info.run_id

    def log_point(self, point: Run, sweep: Run | None) -> None:
        with _soon():
            self._log(point, parent_id=self._ids[sweep.key] if sweep else None)

    def finish_sweep(self, sweep: Run) -> None:
        with _soon():
            self._log(sweep)

    def _stored(self, run: Run, parent_id: str | None = None) -> Stored:
        """Returns the run as MLflow has it, which is made if there is none."""
        found = self._client.search_runs([self._experiment_id], f"tags.`{KEY}` = '{run.key}'", max_results=1)
        if found:
            return found[0]
        tags = {KEY: run.key, **({"mlflow.parentRunId": parent_id} if parent_id else {})}
        return self._client.create_run(self._experiment_id, _in_ms(run.started_s), tags, run.name)

    def _log(self, run: Run, parent_id: str | None = None) -> None:
        from mlflow.entities import Metric, Param, RunTag

        stored = self._stored(run, parent_id)
        run_id, data, now_ms = stored.info.run_id, stored.data, int(time.time() * 1000)
        # What is there already is left alone: parameters never change, and metrics would get a history.
        new = (item for item in _allowed(run.params).items() if item[0] not in data.params)
        params = [Param(name, str(value)[:LONGEST]) for name, value in new]
        changed = (item for item in _allowed(run.metrics).items() if data.metrics.get(item[0]) != item[1])
        metrics = [Metric(name, value, now_ms, 0) for name, value in changed]
        texts = {**run.texts, **({"mlflow.note.content": run.about} if run.about else {})}
        tags = [RunTag(name, text[:LONGEST]) for name, text in texts.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + MOST_PARAMS])
        self._client.log_batch(run_id, metrics, tags=tags)
        if "error" in data.tags.keys() - texts.keys():
            self._client.delete_tag(run_id, "error")
        there = {file.path: file.file_size for file in self._client.list_artifacts(run_id)}
        for path in run.files:
            # Traces may be large; reports may change and have the same size.
            if path.suffix != ".gz" or there.get(path.name) != path.stat().st_size:
                self._client.log_artifact(run_id, str(path))
        self._client.set_terminated(run_id, "FINISHED" if run.ok else "FAILED", _in_ms(run.ended_s))


def _allowed(values: Mapping[str, V]) -> dict[str, V]:
    """Returns the values by names as MLflow takes them."""
    return {_NOT_ALLOWED.sub("_", os.path.normpath(name)): value for name, value in values.items()}


def _in_ms(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1000)
