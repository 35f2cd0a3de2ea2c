"""What every tensor-parallel stack has to train, by stack and mesh, and the same training by one process with the whole
Hugging Face model to hold it against."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training import autotp, hugging_face, run
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, architecture
from overlap_sweep.workloads.tp_training.run import groups_of, initial_weights, token_batches, training_step
from tests.backends import symm_mem_on_cpu
from tests.composed import TINY_OPTIONS, composed, tp_point
from tests.processes import run_ranks


class Trained(NamedTuple):
    losses: list[float]
    """Of each step, of one data-parallel rank."""
    norms: list[float]
    details: dict[str, Any]
    warnings: list[str]


def whole_model(point: Resolved, device: str = "cpu") -> nn.Module:
    """As Hugging Face makes it, with the point's initial weights, of which each kind of device draws others."""
    fields = point.language_model
    with torch.device(device):
        model = hugging_face.whole_model(fields, point.tp_training.attn_impl or "sdpa").train()
    draw = initial_weights(point, Ranks(0, 1, torch.device(device)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape))
    return model


def differences(found: Sequence[Trained], point: Resolved) -> tuple[float, ...]:
    """The largest of the losses and of the norms from the whole model's, relative, over ranks and steps."""
    expected = train_whole(point)
    # Something is learned.
    assert len({round(loss, 3) for loss in expected[0].losses}) == point.tp_training.num_training_steps
    differ: dict[str, list[float]] = {"losses": [], "norms": []}
    for name, values in differ.items():
        for rank, of_rank in enumerate(found):
            theirs = getattr(expected[rank // point.tp_size], name)
            values += [abs(a / b - 1) for a, b in zip(getattr(of_rank, name), theirs, strict=True)]
    return max(differ["losses"]), max(differ["norms"])


def train_whole(point: Resolved, device: str = "cpu") -> list[Trained]:
    """Of each data-parallel rank's batches, by one process: what the point's implementation must come to."""
    training = asdict(point.tp_training) | dict.fromkeys(_ALL_THE_SAME)
    same = {"attn_impl": point.tp_training.attn_impl or "sdpa", "tp_training": training, "device": device}
    key = json.dumps({**same, **{name: point[name] for name in ("language_model", "dp_size", "workload")}})
    if key not in _known:
        _known[key] = _train_whole(point, device)
    return _known[key]


_known: dict[str, list[Trained]] = {}
_ALL_THE_SAME = (
    *("zero_stage", "vocab_parallel", "sequence_parallel", "compile", "tp_comm_overlap", "tp_comm_overlap_cfg"),
    *("dtype", "autocast", "activation_checkpointing", "attn_impl"),
)
"""Options that do not change what is computed, as far as float32 has it."""


def _train_whole(point: Resolved, device: str) -> list[Trained]:
    # Of so small tensors more threads make it slower.
    torch.set_num_threads(1)
    training, ranks = point.tp_training, Ranks(0, 1, torch.device(device))
    micro_batches, dp_size = training.gradient_accumulation_steps, point.dp_size
    model = whole_model(point, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    batches = [token_batches(point, ranks, dp_rank) for dp_rank in range(dp_size)]
    losses: list[list[float]] = [[] for _ in range(dp_size)]
    norms = []
    for step in range(training.num_training_steps):
        for dp_rank in range(dp_size):
            of_step = 0.0
            for micro_batch in range(micro_batches):
                tokens, labels = batches[dp_rank][step * micro_batches + micro_batch]
                logits = model(tokens).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                (loss / micro_batches / dp_size).backward()
                of_step += loss.item() / micro_batches
            losses[dp_rank].append(of_step)
        limit = training.max_grad_norm or float("inf")
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return [Trained(of_rank, norms, {}, []) for of_rank in losses]


def train_points(ranks: Ranks, points: Mapping[str, Resolved]) -> dict[str, Trained]:
    """Each by its own implementation, on all ranks. For `run_ranks`."""
    found = {}
    for name, point in points.items():
        groups = groups_of(ranks, point.tp_size, point.dp_size)
        if point.impl == "megatron" and ranks.device.type == "cpu":
            make_do("megatron", ranks)
        built = run.load(point.impl)(point, ranks, groups)
        batches, training = cycle(token_batches(point, ranks, groups.dp_rank)), point.tp_training
        count = training.gradient_accumulation_steps
        taken = [training_step(built, batches, count, ranks) for _ in range(training.num_training_steps)]
        assert {step.loss.dtype for step in taken} == {torch.float32}
        losses, norms = [step.loss.item() for step in taken], [step.grad_norm.item() for step in taken]
        facts = built.facts()
        built.close()
        found[name] = Trained(losses, norms, facts.details, facts.warnings)
    return found


TIED = "model.tie_word_embeddings=true"
CLIPPED, NOT_CLIPPED = "max_grad_norm=0.3", "max_grad_norm=0"
"""0.3 is less than the norm at each step."""
ACCUMULATED, CHECKPOINTED, COMPILED = "gradient_accumulation_steps=2", "activation_checkpointing=true", "compile=true"
IN_SEQUENCE, WHOLE_VOCABULARY = "sequence_parallel=true", "vocab_parallel=false"
BUCKETS = "ddp_bucket_size=20000"
"""Megatron-Core's; the model has several of them."""
SMALL_BUCKETS = "overlap_comm=true", "reduce_bucket_size=20000", "allgather_bucket_size=20000"
"""DeepSpeed's."""
DISTRIBUTED = "use_distributed_optimizer"


class Case(NamedTuple):
    stack: str
    mesh: str
    name: str
    overrides: tuple[str, ...]
    """A name without a dot is one of tp_training's."""

    def __str__(self) -> str:
        return f"{self.stack}, {self.mesh}, {self.name}"


MESHES = {
    "alone": ("tp_size=1",),
    "tp2": ("tp_size=2",),
    "dp2": ("tp_size=1", "dp_size=2"),
    "tp2 x dp2": ("tp_size=2", "dp_size=2"),
}
RANKS = {"alone": 1, "tp2": 2, "dp2": 2, "tp2 x dp2": 4}
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "autotp": {f"zero{stage}": (f"zero_stage={stage}",) for stage in (0, 1, 2)},
    "fsdp_dtensor": {"whole sequence": (), "in sequence": (IN_SEQUENCE,)},
    "megatron": {"in sequence": (), "whole sequence": ("sequence_parallel=false",)},
}
"""Of the stacks that compute on a CPU by themselves."""
OPTIONS = {
    "accumulated": (CLIPPED, ACCUMULATED, TIED, "weight_decay=1"),
    "checkpointed": (CHECKPOINTED, NOT_CLIPPED, "model.vocab_size=1024"),
    "whole vocabulary": (WHOLE_VOCABULARY, TIED, NOT_CLIPPED),
}
HALF_OPTIONS = {
    "bfloat16": {"accumulated": (NOT_CLIPPED, ACCUMULATED), "autocast": (CLIPPED, "autocast=true")},
    "float16": {"clipped": (CLIPPED,), "autocast": (NOT_CLIPPED, ACCUMULATED, "autocast=true")},
}
"""By precision."""
ASYNC_TP = [
    Case("async_tp", "tp2", "three layers, one sequence", ("model.num_layers=3", "batch_size=1")),
    Case("async_tp", "tp2", "qwen2, checkpointed", ("model.architecture=qwen2", TIED, CHECKPOINTED, ACCUMULATED)),
]
OF_ONE_STACK = [
    *ASYNC_TP,
    Case("autotp", "tp2", "compiled", (COMPILED, CLIPPED)),
    Case("autotp", "tp2", "rank of padding", ("model.vocab_size=9",)),
    Case("fsdp_dtensor", "alone", "accumulated", (ACCUMULATED, CLIPPED, IN_SEQUENCE)),
    Case("fsdp_dtensor", "alone", "whole vocabulary", (WHOLE_VOCABULARY, TIED)),
    Case("fsdp_dtensor", "tp2", "eager", ("attn_impl=eager", IN_SEQUENCE)),
    Case("fsdp_dtensor", "tp2", "compiled, in sequence", (COMPILED, IN_SEQUENCE, CHECKPOINTED)),
    Case("fsdp_dtensor", "dp2", "compiled", (COMPILED,)),
    Case("autotp", "dp2", "zero1, overlapped", (CLIPPED, ACCUMULATED, *SMALL_BUCKETS)),
    Case("autotp", "dp2", "zero2, overlapped", ("zero_stage=2", NOT_CLIPPED, ACCUMULATED, *SMALL_BUCKETS)),
    Case("fsdp_dtensor", "dp2", "kept", ("reshard_after_forward=false", "forward_prefetch=2", ACCUMULATED)),
    Case("fsdp_dtensor", "dp2", "prefetched", ("model.num_layers=3", "forward_prefetch=1", "backward_prefetch=2")),
    Case("fsdp_dtensor", "dp2", "not prefetched", ("model.num_layers=3", "backward_prefetch=0", CHECKPOINTED)),
    Case("megatron", "dp2", "all-reduced", (f"{DISTRIBUTED}=false", BUCKETS, CLIPPED, ACCUMULATED)),
    Case("megatron", "dp2", "reduced at the end", ("overlap_grad_reduce=false", BUCKETS, NOT_CLIPPED, ACCUMULATED)),
    Case("megatron", "dp2", "gathered at once", ("overlap_param_gather=false", BUCKETS, CLIPPED, TIED)),
    Case("megatron", "tp2", "rank of padding", ("model.vocab_size=9",)),
    Case("megatron", "tp2", "wide heads", ("model.head_dim=32", "model.num_kv_heads=4")),
]


def _variants(stack: str, mesh: str) -> dict[str, tuple[str, ...]]:
    """Returns all variants where the mesh has ranks over which they differ, else the first: ZeRO shards over
    data-parallel ranks, sequences are cut over tensor-parallel ones."""
    cuts = "dp" in mesh if stack == "autotp" else mesh.startswith("tp")
    return VARIANTS[stack] if cuts else dict([next(iter(VARIANTS[stack].items()))])


def _options(stack: str, mesh: str, variant: str) -> dict[str, tuple[str, ...]]:
    """Returns what is tried with the variant: on four ranks one set of options, and architectures with one variant,
    since all variants of a stack build them alike. Megatron-Core always cuts the vocabulary."""
    if RANKS[mesh] == 4:
        return {"accumulated": OPTIONS["accumulated"]}
    first = mesh == "tp2" and variant == next(iter(VARIANTS[stack]))
    built = [name for name in sorted(ARCHITECTURES) if first and (stack != "megatron" or architecture(name).megatron)]
    of_architecture = {name: (f"model.architecture={name}", CLIPPED) for name in built}
    left_out = {"whole vocabulary"} if stack == "megatron" else set()
    return {name: given for name, given in OPTIONS.items() if name not in left_out} | of_architecture


CASES = [
    Case(stack, mesh, f"{variant}, {name}", (*own, *overrides))
    for stack in VARIANTS
    for mesh in ("tp2", "dp2", "tp2 x dp2")
    for variant, own in _variants(stack, mesh).items()
    for name, overrides in _options(stack, mesh, variant).items()
] + OF_ONE_STACK
HALF = [
    Case(stack, mesh, f"{dtype}, {variant}, {name}", (f"dtype={dtype}", *own, *overrides))
    for stack in VARIANTS
    for mesh in ("tp2", "dp2")
    for dtype in HALF_OPTIONS
    for variant, own in _variants(stack, mesh).items()
    for name, overrides in HALF_OPTIONS[dtype].items()
    # Megatron-Core has no autocast, and AutoTP neither in float16, which it has under ZeRO only.
    if (stack, name) != ("megatron", "autocast")
    and ((stack, dtype) != ("autotp", "float16") or (name != "autocast" and variant != "zero0"))
] + [Case("autotp", "tp2", "float16, zero1", ("dtype=float16", "zero_stage=1", CLIPPED))]
FUSED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
"""Operators of symmetric memory."""


def point_of(case: Case) -> Resolved:
    """Of three steps: what an optimizer keeps shows in the third one's loss."""
    given = ("num_training_steps=3", *case.overrides)
    return tp_point(
        f"impl={case.stack}",
        *MESHES[case.mesh],
        *(each if "." in each.partition("=")[0] else f"tp_training.{each}" for each in given),
    )


@cache
def trained(stack: str, ranks: int) -> list[dict[str, Trained]]:
    """By rank and case, one after the other in the same processes: they go from one mesh to the other. Details have the
    operators of symmetric memory that were `called`, in order."""
    of_ranks = [case for case in CASES + HALF if (case.stack, RANKS[case.mesh]) == (stack, ranks)]
    points = {str(case): point_of(case) for case in of_ranks}
    return run_ranks(ranks, _train, stack, points, keep=stack)


def _train(ranks: Ranks, stack: str, points: dict[str, Resolved]) -> dict[str, Trained]:
    make_do(stack, ranks)
    found: dict[str, Trained] = {}
    for name, point in points.items():
        symm_mem_on_cpu.called.clear()
        found |= train_points(ranks, {name: point})
        found[name].details["called"] = list(symm_mem_on_cpu.called)
    assert not torch._inductor.config._micro_pipeline_tp, "it is no option of the process"
    return found


def make_do(stack: str, ranks: Ranks) -> None:
    """Have the stack use what there is in this process, which is this stack's alone."""
    if stack == "async_tp":
        symm_mem_on_cpu.stand_in()
        # inductor asks for it, and communicates with whatever there is.
        dist.is_nccl_available = lambda: True
    else:
        # Whether layers can be compiled shows at once; code for them takes inductor tens of seconds.
        torch.compile = partial(torch.compile, backend="aot_eager")
    if stack == "megatron":
        # Not at once: Megatron-Core may not be installed.
        from tests.workloads.tp_training import megatron_on_cpu

        megatron_on_cpu.stand_in()
    if stack == "autotp":
        # DeepSpeed has float16 only on CPUs that multiply it fast.
        accelerator = autotp._deepspeed(ranks).accelerator.get_accelerator()
        accelerator.is_fp16_supported = lambda: True


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


def config_point(directory: Path, *overrides: str) -> Resolved:
    """Of a config.json in which nothing is the default."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return composed(*TINY_OPTIONS, "model=hf", f"model.name={directory}", *overrides)
