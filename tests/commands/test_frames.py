"""`overlap_sweep.read`, `read_trace` and `read_diagnosis`: what `analyze.py` prints, for Python."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import overlap_sweep
from overlap_sweep.commands.output import as_json
from tests.analyze import analyze
from tests.made_sweeps import write_layers

TRACES = Path(__file__).parent.parent / "data" / "traces"
LAYER = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"


def assert_printed(frame: pd.DataFrame, *arguments: str | Path) -> None:
    """What `--format json` prints are these rows, of which there are some."""
    assert analyze(*arguments, "--format", "json").rows == json.loads(as_json(frame)) != []


def test_points_are_those_of_a_query(tmp_path: Path) -> None:
    write_layers(tmp_path)
    frame = overlap_sweep.read(str(tmp_path))
    assert_printed(frame, "query", tmp_path)
    pd.testing.assert_frame_equal(frame, overlap_sweep.read(tmp_path, "layers"))
    assert overlap_sweep.read(tmp_path, "points").empty


@pytest.mark.parametrize("by", ["phase", "class"])
@pytest.mark.parametrize("median", [False, True])
def test_traces_are_those_of_the_command(by: str, median: bool) -> None:
    frame = overlap_sweep.read_trace(LAYER, by=by, median=median)  # type: ignore[arg-type]
    assert_printed(frame, "trace", LAYER, "--by", by, *(["--median"] if median else []))


@pytest.mark.parametrize("by", ["finding", "group", "step"])
def test_diagnoses_are_those_of_the_command(by: str) -> None:
    paths = [TRACES / f"h200x2_fsdp2_checkpoint_rank{rank}.json.gz" for rank in (0, 1)]
    assert_printed(overlap_sweep.read_diagnosis(*paths, by=by), "diagnose", *paths, "--by", by)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="Only rank 0 of 2"):
        assert set(overlap_sweep.read_diagnosis(str(paths[0]), by="step")["rank"]) == {0}


def test_what_cannot_be_read_is_warned_of_or_an_error(tmp_path: Path) -> None:
    shutil.copy(LAYER, tmp_path)
    (tmp_path / "broken.json.gz").write_bytes(LAYER.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="broken"):
        assert len(overlap_sweep.read_trace(tmp_path))
    for call, reason in (
        (lambda: overlap_sweep.read("/no/dir"), "/no/dir"),
        (lambda: overlap_sweep.read(tmp_path, "tables"), "table='tables' is not known; choose one of points"),
        (lambda: overlap_sweep.read_trace("/no/dir"), "/no/dir"),
        (lambda: overlap_sweep.read_trace(LAYER, by="colour"), "by='colour' is not known"),  # type: ignore[arg-type]
        (lambda: overlap_sweep.read_trace(), "give files or directories"),
        (lambda: overlap_sweep.read_diagnosis("/no/dir"), "/no/dir"),
        (lambda: overlap_sweep.read_diagnosis(LAYER, by="colour"), "by='colour' is not known"),  # type: ignore[arg-type]
        (lambda: overlap_sweep.read_diagnosis(), "give files or directories"),
    ):
        with pytest.raises(overlap_sweep.UserError, match=reason):
            call()


def test_torch_is_not_needed() -> None:
    reads = f"import overlap_sweep, sys; overlap_sweep.read_trace({str(LAYER)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", reads], check=False).returncode == 0
