"""Points with made-up numbers that one can compute with by hand, of every workload.

`resolved` returns the configuration of a point, `MEASURED` what it measures, `make_point` writes its run directory.
"""

import copy
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import yaml

from overlap_sweep import workloads
from overlap_sweep.config import ResolvedModel
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import COMM_ONLY, GEMM_ONLY, SEQUENTIAL
from overlap_sweep.results.measured import Measured, Timing
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.results.run_directory import RESULT_FILE, Result, Status, write_result
from overlap_sweep.runtime.resolvers import point_name
from overlap_sweep.workloads.copy_engine.result import CopyTimes
from overlap_sweep.workloads.fsdp.config import RANKING_ON, TRAINING_ON
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.job.command import script_name
from overlap_sweep.workloads.job.config import Config as JobConfig
from overlap_sweep.workloads.job.result import FoundCause, GroupExposure, JobRun
from overlap_sweep.workloads.kernel.config import Config as KernelConfig
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes
from overlap_sweep.workloads.operator.config import Resolved as OperatorPoint
from overlap_sweep.workloads.operator.result import DefaultTiming, OperatorTimes, PassTimes
from overlap_sweep.workloads.tp_training.config import PRECISION_OF
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep

ENVIRONMENT: dict[str, Any] = {
    "host": "node7",
    "gpu": "NVIDIA H200",
    "gpu_count": 8,
    "driver": "580.1",
    "packages": {"torch": "2.13.0"},
}
LANGUAGE_MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1019}
RING: dict[str, Any] = {"method": "ring_exchange", "aggregate": False, "num_sm": 1}
PIPELINE: dict[str, Any] = {"method": "pipeline", "num_splits": 4, "num_sm": 16}
STARTED = "2026-11-20T21:14:03+00:00"

MODEL: dict[str, Any] = {
    **{"name": "llama3_8b", "source": "sizes", "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8},
    **{"num_kv_heads": 4, "head_dim": 32, "gated_mlp": True, "normalization": "RMSNorm", "bias": False},
}
STACKS: dict[str, dict[str, Any]] = {
    "autotp": {"zero_stage": 1},
    "fsdp_dtensor": {},
    "async_tp": {"sequence_parallel": True, "compile": True},
    "megatron": {"attn_impl": None, "sequence_parallel": True, "tp_comm_overlap": True},
}
_OF_ALL_STACKS = {
    **{"zero_stage": None, "sequence_parallel": False, "tp_comm_overlap": None, "batch_size": 2, "seq_length": 512},
    **{"num_training_steps": 7, "warmup_steps": 2, "dtype": "bfloat16"},
}
Point = Mapping[str, Any]
JOB_COMMAND = "torchrun --nproc-per-node={ranks} train.py --size 512"
TOKENS_PER_SAMPLE = 145
"""Of a training run of workload=fsdp."""

_OPTIONS_OF = {name: asdict(workloads.schema(name)()) for name in workloads.names()}
_OWN = {
    **{name: (name,) for name in ("layer", "copy_engine", "tp_training", "job")},
    "fsdp": ("ranking", "fsdp", "training", "distributed", "streams", "compile", "profiling", "telemetry"),
}
_MEASURING = {"tokens": 8192, "warmup": 0, "repeats": 5, "profiled": 1, "seed": 0, "tolerance": None}
_USUAL: dict[str, Any] = {
    "model": MODEL,
    "runtime": {**_OPTIONS_OF["operator"]["runtime"], "device": "cuda"},
    **{"backend": "transformer_engine", "precision": "bf16", "profile": "none", "repetition": 0, "tp_size": 2},
}
_OPERATOR = {"operator": "fc1", "phase": "all", "method": "none", **dict.fromkeys(space.KNOBS), "phases": None}
_USUAL_OF: dict[str, dict[str, Any]] = {
    "operator": _OPERATOR,
    "layer": {**_OPERATOR, "tp_size": 4, "backend": "megatron"},
    "kernel": {
        **{"backend": "torch", "tp_size": 4, "operator": "fc1", "kernel": "ag_gemm", "m": 1024, "n": 57344, "k": 8192},
        **{"model.name": "llama3_70b", "implementations": {"ring_exchange": RING}},
    },
    "fsdp": {
        **{"tp_size": 1, "model.name": "ranking", "fsdp.forward_prefetch": 0, "training": TRAINING_ON["cuda"]},
        **{"distributed.dp_size": 4, "profiling.enabled": False, "ranking": RANKING_ON["cuda"]},
    },
    "copy_engine": {"tp_size": 1, "backend": "copy_engine", "copy_engine.direction": "host_to_device"},
    "tp_training": {
        **{"profile": "all", "model.name": "qwen3_tiny", "impl": "fsdp_dtensor", "dp_size": 1},
        **{"language_model": LANGUAGE_MODEL, "tp_training": _OF_ALL_STACKS},
    },
    "job": {
        **{"tp_size": 1, "backend": "job", "precision": None, "profile": "all", "job.command": JOB_COMMAND},
        **{"job.ranks": 2, "job.values": {}, "job.env": {}},
    },
}


def resolved(workload: str, /, *before: Mapping[str, Any], **changes: Any) -> Any:
    """Returns a completed point: on GPUs, in bf16, unless it is changed; first as in the dicts `before`.

    A change is a top-level key, a dict that is merged into one, or a dotted name: `**{"fsdp.forward_prefetch": 1}`.
    `tokens`, `device` and, as a string, `model` are short for `workload.tokens`, `runtime.device` and `model.name`.
    What follows from other keys (tokens of training, backend and precision of stacks) is filled in.
    """
    return decoded_point(plain(workload, *before, **changes))


def plain(workload: str, /, *before: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns such a point as plain data."""
    known = {name: _OPTIONS_OF[workload][name] for name in _OWN.get(workload, ())}
    if workload == "copy_engine":
        known["model"] = {"name": "custom"}
    point = copy.deepcopy({**_USUAL, **known, "workload": {"name": workload, **_MEASURING}})
    short = {"tokens": "workload.tokens", "device": "runtime.device"}
    if isinstance(changes.get("model"), str):
        short["model"] = "model.name"
    of_stack = {"tp_training": STACKS[changes.get("impl", "fsdp_dtensor")]} if workload == "tp_training" else {}
    for key, value in chain.from_iterable(one.items() for one in (_USUAL_OF[workload], of_stack, *before, changes)):
        section, _, name = short.get(key, key).partition(".")
        if name:
            point[section][name] = value
        elif isinstance(value, Mapping) and isinstance(point.get(section), dict):
            point[section] |= value
        else:
            point[section] = value
    for key, value in _derived(workload, point).items():
        if key not in changes:
            point[key] = {**point[key], **value} if isinstance(value, dict) else value
    return point


def _derived(workload: str, point: Point) -> dict[str, Any]:
    if workload == "kernel":
        return {"workload": {"tokens": point["m"], "warmup": 3}}
    if workload == "copy_engine":
        return {"workload": {"tokens": point["copy_engine"]["matrix_size"], "warmup": 2}}
    if workload == "tp_training":
        options = point["tp_training"]
        measuring = {"tokens": _samples(point) * options["seq_length"], "profiled": 2}
        return {"backend": point["impl"], "precision": PRECISION_OF[options["dtype"]], "workload": measuring}
    if workload == "job":
        return {"model": {"name": script_name(msgspec.convert(point, JobConfig))}, "workload": {"tokens": None}}
    if workload == "fsdp":
        asked = point["training"]["mixed_precision"]
        precision = "fp32" if asked == "none" else asked
        measuring = {"tokens": _samples(point) * TOKENS_PER_SAMPLE, "warmup": 1, "steps": 3}
        return {"backend": point["distributed"]["strategy"], "precision": precision, "workload": measuring}
    return {}


def _samples(point: Point) -> int:
    if "tp_training" in point:
        options = point["tp_training"]
        return int(options["batch_size"] * options["gradient_accumulation_steps"] * point["dp_size"])
    training = point["training"]
    return int(
        (training["batch_size"] or 1) * training["gradient_accumulation"] * (point["distributed"]["dp_size"] or 1)
    )


SMALL: dict[str, Any] = {
    **{"model": {"name": "m"}, "backend": "torch", "precision": "fp32", "runtime": {"device": "cpu"}, "tp_size": 2},
    **{"method": "bulk", "num_sm": 4, "workload": {"tokens": 128, "repeats": 3}},
}
_ON_GPUS = {"backend": "transformer_engine", "precision": "bf16", "runtime": {"device": "cuda"}}
_KERNEL = {
    **{"kernel": "ag_gemm", "n": 48, "k": 32, "workload": {"name": "kernel", "tokens": 24}},
    **dict.fromkeys(("m", "iters", "warmup_iters", "dtype", "implementations", "num_sm")),
}


def operator_point(**changes: Any) -> Any:
    """fc1 by bulk on two ranks of plain torch on a CPU."""
    return resolved("operator", SMALL, **changes)


def gpu_point(**changes: Any) -> Any:
    """fc1 by bulk on two ranks of Transformer Engine, in bf16."""
    return resolved("operator", SMALL, _ON_GPUS, **changes)


def layer_point(**changes: Any) -> Any:
    """A whole transformer layer on two GPUs."""
    return resolved("layer", SMALL, _ON_GPUS, **changes)


def kernel_point(**changes: Any) -> Any:
    """What `complete` gets of an all-gather and a GEMM on two ranks of plain torch on a CPU."""
    point = msgspec.convert(plain("operator", SMALL, _KERNEL, **changes), KernelConfig)
    return replace(point, model=ResolvedModel(**vars(point.model)))


def made_result(workload: str, point: Point | None = None, status: Status = "ok", **overrides: Any) -> Result:
    """Returns the result of a point, by default of `resolved(workload)`.

    `overrides` are fields of Result, or what the workload's function in `MEASURED` takes; a point that is not ok has
    measured nothing.
    """
    point = dict(point or resolved(workload))
    also_taken = "launch_bound" if workload == "copy_engine" else None
    taken = {key for key in overrides if key not in Result.__struct_fields__ or key == also_taken}
    measured = {key: overrides.pop(key) for key in taken}
    fields = {
        **{"name": "", "recorded": point, "status": status, "environment": ENVIRONMENT, "started": STARTED},
        "settings": space.settings(msgspec.convert(point, OperatorPoint)) if workload == "operator" else {},
        "measured": MEASURED[workload](point, **measured) if status == "ok" else None,
    }
    return Result(**{**fields, **overrides})


def make_point(workload: str, directory: Path, point: Point | None = None, **overrides: Any) -> Path:
    """Writes result.json of a point into a new folder of `directory` and returns the folder. `overrides` are as of
    `made_result`; the folder's name is the result's."""
    result = made_result(workload, point, **overrides)
    number = len(list(directory.glob("*")))
    named = point_name(result.point, []) if workload == "operator" else workload
    result.name = result.name or f"{named}_{number}"
    (directory / result.name).mkdir(parents=True)
    write_result(directory / result.name, result)
    return directory / result.name


def missing_point(directory: Path, config: Mapping[str, Any], name: str = "missing") -> Path:
    """What a point that died without a result leaves: the configuration as Hydra composed it, in a new folder. What
    only a resolved one has instead of an option is undone."""
    composed = {key: value for key, value in config.items() if (key, value) != ("num_sm", None)}
    if "implementations" in composed:
        composed["implementations"] = list(composed["implementations"] or ()) or None
    (directory / name / ".hydra").mkdir(parents=True)
    (directory / name / ".hydra" / "config.yaml").write_text(yaml.safe_dump(composed))
    return directory / name


def rewrite(point: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Does `change` to what the point's result.json holds."""
    result = json.loads((point / RESULT_FILE).read_text())
    change(result)
    (point / RESULT_FILE).write_text(json.dumps(result))


def timing(median_us: float, spread_us: float = 0.0, order: Sequence[int] = (-2, -1, 0, 1, 2)) -> Timing:
    """Five samples around the median: their interquartile range is twice the spread."""
    return timing_of([median_us + step * spread_us for step in order])


def timing_of(samples_us: list[float]) -> Timing:
    q1_us, median_us, q3_us = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median_us, q1_us, q3_us, samples_us)


def operator_config(
    tp_size: int = 2, operator: str = "fc1", phase: str = "all", method: str = "none", **changes: Any
) -> dict[str, Any]:
    """`resolved("operator", ...)`, in short."""
    return resolved("operator", tp_size=tp_size, operator=operator, phase=phase, method=method, **changes)


def default_timing(default_us: float, none_us: float = 100.0, minute: int = 0, spread_us: float = 0.0) -> DefaultTiming:
    """The library's default overlap, measured at that minute of the hour."""
    measured = f"2026-11-20T21:{minute:02}:30+00:00"
    return DefaultTiming(timing(default_us, spread_us), timing(none_us, spread_us), measured)


def pass_times(
    point_us: float,
    none_us: float = 100.0,
    floor_us: float = 50.0,
    tp1_us: float | None = None,
    spread_us: float = 0.0,
    default: DefaultTiming | None = None,
) -> PassTimes:
    tp1 = None if tp1_us is None else timing(tp1_us)
    return PassTimes(timing(point_us, spread_us), timing(none_us, spread_us), timing(floor_us), tp1, default)


def operator_times(_: Point, fwd: PassTimes | None = None, bwd: PassTimes | None = None) -> OperatorTimes:
    """A pass that is not given took as long as none."""
    return OperatorTimes(times={"fwd": fwd or pass_times(100.0), "bwd": bwd or pass_times(200.0, 200.0, 150.0)})


def layer_config(
    kind: str = "transformer_layer", tp_size: int = 4, num_replicas: int = 1, training: bool = False, **changes: Any
) -> dict[str, Any]:
    """`resolved("layer", ...)`, in short."""
    layer = {"kind": kind, "num_replicas": num_replicas, "training": training}
    return resolved("layer", tp_size=tp_size, layer=layer, **changes)


def variant(whole_us: Sequence[float], step_us: float | None = None, **changed: Any) -> VariantTimes:
    """`whole_us` by round; a third of it is forward, and the rest but for the optimizer's step is backward."""
    parts = {
        "fwd": [time_us / 3 for time_us in whole_us],
        "bwd": [time_us * 2 / 3 - (step_us or 0.0) for time_us in whole_us],
        "all": list(whole_us),
    }
    if step_us is not None:
        parts["step"] = [step_us] * len(whole_us)
    return VariantTimes(times={name: timing_of(samples) for name, samples in parts.items()}, **changed)


def layer_times(_: Point, variants: Mapping[str, VariantTimes] | None = None, **changed: Any) -> LayerTimes:
    """Without variants `none` alone."""
    given = {"none": variant([100.0, 101.0])} if variants is None else dict(variants)
    return LayerTimes(variants=given, **{"attention_backend": None, **changed})


def kernel_config(m: int = 1024, backend: str = "torch", **changes: Any) -> dict[str, Any]:
    """An all-gather before fc1 of llama3_70b on four GPUs; without an operator, of no model."""
    model = {} if changes.get("operator", "fc1") else {"model": "custom"}
    return resolved("kernel", m=m, backend=backend, **model, **changes)


def implementation(
    time_us: float, spread_us: float = 0.0, setting: Mapping[str, Any] | None = None, **changed: Any
) -> ImplementationTimes:
    """Five samples whose interquartile range is twice the spread."""
    fields = {"setting": dict(setting or {}), "relative_error": 1e-3, **changed}
    return ImplementationTimes(time=timing(time_us, spread_us), **fields)


def baselines(
    sequential_us: float = 200.0, gemm_us: float = 100.0, comm_us: float = 80.0, spread_us: float = 0.0, **changed: Any
) -> dict[str, ImplementationTimes]:
    return {
        SEQUENTIAL: implementation(sequential_us, spread_us, **changed),
        GEMM_ONLY: implementation(gemm_us, spread_us, relative_error=None),
        COMM_ONLY: implementation(comm_us, spread_us, relative_error=None),
    }


def kernel_times(
    _: Point, implementations: Mapping[str, ImplementationTimes] | None = None, **changed: Any
) -> KernelTimes:
    """Baselines that are not given are the usual ones."""
    given = {"ring_exchange": implementation(150.0)} if implementations is None else implementations
    return KernelTimes(implementations={**baselines(), **given}, **changed)


def training_run(
    point: Point,
    step_us: float = 1500.0,
    none_us: float = 2000.0,
    floor_us: float = 1000.0,
    spread_us: float = 0.0,
    **changed: Any,
) -> TrainingRun:
    times = {"point": step_us, "none": none_us, "floor": floor_us}
    measured: dict[str, Any] = {
        "step": {name: timing(time_us, spread_us) for name, time_us in times.items()},
        "host_us": {"point": 300.0, "none": 300.0, "floor": 200.0},
        "samples_per_step": _samples(point),
        "parameters": 12_345_678,
        "losses": [0.7, 0.6, 0.5],
        "peak_memory_gb": 11.5,
    }
    return TrainingRun(**{**measured, **changed})


def copy_config(
    direction: str = "host_to_device", matrix_size: int = 4096, copy_mb: float = 64.0, **changes: Any
) -> dict[str, Any]:
    """`resolved("copy_engine", ...)`, in short."""
    sizes = {"direction": direction, "matrix_size": matrix_size, "copy_mb": copy_mb}
    return resolved("copy_engine", copy_engine=sizes, **changes)


def copy_times(
    _: Point,
    overlapped_us: float = 1100.0,
    gemm_us: float = 1000.0,
    copy_us: float = 400.0,
    spread_us: float = 0.0,
    in_chunks_us: tuple[float, float] | None = None,
    **changed: Any,
) -> CopyTimes:
    """One after the other they take the sum; four GEMMs of 4096 and four copies of 64 MiB. `in_chunks_us`: times of
    the GEMMs in chunks, alone and overlapped."""
    overlapped = {"overlapped": overlapped_us}
    times_us = {"gemm": gemm_us, "copy": copy_us, "sequential": gemm_us + copy_us}
    if in_chunks_us:
        times_us["chunked_gemm"], overlapped["chunked_overlapped"] = in_chunks_us
    times = {name: timing(time_us, spread_us) for name, time_us in times_us.items()}
    times |= {name: timing(time_us, spread_us, order=(1, -2, 2, 0, -1)) for name, time_us in overlapped.items()}
    bound = dict.fromkeys(times, False)
    known: dict[str, Any] = {"launch_bound": bound, "bytes_copied": 4 * 64 * 2**20, "flops": 4 * 2 * 4096**3}
    return CopyTimes(times=times, **{**known, **changed})


def stack_config(
    impl: str = "fsdp_dtensor", tp_size: int = 2, dp_size: int = 1, device: str = "cuda", **changes: Any
) -> dict[str, Any]:
    """`resolved("tp_training", ...)`, in short."""
    return resolved("tp_training", impl=impl, tp_size=tp_size, dp_size=dp_size, device=device, **changes)


def falling(steps: int = 7, off: Mapping[int, float | None] | None = None, times: float = 1.0) -> list[float | None]:
    """Losses; `off`: other ones at some steps."""
    return [(off or {}).get(step, times * (7.0 - step / 10)) for step in range(steps)]


def tp_training_run(
    point: Point,
    step_us: float = 10_000.0,
    spread_us: float = 50.0,
    losses: Sequence[float | None] | None = None,
    norms: Sequence[float | None] | None = None,
    **changed: Any,
) -> TpTrainingRun:
    """The timed steps lie around the median, with an interquartile range of twice the spread if there are five; forward
    takes three tenths, backward a half, the optimizer a tenth."""
    options, samples = point["tp_training"], _samples(point)
    losses = falling(options["num_training_steps"]) if losses is None else losses
    norms = [1.5] * len(losses) if norms is None else norms
    warmup = options["warmup_steps"]
    steps = []
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        slower = (-2, 2, 0, 1, -1)[(number - warmup) % 5]
        time_us = 10 * step_us if number < warmup else step_us + slower * spread_us
        parts = {"forward_us": 0.3 * time_us, "backward_us": 0.5 * time_us, "optimizer_us": 0.1 * time_us}
        memory = {"memory_allocated_gb": 10.0 + number / 10, "memory_peak_gb": 20.0}
        known = {"step": number, "warmup": number < warmup, "loss": loss, "grad_norm": norm, "step_us": time_us}
        steps.append(TpTrainingStep(**known, **parts, **memory))
    measured: dict[str, Any] = {
        "steps": steps,
        "parameters": 200_000_000,
        "tokens_per_step": samples * options["seq_length"],
        "samples_per_step": samples,
        "flops_per_step": 1e12 * samples,
        "host_ahead_us": 5000.0,
        "details": {"attention": "flash"},
    }
    return TpTrainingRun(**{**measured, **changed})


def job_config(
    values: Mapping[str, Any] | None = None, env: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """`resolved("job", ...)`, in short: a command that takes every value as an option."""
    template = " ".join([JOB_COMMAND, *(f"--{name} {{{name}}}" for name in values or {})])
    known = {"job.command": template, "job.values": dict(values or {}), "job.env": dict(env or {})}
    return resolved("job", **{**known, **changes})


def job_run(
    _: Point,
    step_us: float = 100_000.0,
    spread_us: float = 100.0,
    exposed: Mapping[str, float] | None = None,
    causes: Mapping[str, float] | None = None,
    **changed: Any,
) -> JobRun:
    """`exposed`: time by process group; profiled steps are a tenth slower. `causes`: shares of the profiled step."""
    profiled_us = 1.1 * step_us
    profiled: dict[str, Any] = {}
    if exposed is not None:
        groups = [GroupExposure(group=name, exposed_us=time_us, hidden_us=time_us) for name, time_us in exposed.items()]
        found = [
            FoundCause(cause=name, where="layers.1", lost_us=share * profiled_us, share=share, advice=f"Mend {name}.")
            for name, share in (causes or {}).items()
        ]
        profiled = {"profiled_us": profiled_us, "exposed_comm_us": sum(exposed.values()), "groups": groups}
        profiled["causes"] = found
    measured: dict[str, Any] = {"timed_by": "gpu", "calls_per_step": 1, "peak_memory_gb": 12.5, **profiled}
    return JobRun(**{"step": timing(step_us, spread_us), **measured, **changed})


MEASURED: dict[str, Callable[..., Measured]] = {
    "operator": operator_times,
    "layer": layer_times,
    "kernel": kernel_times,
    "fsdp": training_run,
    "copy_engine": copy_times,
    "tp_training": tp_training_run,
    "job": job_run,
}
"""By workload, from a point and what else is known of it, what was measured. A spread is half the interquartile range
of five samples."""
