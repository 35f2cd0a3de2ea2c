from pathlib import Path

import pytest

from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.iterations import overlap_rows
from overlap_sweep.trace.kineto import read_trace
from tests.timeline import Timeline

TRACES = Path(__file__).parent.parent / "data" / "traces"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a trace may be written."""
    return tmp_path / "trace.json"


@pytest.fixture
def trace(path: Path) -> Timeline:
    return Timeline(None, path=path)


@pytest.fixture(params=sorted(path.name for path in TRACES.glob("h200x4_*.json.gz")))
def gpu_trace(request: pytest.FixtureRequest) -> Path:
    return TRACES / request.param


def analyse_trace(path: Path | str) -> list[TraceRow]:
    """Reads a trace; one row per iteration and phase that has any work, in order. UserError when there is none."""
    trace = read_trace(path)
    return overlap_rows(activity_of(trace), str(path), trace.rank)
