"""The model architectures that can be trained: a module for each, named as Hugging Face's model_type, with its
`ARCHITECTURE`. Adding one is adding its file.

No torch: the launcher reads them, too.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from overlap_sweep.errors import UserError
from overlap_sweep.workloads.tp_training.architectures.architecture import Architecture


def known() -> list[str]:
    """Their model_types, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "architecture")


def architecture(model_type: str) -> Architecture:
    """UserError for one that there is not."""
    if model_type not in known():
        raise UserError(
            f"model.architecture={model_type} cannot be trained; choose one of {', '.join(known())}, or add it "
            "(docs/tp_training.md)."
        )
    found: Architecture = import_module(f"{__name__}.{model_type}").ARCHITECTURE
    return found
