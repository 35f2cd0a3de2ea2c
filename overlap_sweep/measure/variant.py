"""One way to compute an operator or a layer, as timing and profiling run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[[int], Any]
Backward = Callable[[int, Any], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Variant:
    """Passes that follow each other. `forward` and `backward` take the turn's number, to rotate their inputs by."""

    forward: Forward
    """-> what `backward` needs: the output."""
    backward: Backward | None = None
    """-> the gradients, by name. None: there is only a forward."""
    step: Callable[[], object] | None = None
    """What follows in a training step: the optimizer."""
    prepare: Callable[[], None] | None = None
    """Untimed, before each of the variant's turns; a first untimed repeat follows it."""

    def get_ready(self) -> None:
        if self.prepare:
            self.prepare()

    def passes(self) -> Iterator[tuple[str, Callable[[int, Any], Any]]]:
        """Each pass's name and function of the repeat and of what the pass before it returned."""
        step = self.step
        yield "fwd", lambda repeat, _: self.forward(repeat)
        if self.backward:
            yield "bwd", self.backward
        if step:
            yield "step", lambda _repeat, _kept: step()
