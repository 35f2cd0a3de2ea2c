"""What measurements with backend=symm_mem say to those who train with PyTorch's async TP: switch it on, or not."""

from __future__ import annotations

from overlap_sweep.analysis.choice import PassChoice, default_sum_us, labels
from overlap_sweep.analysis.layers import VariantRow
from overlap_sweep.analysis.sweep import CaseAnalysis
from overlap_sweep.analysis.trials import DEFAULT, NONE
from overlap_sweep.report.numbers import as_us

BACKEND = "symm_mem"
"""Its default is async TP."""

WHAT = f"what was measured, for layers with backend={BACKEND} (layer.tp_comm_overlap_cfg)"
"""The file of settings, where others have one for Megatron-LM."""

NOT_FOR_MEGATRON = (
    f"Measured with backend={BACKEND}, the operators of PyTorch's async TP: nothing that Megatron-LM could be set to."
)
ALL_OR_NOTHING = (
    "Async TP is one switch for the whole model: what decides is the default against none, not the best of each slot"
)
HOW_TO = (
    "To switch async TP on: in torchtitan --compile.enable --compile.enable_async_tensor_parallel (before August 2026 "
    "--parallelism.enable_async_tensor_parallel); in plain torch, before torch.compile, "
    "torch._inductor.config._micro_pipeline_tp = True and, up to torch 2.13, "
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group(name of the TP group), without which nothing is "
    "fused and nothing said. A trace then shows fused_all_gather_matmul."
)


def advice(case: CaseAnalysis) -> list[str]:
    """One sentence for everything to know before async TP is switched on, those of each TP size together."""
    of_sizes = [sentence for tp_size in case.tp_sizes for sentence in advice_at(case, tp_size)]
    return [*of_sizes, HOW_TO] if of_sizes else []


def advice_at(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Whether to switch it on at this TP size, and what each operator has of it; nothing where it was not measured."""
    plan = case.plans.get(tp_size)
    choices = [choice for choice in plan.choices if choice.default] if plan else []
    row = _on_the_layer(case, tp_size)
    lines = []
    if row:
        lines.append(f"TP={tp_size}: {ALL_OR_NOTHING}. On the whole layer it is {_judged(row)}.")
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


def _on_the_layer(case: CaseAnalysis, tp_size: int) -> VariantRow | None:
    """Async TP beside no overlap, if a tuner ran both on the whole layer."""
    outcome = case.outcomes.get(tp_size)
    trial = outcome.trial if outcome else None
    if not trial or not trial.layer or trial.layer.reference != NONE:
        return None
    row = trial.rows.get(DEFAULT)
    return None if row is None or row.launch_bound else row


def _judged(row: VariantRow) -> str:
    compared = row.to_reference
    return f"{compared.in_words(' than none')}: {'switch it on' if compared.faster else 'leave it off'}"


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
