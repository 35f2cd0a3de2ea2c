"""Find how a tensor-parallel model should overlap its communication with its GEMMs on this machine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_sweep.commands.frames import read, read_diagnosis, read_prediction, read_trace
    from overlap_sweep.errors import UserError
    from overlap_sweep.optimizer import optimize
    from overlap_sweep.profiler_hook import diagnose_trace
    from overlap_sweep.recorder.step_recorder import step
    from overlap_sweep.tuner import tune
    from overlap_sweep.tuner.report import Report

__version__ = "0.2.0"

_MODULES = {
    "Report": "tuner.report",
    "UserError": "errors",
    "diagnose_trace": "profiler_hook",
    "optimize": "optimizer",
    "read": "commands.frames",
    "read_diagnosis": "commands.frames",
    "read_prediction": "commands.frames",
    "read_trace": "commands.frames",
    "step": "recorder.step_recorder",
    "tune": "tuner",
}
__all__ = [
    "Report",
    "UserError",
    "diagnose_trace",
    "optimize",
    "read",
    "read_diagnosis",
    "read_prediction",
    "read_trace",
    "step",
    "tune",
]


def __getattr__(name: str) -> Any:
    # Every part of the package imports this module: what only its users need is loaded when they ask.
    if name in _MODULES:
        return getattr(import_module(f"overlap_sweep.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
