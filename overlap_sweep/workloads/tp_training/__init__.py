"""Training steps of a language model by one of several tensor-parallel stacks, with equal settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.backends.installed import unusable
from overlap_sweep.errors import UserError
from overlap_sweep.nccl import variables
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.workloads import Sample, Searchable, Workers, Workload, run_of, tp_groups_on_nodes, tp_ranks
from overlap_sweep.workloads.memory import ADAM_BYTES, Memory
from overlap_sweep.workloads.tp_training.config import (
    BYTES_OF,
    DATA_PARALLEL_OPTIONS,
    DEFAULT_IMPL,
    IMPLEMENTATIONS,
    OF_DATA_PARALLEL,
    PRECISION_OF,
    REPORTED,
    SEQUENCE_PARALLEL,
    TP_TRAINING_ON,
    TRAINED,
    Asked,
    Config,
    Resolved,
    ResolvedTraining,
    TpTraining,
    data_parallel,
    dp_size_of,
    registered_implementations,
)
from overlap_sweep.workloads.tp_training.language_model import language_model, megatron_refusals

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result

_OF_ALL = ("runtime", "profile", "repetition", "model", "tp_size")
_ONLY_OF = {
    "zero_stage": ("autotp",),
    "attn_impl": ("autotp", "fsdp_dtensor", "async_tp"),
    "tp_comm_overlap": ("megatron",),
    "tp_comm_overlap_cfg": ("megatron",),
}
"""Options that only these implementations use; the others ignore them."""
_LIBRARIES = {
    "autotp": ("transformers", "deepspeed"),
    "fsdp_dtensor": ("transformers",),
    "async_tp": ("transformers",),
    "megatron": (),
}
"""Libraries whose versions are part of the point, in addition to those in every result's environment."""


def complete(config: Asked) -> dict[str, object]:
    """Returns the point with the model's full config, steps and precision filled in, without unused options."""
    impl, tp_size = config.impl or DEFAULT_IMPL, config.tp_size
    if config.backend != "auto":
        raise UserError(f"backend={config.backend}: workload=tp_training uses impl; leave backend out.")
    dp_size, given = dp_size_of(config), asdict(config.tp_training)
    defaults = {name: getattr(TpTraining(), name) for name in _ONLY_OF} | TP_TRAINING_ON[config.runtime.device]
    training = ResolvedTraining(**given | {name: value for name, value in defaults.items() if given[name] is None})
    for name, impls in _ONLY_OF.items():
        if impl in IMPLEMENTATIONS and impl not in impls:
            setattr(training, name, None)
    # It changes where results go, not what is measured.
    training.output_dir = None
    training.env = variables.checked("tp_training.env", training.env or {}) or None
    if training.warmup_steps >= training.num_training_steps:
        raise UserError(
            f"tp_training.warmup_steps={training.warmup_steps} leaves no steps to time of "
            f"tp_training.num_training_steps={training.num_training_steps}; give more steps."
        )
    # One rank has the whole sequence.
    in_sequence = training.sequence_parallel if training.sequence_parallel is not None else impl in SEQUENCE_PARALLEL
    training.sequence_parallel = in_sequence and tp_size != 1
    training.compile |= impl == "async_tp"
    training = _data_parallel_recorded(training, impl, dp_size)
    sequences = training.batch_size * training.gradient_accumulation_steps * dp_size
    completed: dict[str, object] = {
        **{name: config[name] for name in _OF_ALL},
        "impl": impl,
        "backend": impl,
        "dp_size": dp_size,
        "tp_training": asdict(training),
        "language_model": language_model(config.model),
        "libraries": _libraries(impl),
        "precision": PRECISION_OF[training.dtype],
        "workload": {
            **asdict(config.workload),
            "tokens": sequences * training.seq_length,
            "repeats": training.num_training_steps - training.warmup_steps,
        },
    }
    if training.tp_comm_overlap_cfg is not None:
        # Its content, so that the result says what was run.
        completed["overlap_cfg"] = asdict(overlap_cfg.read(Path(training.tp_comm_overlap_cfg).expanduser()))
    return completed


def _libraries(impl: str) -> dict[str, str]:
    """Returns the versions of the libraries of an implementation; of another package's, that package's."""
    if impl in _LIBRARIES:
        return {name: version(name) for name in _LIBRARIES[impl] if find_spec(name)}
    distribution = registered_implementations()[impl].dist
    return {distribution.name: distribution.version} if distribution else {}


def _data_parallel_recorded(training: ResolvedTraining, impl: str, dp_size: int) -> ResolvedTraining:
    """Returns the options with those of data parallelism null unless they change what is run."""
    used = data_parallel(training, impl)
    found = replace(training, **dict.fromkeys(DATA_PARALLEL_OPTIONS))  # type: ignore[arg-type]
    for name in OF_DATA_PARALLEL.get(impl, DATA_PARALLEL_OPTIONS):
        unset = replace(training)
        setattr(unset, name, None)
        value = getattr(used, name)
        idle = (
            dp_size == 1
            or (impl == "autotp" and training.zero_stage == 0)
            or (name == "ddp_bucket_size" and used.overlap_grad_reduce is False)
            or (name == "backward_prefetch" and used.reshard_after_forward is False)
        )
        if value != getattr(data_parallel(unset, impl), name) and not idle:
            setattr(found, name, value)
    return found


def refusal(point: Resolved) -> str | None:
    """Returns why the completed point cannot be trained by its implementation, or None."""
    refusals = _model_refusals(point)
    if point.impl in IMPLEMENTATIONS:
        of_impl = _megatron_refusals if point.impl == "megatron" else _hugging_face_refusals
        refusals = chain(refusals, of_impl(point))
    return next(refusals, None)


def _model_refusals(point: Resolved) -> Iterator[str]:
    """Yields the reasons, as do the next two functions. Later conditions rely on earlier ones."""
    model, tp_size, training = point.trained, point.tp_size, point.tp_training
    heads, kv_heads, length = model.num_attention_heads, model.num_key_value_heads, training.seq_length
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        if (size := getattr(model, name)) % tp_size:
            yield f"{name}={size} of {point.model.name} is not divisible by tp_size={tp_size}"
    if heads % kv_heads:
        yield f"num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}"
    if model.head_dim % 2:
        yield f"head_dim={model.head_dim} is odd; rotary embeddings require an even one"
    if training.sequence_parallel and length % tp_size:
        yield f"tp_training.seq_length={length} is not divisible by tp_size={tp_size}; use a multiple"


def _hugging_face_refusals(point: Resolved) -> Iterator[str]:
    impl, training = point.impl, point.tp_training
    on_cpu, in_sequence = point.runtime.device == "cpu", training.sequence_parallel
    if impl == "autotp":
        if find_spec("deepspeed") is None:
            yield "impl=autotp requires DeepSpeed, which is not installed; pip install 'overlap-sweep[autotp]'"
        if in_sequence:
            yield "impl=autotp has no sequence parallelism; leave tp_training.sequence_parallel out"
        if training.dtype == "float16" and (training.autocast or not training.zero_stage):
            yield "impl=autotp supports float16 only with ZeRO and no autocast; use tp_training.dtype=bfloat16"
        if (odd := data_parallel(training, impl).allgather_bucket_size or 0) % 2:
            yield f"DeepSpeed supports only an even tp_training.allgather_bucket_size, not {odd}"
    if impl == "async_tp":
        if on_cpu:
            yield "impl=async_tp requires GPUs; use impl=fsdp_dtensor"
        if not in_sequence:
            reason = "impl=async_tp requires tp_size > 1 and tp_training.sequence_parallel"
            yield f"{reason}; use impl=fsdp_dtensor"
    softcap = point.language_model.get("attn_logit_softcapping")
    if softcap and training.attn_impl != "flash_attention_2":
        reason = f"does not compute the model's attn_logit_softcapping={softcap}; use flash_attention_2"
        yield f"tp_training.attn_impl={training.attn_impl} {reason}"
    if training.attn_impl == "flash_attention_2":
        if on_cpu or (point.precision == "fp32" and not training.autocast):
            yield "tp_training.attn_impl=flash_attention_2 requires a GPU and bfloat16 or float16; use sdpa"
        if find_spec("flash_attn") is None:
            yield "tp_training.attn_impl=flash_attention_2 requires the package flash-attn; install it, or use sdpa"


def _megatron_refusals(point: Resolved) -> Iterator[str]:
    """Yields also conditions in which Megatron-Core computes different results, or cannot overlap as configured."""
    training, tp_size, config = point.tp_training, point.tp_size, point.overlap_cfg
    if lacking := unusable("megatron.core"):
        yield f"impl=megatron requires Megatron-Core: {lacking}"
    for option, only in {"autocast": False, "compile": False, "vocab_parallel": True}.items():
        if getattr(training, option) != only:
            yield f"impl=megatron supports only tp_training.{option}={only}; leave it out"
    yield from megatron_refusals(point.trained, point.language_model, training.seq_length)
    schedule = data_parallel(training, "megatron")
    for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if schedule.overlap_param_gather and not getattr(schedule, name):
            required = f"requires tp_training.{name}=true; leave one of them out"
            yield f"tp_training.overlap_param_gather=true {required}"
    if point.runtime.device == "cpu":
        yield "impl=megatron requires GPUs"
    if lacking := unusable():
        yield lacking
    if config and tp_size > 1 and not training.sequence_parallel:
        yield "tp_training.tp_comm_overlap_cfg requires tp_training.sequence_parallel=true"
    if not overlaps(point):
        return
    fix = "give tp_training.tp_comm_overlap=false"
    if point.precision != "bf16":
        yield f"userbuffers support bfloat16, not {training.dtype}; {fix} or tp_training.dtype=bfloat16"
    if config:
        if refused := overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config):
            yield refused
    elif tp_size not in space.USERBUFFERS_RANKS:
        reason = f"Transformer Engine's default overlap supports 2, 4 and 8 ranks, not tp_size={tp_size}"
        yield f"{reason}; {fix} or a tp_comm_overlap_cfg"


def overlaps(point: Resolved) -> bool:
    """Returns whether userbuffers overlap the point's tensor-parallel communication."""
    training, config = point.tp_training, point.overlap_cfg
    # With one rank the point has no sequence_parallel.
    enabled = training.tp_comm_overlap and training.sequence_parallel and point.runtime.device == "cuda"
    return bool(enabled and (config is None or config.switches["tp_comm_overlap"]))


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    sizes = [f"tp{config.tp_size}", f"dp{dp_size_of(config)}"]
    return [models.short_name(config.model), *sizes, config.impl or DEFAULT_IMPL]


def _memory(point: Resolved) -> Memory:
    model, training, impl = point.trained, point.tp_training, point.impl
    tp_size, dp_size, options = point.tp_size, point.dp_size, data_parallel(training, impl)
    whole, layers = model.parameters / tp_size, model.num_hidden_layers
    computed_bytes = 4 if training.autocast else BYTES_OF[point.precision]
    # Of parameters that are computed with, of float32 weights beside them, and of gradients.
    held, weights, gradients, shards = 1.0, float(computed_bytes < 4), 4.0, 1
    if impl in ("fsdp_dtensor", "async_tp"):
        weights, shards, gradients = 1.0, dp_size, 4 / dp_size
        if options.reshard_after_forward and dp_size > 1:
            # A layer and the next one, and the vocabulary, which stays.
            held = 1 - model.layers_parameters / model.parameters * max(0.0, 1 - 2 / layers)
    elif impl == "autotp":
        stage = training.zero_stage
        weights, shards = float(bool(stage) or computed_bytes < 4), dp_size if stage else 1
        gradients = computed_bytes / (dp_size if stage == 2 else 1)
    elif impl == "megatron" and options.use_distributed_optimizer:
        shards = dp_size
    of_layer = model.layer.activations(tp_size, bool(training.sequence_parallel))
    kept = of_layer + layers * model.hidden_size if training.activation_checkpointing else layers * of_layer
    # Logits, the same in float32, and their gradient.
    logits = model.vocab_size / (tp_size if training.vocab_parallel else 1)
    activation_bytes = BYTES_OF[point.precision]
    of_token = kept * activation_bytes + logits * (4 + 2 * activation_bytes)
    return Memory(
        parameters=whole * (held * computed_bytes + weights * 4 / shards),
        gradients=whole * gradients,
        optimizer=whole * ADAM_BYTES / shards,
        activations=training.batch_size * training.seq_length * of_token,
    )


def _cost(point: Resolved) -> tuple[object, ...]:
    training = point.tp_training
    # Compiling takes longer than all the steps.
    return training.num_training_steps, training.compile, point.num_layers, point.tp_size


def _workers(point: Resolved, directory: Path) -> Workers:
    """Returns the requirements on the workers. Stacks never share processes, since they patch each other's libraries,
    and their memory is compared."""
    environment = {name: str(value) for name, value in (point.tp_training.env or {}).items()}
    return Workers(max_connections=_queues(point), company=point.impl, environment=environment)


def _queues(point: Resolved) -> int:
    """Returns the default of `runtime.max_connections`."""
    # With eight queues, NCCL's kernels wait for a GEMM that has taken all SMs: a ring exchange took 22 % longer.
    return 1 if point.impl == "megatron" else 8


def _sample(result: Result) -> Sample:
    from overlap_sweep.workloads.tp_training.result import TpTrainingRun

    run = result.measured_as(TpTrainingRun)
    return Sample(tuple(run.timing.samples_us), amount=run.tokens_per_step)


def _deviation(result: Result, reference: Result) -> str:
    from overlap_sweep.workloads.tp_training.rows import deviation

    return deviation(result, reference)


def _same_point(point: Resolved) -> str:
    # Options that affect the log and the report only have any one value.
    training = replace(point.tp_training, log_interval=1, peak_tflops=None, tp_comm_overlap=overlaps(point))
    runtime = replace(point.runtime, max_connections=point.runtime.max_connections or _queues(point))
    return key_of(point_identity(replace(point, tp_training=training, runtime=runtime)))


def _rivals(point: Resolved) -> str:
    """Returns a key of what is trained and on how many ranks, whatever the stack and the grid of ranks."""
    training = {name: getattr(point.tp_training, name) for name in TRAINED}
    same = {name: point[name] for name in ("language_model", "precision", "runtime")}
    return key_of(point_identity({**same, "tp_training": training, "ranks": point.world_size}))


_CASES = ("model", "impl", "tp_size", "dp_size", "ranks")

WORKLOAD = Workload(
    name="tp_training",
    package=__name__,
    complete=complete,
    refusal=refusal,
    run=run_of(__name__),
    # Megatron-Core's, if a file was given.
    overlap_configs=lambda point: {"": point.overlap_cfg} if point.overlap_cfg else {},
    subject=lambda point: f"{point.impl} TP={point.tp_size} DP={dp_size_of(point)} step",
    words=_words,
    named={"tp_size", "impl", "dp_size", "ranks", "tp_training.output_dir"},
    ranks=lambda config: tp_ranks(config, config.dp_size or 1, config.ranks),
    fewer_gpus=lambda config: (
        f"tp_size={config.tp_size} x dp_size={dp_size_of(config)}",
        "sizes whose product is smaller",
    ),
    on_one_node=tp_groups_on_nodes,
    memory=_memory,
    less_memory="fewer layers (model.num_layers), a larger tp_size or a smaller model",
    cost=_cost,
    workers=_workers,
    output_option="tp_training.output_dir",
    names_in_output=True,
    files_of_points=True,
    searchable=Searchable(
        sample=_sample,
        same_point=_same_point,
        options=("tp_training.",),
        of_gpus=("tp_training.env.",),
        cases=(*_CASES, *(f"tp_training.{name}" for name in (*TRAINED, *REPORTED))),
        rivals=_rivals,
        deviation=_deviation,
        experiment="tp_training_best",
        example="tp_training.zero_stage=1,2",
    ),
)
