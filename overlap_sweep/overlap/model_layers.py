"""Says which layers of a model a tp_comm_overlap_cfg applies to, and which operators Megatron-Core does not overlap.

As in Megatron-Core 0.16.1, 0.19.1 and 0.20.0: core/extensions/transformer_engine.py (`TELinear`), transformer/
multi_latent_attention.py, transformer/transformer_layer.py, transformer/moe/experts.py and shared_experts.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from overlap_sweep.overlap import models
from overlap_sweep.overlap.space import OPERATORS

ATTENTION, MLP = ("qkv", "proj"), ("fc1", "fc2")
_KINDS = {ATTENTION: "multihead_attention", MLP: "layernorm_mlp", (*ATTENTION, *MLP): "transformer_layer"}
"""Kinds of layer by their operators."""
WHOLE = "the whole layer"
_PARTS = {"multihead_attention": "the attention", "layernorm_mlp": "the MLP"}


def part(kind: str) -> str:
    """Returns a kind of layer in words: `the whole layer`, `the attention`."""
    return _PARTS.get(kind, WHOLE)


def not_overlapped(model: Mapping[str, Any], operator: str) -> str | None:
    """Returns why Megatron-Core does not overlap an operator of the resolved model, in a sentence, or None.

    A linear whose name is not one of the four operators' turns `tp_comm_overlap` of the whole configuration off. Those
    of latent attention have such names, and are built after the first layer's proj and before its MLP.
    """
    instead = (model.get("instead") or {}).get(operator)
    latent = models.latent_projections(model)
    if instead and operator in MLP:
        return f"{operator}: {instead}, and Megatron-Core runs the experts' GEMMs without overlap"
    if instead and latent:
        sizes = ", ".join(f"{name} {inputs} -> {outputs}" for name, (inputs, outputs) in latent.items())
        return f"{operator}: {instead} ({sizes}), and Megatron-Core overlaps none of these"
    if instead:
        return f"{operator}: {instead}"
    if not latent:
        return None
    shape = models.linear_shape(model, operator, 1, 1)
    sizes = f"({shape.in_features} -> {shape.out_features})"
    but = " except in the first layer of each pipeline stage" if operator in ATTENTION else ""
    return (
        f"{operator}: Megatron-Core does not overlap it {sizes}{but}, because building multi-head latent attention "
        "turns its tp_comm_overlap off"
    )


def layers_with(model: Mapping[str, Any]) -> dict[str, int]:
    """Returns the operators of the resolved model, each with the number of layers that have it; with 1 if all layers
    are alike or their number is unknown."""
    layers = model.get("layers") or {}
    number = layers.get("number") or 1
    dense = layers["dense_mlp"] if layers.get("number") else 1
    return {operator: number if operator in ATTENTION else dense for operator in _operators_of(model)}


def kind_to_prove(model: Mapping[str, Any]) -> str | None:
    """Returns the kind of layer on which settings of the resolved model's operators are proven: what most of its layers
    have of a dense one. None if that is less than attention or MLP."""
    operators, layers = _operators_of(model), model.get("layers") or {}
    if operators == tuple(OPERATORS) and layers.get("number") and 2 * layers["dense_mlp"] < layers["number"]:
        operators = ATTENTION
    return _KINDS.get(operators)


def _operators_of(model: Mapping[str, Any]) -> tuple[str, ...]:
    instead = model.get("instead") or {}
    return tuple(operator for operator in OPERATORS if operator not in instead)


def applies_to(model: Mapping[str, Any], operators: Collection[str]) -> list[str]:
    """Returns which layers settings of these operators apply to, in sentences; empty if all layers are alike."""
    layers = model.get("layers")
    if not layers:
        return []
    number, dense = layers["number"], layers["dense_mlp"]
    found = []
    for part_name, own, count in (("attention", ATTENTION, number), ("dense MLP", MLP, dense)):
        measured = ", ".join(operator for operator in own if operator in operators)
        if measured:
            found.append(f"Applies to the {part_name} ({measured}) of {_layers_in_words(count, number)}.")
    if dense != number:
        found.append("Megatron-Core runs the experts' GEMMs without overlap, whatever the file has.")
        if width := layers["shared_expert"]:
            found.append(
                "Shared experts take the slots fc1_fprop, fc2_fprop and fc2_dgrad, which were not measured with their "
                f"width of {width}; Megatron-LM's --moe-shared-expert-overlap takes them out."
            )
    if "linear attention" in (model.get("instead") or {}).get("qkv", ""):
        found.append("Linear attention takes the slots of fc1 and fc2 too, which were not measured with its sizes.")
    return found


def _layers_in_words(count: int | None, number: int | None) -> str:
    if count == number:
        return f"all {number} layers" if number else "all layers"
    return f"{count} of {number} layers" if number else f"{count} layers"
