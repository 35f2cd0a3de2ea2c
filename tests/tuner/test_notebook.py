"""docs/notebook.ipynb runs from top to bottom, in a folder of its own."""

import os
from pathlib import Path

import pytest

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
