"""AnalysisConfig from the command line's `analysis.NAME=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.declared import check
from overlap_sweep.errors import UserError

PREFIX = "analysis."


def analysis_config(overrides: Sequence[str]) -> AnalysisConfig:
    """Defaults with the overrides applied. UserError for an unknown name or a value out of range."""
    defaults = AnalysisConfig()
    kinds: dict[str, type] = {declared.name: type(getattr(defaults, declared.name)) for declared in fields(defaults)}
    given: dict[str, Any] = {}
    for override in overrides:
        name, equals, value = override.removeprefix(PREFIX).partition("=")
        if not override.startswith(PREFIX) or not equals or name not in kinds:
            known = ", ".join(f"{PREFIX}{name}=..." for name in kinds)
            raise UserError(f"{override} is no option of the analysis; choose from {known}.")
        try:
            given[name] = kinds[name](value)
        except ValueError:
            raise UserError(f"{override} is no number; give {PREFIX}{name} one.") from None
    config = AnalysisConfig(**given)
    check(asdict(config), AnalysisConfig, PREFIX)
    return config
