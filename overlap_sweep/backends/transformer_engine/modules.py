"""A parallel linear operator and whole layers made of Transformer Engine's modules, in its precisions.

FP8 scales stay what they are once they fit, but in layers that train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.quantization import FP8GlobalState, FP8GlobalStateManager

from overlap_sweep.backends import ParallelLayer, ParallelLinear, Purpose
from overlap_sweep.backends.torch.communicator import SilentGroup
from overlap_sweep.backends.transformer_engine import MEGATRON_NAMES, Switches, operator_switches, userbuffers
from overlap_sweep.backends.transformer_engine.userbuffers import Userbuffers
from overlap_sweep.measure.ranks import Ranks, parallel_groups
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import LinearShape, operator_shape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig

CALIBRATION_STEPS = {"fp8_delayed": 3, "fp8_current": 1}
"""Delayed scaling runs its first step with scales of 1, the second with those of the first step's weights and
activations; the gradients' come one step later. Every FP8 layer quantises its weights at least once."""

MakeModule = Callable[
    [Mapping[str, Any], LinearShape, dist.ProcessGroup | None, Switches], tuple[torch.nn.Module, Callable[..., Tensor]]
]
"""(point, shape, tensor-parallel group, switches) -> the module, and its forward(x, first) -> output.

`first` has FP8 weights quantised; later calls use them again, as in the microbatches of a training step."""


def autocast(precision: str, group: dist.ProcessGroup | None) -> AbstractContextManager[Any]:
    """`group` is the one over which delayed scaling agrees on its scales; None for a rank alone."""
    recipe: Recipe
    if precision == "fp8_delayed":
        # Without a group the library would take the default one, in which nobody else may be reducing.
        recipe = DelayedScaling(reduce_amax=group is not None)
    elif precision == "fp8_current":
        recipe = Float8CurrentScaling()
    else:
        return nullcontext()
    context: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return context


def calibrate(precision: str, step: Callable[[], object]) -> None:
    """Run `step`, a forward and backward that quantises the weights, until they and the scales are what they should be.

    Two layers calibrated on the same inputs compute with the same scales.
    """
    # A layer that trained in an earlier point is not to be updated with this one.
    FP8GlobalStateManager.reset()
    for _ in range(CALIBRATION_STEPS.get(precision, 0)):
        step()


def freeze() -> None:
    """Leave all scales as they are.

    No step updates them any more or reduces them over the ranks: Megatron-LM does that once for a whole model, so it is
    no part of one operator's time. Layers enter themselves for updates in their first forward only, and the library
    forgets them here.
    """
    FP8GlobalStateManager.reset()


def kept_apart() -> Callable[[], None]:
    """-> what to call before each forward of one layer, so that only its own scales are updated with it.

    The library updates those of every layer in the process at once, as those of one model.
    """
    state = FP8GlobalState()

    def select() -> None:
        FP8GlobalStateManager.quantization_state = state

    return select


def build(
    point: Mapping[str, Any],
    purpose: Purpose,
    ranks: Ranks,
    parameters: Mapping[str, Tensor],
    make_module: MakeModule,
) -> ParallelLinear:
    shape = operator_shape(point, point["operator"])
    if purpose == "tp1":
        shape = shape.unsharded()
    group = None
    if shape.tp_size > 1:
        group = silent_group(ranks) if purpose == "floor" else dist.group.WORLD
    settings = space.settings(point) if purpose == "point" else {}
    module, module_forward = make_module(point, shape, group, operator_switches(point["operator"], purpose, settings))
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    assert {name for name, _ in module.named_parameters()} == set(parameters)

    def forward(x: Tensor, first: bool = False) -> Tensor:
        with autocast(point["precision"], group):
            return module_forward(x, first)

    linear = ParallelLinear(forward, parameters, shape.input_shape, shape.output_shape)
    seed = point["workload"]["seed"] + ranks.rank
    calibrate(point["precision"], _step(linear, partial(forward, first=True), seed))
    freeze()
    return linear


def _step(linear: ParallelLinear, forward: Callable[[Tensor], Tensor], seed: int) -> Callable[[], object]:
    """A forward and backward on random input."""

    def step() -> object:
        weight = linear.parameters["weight"]
        generator = torch.Generator(weight.device).manual_seed(seed)
        draw: dict[str, Any] = {"generator": generator, "device": weight.device, "dtype": weight.dtype}
        x = torch.randn(linear.input_shape, **draw).requires_grad_()
        gradient = torch.randn(linear.output_shape, **draw)
        return torch.autograd.grad(forward(x), (x, *linear.parameters.values()), gradient)

    return step


@cache
def silent_group(ranks: Ranks) -> SilentGroup:
    return SilentGroup(ranks.rank, ranks.world_size)


def transformer_engine_module(
    point: Mapping[str, Any], shape: LinearShape, group: dist.ProcessGroup | None, switches: Switches
) -> tuple[torch.nn.Module, Callable[..., Tensor]]:
    """`te.LayerNormLinear` for column-parallel operators, `te.Linear` for row-parallel ones, as in its layers."""
    model = point["model"]
    arguments: dict[str, Any] = {
        "bias": model["bias"],
        "params_dtype": torch.bfloat16,
        "tp_group": group,
        "tp_size": shape.tp_size,
        "sequence_parallel": shape.tp_size > 1,
        "parallel_mode": shape.parallel if shape.tp_size > 1 else None,
        **({"ub_name": point["operator"], **switches} if any(switches.values()) else {}),
    }
    if shape.parallel == "column":
        arguments["normalization"] = model["normalization"]
    make = te.LayerNormLinear if shape.parallel == "column" else te.Linear
    module = make(shape.in_features, shape.out_features, **arguments)
    return module, lambda x, first: module(x, is_first_microbatch=first)


def build_layer(
    point: Mapping[str, Any], purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int
) -> ParallelLayer:
    """The layer of `point["layer"]["kind"]` with its userbuffers, precision and group. Collective."""
    tp_size, precision, training = point["tp_size"], point["precision"], point["layer"]["training"]
    prepare = _prepare(point, config)
    # A layer looks for its buffers when it is made.
    prepare()
    group, _ = parallel_groups(tp_size, ranks.world_size)
    if purpose == "floor":
        group = SilentGroup(ranks.rank % tp_size, tp_size)
    torch.manual_seed(seed)
    module, input_shape = _module(point, group, config.switches)
    # Training updates the scales in every step; without it they are frozen once found.
    select_scales = kept_apart() if training else None

    def forward(layer: torch.nn.Module, x: Tensor, first: bool) -> Tensor:
        if select_scales:
            select_scales()
        with autocast(precision, group):
            # FP8 weights are quantised in the first of several calls, which later ones use again.
            output = layer(x, is_first_microbatch=first)
        return output[0] if isinstance(output, tuple) else output

    def calibrate_layer(step: Callable[[], object]) -> None:
        calibrate(precision, step)
        if not training:
            freeze()

    return ParallelLayer(module, forward, input_shape, prepare, calibrate_layer)


def _prepare(point: Mapping[str, Any], config: OverlapConfig) -> Callable[[], None]:
    """Before each of the variant's turns: initialise the userbuffers anew.

    Those that overlap nothing do it too, though they use none of it: the pause lets the GPU cool and its clocks rise,
    and must be the same for all.
    """
    wanted = Userbuffers.of(point, config.slots)

    def prepare() -> None:
        if point["tp_size"] > 1:
            userbuffers.destroy()
            userbuffers.initialize(wanted)

    return prepare


def _module(
    point: Mapping[str, Any], group: dist.ProcessGroup | None, switches: Mapping[str, bool]
) -> tuple[torch.nn.Module, tuple[int, int, int]]:
    """The layer and its input's shape on this rank, [sequence, batch, features].

    `switches` are Megatron-Core's names; none at all builds a layer that does not overlap.
    """
    kind, batch = point["layer"]["kind"], point["layer"]["micro_batch_size"]
    module = _MAKERS[kind](point, _common_arguments(point, group), te_switches(switches))
    if switches.get("tp_comm_overlap_disable_qkv"):
        _disable_qkv(module, switches)
    # Every layer but the bare row-parallel linear begins with a column-parallel operator.
    rows, features = operator_shape(point, "proj" if kind == "linear" else "qkv").input_shape
    return module, (rows // batch, batch, features)


def te_switches(switches: Mapping[str, bool]) -> dict[str, bool]:
    """Transformer Engine's arguments for Megatron-Core's switches."""
    on = switches.get("tp_comm_overlap", False)
    return {ours: on and switches[theirs] for ours, theirs in MEGATRON_NAMES.items()}


def _common_arguments(point: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    parallel = point["tp_size"] > 1
    return {
        "params_dtype": torch.bfloat16,
        "tp_group": group if parallel else None,
        "tp_size": point["tp_size"],
        "sequence_parallel": parallel,
        "bias": point["model"]["bias"],
        "init_method": _initializer(point["model"]["hidden_size"]),
    }


def _initializer(hidden_size: int) -> Callable[[Tensor], Tensor]:
    """Keeps activations at about 1 whatever the model's width.

    The library's fixed deviation makes the attention of wide models all but one-hot, where the last bit of a sum
    decides, and nothing could be compared.
    """
    return lambda weight: torch.nn.init.normal_(weight, std=hidden_size**-0.5)


def _linear(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    """The attention's output projection."""
    shape = operator_shape(point, "proj")
    own = {name: on[name] for name in ("ub_overlap_ag", "ub_overlap_rs")}
    return te.Linear(shape.in_features, shape.out_features, parallel_mode="row", ub_name="proj", **common, **own)


def _layernorm_linear(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    """The projection to queries, keys and values."""
    shape = operator_shape(point, "qkv")
    own = {name: value for name, value in on.items() if name != "ub_overlap_rs"}
    return te.LayerNormLinear(
        shape.in_features,
        shape.out_features,
        parallel_mode="column",
        normalization=point["model"]["normalization"],
        ub_name="qkv",
        **common,
        **own,
    )


def _layernorm_mlp(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    model = point["model"]
    return te.LayerNormMLP(
        model["hidden_size"],
        model["ffn_hidden_size"],
        activation=_activation(model),
        **_block_arguments(point),
        **common,
        **on,
    )


def _multihead_attention(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    return te.MultiheadAttention(
        point["model"]["hidden_size"],
        point["model"]["num_attention_heads"],
        input_layernorm=True,
        attn_mask_type="causal",
        **_attention_arguments(point),
        **_block_arguments(point),
        **common,
        **on,
    )


def _transformer_layer(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    model = point["model"]
    return te.TransformerLayer(
        model["hidden_size"],
        model["ffn_hidden_size"],
        model["num_attention_heads"],
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        activation=_activation(model),
        ub_tp_comm_overlap=any(on.values()),
        **_attention_arguments(point),
        **_block_arguments(point),
        **common,
        **on,
    )


def _block_arguments(point: Mapping[str, Any]) -> dict[str, Any]:
    """Of layers that hold a column-parallel and a row-parallel linear."""
    batch = point["layer"]["micro_batch_size"]
    return {
        "normalization": point["model"]["normalization"],
        "output_layer_init_method": _initializer(point["model"]["hidden_size"]),
        "set_parallel_mode": True,
        "seq_length": point["workload"]["tokens"] // batch,
        "micro_batch_size": batch,
    }


def _attention_arguments(point: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_gqa_groups": point["model"]["num_kv_heads"],
        "kv_channels": point["model"]["head_dim"],
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
    }


def _activation(model: Mapping[str, Any]) -> str:
    return "swiglu" if model["gated_mlp"] else "gelu"


_MAKERS: dict[str, Callable[[Mapping[str, Any], dict[str, Any], dict[str, bool]], torch.nn.Module]] = {
    "linear": _linear,
    "layernorm_linear": _layernorm_linear,
    "layernorm_mlp": _layernorm_mlp,
    "multihead_attention": _multihead_attention,
    "transformer_layer": _transformer_layer,
}


def _disable_qkv(module: torch.nn.Module, switches: Mapping[str, bool]) -> None:
    """tp_comm_overlap_disable_qkv, which Megatron-Core gives to that one linear and te's layers have no argument for:
    what is pipelined with its own GEMMs is off, the bulk overlaps are as their own switches say."""
    for part in module.modules():
        if isinstance(part, te.LayerNormLinear):
            part.ub_overlap_ag_fprop = False
            part.ub_overlap_rs_dgrad = False
            part.ub_bulk_dgrad = te_switches(switches)["ub_bulk_dgrad"]
            part.ub_bulk_wgrad = te_switches(switches)["ub_bulk_wgrad"]
