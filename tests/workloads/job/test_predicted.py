"""The report of a job says beside what was measured what was to be expected from the reference's traces."""

import shutil
from pathlib import Path

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads import analyse
from tests.analyze import shown
from tests.diagnosis.planted import ARCHIVES, unpack
from tests.make_point import job_config, make_point


@pytest.fixture(scope="module")
def one_bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two ranks that all-reduce all gradients after the backward pass."""
    directory = tmp_path_factory.mktemp("recorded")
    unpack(ARCHIVES / "h200x2.tar.xz", directory)
    return directory / "ddp_one_bucket"


def run(directory: Path, traces: Path, step_us: float, *, setting: dict[str, object], number: int) -> None:
    point = make_point(
        "job",
        directory,
        job_config({}, {}, **{"runtime.device": "cuda", "job.ranks": 2, "job.levers": setting}),
        step_us=step_us,
        started=f"2026-11-20T21:{number:02}:00+00:00",
        traces=[trace_file(rank) for rank in (0, 1)],
    )
    for rank in (0, 1):
        shutil.copy(traces / f"trace_rank{rank}.json", point / trace_file(rank).removesuffix(".gz"))
        (point / trace_file(rank).removesuffix(".gz")).rename(point / trace_file(rank))


def test_what_was_predicted_is_beside_what_was_measured(tmp_path: Path, one_bucket: Path) -> None:
    bucket = {"ddp": {"bucket_cap_mb": 25}}
    settings = [
        {},
        bucket,
        {"optimizer": {"fused": True}},
        bucket | {"optimizer": {"fused": True}},
        {"fsdp2": {"prefetch": 2}},
    ]
    for number, setting in enumerate(settings):
        run(tmp_path, one_bucket, 26_400.0 - number * 900, setting=setting, number=number)

    (section,) = analyse(tmp_path, AnalysisConfig()).sections
    rows = {row.setting: row for row in section.answers[0].compared.rows}
    printed = shown(240, "report", tmp_path)

    prediction = rows["ddp.bucket_cap_mb=25"].prediction
    assert prediction is not None
    assert prediction.predicted_us == pytest.approx(24_907, rel=0.01)
    assert rows["fsdp2.prefetch=2"].prediction.status == "cannot tell"
    assert [name for name, row in rows.items() if row.prediction is None] == [
        *(name for name in rows if "fused" in name or name == "defaults"),
    ]
    assert "1.080x (1.01 to 1.17)" in printed
