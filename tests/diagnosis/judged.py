"""The verdicts of `tests/data/judged/verdicts.yaml`, and where the traces are that they judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.diagnosis.independent_judge import traces_in

JUDGED = Path(__file__).parent.parent / "data" / "judged"
OWN = JUDGED / "h100x2.tar.xz"
"""The runs whose names begin with own/, which this project recorded."""
PUBLIC = JUDGED / "public"
"""Where `benchmarks/fetch_public_traces.py` puts the others."""


class Source(msgspec.Struct, forbid_unknown_fields=True):
    repository: str
    commit: str
    licence: str


class Judged(msgspec.Struct, forbid_unknown_fields=True):
    """What is true of a run. README.md beside the file explains the fields."""

    run: str
    ranks: str
    why: str
    first: list[dict[str, Any]]
    figures: dict[str, int]
    collectives: dict[str, int]
    files: str = ""
    also: list[dict[str, Any]] = []
    says: list[str] = []
    never: list[str] = []
    left_out: list[int] = []
    late: dict[int, tuple[int, int]] = {}

    @property
    def is_own(self) -> bool:
        return self.run.startswith("own/")

    def traces(self, own: Path) -> list[Path]:
        """Returns the traces of the run. `own`: where the project's own recordings were unpacked."""
        directory = own / self.run.removeprefix("own/") if self.is_own else PUBLIC / self.run
        if not directory.exists():
            pytest.skip("python benchmarks/fetch_public_traces.py fetches it")
        return traces_in(directory)


class Verdicts(msgspec.Struct, forbid_unknown_fields=True):
    sources: dict[str, Source]
    runs: list[Judged]


def verdicts() -> Verdicts:
    return msgspec.convert(yaml.safe_load((JUDGED / "verdicts.yaml").read_text()), Verdicts)


def cases(runs: list[Judged]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("judged", runs, ids=[each.run for each in runs])
