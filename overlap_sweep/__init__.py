"""Find how a tensor-parallel model should overlap its communication with its GEMMs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_sweep.tuner import Report, tune

__all__ = ["Report", "tune"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # Every part of the package imports this module: what only users of `tune` need is loaded when they ask.
    if name in __all__:
        from overlap_sweep import tuner

        return getattr(tuner, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
