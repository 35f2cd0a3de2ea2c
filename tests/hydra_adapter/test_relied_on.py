"""docs/hydra.md lists what of Hydra is relied on, and only the adapter relies on what is not documented."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.sweeps import ROOT

PRIVATE, DOCUMENTED, BEHAVIOUR = (ROOT / "docs/hydra.md").read_text().partition("## Not documented")[2].split("\n## ")
ADAPTER = ("overlap_sweep/hydra_adapter/", "hydra_plugins/")


def listed(section: str) -> set[str]:
    return set(re.findall(r"^\| `([\w.]+)`", section, re.MULTILINE))


@cache
def used() -> dict[str, set[str]]:
    """Full names that are imported of Hydra, and private attributes of others in the adapter, with the files."""
    found = defaultdict(set)
    for path in [*(ROOT / "overlap_sweep").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("hydra", "hydra_plugins"):
                for alias in node.names:
                    found[f"{node.module}.{alias.name}"].add(name)
            elif isinstance(node, ast.Attribute) and _is_private(node) and name.startswith(ADAPTER):
                found[f".{node.attr}"].add(name)
    return found


def _is_private(node: ast.Attribute) -> bool:
    return re.match("_[a-z]", node.attr) is not None and ast.unparse(node.value) != "self"


def test_the_page_lists_what_is_used() -> None:
    assert listed(PRIVATE) | listed(DOCUMENTED) == used().keys()
    assert not listed(PRIVATE) & listed(DOCUMENTED)


def test_only_the_adapter_uses_what_is_not_documented() -> None:
    assert {name for name in listed(PRIVATE) for path in used()[name] if not path.startswith(ADAPTER)} == set()


def test_where_the_page_says_that_it_is_noticed_there_are_such_files() -> None:
    named = re.findall(r"`(?:tests/golden/|runtime/)?(\w+\.(?:py|txt))`", BEHAVIOUR)
    assert len(named) > 8
    for name in named:
        assert [path for folder in ("tests", "overlap_sweep") for path in Path(ROOT, folder).rglob(name)], name
