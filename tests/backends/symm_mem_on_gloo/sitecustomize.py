"""Lets backend=symm_mem run on a CPU, by its stand-in. Python loads this at its start where a test puts it on
PYTHONPATH."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.when_imported import change_when_imported


def stand_in(module: ModuleType) -> None:
    refusal, build, build_layer = module.refusal, module.build, module.build_layer

    def on_cpu(make: Callable[..., Any], *arguments: Any) -> Any:
        from tests.backends import symm_mem_on_cpu

        symm_mem_on_cpu.stand_in()
        return make(*arguments)

    vars(module).update(
        refusal=lambda point, *operator: refusal(
            replace(point, runtime=replace(point.runtime, device="cuda")), *operator
        ),
        build=partial(on_cpu, build),
        build_layer=partial(on_cpu, build_layer),
    )


change_when_imported({"overlap_sweep.backends.symm_mem": stand_in})
