"""Megatron-Core as its users train with it: GPTModel with Transformer Engine's layers, which overlap tensor-parallel
communication by userbuffers, its DistributedDataParallel and its optimizer, distributed where there are data-parallel
ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from overlap_sweep.backends import installed
from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training import overlaps
from overlap_sweep.workloads.tp_training.config import Resolved, ResolvedTraining, data_parallel
from overlap_sweep.workloads.tp_training.language_model import architecture
from overlap_sweep.workloads.tp_training.run import Facts, Groups, Implementation, initial_weights, padded_vocab_size

Draw = Callable[[str, Sequence[int]], Tensor]

_kept_groups: dict[str, dist.ProcessGroup] = {}


class Megatron(Implementation):
    """An Implementation. Refused if userbuffers don't take the overlap configuration. Collective."""

    def __init__(self, point: Resolved, ranks: Ranks, groups: Groups) -> None:
        self._point = point
        self._micro_batches = point.tp_training.gradient_accumulation_steps
        with ExitStack() as stack:
            with _groups_kept():
                parallel_state.initialize_model_parallel(point.tp_size, create_gloo_process_groups=False)
            stack.callback(parallel_state.destroy_model_parallel)
            for theirs, ours in (
                (parallel_state.get_tensor_model_parallel_group(), groups.tp),
                (parallel_state.get_data_parallel_group(), groups.dp),
            ):
                assert dist.get_process_group_ranks(theirs) == dist.get_process_group_ranks(ours)
            random.model_parallel_cuda_manual_seed(point.tp_training.seed, force_reset_rng=True)
            if overlaps(point):
                stack.callback(_initialize_userbuffers(point))
            self._config = transformer_config(point)
            model = build_model(point, self._config, groups.tp_rank)
            wrapped = model if point.precision == "fp32" else Float16Module(self._config, model)
            schedule = _schedule(point.tp_training, groups)
            self._model = DistributedDataParallel(self._config, schedule, wrapped)
            self._optimizer: MegatronOptimizer = get_megatron_optimizer(
                _optimizer_config(point, self._config, schedule),
                [self._model],
                # None would leave norms and biases without weight decay.
                config_overrides={},
                use_gloo_process_groups=False,
            )
            _load(initial_parts(point, initial_weights(point, ranks), groups.tp_rank), model, self._optimizer)
            self._closing = stack.pop_all()

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        losses: Tensor = self._model(input_ids=tokens, position_ids=None, attention_mask=None, labels=labels)
        return losses.mean()

    def backward(self, loss: Tensor, last: bool) -> None:
        with nullcontext() if last else self._model.no_sync():
            self._optimizer.scale_loss(loss / self._micro_batches).backward()
        if last:
            finalize_model_grads([self._model])

    def update(self) -> Tensor:
        taken, norm, _ = self._optimizer.step()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        return torch.tensor(norm if taken else torch.inf)

    def facts(self) -> Facts:
        schedule, overlap = self._model.ddp_config, "off"
        if self._config.tp_comm_overlap:
            overlap = self._point.tp_training.tp_comm_overlap_cfg or "Transformer Engine's defaults"
        backend = installed.attention_backend()
        details = {
            "attention_backend": backend,
            "tp_comm_overlap": overlap,
            "optimizer": "distributed" if schedule.use_distributed_optimizer else "not distributed",
            "overlap_grad_reduce": schedule.overlap_grad_reduce,
            "overlap_param_gather": schedule.overlap_param_gather,
            "buckets": sum(len(group.buckets) for group in self._model.bucket_groups),
        }
        return Facts(details, installed.attention_warnings(backend))

    def close(self) -> None:
        self._closing.close()


@contextmanager
def _groups_kept() -> Iterator[None]:
    """Makes Megatron-Core use one process group for equal ranks, and for every point: it makes some twenty each time
    and never destroys them, and with NCCL each takes memory of the GPU."""
    make = dist.new_group

    def kept(**asked: Any) -> dist.ProcessGroup:
        key = str({**asked, "group_desc": None})
        if key not in _kept_groups:
            _kept_groups[key] = make(**asked)
        return _kept_groups[key]

    with patch.object(dist, "new_group", kept):
        yield


def _initialize_userbuffers(point: Resolved) -> Callable[[], None]:
    """Initialises userbuffers, and returns a function that destroys them."""
    from overlap_sweep.backends.transformer_engine import userbuffers

    training, given = point.tp_training, point.overlap_cfg
    userbuffers.initialize(
        tokens=training.seq_length * training.batch_size,
        hidden_size=point.trained.hidden_size,
        tp_size=point.tp_size,
        fp8=False,
        bootstrap_backend=point.runtime.bootstrap_backend,
        ub_cfgs=given.slots if given else {},
    )
    return userbuffers.destroy


def _schedule(training: ResolvedTraining, groups: Groups) -> DistributedDataParallelConfig:
    """Returns how data-parallel ranks communicate. Gradients are accumulated and reduced in the type of the
    parameters."""
    options = data_parallel(training, "megatron")
    # One rank alone has nothing to reduce or to gather.
    several = groups.dp_size > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=False,
        bucket_size=options.ddp_bucket_size,
        use_distributed_optimizer=several and options.use_distributed_optimizer,
        overlap_grad_reduce=several and options.overlap_grad_reduce,
        overlap_param_gather=several and options.overlap_param_gather,
    )


def _optimizer_config(
    point: Resolved, config: TransformerConfig, schedule: DistributedDataParallelConfig
) -> OptimizerConfig:
    training = point.tp_training
    return OptimizerConfig(
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        clip_grad=training.max_grad_norm,
        params_dtype=config.params_dtype,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=2.0**16,
        loss_scale_window=2000,
        hysteresis=1,
        use_distributed_optimizer=schedule.use_distributed_optimizer,
        overlap_param_gather=schedule.overlap_param_gather,
    )


@torch.no_grad()
def _load(parts: Iterable[tuple[str, Tensor]], model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Copies the weights into the parameters, and in float32 into the optimizer's copies of them."""
    parameters = dict(model.named_parameters())
    for name, part in parts:
        parameter = parameters.pop(name)
        parameter.copy_(part)
        master = getattr(parameter, "main_param", None)
        if master is None:
            continue
        if getattr(parameter, "main_param_sharded", False):
            (distributed,) = optimizer.chained_optimizers
            owned = distributed._get_model_param_range_map(parameter)["param"]
            part = part.flatten()[owned.start : owned.end]
        master.copy_(part)
    assert not parameters, f"no weights for {sorted(parameters)}"


def transformer_config(point: Resolved) -> TransformerConfig:
    """Returns the config of the layers."""
    model, training, precision = point.trained, point.tp_training, point.precision
    has = architecture(model.model_type)
    given = point.overlap_cfg
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=bool(has.head_norms),
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=has.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        # It returns its gradient in bfloat16, whatever the logits are in.
        cross_entropy_loss_fusion=precision == "bf16",
        params_dtype=getattr(torch, training.dtype),
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # The weights are drawn as for all implementations. With perform_initialization=False Megatron-Core would not
        # mark them as cut, either, and leave those of all ranks but the first out of the norm of the gradients.
        init_method=nn.Identity(),
        output_layer_init_method=nn.Identity(),
        embedding_init_method=nn.Identity(),
        tensor_model_parallel_size=point.tp_size,
        sequence_parallel=training.sequence_parallel,
        **(recompute if training.activation_checkpointing else {}),
        **({"tp_comm_overlap": True, **(given.switches if given else {})} if overlaps(point) else {}),
    )


def build_model(point: Resolved, config: TransformerConfig, tp_rank: int) -> GPTModel:
    """Returns this rank's part, its weights not yet drawn, with Transformer Engine's layers. With labels it returns
    losses [batch, sequence], float32. Parallel state must be initialised, and userbuffers, if layers use them."""
    model, tp_size = point.trained, point.tp_size
    rows = padded_vocab_size(model.vocab_size, tp_size)
    built = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm),
        vocab_size=rows,
        max_sequence_length=point.tp_training.seq_length,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_parameters["rope_theta"],
    )
    _leave_padding_out(built.output_layer, rows // tp_size, tp_rank, model.vocab_size)
    return built.to(config.params_dtype)


def _leave_padding_out(output_layer: nn.Module, rows: int, tp_rank: int, vocab_size: int) -> None:
    """Masks the padding's logits, which Megatron-Core's cross-entropy would count like all others."""
    real = max(vocab_size - rows * tp_rank, 0)

    def masked(_module: nn.Module, _inputs: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
        logits, bias = output
        return logits.masked_fill(torch.arange(rows, device=logits.device) >= real, -torch.inf), bias

    if real < rows:
        output_layer.register_forward_hook(masked)


def initial_parts(point: Resolved, draw: Draw, tp_rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's part of every initial weight, by its name in GPTModel, float32. `draw`: see
    run.initial_weights."""
    model, tp_size = point.trained, point.tp_size
    of = architecture(model.model_type)
    hidden, ffn, head_dim = model.hidden_size, model.intermediate_size, model.head_dim
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    vocabulary = padded_vocab_size(model.vocab_size, tp_size), hidden
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")

    def cut(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tp_size, dim)[tp_rank]

    def qkv(layer: str, kind: str, *columns: int) -> Tensor:
        """Returns, for each group of heads with one key, its queries, its key and its value."""
        grouped = [
            draw(f"{layer}.self_attn.{name}.{kind}", (count * head_dim, *columns)).view(kv_heads, -1, *columns)
            for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
        ]
        return cut(torch.cat(grouped, dim=1)).flatten(0, 1)

    yield "embedding.word_embeddings.weight", cut(draw(f"{of.embedding}.weight", vocabulary))
    for index in range(model.num_hidden_layers):
        theirs, ours = f"decoder.layers.{index}", f"{of.layers}.{index}"
        for name, norm in zip(norms, of.layer_norms, strict=True):
            yield f"{theirs}.{name}", draw(f"{ours}.{norm}.weight", (hidden,))
        yield f"{theirs}.self_attention.linear_qkv.weight", qkv(ours, "weight", hidden)
        if of.qkv_bias:
            yield f"{theirs}.self_attention.linear_qkv.bias", qkv(ours, "bias")
        for norm, name in zip(of.head_norms, ("q_layernorm", "k_layernorm"), strict=False):
            yield f"{theirs}.self_attention.{name}.weight", draw(f"{ours}.{norm}.weight", (head_dim,))
        output = draw(f"{ours}.self_attn.o_proj.weight", (hidden, heads * head_dim))
        yield f"{theirs}.self_attention.linear_proj.weight", cut(output, dim=1)
        # Each rank has its own columns of both, one behind the other.
        gate_up = (draw(f"{ours}.mlp.{name}.weight", (ffn, hidden)) for name in ("gate_proj", "up_proj"))
        yield f"{theirs}.mlp.linear_fc1.weight", torch.cat([cut(weight) for weight in gate_up])
        yield f"{theirs}.mlp.linear_fc2.weight", cut(draw(f"{ours}.mlp.down_proj.weight", (hidden, ffn)), dim=1)
    yield "decoder.final_layernorm.weight", draw(f"{of.final_norm}.weight", (hidden,))
    if not model.tie_word_embeddings:
        yield "output_layer.weight", cut(draw(f"{of.output}.weight", vocabulary))
