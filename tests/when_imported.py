"""Changes modules when they are imported: for a sitecustomize.py, which Python loads before anything else."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


def change_when_imported(changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Has this process, and those forked from it, call `changes[name](module)` after a module of that name has run."""
    sys.meta_path.insert(0, _Finder(changes))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(name, path) if name in self._changes else None
        if found and found.loader:
            execute = found.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._changes[name](module)

            found.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return found
