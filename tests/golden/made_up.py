"""Made-up sweeps in which something rare happens that a reader must be told of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.made_sweeps import (
    write_sweep,
    write_sweep_of_copies,
    write_sweep_of_stacks,
    write_sweep_of_training,
    write_tuned_sweep,
)

MADE_UP: dict[str, Callable[[Path], object]] = {
    "operators": write_sweep,
    "training": write_sweep_of_training,
    "copies": write_sweep_of_copies,
    "stacks": write_sweep_of_stacks,
    "tuned": write_tuned_sweep,
}
"""By name what writes the run directories into a folder that is not there yet."""
