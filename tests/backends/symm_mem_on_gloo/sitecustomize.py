"""Lets backend=symm_mem run on a CPU, by its stand-in. Python loads this at its start where a test puts it on
PYTHONPATH."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

BACKEND = "overlap_sweep.backends.symm_mem"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        refusal, build, build_layer = module.refusal, module.build, module.build_layer

        def on_cpu(make: Callable[..., Any], *arguments: Any) -> Any:
            from tests.backends import symm_mem_on_cpu

            symm_mem_on_cpu.stand_in()
            return make(*arguments)

        vars(module).update(
            refusal=lambda point: refusal({**point, "runtime": {**point["runtime"], "device": "cuda"}}),
            build=partial(on_cpu, build),
            build_layer=partial(on_cpu, build_layer),
        )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(name, path) if name == BACKEND else None
        if found and found.loader:
            found.loader = _Loader(found.loader)
        return found


sys.meta_path.insert(0, _Finder())
