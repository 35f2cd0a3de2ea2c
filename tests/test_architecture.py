"""docs/architecture.md's rules of what may import what, read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "overlap_sweep"

BASE = {
    *("config", "space", "models", "run_directory", "errors", "numeric_options", "overlap_cfg", "cache"),
    *("identity", "machine", "kernel_shape", "intervals", "telemetry", "training_config", "declared"),
    *("tp_training_config", "language_model", "model_forms"),
}
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "ranks": set(),
    "seeding": set(),
    "store": BASE,
    "trace": BASE,
    "analysis": BASE | {"trace"},
    "report": BASE | {"analysis", "trace", "store"},
    "measure": BASE | {"ranks"},
    "backends": BASE | {"ranks"},
    "training": BASE | {"ranks", "measure", "seeding"},
    "tp_training": BASE | {"ranks", "backends", "measure", "training", "seeding"},
    "workloads": BASE | {"ranks", "backends", "measure", "training", "tp_training", "seeding"},
    "runtime": BASE | {"ranks", "workloads", "backends", "measure", "store"},
    "search": BASE | {"analysis", "report", "runtime", "workloads", "backends"},
    "tuner": BASE | {"analysis", "report", "runtime", "workloads", "search"},
}
WITHOUT_TORCH = BASE | {"trace", "analysis", "report", "store"}


def imports(path: Path) -> set[str]:
    """Full names of the modules that the file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


PART_OF = {path: path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_point_one_way_and_what_runs_without_torch_does_not_name_it(part: str) -> None:
    files = [path for path, of in PART_OF.items() if of == part]
    assert files
    for path in files:
        names = imports(path)
        own = {name.split(".")[1] for name in names if name.startswith("overlap_sweep.")}
        assert own <= MAY_IMPORT[part] | {part}, path
        assert part not in WITHOUT_TORCH or "torch" not in {name.split(".")[0] for name in names}, path


def test_every_part_has_its_rule() -> None:
    assert set(PART_OF.values()) - {"__init__"} == set(MAY_IMPORT)
