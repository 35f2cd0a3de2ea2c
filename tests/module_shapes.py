"""The four operators as they stand in transformers' own model of a config, built without memory: the truth that sizes
read from a config are held to."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

from overlap_sweep.overlap.space import OPERATORS

ROLES = {
    "qkv": r"(query_key_value|[qkv]_proj|qkv_proj|c_attn|Wqkv|W[qkv]|self\.(query|key|value))$",
    "proj": r"(o_proj|out_proj|dense|c_proj)$",
    "fc1": r"((gate|up|gate_up)_proj|fc1|fc_in|c_fc|dense_h_to_4h|intermediate\.dense|ffn\.0)$",
    "fc2": r"(down_proj|fc2|fc_out|c_proj|dense_4h_to_h|output\.dense|ffn\.2)$",
}
"""By operator the names of the linear modules that are it. What else a layer multiplies with makes it another one."""

ATTENTION = re.compile(r"(^|\.)\w*(attn|attention)\w*\.", re.IGNORECASE)


@dataclass(frozen=True)
class Operator:
    """One operator of one layer, all its matrices at once."""

    in_features: int
    out_features: int


def layers_of(config: Any) -> list[nn.Module]:
    """Of all stacks of the config's model; a stack in a layer is a part of it."""
    # Those of models for images and text have no head of their own.
    make = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    with torch.device("meta"):
        model = make.from_config(config)
    stacks = [(name, child) for name, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    outermost = [child for name, child in stacks if not any(name.startswith(f"{other}.") for other, _ in stacks)]
    layers = [layer for stack in outermost for layer in stack]
    assert layers
    return layers


def operators_of(layers: Sequence[nn.Module]) -> dict[str, set[Operator | str]]:
    """By operator, what the layers have for it: one Operator where all are alike and in the form that is swept, or in
    words something else."""
    found: dict[str, set[Operator | str]] = {name: set() for name in ROLES}
    for layer in layers:
        for name, operator in _operators(layer).items():
            found[name].add(operator)
    return found


@dataclass(frozen=True)
class Experts:
    """The experts of one layer; `shared` is the width of those that every token passes, None if it has none."""

    number: int
    width: int
    shared: int | None


def experts_of(layers: Sequence[nn.Module]) -> set[Experts]:
    """The mixtures of experts in the layers."""
    found = set()
    for layer in layers:
        sizes = {name: parameter.shape for name, parameter in layer.named_parameters()}
        routed = next((shape for name, shape in sizes.items() if name.endswith("experts.down_proj")), None)
        if routed is None:
            continue
        shared = next(
            (shape for name, shape in sizes.items() if re.search(r"shared\w*\.(down_proj|output_linear)\.w", name)),
            None,
        )
        hidden = next(
            shape
            for name, shape in sizes.items()
            if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))
        )[0]
        # Some multiply with the transpose.
        width = (routed.numel() // routed[0]) // hidden
        found.add(Experts(routed[0], width, shared[1] if shared else None))
    return found


def latent_of(layers: Sequence[nn.Module]) -> set[tuple[tuple[str, tuple[int, int]], ...]]:
    """The inputs and outputs of the linears of latent attention, by Megatron-Core's names, sorted; empty without it."""
    names = {
        **{"q_a_proj": "q_down_proj", "q_b_proj": "q_up_proj", "q_proj": "q_proj"},
        **{"kv_a_proj_with_mqa": "kv_down_proj", "kv_b_proj": "kv_up_proj", "o_proj": "proj"},
    }
    found = set()
    for layer in layers:
        linears = {name.rpartition(".")[2]: module for name, module in layer.named_modules() if ATTENTION.search(name)}
        if "kv_b_proj" in linears:
            sizes = {ours: _features(linears[theirs]) for theirs, ours in names.items() if theirs in linears}
            found.add(tuple(sorted(sizes.items())))
    return found


def norms_of(layers: Sequence[nn.Module]) -> set[str]:
    """Of the layers' own norms; empty where they are deeper."""
    names = {type(child).__name__ for layer in layers for child in layer.children()}
    return {kind for kind in ("RMSNorm", "LayerNorm") if any(kind in name for name in names)}


def _operators(layer: nn.Module) -> dict[str, Operator | str]:
    found: dict[str, Operator | str] = {}
    for operators, in_attention in ((("qkv", "proj"), True), (("fc1", "fc2"), False)):
        matrices = {
            name.removesuffix(".weight"): module
            for name, module in _matrices(layer)
            if bool(ATTENTION.search(name)) == in_attention
        }
        # By name, unless it is something else that the layer multiplies with.
        role = {
            name: next((operator for operator in operators if module and re.search(ROLES[operator], name)), None)
            for name, module in matrices.items()
        }
        other = [name for name in matrices if role[name] is None or "cross" in name or "encoder" in name]
        for operator in operators:
            modules = [module for name, module in matrices.items() if module and role[name] == operator]
            inputs = {_features(module)[0] for module in modules}
            if other or len(inputs) != 1 or (OPERATORS[operator] == "row" and len(modules) > 1):
                found[operator] = ", ".join(other or matrices) or "nothing"
            else:
                found[operator] = Operator(inputs.pop(), sum(_features(module)[1] for module in modules))
    return found


def _features(module: nn.Module) -> tuple[int, int]:
    weight: Any = module.weight
    rows, columns = weight.shape
    # GPT-2's is the transpose of everybody else's.
    return (rows, columns) if type(module).__name__ == "Conv1D" else (columns, rows)


def _matrices(layer: nn.Module) -> Iterator[tuple[str, nn.Module | None]]:
    """Every parameter that could be multiplied with, with its module where that is a linear one."""
    for name, parameter in layer.named_parameters():
        if parameter.dim() < 2:
            continue
        owner = layer.get_submodule(name.rpartition(".")[0])
        if "Norm" in type(owner).__name__:
            continue
        linear = parameter.dim() == 2 and name.endswith(".weight") and "Embedding" not in type(owner).__name__
        yield name, owner if linear and re.search("linear|conv1d", type(owner).__name__, re.IGNORECASE) else None
