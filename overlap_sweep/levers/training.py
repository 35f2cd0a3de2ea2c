"""Says which levers apply to a training, from its trace, its command, or both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from overlap_sweep.levers import Lever, programs, shells


@dataclass(frozen=True)
class Training:
    """A training, as far as its trace and its command show it."""

    libraries: Collection[str] | None = None
    """Names of diagnosis.facts.LIBRARIES that a trace shows; None without a trace."""
    words: Sequence[str] = ()
    """The command's."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that say which programs the command starts."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Options that set the same as a lever, by its name."""
    on_cpu: bool = False
    """Whether it is known to have run without GPUs."""
    override: bool = False
    """Whether levers may change what the command sets itself, too."""

    def applies(self, name: str, lever: Lever) -> str:
        """Returns yes, or what it depends on, or no and why."""
        if other := self.elsewhere.get(name):
            return f"no: {other} sets the same"
        has_trace = self.libraries is not None
        if lever.gpu and self.on_cpu:
            why = "the trace has none" if has_trace else "it ran with runtime.device=cpu"
            return f"no: it has a meaning on GPUs, and {why}"
        if self.libraries is not None and lever.of and not {*self.libraries} & {*lever.of}:
            return f"no: the trace shows no {' or '.join(lever.of)}"
        if self.libraries is not None and {*self.libraries} & {*lever.there}:
            return f"no: the trace shows that it is set ({', '.join(lever.there)})"
        if lever.way == "argument":
            return self._of_program(lever)
        needed = [] if has_trace else [" or ".join(lever.of)] * bool(lever.of) + ["GPUs"] * lever.gpu
        return f"if it uses {' and '.join(needed)}" if needed else "yes"

    def _of_program(self, lever: Lever) -> str:
        if not self.words:
            return f"if it uses {programs.PROGRAMS[lever.program].title}"
        changes = ({"it": programs.change(lever, value)} for value in lever.values)
        reasons = (shells.refusal(one, self.words, self.texts, override=self.override) for one in changes)
        reason = next(filter(None, reasons), "")
        return f"no: {reason.removeprefix('it cannot be applied: ')}" if reason else "yes"
