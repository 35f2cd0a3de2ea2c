"""What every tensor-parallel stack has to train like the whole model, by stack and mesh."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import architectures, autotp
from overlap_sweep.tp_training.architectures import known
from tests.backends import symm_mem_on_cpu
from tests.processes import run_ranks
from tests.tp_training.whole_model import Trained, train_points
from tests.training.points import TINY_OPTIONS, composed, tp_point

IN_SEQUENCE = "tp_training.sequence_parallel=true"
WHOLE_SEQUENCE = "tp_training.sequence_parallel=false"
WHOLE_VOCABULARY = "tp_training.vocab_parallel=false"
TIED = "model.tie_word_embeddings=true"
ACCUMULATED = "tp_training.gradient_accumulation_steps=2"
NOT_CLIPPED = "tp_training.max_grad_norm=0"
CLIPPED = "tp_training.max_grad_norm=0.3"
"""Less than the norm at each step."""
DECAY = "tp_training.weight_decay=1"
CHECKPOINTED = "tp_training.activation_checkpointing=true"
COMPILED = "tp_training.compile=true"
AUTOCAST = "tp_training.autocast=true"
STEPS = "tp_training.num_training_steps=3"


def zero(stage: int) -> str:
    return f"tp_training.zero_stage={stage}"


def of(architecture: str) -> str:
    return f"model.architecture={architecture}"


class Case(NamedTuple):
    stack: str
    mesh: str
    name: str
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.stack}, {self.mesh}, {self.name}"


MESHES = {
    "alone": ("tp_size=1",),
    "tp2": ("tp_size=2",),
    "dp2": ("tp_size=1", "dp_size=2"),
    "tp2 x dp2": ("tp_size=2", "dp_size=2"),
    "tp4": ("tp_size=4", "model.num_kv_heads=4"),
    "dp4": ("tp_size=1", "dp_size=4"),
}
RANKS = {"alone": 1, "tp2": 2, "dp2": 2, "tp2 x dp2": 4, "tp4": 4, "dp4": 4}
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "autotp": {f"zero{stage}": (zero(stage),) for stage in (0, 1, 2)},
    "fsdp_dtensor": {"whole sequence": (), "in sequence": (IN_SEQUENCE,)},
    "megatron": {"in sequence": (), "whole sequence": (WHOLE_SEQUENCE,)},
}
"""Of the stacks that compute on a CPU by themselves."""
OPTIONS = {
    "accumulated": (CLIPPED, ACCUMULATED, DECAY),
    "checkpointed": (CHECKPOINTED, NOT_CLIPPED, "model.vocab_size=1024"),
    "tied": (TIED, CLIPPED),
    "whole vocabulary": (WHOLE_VOCABULARY, TIED, NOT_CLIPPED, CHECKPOINTED),
}
HALF_OPTIONS = {
    "clipped": (CLIPPED,),
    "accumulated": (NOT_CLIPPED, ACCUMULATED),
    "autocast": (CLIPPED, AUTOCAST),
}
ASYNC_TP = [
    Case("async_tp", "tp2", "three layers", ("model.num_layers=3",)),
    Case("async_tp", "tp2", "qwen2", (of("qwen2"), TIED)),
    Case("async_tp", "tp2", "checkpointed", (CHECKPOINTED, ACCUMULATED)),
    Case("async_tp", "tp2", "one sequence", ("tp_training.batch_size=1",)),
]
OF_ONE_STACK = [
    *ASYNC_TP,
    Case("autotp", "tp2", "compiled", (COMPILED, CLIPPED)),
    Case("fsdp_dtensor", "alone", "accumulated", (ACCUMULATED, CLIPPED, IN_SEQUENCE)),
    Case("fsdp_dtensor", "alone", "whole vocabulary", (WHOLE_VOCABULARY, TIED)),
    Case("fsdp_dtensor", "tp2", "eager", ("tp_training.attn_impl=eager", IN_SEQUENCE)),
    Case("fsdp_dtensor", "tp2", "compiled", (COMPILED,)),
    Case("fsdp_dtensor", "tp2", "compiled, in sequence", (COMPILED, IN_SEQUENCE, CHECKPOINTED)),
    Case("fsdp_dtensor", "dp2", "compiled", (COMPILED, CHECKPOINTED)),
    Case("megatron", "tp2", "rank of padding", ("model.vocab_size=9",)),
    Case("megatron", "tp2", "wide heads", ("model.head_dim=32", "model.num_kv_heads=4")),
]


def _variants(stack: str, mesh: str) -> dict[str, tuple[str, ...]]:
    """One rank has the whole sequence anyway."""
    cuts = stack == "autotp" or mesh.startswith("tp")
    return VARIANTS[stack] if cuts else dict([next(iter(VARIANTS[stack].items()))])


def _options(stack: str, mesh: str) -> dict[str, tuple[str, ...]]:
    """Megatron-Core always cuts the vocabulary; what options do on two ranks they do on four."""
    left_out = {"whole vocabulary"} if stack == "megatron" else set()
    names = ["accumulated"] if mesh in ("tp4", "dp4") else [name for name in OPTIONS if name not in left_out]
    architectures = {name: (of(name), CLIPPED) for name in known()} if mesh == "tp2" else {}
    return {name: OPTIONS[name] for name in names} | architectures


def _has_autocast(stack: str, dtype: str, variant: str) -> bool:
    """AutoTP has it in float16 only without ZeRO."""
    return stack != "megatron" and (dtype == "bfloat16" or variant not in ("zero1", "zero2"))


CASES = [
    Case(stack, mesh, f"{variant}, {name}", (*own, *overrides))
    for stack in VARIANTS
    for mesh in ("tp2", "dp2", "tp2 x dp2", "tp4", "dp4")
    for variant, own in _variants(stack, mesh).items()
    for name, overrides in _options(stack, mesh).items()
] + OF_ONE_STACK
HALF = [
    Case(stack, mesh, f"{dtype}, {variant}, {name}", (f"tp_training.dtype={dtype}", *own, *overrides))
    for stack, meshes in {"autotp": ["tp2 x dp2"], "fsdp_dtensor": ["tp2", "dp2"], "megatron": ["tp2", "dp2"]}.items()
    for mesh in meshes
    for dtype in ("bfloat16", "float16")
    for variant, own in _variants(stack, mesh).items()
    for name, overrides in HALF_OPTIONS.items()
    # Megatron-Core has no autocast, and AutoTP in float16 only without ZeRO.
    if name != "autocast"
    or (stack != "megatron" and (dtype, variant) not in {("float16", "zero1"), ("float16", "zero2")})
]

FUSED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
"""Operators of symmetric memory."""
GRANITE = '''
"""Llama with factors of its own."""

from overlap_sweep.tp_training.architectures.architecture import Architecture

ARCHITECTURE = Architecture("granite", more={"embedding_multiplier": 3.0, "logits_scaling": 0.5})
'''
LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 333},
    **{"rms_norm_eps": 1e-2, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "gelu"},
    **{"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.5, "initializer_range": 0.1},
    **{"rope_theta": 100.0, "pad_token_id": 0, "max_position_embeddings": 64},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
}
"""Nothing in it is the default."""


def point_of(case: Case) -> dict[str, Any]:
    """Of three steps: what an optimizer keeps shows in the third one's loss."""
    return tp_point(f"impl={case.stack}", STEPS, *MESHES[case.mesh], *case.overrides)


class Ran(NamedTuple):
    trained: dict[str, Trained]
    """By case, of one rank."""
    fused: dict[str, list[str]]
    """By case, the operators of symmetric memory that were called, in order."""


@cache
def trained(stack: str, ranks: int) -> list[Ran]:
    """By rank, of all cases one after the other in the same processes: they go from one mesh to the other."""
    of_ranks = [case for case in CASES + HALF if (case.stack, RANKS[case.mesh]) == (stack, ranks)]
    points = {str(case): point_of(case) for case in of_ranks}
    found: list[Ran] = run_ranks(ranks, _train, points, keep=stack)
    return found


def _train(ranks: Ranks, points: dict[str, dict[str, Any]]) -> Ran:
    ran = Ran({}, {})
    for name, point in points.items():
        make_do(point["impl"], ranks)
        symm_mem_on_cpu.called.clear()
        ran.trained.update(train_points(ranks, {name: point}))
        ran.fused[name] = list(symm_mem_on_cpu.called)
        if point["impl"] == "async_tp":
            assert not torch._inductor.config._micro_pipeline_tp, "it is no option of the process"
    return ran


def make_do(stack: str, ranks: Ranks) -> None:
    """Have the stack use what there is in this process, which is this stack's alone."""
    if stack == "async_tp":
        symm_mem_on_cpu.stand_in()
        # inductor asks for it, and communicates with whatever there is.
        dist.is_nccl_available = lambda: True
    if stack == "autotp":
        # DeepSpeed has float16 only on CPUs that multiply it fast.
        accelerator = autotp._deepspeed(ranks.device).accelerator.get_accelerator()
        accelerator.is_fp16_supported = lambda: True


def config_point(directory: Path, *overrides: str) -> dict[str, Any]:
    """Of a config.json in which nothing is the default."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return composed(*TINY_OPTIONS, "model=hf", f"model.name={directory}", *overrides)


def train_with_architectures(ranks: Ranks, directory: Path, points: Mapping[str, dict[str, Any]]) -> dict[str, Trained]:
    """Where `directory` has more of them."""
    architectures.__path__.append(str(directory))
    try:
        return train_points(ranks, points)
    finally:
        architectures.__path__.pop()
