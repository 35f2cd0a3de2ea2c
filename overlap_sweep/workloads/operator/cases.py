"""The answers for operators that may be compared: what each slot is to be given, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.provenance import GpuConditions
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice
from overlap_sweep.workloads.operator.drift import Drift
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Unproven
from overlap_sweep.workloads.operator.repeats import Repeats
from overlap_sweep.workloads.operator.scaling import Scaling
from overlap_sweep.workloads.operator.switches import Plan, SwitchAdvice, UnmeasuredSlot, unmeasured_slots


@dataclass(frozen=True)
class SlotAnswer:
    """What one slot is to be given."""

    slot: str
    setting: space.Setting | None
    """The best for its pass; None: no overlap."""
    choice: PassChoice
    """The decision about its pass: its times are those of all slots of the pass together."""
    final: Candidate
    """What the pass will run under Megatron-Core's switches: the choice, unless they don't allow it."""

    @property
    def tried(self) -> bool:
        return self.slot in self.choice.tried_slots

    @property
    def final_setting(self) -> space.Setting | None:
        """What goes into the YAML."""
        return self.final.settings.get(self.slot)

    @property
    def phase(self) -> str:
        return self.slot.partition("_")[2]


@dataclass(frozen=True)
class CaseAnalysis:
    """The answers for points that may be compared with each other."""

    case: Case
    points: list[Point]
    plans: dict[int, Plan]
    """By TP size, from 2 on."""
    scaling: Scaling
    drift: list[Drift]
    repeats: list[Repeats]
    conditions: GpuConditions | None
    launch_bound: list[str]
    """Points whose times say nothing about the device."""
    outcomes: dict[int, Outcome]
    """By TP size, of those that a tuner measured: what it proved on the whole layer, or why it proved nothing."""
    superseded: list[Outcome]
    """The other outcomes of TP sizes that were tuned more than once."""

    @property
    def proofs(self) -> dict[int, Proof]:
        """By TP size."""
        return {tp_size: found for tp_size, found in self.outcomes.items() if isinstance(found, Proof)}

    @property
    def unproven(self) -> dict[int, Unproven]:
        """By TP size."""
        return {tp_size: found for tp_size, found in self.outcomes.items() if isinstance(found, Unproven)}

    @property
    def tp_sizes(self) -> list[int]:
        """Those that there is a configuration for, from 2 on."""
        return sorted({*self.plans, *self.proofs})

    def config(self, tp_size: int) -> OverlapConfig:
        """What to train with: what was proven, or where the best of each slot was refuted what is left, or else the
        best of each slot, one by one."""
        return self.decided(tp_size) or self.plans[tp_size].config

    def decided(self, tp_size: int) -> OverlapConfig | None:
        """What the whole layer said; None where it said nothing."""
        if tp_size in self.proofs:
            return self.proofs[tp_size].config
        return self.unproven[tp_size].instead if tp_size in self.unproven else None

    def switches(self, tp_size: int) -> list[SwitchAdvice]:
        """The switches of that configuration that must not keep their defaults."""
        planned = {advice.name: advice for advice in self.plans[tp_size].switches} if tp_size in self.plans else {}
        decided = self.decided(tp_size)
        if decided is None:
            return list(planned.values())
        advices = []
        what = self.proofs[tp_size].recommended if tp_size in self.proofs else "what could be"
        for name, value in decided.switches.items():
            if value != SWITCH_DEFAULTS[name]:
                known = planned.get(name)
                as_proven = SwitchAdvice(name, value, f"as {what} was measured")
                advices.append(known if known and known.value == value else as_proven)
        return advices

    def unmeasured(self, tp_size: int) -> list[UnmeasuredSlot]:
        """The slots that no point of an operator overlapped, and what that configuration makes of them."""
        tried = {answer.slot for answer in self.slots(tp_size) if answer.tried}
        return unmeasured_slots(self.config(tp_size), tried, self.decided(tp_size) is not None)

    def slots(self, tp_size: int) -> list[SlotAnswer]:
        """Every configurable slot of the operators measured at this TP size, tried or not."""
        if tp_size not in self.plans:
            return []
        return [
            SlotAnswer(slot, choice.chosen.settings.get(slot), choice, final)
            for choice, final in zip(self.plans[tp_size].choices, self.plans[tp_size].finals, strict=True)
            for phase in space.PHASES
            if space.PASS_OF_PHASE[phase] == choice.pass_name and space.methods_of(choice.operator, phase)
            for slot in [space.slot(choice.operator, phase)]
        ]
