"""A parallel linear operator and whole layers made of Transformer Engine's modules, in its precisions.

FP8 scales are frozen once calibrated, except in layers that train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as makers
from transformer_engine.pytorch.quantization import FP8GlobalState, FP8GlobalStateManager

from overlap_sweep.backends import LayerPoint, ParallelLayer, ParallelLinear, Purpose
from overlap_sweep.backends.communicator import SilentGroup, cached_silent_group
from overlap_sweep.backends.megatron import transformer_config
from overlap_sweep.backends.transformer_engine import userbuffers
from overlap_sweep.config import TensorParallelPoint
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks, parallel_groups
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import LinearShape, operator_shape
from overlap_sweep.overlap.overlap_cfg import (
    MEGATRON_NAMES,
    SWITCHES_OF_PARALLEL,
    OverlapConfig,
    operator_switches,
)
from overlap_sweep.overlap.recipes import RECIPES
from overlap_sweep.overlap.space import OperatorPoint

ModuleForward = Callable[[Tensor, bool], Tensor]
"""forward(x, first): `first` quantises FP8 weights, which later calls reuse, as in the microbatches of a training
step."""


def autocast(precision: str, group: dist.ProcessGroup | None) -> AbstractContextManager[object]:
    """Returns the precision's autocast context. Delayed scaling agrees on its scales over `group`."""
    recipe = RECIPES.get(precision)
    if recipe is None:
        return nullcontext()
    # Without a group the library would use the default one, where other ranks may not take part.
    options = {"reduce_amax": group is not None} if recipe.precision == "fp8_delayed" else {}
    made = getattr(makers, recipe.made_by)(**options)
    context: AbstractContextManager[object] = te.autocast(enabled=True, recipe=made, amax_reduction_group=group)
    return context


def check_available(precision: str) -> None:
    """Raises Refused with the library's reason if this GPU lacks the precision's recipe."""
    if recipe := RECIPES.get(precision):
        available, reason = getattr(te, recipe.available)(return_reason=True)
        if not available:
            raise Refused(f"Transformer Engine: {reason.rstrip('.')}")


def calibrate(precision: str, step: Callable[[], object]) -> None:
    """Runs `step`, a forward and backward that quantises the weights, until they and the scales have settled.

    Two layers calibrated on the same inputs compute with the same scales.
    """
    # Layers that trained in earlier points must not be updated with this one.
    FP8GlobalStateManager.reset()
    for _ in range(RECIPES[precision].calibration_steps if precision in RECIPES else 0):
        step()


def freeze() -> None:
    """Has steps no longer update scales or reduce them over the ranks: Megatron-LM does that once for a whole model, so
    it is not part of an operator's time. Layers register for updates only in their first forward."""
    FP8GlobalStateManager.reset()


def build(point: OperatorPoint, purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    """Returns the point's operator as a module of its backend, Transformer Engine or Megatron-Core. Collective."""
    check_available(point.precision)
    shape = operator_shape(point, point.operator)
    if purpose == "tp1":
        shape = shape.unsharded()
    group = None
    if shape.tp_size > 1:
        group = cached_silent_group(ranks.rank, ranks.world_size) if purpose == "floor" else dist.group.WORLD
    settings = space.settings(point) if purpose == "point" else {}
    make_module = _megatron_module if point.backend == "megatron" else _transformer_engine_module
    module, module_forward = make_module(point, shape, group, operator_switches(point.operator, purpose, settings))
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    assert {name for name, _ in module.named_parameters()} == set(parameters)

    def forward(x: Tensor, first: bool = False) -> Tensor:
        with autocast(point.precision, group):
            return module_forward(x, first)

    def step() -> None:
        weight = parameters["weight"]
        generator = torch.Generator(weight.device).manual_seed(point.workload.seed + ranks.rank)
        draw = partial(torch.randn, generator=generator, device=weight.device, dtype=weight.dtype)
        x, gradient = draw(shape.input_shape).requires_grad_(), draw(shape.output_shape)
        torch.autograd.grad(forward(x, first=True), (x, *parameters.values()), gradient)

    calibrate(point.precision, step)
    freeze()
    return ParallelLinear(forward, parameters, shape.input_shape, shape.output_shape)


def _transformer_engine_module(
    point: OperatorPoint, shape: LinearShape, group: dist.ProcessGroup | None, switches: Mapping[str, bool]
) -> tuple[torch.nn.Module, ModuleForward]:
    module = _linear(
        point,
        shape,
        bias=point.model.bias,
        params_dtype=torch.bfloat16,
        tp_group=group,
        tp_size=shape.tp_size,
        sequence_parallel=shape.tp_size > 1,
        parallel_mode=shape.parallel if shape.tp_size > 1 else None,
        **({"ub_name": point.operator, **switches} if any(switches.values()) else {}),
    )
    return module, lambda x, first: module(x, is_first_microbatch=first)


def _linear(point: TensorParallelPoint, shape: LinearShape, **arguments: object) -> torch.nn.Module:
    if shape.parallel == "row":
        return te.Linear(shape.in_features, shape.out_features, **arguments)
    normalization = point.model.normalization
    return te.LayerNormLinear(shape.in_features, shape.out_features, normalization=normalization, **arguments)


def _megatron_module(
    point: OperatorPoint, shape: LinearShape, group: dist.ProcessGroup | None, switches: Mapping[str, bool]
) -> tuple[torch.nn.Module, ModuleForward]:
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    model = point.model
    config = transformer_config(
        model,
        "bf16",
        shape.tp_size,
        ffn_hidden_size=model.ffn_hidden_size,
        add_bias_linear=model.bias,
        tp_comm_overlap=any(switches.values()),
        **{MEGATRON_NAMES[name]: on for name, on in switches.items()},
    )
    arguments: dict[str, object] = {
        "config": config,
        "init_method": torch.nn.init.zeros_,
        "bias": model.bias,
        "skip_bias_add": False,
        "is_expert": False,
        "tp_comm_buffer_name": point.operator,
        # Megatron-Core requires a group at TP=1 too.
        "tp_group": group or cached_silent_group(0, 1),
    }
    if shape.parallel == "column":
        make, arguments["gather_output"] = TELayerNormColumnParallelLinear, False
    else:
        make, arguments["input_is_parallel"] = TERowParallelLinear, True
    module = make(shape.in_features, shape.out_features, **arguments)

    def forward(x: Tensor, first: bool) -> Tensor:
        module.is_first_microbatch = first
        output, _bias = module(x)
        return output

    return module, forward


def build_layer(point: LayerPoint, purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    """Returns the layer of `point.layer.kind` with its userbuffers, precision and group. Collective."""
    tp_size, precision, training = point.tp_size, point.precision, point.layer.training
    check_available(precision)
    kind, batch = point.layer.kind, point.layer.micro_batch_size

    def prepare() -> None:
        # Layers with no overlap do it too: the pause lets the GPU cool and its clocks rise, so it must be the same for
        # all.
        if tp_size > 1:
            userbuffers.destroy()
            userbuffers.initialize_for(point, config.slots)

    # A layer looks up its buffers when it is created.
    prepare()
    group, _ = parallel_groups(tp_size, ranks.world_size)
    if purpose == "floor":
        group = SilentGroup(ranks.rank % tp_size, tp_size)
    torch.manual_seed(seed)
    # No switches mean no overlap.
    is_on = config.switches.get("tp_comm_overlap", False)
    switches = {ours: is_on and config.switches[theirs] for ours, theirs in MEGATRON_NAMES.items()}
    module = _layer(point, group, switches)
    _name_bulk_overlaps(module)
    if config.switches.get("tp_comm_overlap_disable_qkv"):
        _disable_qkv(module, switches)
    # Training updates the scales in every step. The library's global state would update every layer in the process as
    # one model, so a layer that trains has its own state.
    state = FP8GlobalState() if training else None

    def forward(layer: torch.nn.Module, x: Tensor, first: bool) -> Tensor:
        if state is not None:
            FP8GlobalStateManager.quantization_state = state
        with autocast(precision, group):
            # FP8 weights are quantised in the first of several calls and reused by the others.
            output = layer(x, is_first_microbatch=first)
        return output[0] if isinstance(output, tuple) else output

    def calibrate_layer(step: Callable[[], object]) -> None:
        calibrate(precision, step)
        if not training:
            freeze()

    # Every layer but the bare row-parallel linear begins with a column-parallel operator.
    rows, features = operator_shape(point, "proj" if kind == "linear" else "qkv").input_shape
    return ParallelLayer(module, forward, (rows // batch, batch, features), prepare, calibrate_layer)


def _layer(point: LayerPoint, group: dist.ProcessGroup | None, switches: Mapping[str, bool]) -> torch.nn.Module:
    model, kind = point.model, point.layer.kind
    hidden_size, parallel = model.hidden_size, point.tp_size > 1
    assert hidden_size
    common: dict[str, object] = {
        "params_dtype": torch.bfloat16,
        "tp_group": group if parallel else None,
        "tp_size": point.tp_size,
        "sequence_parallel": parallel,
        "bias": model.bias,
        # The library's fixed deviation makes the attention of wide models all but one-hot, where the last bit of a sum
        # decides, and nothing could be compared. This keeps activations at about 1 for any width.
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=hidden_size**-0.5),
    }
    if kind in ("linear", "layernorm_linear"):
        # The attention's output projection, or the projection to queries, keys and values.
        operator = "proj" if kind == "linear" else "qkv"
        shape = operator_shape(point, operator)
        own = {name: switches[name] for name in SWITCHES_OF_PARALLEL[shape.parallel]}
        return _linear(point, shape, parallel_mode=shape.parallel, ub_name=operator, **common, **own)
    common |= {**switches, "normalization": model.normalization, "set_parallel_mode": True}
    common["output_layer_init_method"] = common["init_method"]
    activation = "swiglu" if model.gated_mlp else "gelu"
    if kind == "layernorm_mlp":
        return te.LayerNormMLP(hidden_size, model.ffn_hidden_size, activation=activation, **common)
    common |= {
        "num_gqa_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
    }
    if kind == "multihead_attention":
        return te.MultiheadAttention(
            hidden_size, model.num_attention_heads, input_layernorm=True, attn_mask_type="causal", **common
        )
    assert kind == "transformer_layer"
    return te.TransformerLayer(
        hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        activation=activation,
        ub_tp_comm_overlap=any(switches.values()),
        **common,
    )


def _name_bulk_overlaps(module: torch.nn.Module) -> None:
    """Makes MLPs overlap dgrad and wgrad as `ub_bulk_dgrad` and `ub_bulk_wgrad` say.

    `te.LayerNormMLP` does for each what the other says (2.4 to 2.20.2): its forward passes them in one order, and the
    function that it calls takes them in the other. Megatron-LM builds no such module, so without this a file with one
    of the two would be proven with the other.
    """
    for part in module.modules():
        if isinstance(part, te.LayerNormMLP) and _mlp_swaps_bulk_overlaps():
            part.ub_bulk_dgrad, part.ub_bulk_wgrad = part.ub_bulk_wgrad, part.ub_bulk_dgrad


@cache
def _mlp_swaps_bulk_overlaps() -> bool:
    """Returns whether the installed library's MLP passes the two in another order than it takes them, by its source."""
    own = vars(inspect.getmodule(te.LayerNormMLP))
    orders = {
        source.find("ub_bulk_dgrad") < source.find("ub_bulk_wgrad")
        for source in map(inspect.getsource, (te.LayerNormMLP.forward, own["_LayerNormMLP"]))
    }
    return len(orders) == 2


def _disable_qkv(module: torch.nn.Module, switches: Mapping[str, bool]) -> None:
    """Applies Megatron-Core's tp_comm_overlap_disable_qkv, for which te's layers have no argument: switches off
    pipelined overlap of this linear operator; bulk overlap follows its own switches."""
    for part in module.modules():
        if isinstance(part, te.LayerNormLinear):
            part.ub_overlap_ag_fprop = False
            part.ub_overlap_rs_dgrad = False
            part.ub_bulk_dgrad = switches["ub_bulk_dgrad"]
            part.ub_bulk_wgrad = switches["ub_bulk_wgrad"]
