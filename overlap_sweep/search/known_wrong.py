"""Settings that are known to compute wrong numbers, which a search does not measure.

They are those of the backend's own list, and those that points on an identical machine have found, in this search or
before.
A wrong result is believed to be one of the library, not of an operator or a model: it counts for all settings that move
the same data in another order or at another speed, in all operators that are parallel in the same way.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from overlap_sweep import backends
from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import KnobValue, Setting
from overlap_sweep.results.identity import environment_identity, key_of
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.operator.choice import slots_in_pass, wrong_passes
from overlap_sweep.workloads.operator.config import Resolved

_OF_SCHEDULE = ("num_sm", "num_splits", "cga_size", "set_sm_margin", "comm_priority", "gemm_priority")
"""Knobs that say when and on what data moves, not how it is computed."""

_Machine = tuple[str, bool, str, str]
"""Module of the backend, whether it overlaps by cuBLASMp, precision, key of the environment."""
_Kind = frozenset[tuple[str, str, frozenset[tuple[str, KnobValue]]]]
"""The slots of a pass by phase and kind of parallelism, with their settings without schedule."""


Listed = Callable[[Resolved, str, Setting, Mapping[str, object]], str | None]
"""`known_wrong` of a backend."""


@dataclass
class KnownWrong:
    """What is known to compute wrong numbers, by machine."""

    _found: dict[_Machine, dict[_Kind, str]] = field(default_factory=dict)
    """By kind the reason, with the point that found it."""

    def learn(self, results: Iterable[Result]) -> None:
        """Remembers settings of `failed` operator points of which a single pass computed wrong numbers. Not those of a
        tolerance that the user set: others may accept such numbers."""
        for result in results:
            if getattr(result.point.workload, "tolerance", None) is not None:
                continue
            wrong = wrong_passes(result)
            settings = slots_in_pass(result.settings, min(wrong)) if len(wrong) == 1 else {}
            if settings:
                reason = f"wrong numbers in {result.name} on an identical machine"
                own = self._found.setdefault(_machine(result.point_as(Resolved), result.environment), {})
                own.setdefault(_kind(settings), reason)

    def reason(self, point: Resolved, settings: Mapping[str, Setting], environment: Mapping[str, object]) -> str | None:
        """Returns why the settings of a pass are known to compute wrong numbers in this environment, or None."""
        listed: Listed | None = getattr(backends.load(point.backend), "known_wrong", None)
        reasons = (listed(point, slot, setting, environment) for slot, setting in settings.items() if listed)
        if reason := next(filter(None, reasons), None):
            return reason
        own, kind = self._found.get(_machine(point, environment), {}), _kind(settings)
        return next((reason for wrong, reason in own.items() if wrong <= kind), None)


def _machine(point: Resolved, environment: Mapping[str, object]) -> _Machine:
    module = backends.BACKENDS[point.backend]
    return module, bool(point.with_cublasmp), point.precision, key_of(environment_identity(environment))


def _kind(settings: Mapping[str, Setting]) -> _Kind:
    found = set()
    for slot, setting in settings.items():
        operator, _, phase = slot.partition("_")
        data = frozenset((knob, value) for knob, value in setting.items() if knob not in _OF_SCHEDULE)
        found.add((space.OPERATORS[operator], phase, data))
    return frozenset(found)
