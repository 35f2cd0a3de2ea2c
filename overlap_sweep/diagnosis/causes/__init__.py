"""Causes of lost time, a module each, which declares `CAUSE` and is found by being here; what to try is in
`advice.yaml`. How the losses to them are found: `losses.py`."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from overlap_sweep.diagnosis import Cause


def _declared() -> Iterator[Cause]:
    for found in iter_modules(__path__):
        cause: Cause = import_module(f"{__name__}.{found.name}").CAUSE
        yield replace(cause, name=found.name)


_NONE = Cause(order=0, name="none", meaning="on average a rank exposes less than 2 % of the step")
"""That exposed communication costs next to nothing; `findings.py` says so."""

CAUSES = {cause.name: cause for cause in sorted([_NONE, *_declared()], key=lambda cause: cause.order)}
"""By name."""

CAUSES_IN_WORDS = ", ".join([*CAUSES][1:-1]) + f" or {[*CAUSES][-1]}"
"""All but `none`."""
