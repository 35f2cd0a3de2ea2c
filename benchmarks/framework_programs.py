"""Trainings of record_effects.py with Megatron-Core, DeepSpeed, Transformer Engine, and compiled tensor parallelism.

Each returns the step of a training, as those of record_effects.py do. Nothing of overlap_sweep is imported.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[], None]


def megatron(
    training: Any,
    *,
    distributed: bool = True,
    overlap_param_gather: bool = False,
    micro_batches: int = 1,
    **options: Any,
) -> Step:
    """Megatron-Core's DistributedDataParallel and optimizer; options of DistributedDataParallelConfig."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=training.layers,
        hidden_size=training.hidden,
        num_attention_heads=16,
        bf16=True,
        params_dtype=training.dtype,
        pipeline_dtype=training.dtype,
    )
    model = training.blocks()
    schedule = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_param_gather=overlap_param_gather, **options
    )
    wrapped = DistributedDataParallel(config, schedule, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            params_dtype=training.dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap_param_gather,
            clip_grad=0.0,
        ),
        [wrapped],
        config_overrides={},
        use_gloo_process_groups=False,
    )
    x = training.batch()

    def step() -> None:
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            if last:
                wrapped(x).float().square().mean().backward()
            else:
                with wrapped.no_sync():
                    wrapped(x).float().square().mean().backward()
        finalize_model_grads([wrapped])
        optimizer.step()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()

    return step


def deepspeed(training: Any, *, stage: int, **options: Any) -> Step:
    """DeepSpeed's ZeRO; options of zero_optimization, in which bucket sizes are shares of the parameters."""
    import deepspeed as ds

    model = training.blocks()
    parameters = sum(one.numel() for one in model.parameters())
    options |= {name: int(value * parameters) for name, value in options.items() if name.endswith("bucket_size")}
    on_gpu = training.device.type == "cuda"
    engine, *_ = ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": on_gpu},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, **options},
            "steps_per_print": 1000000,
        },
    )
    x = training.batch()

    def step() -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    return step


class SequenceParallelBlock(nn.Module):
    """A block of two linear layers, sharded over the ranks of a group; the input is a shard of the tokens, or whole."""

    def __init__(self, training: Any, group: str, *, sequence_parallel: bool):
        super().__init__()
        ranks, hidden = dist.get_world_size(), training.hidden
        self.group, self.sequence_parallel = group, sequence_parallel
        self.up = nn.Parameter(
            torch.randn(hidden, 4 * hidden // ranks, device=training.device, dtype=training.dtype) / hidden
        )
        self.down = nn.Parameter(
            torch.randn(4 * hidden // ranks, hidden, device=training.device, dtype=training.dtype) / hidden
        )

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import (
            all_gather_tensor_autograd,
            all_reduce,
            reduce_scatter_tensor_autograd,
        )

        if not self.sequence_parallel:
            return x + all_reduce(torch.relu(x @ self.up) @ self.down, "sum", self.group)
        whole = all_gather_tensor_autograd(x, 0, self.group)
        return x + reduce_scatter_tensor_autograd(torch.relu(whole @ self.up) @ self.down, "sum", 0, self.group)


def tensor_parallel(training: Any, *, micro_pipeline: bool = False, sequence_parallel: bool = True) -> Step:
    """Functional collectives around GEMMs, compiled; async tensor parallelism is a pass of the compiler, which fuses
    all-gathers and reduce-scatters, and no all-reduce."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group
    if micro_pipeline:
        symmetric.enable_symm_mem_for_group(group.group_name)
    torch._dynamo.reset()
    torch._inductor.config._micro_pipeline_tp = micro_pipeline
    torch.manual_seed(0)
    model = nn.Sequential(
        *[
            SequenceParallelBlock(training, group.group_name, sequence_parallel=sequence_parallel)
            for _ in range(training.layers)
        ]
    )
    compiled = torch.compile(model, fullgraph=True)
    tokens = training.tokens // (dist.get_world_size() if sequence_parallel else 1)
    x = torch.randn(tokens, training.hidden, device=training.device, dtype=training.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def one() -> None:
        out = compiled(x)
        # An all-reduce has no gradient here: without sequence parallelism there is a forward pass alone.
        if sequence_parallel:
            out.float().square().mean().backward()

    step: Step = training.step(model, optimizer, one)
    return step


def captured(training: Any, *, chunks: int = 1) -> Step:
    """A tensor-parallel forward pass in a CUDA graph, whose all-reduces are cut into chunks."""
    ranks, hidden = dist.get_world_size(), training.hidden
    torch.manual_seed(0)
    sizes = {"device": training.device, "dtype": training.dtype}
    weights = [
        (
            torch.randn(hidden, 4 * hidden // ranks, **sizes) / hidden,
            torch.randn(4 * hidden // ranks, hidden, **sizes) / hidden,
        )
        for _ in range(training.layers)
    ]
    x = training.batch()

    def forward() -> Tensor:
        out = x
        for up, down in weights:
            product = torch.relu(out @ up) @ down
            for part in product.chunk(chunks):
                dist.all_reduce(part)
            out = out + product
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        forward()
    return graph.replay


def userbuffers(
    training: Any,
    *,
    overlap: bool = True,
    settings: dict[str, Any] | None = None,
    preset: str | None = None,
    slots: tuple[str, ...] = (),
    **switches: Any,
) -> Step:
    """Two Transformer Engine layers with userbuffers over CUDA IPC. `preset`: a file in presets/, of which only `slots`
    are taken, if any are named."""
    import transformer_engine.pytorch as te

    hidden, tokens = 4096, 4096
    ranks = dist.get_world_size()
    if preset:
        import yaml

        published = yaml.safe_load((Path(__file__).parent / "presets" / preset).read_text())
        settings = {slot: given for slot, given in published.items() if not slots or slot in slots}
    if overlap:
        saved = os.dup(1)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        te.module.base.initialize_ub(
            [tokens, hidden], ranks, use_fp8=False, dtype=training.dtype, bootstrap_backend="nccl", ub_cfgs=settings
        )
        os.dup2(saved, 1)
    flags = {
        "ub_overlap_ag": overlap,
        "ub_overlap_rs": overlap,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": overlap,
        "ub_bulk_wgrad": overlap,
        "ub_tp_comm_overlap": overlap,
    } | switches
    torch.manual_seed(0)
    layers = [
        te.TransformerLayer(
            hidden,
            4 * hidden,
            32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tp_group=dist.group.WORLD,
            tp_size=ranks,
            sequence_parallel=True,
            set_parallel_mode=True,
            params_dtype=training.dtype,
            device=training.device,
            **flags,
        )
        for _ in range(2)
    ]
    model = nn.Sequential(*layers)
    x = torch.randn(tokens // ranks, 1, hidden, device=training.device, dtype=training.dtype, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def one() -> None:
        model(x).float().square().mean().backward()

    step: Step = training.step(model, optimizer, one)
    return step


def userbuffers_off() -> None:
    import transformer_engine.pytorch as te

    te.module.base.destroy_ub()
