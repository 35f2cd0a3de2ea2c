"""The typed configuration of `workload=tp_training`. The field docstrings are the manual.

The names are those that such benchmarks have on their command lines. Who trains is said by the top-level `impl`, on how
many ranks by `tp_size` and `dp_size`, which model by `model`, `model.num_layers` among it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from overlap_sweep.config import OF_LANGUAGE_MODELS, OF_OPERATORS, TORCHS, TensorParallelConfig
from overlap_sweep.declared import one_of, ranged

IMPLEMENTATIONS = ("autotp", "fsdp_dtensor", "async_tp", "megatron")

DEFAULT_IMPL = "fsdp_dtensor"

SEQUENCE_PARALLEL = ("async_tp", "megatron")
"""Implementations that are so unasked, where there is more than one tensor-parallel rank: they overlap nothing
else."""

PRECISION_OF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""By `tp_training.dtype`."""


@dataclass
class TpTraining:
    """How a causal language model is trained. What concerns one implementation only is ignored by the others, so that
    all can be swept with one command; the point then has null there."""

    attn_impl: str | None = one_of("sdpa", "sdpa", "flash_attention_2", "eager")
    """Hugging Face's attention. Not for megatron, whose attention is Transformer Engine's."""
    zero_stage: int | None = ranged(1, 0, 2)
    """autotp: what DeepSpeed's ZeRO shards over the data-parallel ranks: 0 nothing, 1 the optimizer's state, 2 also
    gradients."""
    vocab_parallel: bool = True
    """Each tensor-parallel rank holds a part of the vocabulary's rows of the embedding and the output projection, and
    the loss is computed without gathering logits. false: every rank holds all; not for megatron."""
    sequence_parallel: bool | None = None
    """Between the parallel linears each rank holds a part of the sequence. null: for async_tp and megatron, which
    overlap nothing without it. Not for autotp, which has none."""
    compile: bool = False
    """torch.compile every layer; async_tp always does. Not for megatron."""
    tp_comm_overlap: bool | None = True
    """megatron, on a GPU with sequence_parallel: overlap by Transformer Engine's userbuffers."""
    tp_comm_overlap_cfg: str | None = None
    """megatron: the tuned file, such as `analyze.py` or the tuner writes it, with the switches in its comments. null:
    Transformer Engine's defaults."""
    batch_size: int = ranged(1, 1, 2**20)
    """Sequences of a data-parallel rank's micro batch."""
    seq_length: int | None = ranged(None, 2, 2**24)
    """Tokens of a sequence. null: 2048, on a CPU 64."""
    num_training_steps: int | None = ranged(None, 2, 10**6)
    """Steps that are run. null: 100, on a CPU 8."""
    warmup_steps: int | None = ranged(None, 0, 10**6)
    """The first steps, which no time or memory is taken from. null: 5, on a CPU 2."""
    gradient_accumulation_steps: int = ranged(1, 1, 4096)
    """Micro batches of a step."""
    learning_rate: float = ranged(1e-5, 0.0, 100.0)
    """Of AdamW, constant."""
    weight_decay: float = ranged(0.01, 0.0, 100.0)
    """Of AdamW, for all parameters alike."""
    max_grad_norm: float = ranged(1.0, 0.0, 10**6)
    """Largest norm of the gradients over all ranks. 0: gradients are not clipped, only their norm is recorded."""
    dtype: str | None = one_of(None, *PRECISION_OF, also=TORCHS)
    """What is computed and communicated in. null: bfloat16, on a CPU float32. Weights and the optimizer's state are
    kept in float32 by all implementations; float16 scales the loss."""
    autocast: bool = False
    """By torch.autocast to `dtype`, with parameters in float32, instead of computing in parameters of `dtype`. Not for
    megatron."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward."""
    log_interval: int = ranged(10, 1, 10**6)
    """Steps between lines in worker.log. For each the host waits for the device."""
    output_dir: str | None = None
    """Where the run directories are made instead of in `multirun/<date>/<time>`. Single runs may share it, too."""
    seed: int = ranged(42, 0, 2**31 - 1)
    """Of initial weights and data, which are the same for all implementations."""
    peak_tflops: float | None = ranged(None, 0.001, 10**6)
    """Of one GPU in `dtype`, dense, for model FLOP utilisation. null: what is known of the GPU by its name."""


@dataclass
class WorkloadOptions:
    """Training steps of a language model by one of several tensor-parallel stacks, timed step by step; see `impl` and
    `tp_training`."""

    name: str = "tp_training"
    tokens: int | None = ranged(None, 1, 2**40)
    """Tokens of a step, of all data-parallel ranks' micro batches: what `tp_training` says."""
    repeats: int | None = ranged(None, 1, 10**6)
    """Timed steps: what `tp_training` says."""
    profiled: int = ranged(2, 1, 100)
    """Steps under the profiler, after the timed ones, unless `profile=none`."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    impl: str | None = one_of(None, *IMPLEMENTATIONS)
    """Who trains: `autotp`, DeepSpeed's AutoTP and ZeRO; `fsdp_dtensor`, FSDP2 over the
    data-parallel ranks and DTensor over the tensor-parallel ones; `async_tp`, the same with PyTorch's asynchronous TP;
    `megatron`, Megatron-Core. null: fsdp_dtensor."""
    dp_size: int | None = ranged(None, 1, 1024)
    """Data-parallel ranks; it runs on tp_size x dp_size. null: 1."""
    tp_training: TpTraining = field(default_factory=TpTraining)

    reads_of_model: ClassVar[tuple[str, ...]] = (
        *(name for name in OF_OPERATORS if name != "gated_mlp"),
        *OF_LANGUAGE_MODELS,
    )
    precision_option: ClassVar[str | None] = "tp_training.dtype"


TP_TRAINING_ON: dict[str, dict[str, Any]] = {
    "cuda": {"seq_length": 2048, "num_training_steps": 100, "warmup_steps": 5, "dtype": "bfloat16"},
    "cpu": {"seq_length": 64, "num_training_steps": 8, "warmup_steps": 2, "dtype": "float32"},
}
"""What null stands for, by device."""
