"""docs/architecture.md's rules of what may import what, read off the source."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "overlap_sweep"

BASE = {"errors", "declared", "options", "cache", "config", "gpus", "program", "keeper", "scopes"}
BELOW_RESULTS = BASE | {"hydra_adapter", "trace", "overlap", "nccl", "diagnosis"}
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "hydra_adapter": {"errors", "declared", "options", "config", "program"},
    "trace": BASE,
    "overlap": BASE,
    "nccl": BASE,
    "diagnosis": BASE | {"trace"},
    "effects": BASE | {"trace", "diagnosis"},
    "predict": BASE | {"trace", "diagnosis"},
    "levers": BASE | {"nccl", "trace", "diagnosis", "effects", "startup"},
    "results": BELOW_RESULTS,
    "measure": BELOW_RESULTS | {"results"},
    "backends": BELOW_RESULTS | {"results", "measure"},
    "report": BELOW_RESULTS | {"results"},
    "study": BELOW_RESULTS | {"results", "report", "effects", "predict"},
    "store": BELOW_RESULTS | {"results"},
    "workloads": BELOW_RESULTS
    | {"results", "measure", "backends", "report", "study", "effects", "predict", "recorder", "levers"},
    "trackers": BELOW_RESULTS | {"results", "report", "workloads"},
    "runtime": BELOW_RESULTS | {"results", "measure", "backends", "report", "workloads", "store", "trackers"},
    "search": BELOW_RESULTS | {"results", "measure", "backends", "report", "workloads", "runtime"},
    "compare": BELOW_RESULTS | {"results", "report", "workloads", "store"},
    "tuner": BELOW_RESULTS | {"results", "report", "workloads", "runtime", "search", "effects"},
    "optimizer": BELOW_RESULTS
    | {"results", "report", "study", "predict", "levers", "recorder", "workloads", "runtime", "search", "tuner"},
    "commands": BELOW_RESULTS
    | {
        "effects",
        "predict",
        "levers",
        "results",
        "report",
        "workloads",
        "store",
        "trackers",
        "runtime",
        "search",
        "compare",
        "tuner",
        "optimizer",
    },
    "profiler_hook": BELOW_RESULTS | {"results", "report", "commands"},
    "recorder": BELOW_RESULTS | {"results", "measure", "startup", "levers"},
    "attach": {"program", "startup"},
    "startup": set(),
    "__main__": {"commands"},
}
"""By part the parts that it may import, besides itself; workloads count as one, see MAY_IMPORT_SLICE."""

SLICES = {path.name for path in (PACKAGE / "workloads").iterdir() if path.is_dir() and path.name != "__pycache__"}
MAY_IMPORT_SLICE = {
    "operator": {"layer"},
    "tuner": {"operator", "layer"},
    "optimizer": {"job", "operator"},
    "search": {"operator"},
}
"""Who may use the modules of which workload; `overlap_sweep.workloads` itself is for all that may use workloads."""
WITHOUT_TORCH = {
    *BASE,
    "hydra_adapter",
    "trace",
    "overlap",
    "nccl",
    "diagnosis",
    "effects",
    "predict",
    "results",
    "report",
    "study",
    "store",
    "compare",
    "trackers",
    "commands",
}
WITHOUT_TORCH_IN_SLICES = {"config", "result", "answer", "section", "compare", "study", "tables", "rows"}
WITHOUT_TORCH_IN_JOB = {
    "command",
    "program_options",
    "lever_values",
    "output",
    "nodes",
    "run",
    "steps",
}
"""What the launcher runs itself, since the command has torch."""


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


MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


def _against_the_rules(module: str) -> Iterator[str]:
    """The parts and slices that a module imports and may not."""
    part, *below = module.split("/")
    own_slice = below[0] if part == "workloads" and len(below) > 1 else part
    allowed = {own_slice, *MAY_IMPORT_SLICE.get(own_slice, set())}
    for name in imports(MODULES[module]):
        if not name.startswith("overlap_sweep."):
            continue
        other, *path = name.split(".")[1:]
        if other != part and other not in MAY_IMPORT[part]:
            yield other
        elif other == "workloads" and path and path[0] in SLICES - allowed:
            yield f"workloads/{path[0]}"


def test_imports_point_one_way() -> None:
    found = {module: set(_against_the_rules(module)) for module in MODULES if module != "__init__"}
    assert {module: names for module, names in found.items() if names} == {}


def test_what_runs_without_torch_does_not_name_it() -> None:
    for module, path in MODULES.items():
        part, *below = module.split("/")
        in_slice = part == "workloads" and below[-1] in WITHOUT_TORCH_IN_SLICES
        in_launcher = below[:1] == ["job"] and below[-1] in WITHOUT_TORCH_IN_JOB
        if part in WITHOUT_TORCH or in_slice or in_launcher:
            assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


def test_every_part_has_its_rule() -> None:
    assert {module.split("/")[0] for module in MODULES} - {"__init__"} == set(MAY_IMPORT)


def _when_imported(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            checked_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from _when_imported([] if checked_only else node.body)


def test_no_module_comes_back_to_itself() -> None:
    names = {
        f"overlap_sweep.{module}".replace("/", ".").removesuffix(".__init__"): path for module, path in MODULES.items()
    }
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        asked = [node for node in _when_imported(ast.parse(path.read_text()).body) if isinstance(node, ast.ImportFrom)]
        pairs = [(f"{node.module}.{alias.name}", str(node.module)) for node in asked for alias in node.names]
        imported[name] = {full if full in names else module for full, module in pairs} & names.keys() - {name}
    # CycleError names the modules of a circle.
    assert {*TopologicalSorter(imported).static_order()} == names.keys()
