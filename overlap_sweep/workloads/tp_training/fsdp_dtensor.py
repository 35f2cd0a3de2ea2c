"""PyTorch's own stack: DTensor cuts a Hugging Face model over the tensor-parallel ranks, FSDP2 shards it over the
data-parallel ones, on one two-dimensional mesh.

Every parameter is a DTensor of both dimensions, the norms' too, so that optimizer and loss scale treat all alike.
Between modules there are plain tensors: DTensor's dispatch of every small operator of a norm would take the host longer
than the device takes for the layer.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import _symmetric_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from overlap_sweep.backends.symm_mem import operators
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training import hugging_face
from overlap_sweep.workloads.tp_training.config import Resolved, ResolvedTraining, data_parallel
from overlap_sweep.workloads.tp_training.language_model import Architecture, architecture
from overlap_sweep.workloads.tp_training.run import Facts, Groups, Implementation, initial_weights, padded_vocab_size

SEQUENCE = 1
"""Dimension of activations [batch, sequence, hidden]."""
GATHERED, SCATTERED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
CompileOptions = dict[str, str | int | bool | Callable[..., object]]
LEFT = "all_gather_into_tensor", "reduce_scatter_tensor"
"""Collectives that no GEMM was fused with."""


class FsdpDtensor(Implementation):
    """See run.Implementation."""

    def __init__(
        self, point: Resolved, ranks: Ranks, groups: Groups, compile_options: CompileOptions | None = None
    ) -> None:
        """Builds the model. `compile_options`: inductor's, if layers are compiled."""
        self._training = training = point.tp_training
        self._device, self._tp_size = ranks.device, groups.tp_size
        self._vocab_size = point.trained.vocab_size
        self._loss_group = groups.tp if training.vocab_parallel else None
        self._dtype = getattr(torch, training.dtype)
        self._positions = torch.arange(training.seq_length, device=ranks.device).unsqueeze(0)
        # A Hugging Face model, and FSDP2's module.
        self._model: Any = self._build(point, ranks, groups, compile_options)
        self._parameters = list(self._model.parameters())
        self._optimizer = hugging_face.adamw(self._parameters, asdict(training), ranks.device)
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=self._dtype == torch.float16)

    def _build(
        self, point: Resolved, ranks: Ranks, groups: Groups, compile_options: CompileOptions | None
    ) -> nn.Module:
        of = architecture(point.trained.model_type)
        model = hugging_face.build_on_meta(point)
        cut = self._training.vocab_parallel
        rows = padded_vocab_size(self._vocab_size, groups.tp_size) if cut else self._vocab_size
        hugging_face.pad_vocabulary(model, of, point.trained.hidden_size, rows)
        _cut(model, of, groups, point)
        layers = hugging_face.decoder_layers(model, of)
        _compute_as_asked(layers, self._training, compile_options)
        _shard(model, layers, self._training, groups)
        model.to_empty(device=ranks.device)
        hugging_face.restore_buffers(model, of, ranks.device)
        _fill(model, initial_weights(point, ranks), groups)
        return model

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        self._model.set_requires_gradient_sync(last)
        autocast = self._training.autocast and self._dtype != torch.float32
        with torch.autocast(self._device.type, self._dtype) if autocast else nullcontext():
            # Hugging Face would count the positions in what the embedding returns, which may be a part of the sequence.
            logits = self._model(tokens, position_ids=self._positions, use_cache=False).logits
        if isinstance(logits, DTensor):
            logits = logits.to_local()
        return hugging_face.vocab_parallel_cross_entropy(logits, labels, self._vocab_size, self._loss_group)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._scaler.scale(loss / self._training.gradient_accumulation_steps).backward()

    def update(self) -> Tensor:
        self._scaler.unscale_(self._optimizer)
        norm = self._clip()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return norm

    def _clip(self) -> Tensor:
        """Clips local tensors, with one collective, and returns the norm: DTensors would take one each."""
        cut: list[Tensor] = []
        whole: list[Tensor] = []
        for parameter in self._parameters:
            assert isinstance(parameter.grad, DTensor)
            (cut if parameter.grad.placements[1].is_shard() else whole).append(parameter.grad.to_local())
        return hugging_face.clip(cut, whole, self._training.max_grad_norm, self._tp_size)

    def close(self) -> None:
        """Forgets compiled code, which would decide whether another point's layers are compiled."""
        if self._training.compile:
            torch._dynamo.reset()


def _cut(model: nn.Module, of: Architecture, groups: Groups, point: Resolved) -> None:
    """Cuts the model over the tensor-parallel ranks. Between the parallel linears every rank has the whole residual
    stream, or its part of the sequence."""
    mesh, training = groups.mesh["tp"], point.tp_training
    in_sequence = bool(training.sequence_parallel)
    stream: Placement = Shard(SEQUENCE) if in_sequence else Replicate()
    # A norm that sees a part of the sequence, or of the heads, knows a part of its weight's gradient.
    of_norm: Placement = Partial() if in_sequence else Replicate()
    for layer in hugging_face.decoder_layers(model, of):
        if of.get_tp_mapping:
            parallelize_module(layer, mesh, dict(of.get_tp_mapping(in_sequence)))
        else:
            _cut_linears(layer, of, mesh, stream, flat=in_sequence and training.batch_size == 1)
        gradients = dict.fromkeys(of.layer_norms, of_norm) | dict.fromkeys(of.head_norms, Partial())
        for name, module in list(layer.named_modules()):
            if not all(isinstance(one, DTensor) for one in module.parameters(recurse=False)):
                _replicate(module, groups, gradients.get(name, Replicate()))
    _replicate(model.get_submodule(of.final_norm), groups, of_norm)
    embedding, output = model.get_submodule(of.embedding), model.get_submodule(of.output)
    whole_input = PrepareModuleInput(
        input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True
    )
    if training.vocab_parallel:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=stream))
        parallelize_module(output, mesh, ColwiseParallel(input_layouts=stream, use_local_output=False))
    else:
        _replicate(embedding, groups, Replicate())
        _replicate(output, groups, Replicate())
        parallelize_module(
            embedding, mesh, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
        )
        parallelize_module(output, mesh, whole_input)
    hugging_face.tie_weights(model, of, point.trained)
    if training.compile:
        embedding.register_forward_hook(_arrived)


def _cut_linears(layer: nn.Module, of: Architecture, mesh: DeviceMesh, stream: Placement, *, flat: bool) -> None:
    """Cuts the linears, whose names are those of columns and rows in attention and MLP."""
    column_parallel = {name: ColwiseParallel() for name in of.column_parallel}
    row_parallel = {name: RowwiseParallel(output_layouts=Partial(), use_local_output=False) for name in of.row_parallel}
    parallelize_module(layer, mesh, {**column_parallel, **row_parallel})
    for name in sorted({name.rpartition(".")[0] for name in of.column_parallel}):
        hook = partial(_gather, mesh, stream, flat)
        layer.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    for name in of.row_parallel:
        layer.get_submodule(name).register_forward_hook(partial(_scatter, stream, flat))


def _gather(
    mesh: DeviceMesh, stream: Placement, flat: bool, module: nn.Module, arguments: Any, named: Any
) -> tuple[Any, Any]:
    """Gathers the input once for all linears that have it, with one reduction backward."""
    arguments = list(arguments)
    where, key = (arguments, 0) if arguments else (named, "hidden_states")
    # Of one sequence [1, sequence, hidden] the gathered dimension is made the first one anyway, by views among which
    # inductor does not find the GEMM.
    part, placement = (where[key].flatten(0, 1), Shard(0)) if flat else (where[key], stream)
    gathered = DTensor.from_local(part, mesh, [placement]).redistribute(placements=[Replicate()])
    where[key] = gathered.unflatten(0, (1, gathered.shape[0])) if flat else gathered
    return tuple(arguments), named


def _scatter(stream: Placement, flat: bool, module: nn.Module, arguments: object, summed: DTensor) -> Tensor:
    if flat:
        rows: Any = summed.flatten(0, 1)
        part: Tensor = rows.redistribute(placements=[Shard(0)]).to_local()
        return part.unflatten(0, (1, part.shape[0]))
    return summed.redistribute(placements=[stream]).to_local()


def _arrived(module: nn.Module, arguments: object, embedded: Tensor) -> Tensor:
    """Returns a copy of a tensor that a collective is still writing: a layer that torch.compile made loses its
    gradient, silently (torch 2.13); so does waiting for it."""
    return embedded.clone() if isinstance(embedded, AsyncCollectiveTensor) else embedded


def _replicate(module: nn.Module, groups: Groups, gradient: Placement) -> None:
    """Gives every rank the whole weight, computing with plain tensors. `gradient`: the placement of each rank's
    gradient, which FSDP2 makes whole when it reduces it."""
    distribute_module(module, groups.mesh["tp"])
    names = tuple(name for name, _ in module.named_parameters(recurse=False))
    module.__class__ = _local(type(module), names, gradient)  # type: ignore[arg-type]


@cache
def _local(kind: type[nn.Module], names: Sequence[str], gradient: Placement) -> type[nn.Module]:
    """Returns a subclass with local parameters, one for all layers, or torch.compile would compile each."""

    def local(name: str) -> property:
        def read(self: nn.Module) -> Tensor:
            parameter = self._parameters[name]
            assert isinstance(parameter, DTensor)
            # Between forwards FSDP2 looks for the part of it that it has made.
            return parameter.to_local(grad_placements=[gradient]) if parameter.device_mesh.ndim == 1 else parameter

        return property(read)

    return type(f"Local{kind.__name__}", (kind,), {name: local(name) for name in names})


def _compute_as_asked(
    layers: Sequence[nn.Module], training: ResolvedTraining, compile_options: CompileOptions | None
) -> None:
    """Compiles and checkpoints inside of FSDP2's hooks. Checkpointing is around what is compiled: inside of it, as
    Hugging Face has it, torch 2.13 fails with DTensors ("expected all tensors_saved_with_vc_check to be Tensors")."""
    for layer in layers:
        if training.compile:
            layer.forward = torch.compile(layer.forward, options=compile_options)
        if training.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _shard(model: nn.Module, layers: Sequence[nn.Module], training: ResolvedTraining, groups: Groups) -> None:
    """Shards over the data-parallel ranks; over one, too, since FSDP2 keeps float32 weights and computes in less."""
    computed, schedule = hugging_face.parameter_dtype(training), data_parallel(training, "fsdp_dtensor")
    policy = MixedPrecisionPolicy(param_dtype=None if computed == torch.float32 else computed)
    # One rank alone would free nothing.
    reshards = bool(schedule.reshard_after_forward) and groups.dp_size > 1
    shard = partial(fully_shard, mesh=groups.mesh["dp"], mp_policy=policy)
    units: list[FSDPModule] = [shard(layer, reshard_after_forward=reshards) for layer in layers]
    units.append(shard(model, reshard_after_forward=False))
    forward, backward = schedule.forward_prefetch or 0, schedule.backward_prefetch or 0
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        if backward != 1:
            # By itself FSDP2 gathers the one before, unless it is given a list that is not empty. The unit itself is
            # gathered already.
            unit.set_modules_to_backward_prefetch(units[max(index - backward, 0) : index][::-1] or [unit])


def _fill(model: nn.Module, draw: Callable[[str, Sequence[int]], Tensor], groups: Groups) -> None:
    """Fills this rank's part of every weight."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        part = draw(name, parameter.shape)
        over_tp = parameter.placements[1]
        if isinstance(over_tp, Shard):
            part = part.chunk(groups.tp_size, over_tp.dim)[groups.tp_rank]
        # FSDP2 cuts the first dimension, and leaves the last ranks with fewer rows, or none.
        rows = -(-part.shape[0] // groups.dp_size)
        part = part[groups.dp_rank * rows : (groups.dp_rank + 1) * rows]
        local = parameter.to_local()
        assert local.shape == part.shape
        with torch.no_grad():
            local.copy_(part)


class AsyncTp(FsdpDtensor):
    """An Implementation. Refused if nothing could be fused."""

    def __init__(self, point: Resolved, ranks: Ranks, groups: Groups) -> None:
        # Inductor's pass is skipped without it.
        if not dist.is_nccl_available():
            raise Refused(
                "impl=async_tp requires PyTorch with NCCL, without which nothing is fused; use impl=fsdp_dtensor"
            )
        with warnings.catch_warnings():
            # Deprecated, as if it were not needed; without it the compile pass fuses nothing.
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(operators.group_name(groups.tp))  # type: ignore[arg-type]
        self._found = Collectives()
        # Options of these layers instead of inductor's global ones, which other threads, such as that of a backward,
        # have their own of.
        options: CompileOptions = {
            "_micro_pipeline_tp": True,
            "post_grad_custom_pre_pass": without_undone_views,
            "post_grad_custom_post_pass": self._found.count,
            # What comes from a cache has passed nobody who counts.
            "fx_graph_cache": False,
        }
        super().__init__(point, ranks, groups, options)

    def facts(self) -> Facts:
        return self._found.facts()

    def close(self) -> None:
        """Frees the memory that the ranks share, too. Collective."""
        super().close()
        operators.close()


def without_undone_views(graph: fx.Graph) -> None:
    """Runs as inductor's pass that removes a view that undoes the one before it: the fusions find a GEMM only next to
    the collective, and inductor leaves such a pair where several GEMMs have the same input."""
    reshape = torch.ops.aten.reshape.default
    for node in graph.nodes:
        if node.target is not reshape or node.args[0].target is not reshape:
            continue
        before = node.args[0].args[0]
        if before.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(before)
            graph.erase_node(node)


class Collectives:
    """Collectives of the compiled graphs. All layers share one forward and one backward graph, unless they differ."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()
        self._graphs = 0

    def count(self, graph: fx.Graph) -> None:
        """Counts collectives, as inductor's pass over each graph after the fusions."""
        self._graphs += 1
        for node in graph.nodes:
            name = getattr(node.target, "_opname", "")
            self._found[name] += 1
            if name == GATHERED:
                # A small input that is not asked for would be gathered by NVLink multicast.
                node.kwargs = {**node.kwargs, "return_A": True}

    def facts(self) -> Facts:
        details = {name: self._found[name] for name in (GATHERED, SCATTERED, *LEFT)}
        not_fused = [
            f"async_tp found no {name} in the layers' graphs, so that communication is not overlapped."
            for name in (GATHERED, SCATTERED)
            if not details[name]
        ]
        return Facts({**details, "compiled_graphs": self._graphs}, not_fused)
