"""What trackers hold, read back from their own files: MLflow's SQLite file, and the files of W&B's offline runs."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Held:
    """A run, as its tracker has it."""

    name: str
    ok: bool
    is_sweep: bool
    of: str | None
    """Its sweep, which is equal for runs that are shown together; None for a point that ran alone."""
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    texts: Mapping[str, str]
    files: frozenset[str]


class Store(Protocol):
    name: str
    variables: Mapping[str, str]
    """Environment that makes the tracker write here."""
    folder: Path

    def runs(self) -> list[Held]: ...

    def end(self) -> None:
        """Ends what the tracker runs in the background of this process, which has the environment of its start."""


def by_name(store: Store) -> dict[str, Held]:
    """The runs, whose names must be different."""
    runs = store.runs()
    found = {run.name: run for run in runs}
    assert len(found) == len(runs), sorted(run.name for run in runs)
    return found


class MlflowStore:
    name = "mlflow"

    def __init__(self, folder: Path, empty: Path) -> None:
        """`empty`: a database with MLflow's tables, which takes a second to make."""
        self.folder = folder
        shutil.copy(empty, folder / "tracked.db")
        self.uri = f"sqlite:///{folder / 'tracked.db'}"
        self.variables = {"MLFLOW_TRACKING_URI": self.uri, "MLFLOW_DISABLE_TELEMETRY": "true"}

    def runs(self) -> list[Held]:
        from mlflow import MlflowClient

        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("overlap_sweep")
        if experiment is None:
            return []
        found = client.search_runs([experiment.experiment_id])
        sweeps = {run.data.tags["mlflow.parentRunId"] for run in found if "mlflow.parentRunId" in run.data.tags}

        def held(run: Any) -> Held:
            is_sweep = run.info.run_id in sweeps
            return Held(
                run.info.run_name,
                run.info.status == "FINISHED",
                is_sweep,
                run.info.run_id if is_sweep else run.data.tags.get("mlflow.parentRunId"),
                run.data.params,
                run.data.metrics,
                {**run.data.tags, "about": run.data.tags.get("mlflow.note.content", "")},
                frozenset(file.path for file in client.list_artifacts(run.info.run_id)),
            )

        return [held(run) for run in found]

    def end(self) -> None:
        """It has nothing there."""


class WandbStore:
    name = "wandb"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_ERROR_REPORTING": "false"}

    def runs(self) -> list[Held]:
        self.end()
        by_id: dict[str, Held] = {}
        # A run that is logged again is one with the same id: what is sent later counts.
        for path in sorted(self.folder.glob("wandb/*-run-*/run-*.wandb")):
            by_id.update(read_offline_run(path))
        return [*by_id.values()]

    def end(self) -> None:
        import wandb

        wandb.teardown()


def read_offline_run(path: Path) -> dict[str, Held]:
    """The run by its id."""
    from wandb.proto import wandb_internal_pb2

    run_id, name, group, kind, about, exit_code = "", "", None, "", "", 0
    params: dict[str, str] = {}
    summary: dict[str, Any] = {}
    for content in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.HasField("run"):
            run = record.run
            run_id, name, group, kind, about = run.run_id, run.display_name, run.run_group, run.job_type, run.notes
            params = {one.key: str(json.loads(one.value_json)) for one in run.config.update if one.key != "_wandb"}
        for one in record.summary.update:
            summary["/".join(one.nested_key) or one.key] = json.loads(one.value_json)
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
    numbers = {key: value for key, value in summary.items() if isinstance(value, float | int) and key[0] != "_"}
    texts = {key: value for key, value in summary.items() if isinstance(value, str) and value}
    # Links to what was measured, which is sent from there.
    files = frozenset(file.name for file in (path.parent / "files").iterdir() if file.exists())
    held = Held(name, exit_code == 0, kind == "sweep", group or None, params, numbers, {**texts, "about": about}, files)
    return {run_id: held}


BLOCK, HEADER = 32768, 7


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after W&B's own header of 7 bytes: each fragment has a checksum (4
    bytes), its size (2) and whether it is whole, first, middle or last (1)."""
    place, record = HEADER, b""
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):
            yield record
            record = b""


def environment(store: Store) -> dict[str, str]:
    """The environment of a process that tracks there, and nowhere else."""
    others = ("MLFLOW_", "WANDB_")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(others)}, **store.variables}
