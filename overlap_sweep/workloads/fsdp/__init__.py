"""Training steps of a ranking model under FSDP2 or DDP: what of their communication is hidden."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models
from overlap_sweep.workloads import Sample, Searchable, Workers, Workload
from overlap_sweep.workloads.fsdp.config import TRAINING_ON, Compile, Distributed, Fsdp, Streams

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks
    from overlap_sweep.results.run_directory import Result

_SECTIONS = {"fsdp": Fsdp, "distributed": Distributed, "streams": Streams}
PRECISION_OF = {"bf16": "bf16", "fp16": "fp16", "none": "fp32"}

_KEPT = ("model", "ranking", "fsdp", "training", "distributed", "streams", "compile", "profiling", "telemetry")
_OF_ALL = ("runtime", "profile", "repetition")
_ENVIRONMENT = re.compile(r"(NCCL|RCCL|TORCH_NCCL|HSA|GPU|UCX|FI|MSCCLPP)_[A-Z0-9_]+")
_REFUSED = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "give runtime.max_connections instead",
    "NCCL_NVLS_ENABLE": "give runtime.multicast instead",
    "NCCL_CONF_FILE": "give its variables instead, so that results tell them",
    "NCCL_ALGO=NVLS": "multicast is off; leave it out",
    "GPU_DEVICE_ORDINAL": "set HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES in your shell",
}
"""Variables, or values of them, and what to do instead."""


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with batch, steps and precision, without the options that training does not use."""
    device, distributed, profiling = point["runtime"]["device"], dict(point["distributed"]), dict(point["profiling"])
    if point["backend"] != "auto":
        raise UserError(f"backend={point['backend']}: who shards is said by distributed.strategy; leave backend out.")
    training = {**TRAINING_ON[device], **{name: v for name, v in point["training"].items() if v is not None}}
    # It says where results go, not what is measured.
    training.pop("output_dir", None)
    if profiling["enabled"] is None:
        profiling["enabled"] = point["profile"] != "none"
    distributed["env"] = _environment(distributed["env"])
    ranking, fsdp = point["ranking"], dict(point["fsdp"])
    _check_choice("fsdp.forward_prefetch", fsdp["forward_prefetch"], 0, "layers")
    fsdp["forward_prefetch"] = int(fsdp["forward_prefetch"])
    _check_choice("fsdp.reshard_after_forward", fsdp["reshard_after_forward"], 2, "ranks")
    samples = training["batch_size"] * training["gradient_accumulation"] * distributed["dp_size"]
    # Of the backbone's input.
    tokens = ranking["sequence_length"] + ranking["num_sparse_features"] + 1
    return {
        **{name: point[name] for name in (*_OF_ALL, *_KEPT)},
        **{"training": training, "distributed": distributed, "profiling": profiling, "fsdp": fsdp},
        "workload": {**point["workload"], "tokens": samples * tokens},
        "backend": distributed["strategy"],
        "precision": PRECISION_OF[training["mixed_precision"]],
        "tp_size": 1,
    }


def _environment(asked: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that are set. UserError for one that is not of NCCL, RCCL or their transports."""
    for name in asked:
        if name not in _REFUSED and not _ENVIRONMENT.fullmatch(name):
            raise UserError(f"distributed.env.{name} is no variable of NCCL, RCCL or HIP; set it in your shell.")
        if isinstance(asked[name], list | dict):
            raise UserError(f"distributed.env.{name}={asked[name]} is no single value; quote it: '\"a,b\"'.")
        for refused in (name, f"{name}={str(asked[name])[:4].upper()}"):
            if refused in _REFUSED and asked[name] is not None:
                raise UserError(f"distributed.env.{name}={asked[name]}: {_REFUSED[refused]}.")
    return {name: str(int(v) if isinstance(v, bool) else v) for name, v in asked.items() if v is not None}


def _check_choice(name: str, asked: Any, lowest: int, what: str) -> None:
    """Raises UserError unless `asked` is true, false or a number from `lowest` on."""
    if not isinstance(asked, bool) and not (isinstance(asked, int) and lowest <= asked <= 1024):
        raise UserError(f"{name}={asked} is neither true, false nor a number of {what}; give one of them.")


def refusal(point: Mapping[str, Any]) -> str | None:
    distributed, fsdp, ranks = point["distributed"], point["fsdp"], point["distributed"]["dp_size"]
    if lacking := models.lacks(point["model"]):
        return lacking
    if point["model"]["num_attention_heads"] % point["model"]["num_kv_heads"]:
        return "the attention heads do not divide by the key-value heads"
    if point["compile"]["mode"] and point["compile"]["options"]:
        return "torch.compile takes compile.mode or compile.options, not both"
    if not point["compile"]["enabled"] and point["compile"] != asdict(Compile()):
        return "the other options of compile change nothing without compile.enabled=true"
    if point["profiling"]["tensorboard"] and not point["profiling"]["enabled"]:
        return "profiling.tensorboard writes nothing without profiling.enabled=true"
    for section, names, why in _unused(point):
        usual = asdict(_SECTIONS[section]())
        if changed := [name for name in names if point[section][name] != usual[name]]:
            return f"{section}.{changed[0]} {why}"
    if distributed["strategy"] == "ddp":
        if distributed["overlap_reduce_scatter"] and not distributed["enable_overlap"]:
            return "distributed.overlap_reduce_scatter needs distributed.enable_overlap"
        return None
    if not fsdp["use_orig_params"]:
        return "FSDP2 has no flat parameters: fsdp.use_orig_params=false was FSDP1's"
    if ranks % fsdp["replicas"]:
        return f"distributed.dp_size={ranks} does not divide by fsdp.replicas={fsdp['replicas']}"
    shards, group = ranks // fsdp["replicas"], fsdp["reshard_after_forward"]
    if not isinstance(group, bool) and fsdp["replicas"] > 1:
        return (
            "fsdp.reshard_after_forward takes no number of ranks beside fsdp.replicas, each of which would make its own"
        )
    if not isinstance(group, bool) and (shards % group or group >= shards):
        return f"fsdp.reshard_after_forward={group} is no smaller part of {shards} ranks"
    return None


def _unused(point: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[str], str]]:
    """Yields a section, those of its options that have no effect beside the others, and why."""
    distributed, fsdp = point["distributed"], point["fsdp"]
    if distributed["strategy"] == "ddp":
        yield "fsdp", [name for name in fsdp if name != "sync_module_states"], "changes nothing under DDP"
        if distributed["enable_overlap"]:
            idle = ["auxiliary"] if distributed["overlap_reduce_scatter"] else ["auxiliary", "reduce_scatter"]
            yield "streams", idle, "changes nothing here: DDP only all-reduces"
    else:
        idle = ["overlap_reduce_scatter", "bucket_cap_mb", "gradient_as_bucket_view"]
        yield "distributed", idle, "changes nothing under FSDP2"
        if fsdp["replicas"] == 1:
            yield "streams", ["all_reduce"], "changes nothing without fsdp.replicas: there is no all-reduce"
    if not distributed["overlap_reduce_scatter"]:
        clone = "overlap_clone_for_reduce_scatter"
        yield "distributed", [clone], "changes nothing without distributed.overlap_reduce_scatter"
    if not distributed["enable_overlap"]:
        yield "streams", point["streams"], "is a stream of distributed.enable_overlap, which is off"


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Trains with telemetry, profiles, and compares with no overlap and with no communication."""
    from overlap_sweep.workloads.fsdp.run import forget, run_training

    try:
        return run_training(point, directory, ranks)
    finally:
        forget(ranks)


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    distributed = point["distributed"]
    return [models.short_name(point["model"]), f"dp{distributed['dp_size']}", distributed["strategy"]]


def _cost(point: Mapping[str, Any]) -> tuple[Any, ...]:
    profiling = point["profiling"]
    profiled = profiling["enabled"] and profiling["repeat"] * sum(profiling[n] for n in ("wait", "warmup", "active"))
    steps = (point["training"]["max_steps"], point["workload"]["steps"], profiled)
    # Compiling takes longer than all the steps.
    return *steps, point["ranking"]["num_layers"], point["compile"]["enabled"]


def _workers(point: Mapping[str, Any], directory: Path) -> Workers:
    """Returns the point's workers, not shared if it leaves process groups behind: FSDP2 makes two, and keeps them, for
    each unit that stays gathered within a smaller group."""
    leaves_groups = type(point["fsdp"]["reshard_after_forward"]) is int
    return Workers(
        max_connections=8,
        environment=point["distributed"]["env"],
        wrapper=_rocprofv3(point["profiling"], directory),
        wrapper_missing="profiling.rocprofv3=true needs rocprofv3 in PATH, which comes with ROCm (/opt/rocm/bin); add "
        "it, or leave profiling.rocprofv3 out.",
        company=str(directory) if leaves_groups else "",
    )


def _rocprofv3(profiling: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    if not profiling["rocprofv3"]:
        return ()
    try:
        arguments = shlex.split(profiling["rocprofv3_args"])
    except ValueError as error:
        raise UserError(f"profiling.rocprofv3_args cannot be split ({error}); close its quotes.") from None
    return ("rocprofv3", *arguments, "-d", str(directory.resolve() / "rocprofv3"), "--")


def _sample(result: Result) -> Sample:
    from overlap_sweep.workloads.fsdp.result import sample

    return sample(result)


def _same_point(point: Mapping[str, Any]) -> str:
    from overlap_sweep.workloads.fsdp.knobs import frozen, knobs_of

    return str(sorted(frozen(knobs_of(point)), key=str))


WORKLOAD = Workload(
    name="fsdp",
    package=__name__,
    complete=complete,
    refusal=refusal,
    run=run,
    subject=lambda point: f"{point['distributed']['strategy']} step",
    words=_words,
    named={"distributed.strategy", "distributed.dp_size", "training.output_dir"},
    world_size=lambda point: int(point["distributed"]["dp_size"]),
    fewer_gpus=lambda point: (f"distributed.dp_size={point['distributed']['dp_size']}", "a smaller one"),
    cost=_cost,
    workers=_workers,
    output_option="training.output_dir",
    searchable=Searchable(
        sample=_sample,
        same_point=_same_point,
        options=("fsdp.", "streams.", "distributed."),
        cases=("distributed.strategy", "distributed.dp_size"),
        of_gpus=("streams.", "distributed.env."),
        experiment="fsdp_overlap",
        example="fsdp.forward_prefetch=false,1",
    ),
)
