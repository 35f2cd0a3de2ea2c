"""Training steps of a ranking model under FSDP2 or DDP: how much of their communication is hidden."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from overlap_sweep.declared import types_of
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import all_ranks
from overlap_sweep.nccl import variables
from overlap_sweep.overlap import models
from overlap_sweep.workloads import Sample, Searchable, Workers, Workload, profilers, run_of
from overlap_sweep.workloads.fsdp.config import (
    COPY_ENGINES,
    PER_NODE,
    PRECISION_OF,
    RANKING_ON,
    STEPS_ON,
    TRAINING_ON,
    WITHIN_NODE,
    Compile,
    Config,
    Fsdp,
    Ranking,
    Resolved,
    ResolvedRanking,
    ResolvedTraining,
    Streams,
    Training,
)
from overlap_sweep.workloads.memory import ADAM_BYTES, DenseLayer, Memory

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result

C = TypeVar("C")

_CTA_POLICY = "NCCL_CTA_POLICY"
"""Variable by which NCCL uses copy engines instead of SMs where it can (2: zero CTAs)."""


def complete(config: Config) -> Mapping[str, object]:
    """Returns the point with batch size, steps and precision filled in, without unused options."""
    device, distributed, replicas = config.runtime.device, config.distributed, config.fsdp.replicas
    if config.backend != "auto":
        raise UserError(f"backend={config.backend}: workload=fsdp uses distributed.strategy; leave backend out.")
    training = _filled(config.training, TRAINING_ON[device], ResolvedTraining)
    ranking = _filled(config.ranking, RANKING_ON[device], ResolvedRanking)
    environment = variables.checked("distributed.env", distributed.env)
    if replicas != PER_NODE and (type(replicas) is not int or not 1 <= replicas <= 1024):
        raise UserError(
            f"fsdp.replicas={replicas} is invalid; give a number of replicas from 1 to 1024, or {PER_NODE}."
        )
    fsdp = config.fsdp.numbered(config.nodes, distributed.dp_size)
    _check_choice("fsdp.forward_prefetch", fsdp.forward_prefetch, 0, "layers")
    _check_choice("fsdp.reshard_after_forward", fsdp.reshard_after_forward, 2, "ranks", WITHIN_NODE)
    profiled = config.profile != "none" if config.profiling.enabled is None else config.profiling.enabled
    # Tokens of the backbone's input.
    tokens = ranking.sequence_length + ranking.num_sparse_features + 1
    completed = replace(
        config,
        workload=replace(
            config.workload,
            tokens=training.samples_per_rank * config.world_size * tokens,
            steps=config.workload.steps or STEPS_ON[device],
        ),
        backend=distributed.strategy,
        precision=PRECISION_OF[training.mixed_precision],
        ranking=ranking,
        fsdp=replace(fsdp, forward_prefetch=int(fsdp.forward_prefetch)),
        # The folder changes where results go, not what is measured.
        training=replace(training, output_dir=None),
        distributed=replace(distributed, env=environment),
        profiling=replace(config.profiling, enabled=profiled),
    )
    return {**completed, "tp_size": 1}


def _filled(options: Training | Ranking, usual: Mapping[str, int | str], kind: type[C]) -> C:
    """Returns the options with those of `usual` where they are null."""
    given = asdict(options)
    return msgspec.convert(given | {name: value for name, value in usual.items() if given[name] is None}, kind)


def _check_choice(name: str, value: object, lowest: int, unit: str, *words: str) -> None:
    """Raises UserError unless `value` is true, false or a number from `lowest` on. `words`: others."""
    if not isinstance(value, bool) and not (isinstance(value, int) and lowest <= value <= 1024):
        others = ", ".join(("true", "false", *words))
        raise UserError(f"{name}={value} is invalid; give {others} or a number of {unit} from {lowest} to 1024.")


def refusal(point: Resolved) -> str | None:
    """Returns why the completed point cannot be trained, or which option has no effect in it; None if it is valid."""
    distributed, fsdp, ranks = point.distributed, point.fsdp, point.distributed.dp_size
    if lacking := models.lacks(point.model) or models.mixed(point.model):
        return lacking
    heads, kv_heads = point.model.num_attention_heads, point.model.num_kv_heads
    assert heads
    assert kv_heads
    if heads % kv_heads:
        return f"model.num_attention_heads={heads} is not divisible by model.num_kv_heads={kv_heads}"
    if point.compile.mode and point.compile.options:
        return "torch.compile takes compile.mode or compile.options, not both"
    if not point.compile.enabled and asdict(point.compile) != asdict(Compile()):
        return "the other compile options have no effect without compile.enabled=true"
    if point.profiling.tensorboard and not point.profiling.enabled:
        return "profiling.tensorboard has no effect without profiling.enabled=true"
    for section, names, why in _unused(point):
        own, usual = getattr(point, section), types_of(Config)[section]()
        if changed := [name for name in names if getattr(own, name) != getattr(usual, name)]:
            return f"{section}.{changed[0]} {why}"
    if distributed.strategy == "ddp":
        if distributed.overlap_reduce_scatter and not distributed.enable_overlap:
            return "distributed.overlap_reduce_scatter requires distributed.enable_overlap=true"
        return None
    if not fsdp.use_orig_params:
        return "fsdp.use_orig_params=false is an option of FSDP1; FSDP2 has no flat parameters"
    if ranks % fsdp.replicas:
        return f"distributed.dp_size={ranks} is not divisible by fsdp.replicas={fsdp.replicas}"
    shards, group = ranks // fsdp.replicas, fsdp.reshard_after_forward
    if not isinstance(group, bool) and fsdp.replicas > 1:
        return "fsdp.reshard_after_forward must be true or false with fsdp.replicas"
    if not isinstance(group, bool) and (shards % group or group >= shards):
        return f"fsdp.reshard_after_forward={group} must be smaller than the {shards} ranks and divide them"
    layers, per_unit = point.ranking.num_layers, fsdp.layers_per_unit
    if per_unit > layers:
        return f"fsdp.layers_per_unit={per_unit} is larger than ranking.num_layers={layers}"
    return _without_symmetric_memory(point, shards)


def _without_symmetric_memory(point: Resolved, shards: int) -> str | None:
    if not (kind := point.fsdp.symmetric_memory):
        return None
    if point.runtime.device == "cpu":
        return f"fsdp.symmetric_memory={kind} needs GPUs"
    if point.ranks_per_node % shards:
        return f"fsdp.symmetric_memory={kind} needs shards within a node; add fsdp.replicas={PER_NODE}"
    if not isinstance(point.fsdp.reshard_after_forward, bool):
        return (
            f"fsdp.reshard_after_forward must be true or false with fsdp.symmetric_memory={kind}, which is of one group"
        )
    if kind == COPY_ENGINES and _CTA_POLICY in point.distributed.env:
        return f"distributed.env.{_CTA_POLICY} is set by fsdp.symmetric_memory={kind}; leave it out"
    return None


def _unused(point: Resolved) -> Iterator[tuple[str, Iterable[str], str]]:
    """Yields a section, those of its options that have no effect with the others, and why."""
    distributed, fsdp = point.distributed, point.fsdp
    if distributed.strategy == "ddp":
        yield "fsdp", [name for name in types_of(Fsdp) if name != "sync_module_states"], "has no effect under DDP"
        if distributed.enable_overlap:
            idle = ["auxiliary"] if distributed.overlap_reduce_scatter else ["auxiliary", "reduce_scatter"]
            yield "streams", idle, "has no effect under DDP, which only all-reduces"
    else:
        idle = ["overlap_reduce_scatter", "bucket_cap_mb", "gradient_as_bucket_view"]
        yield "distributed", idle, "has no effect under FSDP2"
        if fsdp.replicas == 1:
            yield "streams", ["all_reduce"], "has no effect without fsdp.replicas: there is no all-reduce"
        if distributed.dp_size == fsdp.replicas:
            idle = ["separate_reduce_scatter_group", "symmetric_memory"]
            yield "fsdp", idle, "has no effect on a rank that has the whole model"
    if not distributed.overlap_reduce_scatter:
        clone = "overlap_clone_for_reduce_scatter"
        yield "distributed", [clone], "has no effect without distributed.overlap_reduce_scatter"
    if not distributed.enable_overlap:
        yield "streams", types_of(Streams), "has no effect without distributed.enable_overlap=true"


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    distributed = config.distributed
    return [models.short_name(config.model), f"dp{distributed.dp_size}", distributed.strategy]


def _ranks(point: Config) -> dict[str, int]:
    if point.distributed.dp_size is not None:
        return {}
    return {"distributed.dp_size": all_ranks(point, "distributed.dp_size")}


def _memory(point: Resolved) -> Memory:
    layer, ranking = DenseLayer.of(point.model), point.ranking
    tables = ranking.num_sparse_features + 1
    layers = ranking.num_layers * layer.parameters
    count = layers + tables * ranking.vocab_size * layer.hidden_size
    shards = point.world_size // point.fsdp.replicas if point.backend == "fsdp2" else 1
    number_bytes = 4 if point.precision == "fp32" else 2
    tokens = point.workload.tokens / point.world_size / point.training.gradient_accumulation
    return Memory(
        # In float32 every rank has the whole model until it is sharded.
        parameters=4 * count,
        gradients=4 * count / shards,
        optimizer=ADAM_BYTES * count / shards,
        activations=tokens * ranking.num_layers * layer.activations() * number_bytes,
    )


def _cost(point: Resolved) -> tuple[object, ...]:
    profiling = point.profiling
    profiled = profiling.enabled and profiling.repeat * (profiling.wait + profiling.warmup + profiling.active)
    # Compiling takes longer than all the steps.
    return point.training.max_steps, point.workload.steps, profiled, point.ranking.num_layers, point.compile.enabled


def _workers(point: Resolved, directory: Path) -> Workers:
    """Returns the requirements on the workers. They are not shared if the point leaves process groups behind: FSDP2
    makes two for each unit that is resharded to a smaller group, and keeps them."""
    leaves_groups = type(point.fsdp.reshard_after_forward) is int
    symmetric = point.fsdp.symmetric_memory or ""
    policy = {_CTA_POLICY: "2"} if symmetric == COPY_ENGINES else {}
    return Workers(
        max_connections=8,
        environment={name: str(value) for name, value in point.distributed.env.items()} | policy,
        wrapper=profilers.wrapper(point.profiling, directory),
        # Symmetric memory stays with the process that has registered it.
        company=str(directory) if leaves_groups else symmetric,
    )


def _sample(result: Result) -> Sample:
    from overlap_sweep.workloads.fsdp.rows import sample

    return sample(result)


def _same_point(point: Resolved) -> str:
    from overlap_sweep.study.settings import key
    from overlap_sweep.workloads.fsdp.rows import knobs_of

    return str(sorted(key(knobs_of(point)), key=str))


WORKLOAD = Workload(
    name="fsdp",
    package=__name__,
    complete=complete,
    refusal=refusal,
    run=run_of(__name__),
    subject=lambda point: f"{point.distributed.strategy} step",
    words=_words,
    named={"distributed.strategy", "distributed.dp_size", "training.output_dir"},
    ranks=_ranks,
    fewer_gpus=lambda point: (f"distributed.dp_size={point.distributed.dp_size}", "a smaller one"),
    # NCCL and gloo reach other nodes, and no group must be within one.
    on_one_node=lambda point: None,
    memory=_memory,
    less_memory="fewer layers (ranking.num_layers) or a smaller model",
    cost=_cost,
    workers=_workers,
    output_option="training.output_dir",
    searchable=Searchable(
        sample=_sample,
        same_point=_same_point,
        options=("fsdp.", "streams.", "distributed."),
        cases=("distributed.strategy", "distributed.dp_size"),
        of_gpus=("streams.", "distributed.env.", "fsdp.symmetric_memory"),
        experiment="fsdp_overlap",
        example="fsdp.forward_prefetch=false,1",
    ),
)
