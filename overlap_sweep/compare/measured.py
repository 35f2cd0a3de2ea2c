"""What one dataset measured: a time for each key, which says of what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from overlap_sweep.overlap import space
from overlap_sweep.overlap.variants import DEFAULT, FLOOR, NONE
from overlap_sweep.results.estimate import Estimate, hidden_fraction
from overlap_sweep.results.points import Case

WHOLE = "all"
"""The pass of what has but one: a layer, a kernel, a copy."""
BASELINES = {NONE, DEFAULT, FLOOR}
"""Settings that are the same thing in every dataset."""


class Key(NamedTuple):
    """What was measured. A field that is compared and not matched is None while keys are matched."""

    model: Any
    """None of kernels and copies, which are the same where their sizes are."""
    tokens: Any
    precision: Any
    backend: Any
    device: Any
    tp_size: Any
    operator: str
    """Of a layer its kind, with what else makes layers different; of a kernel its name, n and k; of copies
    their direction and sizes; of a tensor-parallel stack its data-parallel ranks, layers and batch."""
    pass_name: str
    setting: Any
    """What its slots are given, in a word; of a layer the variant, of a kernel the implementation; of copies `gemm`,
    `copy`, `sequential` or `overlapped`; of a tensor-parallel stack the options not at their defaults; empty for the
    pass, whatever its setting."""
    swept: str = ""
    """The words of a tensor-parallel stack's setting without those that differ between datasets throughout; matched
    where settings are compared."""

    def case(self, telling: Sequence[str]) -> str:
        """What tells it from the other cases, where there are several: the values of these fields."""
        values = {name: str(getattr(self, name)) for name in telling if getattr(self, name) is not None}
        return " ".join(f"{value} tokens" if name == "tokens" else value for name, value in values.items())

    @property
    def order(self) -> tuple[Any, ...]:
        """By case and TP size, operators in the order of the layer, the others last; settings stay as they are."""
        operators = list(space.OPERATORS)
        place = operators.index(self.operator) if self.operator in operators else len(operators)
        case = (str(self.model), self.tokens or 0, str(self.precision), str(self.backend), str(self.device))
        return (*case, self.tp_size, place, self.operator, self.pass_name != "fwd")


@dataclass(frozen=True)
class Measured:
    """All measurements of one thing in one dataset, pooled."""

    key: Key
    time: Estimate
    none_us: float | None
    """None where the layer was not measured without overlap."""
    floor_us: float | None
    points: tuple[str, ...]

    @property
    def hidden_fraction(self) -> float:
        """NaN where it is undefined."""
        if self.none_us is None or self.floor_us is None:
            return math.nan
        return hidden_fraction(self.time.time_us, self.none_us, self.floor_us)


def key_of_pass(case: Case, tp_size: int, operator: str, pass_name: str) -> Key:
    """Of no setting yet."""
    return Key(**case._asdict(), tp_size=tp_size, operator=operator, pass_name=pass_name, setting="")
