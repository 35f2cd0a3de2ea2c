"""The shapes of a model's parallel linear operators and of their kernels, and which layers have and overlap them.

Supported are dense layers: one projection from the hidden state to all heads' queries, keys and values, one back, and
one MLP. `model_forms` reads a model's sizes.

What Megatron-Core overlaps is as in its versions 0.16.1, 0.19.1 and 0.20.0: core/extensions/transformer_engine.py
(`TELinear`), transformer/multi_latent_attention.py, transformer/transformer_layer.py, transformer/moe/experts.py and
shared_experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from overlap_sweep.config import OF_EXPERTS, Model, ModelLayers, ResolvedModel, TensorParallelPoint, known
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.space import LAYER_KINDS, OPERATORS

M = TypeVar("M", bound=Model)

SIZES_OF = {
    **dict.fromkeys(("qkv", "proj"), ("num_kv_heads", "head_dim")),
    **dict.fromkeys(("fc1", "fc2"), ("ffn_hidden_size", "gated_mlp")),
}
"""Sizes that an operator needs besides those of the whole model."""
ATTENTION, MLP = LAYER_KINDS["multihead_attention"], LAYER_KINDS["layernorm_mlp"]
WHOLE = "the whole layer"
_PARTS = {"multihead_attention": "the attention", "layernorm_mlp": "the MLP"}

KERNELS = {
    "ag_gemm": "all-gather of the input, then the GEMM",
    "gemm_rs": "the GEMM, then the reduce-scatter of its output",
    "gemm_ar": "the GEMM, then the all-reduce of its output",
}

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Kernels of workload=kernel that are a collective alone, beside a GEMM that has nothing to do with it."""


def bus_bytes(collective: str, size_bytes: float, ranks: int) -> float:
    """Returns the fewest bytes that a rank can send for a buffer of this size: that of all ranks together, or what an
    all-reduce or all-to-all has on each. Over the time it is what nccl-tests call bus bandwidth."""
    return size_bytes * (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)


CUSTOM = "custom"
"""Stands for a model's name if the sizes were given."""

SEQUENTIAL = "sequential"
"""The baseline: torch's GEMM and NCCL (or gloo), one after the other."""
GEMM_ONLY = "gemm_only"
COMM_ONLY = "comm_only"
BASELINES = (SEQUENTIAL, GEMM_ONLY, COMM_ONLY)
"""Measured with every implementation."""

_INPUT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_OUTPUT_BYTES = {**_INPUT_BYTES, "fp8": 2}
"""The output of an FP8 GEMM is bf16."""
PRECISION_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
"""Our names of the input types, by torch's."""


@dataclass(frozen=True)
class LinearShape:
    """One linear operator `y = x W^T + b` under tensor and sequence parallelism.

    Column parallel: x [tokens / tp, in] is gathered to [tokens, in], W is [out / tp, in], y [tokens, out / tp].
    Row parallel: x is [tokens, in / tp], W [out, in / tp], and y is reduced and scattered to [tokens / tp, out].
    """

    parallel: str
    tokens: int
    in_features: int
    out_features: int
    tp_size: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        if self.parallel == "column":
            return self.out_features // self.tp_size, self.in_features
        return self.out_features, self.in_features // self.tp_size

    @property
    def input_shape(self) -> tuple[int, int]:
        rows = self.tokens // self.tp_size if self.parallel == "column" else self.tokens
        return rows, self.weight_shape[1]

    @property
    def output_shape(self) -> tuple[int, int]:
        rows = self.tokens // self.tp_size if self.parallel == "row" else self.tokens
        return rows, self.weight_shape[0]

    def local(self) -> LinearShape:
        """Returns one rank's GEMMs as an operator without communication."""
        out_features, in_features = self.weight_shape
        return replace(self, in_features=in_features, out_features=out_features, tp_size=1)

    def unsharded(self) -> LinearShape:
        return replace(self, tp_size=1)

    def refusal(self) -> str | None:
        """Returns why these sizes cannot be cut into `tp_size` equal parts, or None."""
        cut = ("outputs", self.out_features) if self.parallel == "column" else ("inputs", self.in_features)
        for dimension, count in (cut, ("tokens", self.tokens)):
            if count % self.tp_size:
                return f"{count} {dimension} are not divisible by tp_size={self.tp_size}"
        return None


class KernelPoint(TensorParallelPoint, Protocol):
    """A completed point of workload=kernel."""

    kernel: str
    m: int
    n: int
    k: int
    num_sm: int | None


@dataclass(frozen=True)
class KernelShape:
    """Global shape of `y = x W^T`: x [m, k], W [n, k], y [m, n].

    ag_gemm: a rank holds x [m / tp, k] and W [n / tp, k], gathers x, and computes y [m, n / tp].
    gemm_rs: a rank holds x [m, k / tp] and W [n, k / tp], and gets its part y [m / tp, n] of the sum over the ranks.
    gemm_ar: the same, but every rank gets the whole sum y [m, n].
    COLLECTIVES: the GEMM beside is each rank's own, of x [m, k] and W [n, k].
    """

    kernel: str
    m: int
    n: int
    k: int
    tp_size: int

    @classmethod
    def of(cls, point: KernelPoint) -> KernelShape:
        """Returns the shape of a resolved point's kernel."""
        return cls(point.kernel, point.m, point.n, point.k, point.tp_size)

    @property
    def gathers(self) -> bool:
        return self.kernel == "ag_gemm"

    @property
    def linear(self) -> LinearShape:
        """Returns the shape as that of an operator, whose output is scattered unless the input is gathered."""
        return LinearShape("column" if self.gathers else "row", self.m, self.k, self.n, self.tp_size)

    @property
    def output_shape(self) -> tuple[int, int]:
        return (self.m, self.n) if self.kernel == "gemm_ar" else self.linear.output_shape

    @property
    def gemm_shape(self) -> tuple[int, int, int]:
        """Returns m, n, k of one rank's GEMM."""
        return self.m, *self.linear.weight_shape

    @property
    def flops(self) -> int:
        """Returns one rank's floating-point operations, counting multiplications and additions."""
        return 2 * self.m * self.n * self.k // self.tp_size

    def link_bytes(self, precision: str) -> float:
        """Returns the fewest bytes that a rank can send and receive: (tp - 1) / tp of the tensor, twice that for an
        all-reduce. nccl-tests' bus bandwidth counts the same."""
        whole = self.m * (self.k * _INPUT_BYTES[precision] if self.gathers else self.n * _OUTPUT_BYTES[precision])
        return whole * (self.tp_size - 1) / self.tp_size * (2 if self.kernel == "gemm_ar" else 1)

    def refusal(self) -> str | None:
        """Returns why these sizes cannot be cut into `tp_size` equal parts, or None."""
        for name in {"ag_gemm": "mn", "gemm_rs": "km", "gemm_ar": "k"}.get(self.kernel, ""):
            if getattr(self, name) % self.tp_size:
                return f"{self.kernel}: {name}={getattr(self, name)} is not divisible by tp_size={self.tp_size}"
        return None


def mixed(model: ResolvedModel) -> str | None:
    """Returns in how many of its layers the model has experts next to dense ones, in a sentence, or None."""
    number, dense = _layers(model)
    if not dense or dense == number:
        return None
    others = f"{number - dense} of {number}" if number else "other"
    return f"{model.name} has experts in {others} layers; give model.ffn_hidden_size to make all layers dense"


def _layers(model: ResolvedModel) -> tuple[int | None, int | None]:
    """Returns the number of layers, and how many have a dense MLP; None and 0 if all are alike."""
    layers = model.layers or ModelLayers()
    return layers.number, layers.dense_mlp


def linear_shape(model: ResolvedModel, operator: str, tokens: int, tp_size: int) -> LinearShape:
    """Returns the shape of one operator of the model. UserError if it has no such operator."""
    if lacking := lacks(model, [operator]):
        raise UserError(f"{lacking}.")
    hidden, heads = known(model.hidden_size), known(model.num_attention_heads)
    if operator == "qkv":
        sizes = hidden, (heads + 2 * known(model.num_kv_heads)) * known(model.head_dim)
    elif operator == "proj":
        # Given, the head's width makes latent attention a dense one.
        sizes = heads * known(model.head_dim or model.v_head_dim), hidden
    elif operator == "fc1":
        sizes = hidden, known(model.ffn_hidden_size) * (2 if model.gated_mlp else 1)
    else:
        sizes = known(model.ffn_hidden_size), hidden
    return LinearShape(OPERATORS[operator], tokens, *sizes, tp_size)


def operator_shape(point: TensorParallelPoint, operator: str) -> LinearShape:
    """Returns the shape of one operator of a resolved point. UserError if its model has no such operator."""
    return linear_shape(point.model, operator, point.workload.tokens, point.tp_size)


def lacks(model: ResolvedModel, operators: Collection[str] = tuple(OPERATORS)) -> str | None:
    """Returns why the model lacks one of these operators and what to do, or None."""
    instead = model.instead
    for operator in operators:
        if operator in instead:
            left = ",".join(name for name in OPERATORS if name not in instead)
            sweep = f"sweep operator={left}, or " if left and len(operators) == 1 else ""
            sizes = " and ".join(f"model.{name}" for name in SIZES_OF[operator])
            return f"{operator}: {instead[operator]}; {sweep}give {sizes}"
    return None


def refusal(model: ResolvedModel, operator: str, tokens: int, tp_size: int) -> str | None:
    """Returns why the operator cannot run at this TP size, or None."""
    if lacking := lacks(model, [operator]):
        return lacking
    heads = known(model.num_attention_heads)
    if operator in ATTENTION and heads % tp_size:
        return f"{operator}: {heads} attention heads are not divisible by tp_size={tp_size}"
    if operator == "qkv":
        kv_heads = known(model.num_kv_heads)
        if heads % kv_heads:
            return f"qkv: {heads} attention heads are not divisible by {kv_heads} key-value heads"
        if kv_heads % tp_size:
            return f"qkv: {kv_heads} key-value heads are not divisible by tp_size={tp_size}"
    reason = linear_shape(model, operator, tokens, tp_size).refusal()
    if not reason and operator == "fc1" and known(model.ffn_hidden_size) % tp_size:
        # Both halves of a gated MLP are cut.
        reason = f"ffn_hidden_size={model.ffn_hidden_size} is not divisible by tp_size={tp_size}"
    return f"{operator}: {reason}" if reason else None


def layer_refusal(model: ResolvedModel, kind: str, micro_batch_size: int, tokens: int, tp_size: int) -> str | None:
    """Returns why a layer of this kind cannot be cut for this TP size, or which operator the model lacks, or None."""
    if tokens % (micro_batch_size * tp_size):
        return (
            f"workload.tokens={tokens} is not divisible by layer.micro_batch_size={micro_batch_size} "
            f"times tp_size={tp_size}"
        )
    operators = LAYER_KINDS[kind]
    if lacking := lacks(model, operators):
        return lacking
    return next(filter(None, (refusal(model, operator, tokens, tp_size) for operator in operators)), None)


def latent_projections(model: ResolvedModel) -> dict[str, tuple[int, int]]:
    """Returns the inputs and outputs of what latent attention has instead of `qkv`, by Megatron-Core's names; empty
    without latent attention. Every rank has the down-projections, and the `*up_proj` and `q_proj` are column parallel.
    """
    rank = model.kv_lora_rank
    if not rank or "qkv" not in model.instead:
        return {}
    hidden, heads = known(model.hidden_size), known(model.num_attention_heads)
    rotary, head = known(model.qk_pos_emb_head_dim), known(model.qk_head_dim)
    queries = heads * (head + rotary)
    query_projections = {"q_proj": (hidden, queries)}
    if q_rank := model.q_lora_rank:
        query_projections = {"q_down_proj": (hidden, q_rank), "q_up_proj": (q_rank, queries)}
    return {
        **query_projections,
        "kv_down_proj": (hidden, rank + rotary),
        "kv_up_proj": (rank, heads * (head + known(model.v_head_dim))),
    }


def short_name(model: Model) -> str:
    """Returns the model's name without folders."""
    return model.name.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]


_TITLES = {"qwen3_30b_a3b": "Qwen3 30B-A3B", "mixtral_8x7b": "Mixtral 8x7B", "deepseek_v3": "DeepSeek-V3"}
_FAMILIES = {"llama3": "Llama-3", "gpt3": "GPT-3", "qwen3": "Qwen3"}


def title_of(name: str) -> str:
    """Returns a title such as `Llama-3 8B` for `llama3_8b`; names that are not in conf/model are returned unchanged."""
    ours = re.fullmatch(r"(llama3|gpt3|qwen3)_([0-9_]+)b", name)
    return f"{_FAMILIES[ours[1]]} {ours[2].replace('_', '.')}B" if ours else _TITLES.get(name, name)


def without_experts(model: M) -> M:
    """Returns the resolved model without the sizes of its experts, for points that run none: they measure the same."""
    unset: dict[str, Any] = dict.fromkeys(OF_EXPERTS)
    return replace(model, **unset)


def part(kind: str) -> str:
    """Returns a kind of layer in words: `the whole layer`, `the attention`."""
    return _PARTS.get(kind, WHOLE)


def not_overlapped(model: ResolvedModel, operator: str) -> str | None:
    """Returns why Megatron-Core does not overlap an operator of the model, in a sentence, or None.

    A linear whose name is not one of the four operators' turns `tp_comm_overlap` of the whole configuration off. Those
    of latent attention have such names, and are built after the first layer's proj and before its MLP.
    """
    instead = model.instead.get(operator)
    latent = latent_projections(model)
    if instead and operator in MLP:
        return f"{operator}: {instead}, and Megatron-Core runs the experts' GEMMs without overlap"
    if instead and latent:
        sizes = ", ".join(f"{name} {inputs} -> {outputs}" for name, (inputs, outputs) in latent.items())
        return f"{operator}: {instead} ({sizes}), and Megatron-Core overlaps none of these"
    if instead:
        return f"{operator}: {instead}"
    if not latent:
        return None
    shape = linear_shape(model, operator, 1, 1)
    sizes = f"({shape.in_features} -> {shape.out_features})"
    but = " except in the first layer of each pipeline stage" if operator in ATTENTION else ""
    return (
        f"{operator}: Megatron-Core does not overlap it {sizes}{but}, because building multi-head latent attention "
        "turns its tp_comm_overlap off"
    )


def layers_with(model: ResolvedModel) -> dict[str, int]:
    """Returns the operators of the model, each with the number of layers that have it; with 1 if all layers
    are alike or their number is unknown."""
    number, dense = _layers(model)
    if not number:
        number, dense = 1, 1
    return {operator: number if operator in ATTENTION else dense or 0 for operator in _operators_of(model)}


def kind_to_prove(model: ResolvedModel) -> str | None:
    """Returns the kind of layer on which settings of the model's operators are proven: what most of its layers have of
    a dense one. None if that is less than attention or MLP."""
    operators, (number, dense) = _operators_of(model), _layers(model)
    if operators == tuple(OPERATORS) and number and 2 * (dense or 0) < number:
        operators = ATTENTION
    return next((kind for kind, own in LAYER_KINDS.items() if own == operators and len(own) > 1), None)


def _operators_of(model: ResolvedModel) -> tuple[str, ...]:
    return tuple(operator for operator in OPERATORS if operator not in model.instead)


def applies_to(model: ResolvedModel, operators: Collection[str]) -> list[str]:
    """Returns which layers settings of these operators apply to, in sentences; empty if all layers are alike."""
    if not model.layers:
        return []
    number, dense = _layers(model)
    found = []
    for part_name, own, count in (("attention", ATTENTION, number), ("dense MLP", MLP, dense)):
        if measured := ", ".join(operator for operator in own if operator in operators):
            which = "all" if count == number else f"{count} of" if number else str(count)
            layers_in_words = f"{which} {f'{number} ' if number else ''}layers"
            found.append(f"Applies to the {part_name} ({measured}) of {layers_in_words}.")
    if dense != number:
        found.append("Megatron-Core runs the experts' GEMMs without overlap, whatever the file has.")
        if width := model.layers.shared_expert:
            found.append(
                "Shared experts take the slots fc1_fprop, fc2_fprop and fc2_dgrad, which were not measured with their "
                f"width of {width}; Megatron-LM's --moe-shared-expert-overlap takes them out."
            )
    if "linear attention" in model.instead.get("qkv", ""):
        found.append("Linear attention takes the slots of fc1 and fc2 too, which were not measured with its sizes.")
    return found
