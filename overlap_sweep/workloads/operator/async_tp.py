"""What measurements with backend=symm_mem say to those who train with PyTorch's async TP: switch it on, or not."""

from __future__ import annotations

from overlap_sweep.overlap.overlap_cfg import ASYNC_TP_BACKEND, DEFAULT, NONE
from overlap_sweep.report.numbers import as_us
from overlap_sweep.workloads.layer.answer import VariantRow
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, labels
from overlap_sweep.workloads.operator.proof import Outcome, advised

BACKEND = ASYNC_TP_BACKEND

WHAT = f"what was measured, for layers with backend={BACKEND} (layer.tp_comm_overlap_cfg)"
"""The file of settings, where others have one for Megatron-LM."""

NOT_FOR_MEGATRON = (
    f"Measured with backend={BACKEND}, the operators of PyTorch's async TP: nothing that Megatron-LM could be set to."
)
ALL_OR_NOTHING = (
    "Async TP is one switch for the whole model: what decides is all of it against none, not the best of each slot"
)
HOW_TO = (
    "To switch async TP on in torchtitan: --compile.enable --compile.enable_async_tensor_parallel (before August 2026 "
    "--parallelism.enable_async_tensor_parallel).",
    "In plain torch, before torch.compile: torch._inductor.config._micro_pipeline_tp = True and "
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group(name of the TP group), which torch 2.13 calls "
    "deprecated and unnecessary, but without which the compile pass fuses nothing and says nothing; a trace shows "
    "fused_all_gather_matmul where it does.",
)
"""A sentence each."""


def verdict(outcome: Outcome | None, with_interval: bool = True) -> str:
    """`switch async TP on, 9.4% faster than none`, where the whole layer says so; empty where that does not tell."""
    row = _on_the_layer(outcome) if outcome else None
    if row is None:
        return ""
    label = DEFAULT if row.to_reference.faster else NONE
    return f"{advised(label, BACKEND)}, {'' if label == DEFAULT else 'it is '}" + row.to_reference.in_words(
        " than none", with_interval=with_interval
    )


def how_to(outcome: Outcome) -> list[str]:
    """Nothing where it is to be left off, or that is not known."""
    row = _on_the_layer(outcome)
    return list(HOW_TO) if row and row.to_reference.faster else []


def advice(case: CaseAnalysis) -> list[str]:
    """One sentence for everything to know before async TP is switched on, those of each TP size together."""
    of_sizes = [sentence for tp_size in case.tp_sizes for sentence in advice_at(case, tp_size)]
    return [*of_sizes, *HOW_TO] if of_sizes else []


def advice_at(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Whether to switch it on at this TP size, and what each operator has of it; nothing where it was not measured."""
    plan = case.plans.get(tp_size)
    choices = [choice for choice in plan.choices if choice.default] if plan else []
    lines = []
    if said := verdict(case.outcomes.get(tp_size)):
        lines.append(f"TP={tp_size}: {ALL_OR_NOTHING}. The whole layer says: {said}.")
    elif choices:
        lines.append(f"TP={tp_size}: {ALL_OR_NOTHING}. {_judged_by_operators(choices)}")
    if choices:
        speedups = ", ".join(f"{choice.label} {_speedup(choice):.2f}x" for choice in choices)
        lines.append(f"TP={tp_size}: async TP against no overlap, operator by operator: {speedups}.")
    return lines


def beside_setting(choice: PassChoice) -> str:
    """To be appended to what is said of a pass; empty where async TP was not measured."""
    if not choice.default:
        return ""
    return f"; async TP, for the whole model or not at all, is {_speedup(choice):.2f}x no overlap here"


def _on_the_layer(outcome: Outcome) -> VariantRow | None:
    """Async TP beside no overlap, if a tuner ran both on the whole layer."""
    trial = outcome.trial
    if not trial or not trial.point or trial.point.config["backend"] != BACKEND:
        return None
    if not trial.layer or trial.layer.reference != NONE:
        return None
    row = trial.rows.get(DEFAULT)
    return None if row is None or row.launch_bound else row


def _judged_by_operators(choices: list[PassChoice]) -> str:
    default_us = default_sum_us(choices)
    none_us = sum(choice.none.time_us for choice in choices)
    assert default_us is not None
    sums = f"Over {', '.join(labels(choices))} it takes {as_us(default_us)} us, without overlap {as_us(none_us)}"
    if default_us < none_us:
        return f"{sums}: prove it on the whole layer, which the tuner does, before you switch it on."
    return f"{sums}: leave it off."


def _speedup(choice: PassChoice) -> float:
    assert choice.default
    return choice.none.time_us / choice.default.time_us
