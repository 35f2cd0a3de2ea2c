"""Let an integer choose from a config group: `tp_size=4`, `num_sm=37`.

Hydra parses the 4 as an integer and refuses it for a group, whose options are strings. Here a number selects the
option of that name where there is one, and otherwise sets the value that the group's options set, if those are numbers.
"""

from __future__ import annotations

from typing import Any

from hydra._internal import defaults_list
from hydra.core.override_parser.types import Override


class _Overrides(defaults_list.Overrides):
    def __init__(self, repo: Any, overrides_list: list[Override]) -> None:
        values = []
        for override in overrides_list:
            group, value = override.key_or_group, None if override.is_sweep_override() else override.value()
            if not isinstance(value, int | float) or not repo.group_exists(group):
                continue
            options = repo.get_group_options(group)
            # bool is an int to Python, but no number.
            is_value = not isinstance(value, bool) and str(value) not in options
            if is_value and any(option.isdigit() for option in options):
                values.append(override)
            else:
                override._value = str(value)
        super().__init__(repo, [override for override in overrides_list if override not in values])
        self.config_overrides += values


def accept_numeric_options() -> None:
    """Replace the class by which Hydra tells overrides of groups from overrides of values."""
    defaults_list.Overrides = _Overrides  # type: ignore[misc]
