"""Recognises training steps in the sequence of optimizers' calls."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from overlap_sweep.trace import smallest_period

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

LONGEST_CYCLE = 4096
"""Calls that are looked at for what repeats. Where nothing does, every call is a search."""


Key = tuple[int, int]
"""The identities of an optimizer and its first parameter."""


class StepCalls:
    """Counts steps as optimizers are called.

    The calls of a step are the smallest period of the sequence of optimizers so far: `a b a b` are two steps, and so
    are `a a b a a b`. What does not repeat yet counts as one step. A given number of calls is taken as it is.
    """

    def __init__(self, per_step: int | None = None) -> None:
        self._given = per_step
        self._parties = _Parties()
        self._calls: list[int] = []
        self._cycle: list[int] = []
        self._keys: list[Key | None] = [None]
        """Keys of the cycle's calls as they were last."""
        self._place = 0
        self.steps = 0
        """Whole steps so far; after the calls of a step have changed, those that fit the new ones."""
        self.changes = 0
        """How often a call did not fit the steps before it."""

    @property
    def per_step(self) -> int:
        return self._given or len(self._cycle)

    def add(self, optimizer: Optimizer) -> bool:
        """Counts a call, and returns whether it ended a step. Between steps every line of Python counts."""
        place = self._place
        if self._given is None:
            parameter = None
            for group in optimizer.param_groups:
                if group["params"]:
                    parameter = group["params"][0]
                    break
            key = (id(optimizer), id(parameter))
            if key != self._keys[place] and not self._fits(key, optimizer, parameter):
                return self._place == 0
            self._calls.append(self._cycle[place])
        place += 1
        if place == (self._given or len(self._cycle)):
            self._place = 0
            self.steps += 1
            return True
        self._place = place
        return False

    def _fits(self, key: Key, optimizer: Optimizer, parameter: Tensor | None) -> bool:
        """Returns whether a call of another key is what the cycle expects. If it is not, the cycle is another one."""
        party = self._parties.number(optimizer, parameter)
        if self._cycle and self._cycle[self._place] == party:
            self._keys[self._place] = key
            return True
        self.changes += bool(self._cycle)
        self._calls.append(party)
        del self._calls[:-LONGEST_CYCLE]
        self._cycle, self._place, self.steps = _cycle(self._calls)
        self._keys = [None] * len(self._cycle)
        return False


def _cycle(calls: Sequence[int]) -> tuple[list[int], int, int]:
    """Returns the calls of a step, how many of them the step that has begun has had, and the number of whole steps."""
    last = calls[-1]
    for period in range(1, len(calls) // 2 + 1):
        # Compared as a whole only where it can be equal: a step may have hundreds of calls.
        if calls[-1 - period] == last and calls[-period:] == calls[-2 * period : -period]:
            return list(calls[-period:]), 0, 2
    period = smallest_period(calls)
    return list(calls[:period]), len(calls) % period, len(calls) // period


class _Parties:
    """Numbers those that step: an optimizer with its first parameter.

    The parameter, because DeepSpeed's ZeRO calls one optimizer in turn with each group of parameters. When one of them
    is gone, the number is free for the next: an optimizer that is made anew for every step keeps its number.
    """

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._free: list[int] = []
        self._new = itertools.count()

    def number(self, optimizer: Optimizer, parameter: Tensor | None) -> int:
        key = id(optimizer), id(parameter)
        if key not in self._numbers:
            self._numbers[key] = heapq.heappop(self._free) if self._free else next(self._new)
            for each in (optimizer, parameter):
                if each is not None:
                    weakref.finalize(each, self._forget, key).atexit = False
        return self._numbers[key]

    def _forget(self, key: Key) -> None:
        if (number := self._numbers.pop(key, None)) is not None:
            heapq.heappush(self._free, number)
