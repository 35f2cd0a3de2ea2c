"""docs/python.md and docs/notebook.ipynb: their examples run on a recorded sweep of the tuner and in a folder of their
own, and the table has every argument of `tune`."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

import overlap_sweep
from overlap_sweep import Report, tuner
from tests.analyze import analyze
from tests.golden.archives import unpack

PAGE = (Path(__file__).parent.parent.parent / "docs" / "python.md").read_text()
REAL_TUNE = tuner.tune


def recorded_or_refused(model: str, **options: Any) -> Report:
    """Nothing is measured here: an example either shows an error or has the recorded report."""
    return REAL_TUNE(model, **options) if "operator" in options else Report("multirun/tuned")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(unpack("tuner", tmp_path / "multirun" / "tuned")).returncode == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuner, "tune", recorded_or_refused)
    capsys.readouterr()
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example, names)
    printed = capsys.readouterr().out
    assert "operator=fc3 is not known; choose one of fc1, fc2, proj, qkv." in printed
    assert "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap" in printed
    assert (tmp_path / "results" / "llama3_8b" / "tuning_report.json").exists()


def test_every_argument_and_name_is_explained() -> None:
    rows = re.findall(r"^\| (.+?) \| ", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert set(inspect.signature(REAL_TUNE).parameters) - {"options"} <= named
    options = {
        name: 1 for row in re.findall(r"^\| `\w+=.*", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)=", row)
    }
    assert len(tuner.option_overrides(options)) == len(options) > 10
    assert set(overlap_sweep.__all__) <= named
    public = {name for name in dir(Report) if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"\b{name}\b", PAGE)} == set()


ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_it_is_kept_without_outputs() -> None:
    import nbformat

    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


@pytest.mark.end_to_end
def test_it_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}})
    # Where it sees a test, a kernel shows nothing of what other processes print.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    client.execute(env={**environment, "PYTHONPATH": str(ROOT)})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert {"text/html", "image/svg+xml"} <= set(shown)
    # What the tuner's processes print is seen, too.
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Written to multirun/notebook" in printed
    assert (tmp_path / "results" / "qwen3_0_6b" / "tuning_report.json").exists()
