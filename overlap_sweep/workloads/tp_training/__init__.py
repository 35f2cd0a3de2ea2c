"""Training steps of a language model by one of several tensor-parallel stacks, under equal settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, overlap_cfg
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Workers, Workload
from overlap_sweep.workloads.tp_training.architectures import architecture
from overlap_sweep.workloads.tp_training.config import DEFAULT_IMPL, PRECISION_OF, TP_TRAINING_ON, TpTraining
from overlap_sweep.workloads.tp_training.language_model import language_model
from overlap_sweep.workloads.tp_training.refusals import refusal

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks

_OF_ALL = ("runtime", "profile", "repetition", "model", "tp_size")
_ONLY_OF = {
    "zero_stage": ("autotp",),
    "attn_impl": ("autotp", "fsdp_dtensor", "async_tp"),
    "tp_comm_overlap": ("megatron",),
    "tp_comm_overlap_cfg": ("megatron",),
}
"""Options that the others ignore."""
_LIBRARIES = {
    "autotp": ("transformers", "deepspeed"),
    "fsdp_dtensor": ("transformers",),
    "async_tp": ("transformers",),
    "megatron": (),
}
"""Whose version is part of the point, beside those that every result's environment is compared by."""
_IN_SEQUENCE = ("async_tp", "megatron")
"""Implementations that overlap nothing without sequence parallelism."""


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """With the model's whole config, steps and precision: the point without whatever this has no use for."""
    device, impl = point["runtime"]["device"], point["impl"] or DEFAULT_IMPL
    if point["backend"] != "auto":
        raise UserError(f"backend={point['backend']}: who trains is said by impl; leave backend out.")
    model, dp_size = point["model"], point["dp_size"] or 1
    training = dict(point["tp_training"])
    unasked = TP_TRAINING_ON[device] | {name: getattr(TpTraining(), name) for name in _ONLY_OF}
    training |= {name: value for name, value in unasked.items() if training[name] is None}
    # It says where results go, not what is measured.
    training.pop("output_dir")
    if training["warmup_steps"] >= training["num_training_steps"]:
        raise UserError(
            f"tp_training.warmup_steps={training['warmup_steps']} leaves nothing of "
            f"tp_training.num_training_steps={training['num_training_steps']} to be timed; give more steps."
        )
    training |= {name: None for name, impls in _ONLY_OF.items() if impl not in impls}
    if training["sequence_parallel"] is None:
        training["sequence_parallel"] = impl in _IN_SEQUENCE
    # One rank has the whole sequence.
    training["sequence_parallel"] &= point["tp_size"] > 1
    if impl == "async_tp":
        training["compile"] = True
    sequences = training["batch_size"] * training["gradient_accumulation_steps"] * dp_size
    completed = {
        **{name: point[name] for name in _OF_ALL},
        **{"impl": impl, "backend": impl, "dp_size": dp_size, "tp_training": training},
        "language_model": _language_model(model),
        "libraries": {name: version(name) for name in _LIBRARIES[impl] if find_spec(name)},
        "precision": PRECISION_OF[training["dtype"]],
        "workload": {
            **point["workload"],
            "tokens": sequences * training["seq_length"],
            "repeats": training["num_training_steps"] - training["warmup_steps"],
        },
    }
    if training["tp_comm_overlap_cfg"] is not None:
        completed["overlap_cfg"] = _read_overlap_cfg(training["tp_comm_overlap_cfg"])
    return completed


def _language_model(model: Mapping[str, Any]) -> dict[str, Any]:
    if model["architecture"] is None and model["source"] != "hf":
        raise UserError(
            f"model {model['name']} has no architecture, so it is no language model; give model.architecture=llama or "
            "another, or a model that has one."
        )
    more = architecture(model["architecture"]).more if model["architecture"] else {}
    fields = language_model(model, more)
    architecture(fields["model_type"])
    return fields


def _read_overlap_cfg(path: str) -> dict[str, Any]:
    """Its content, so that the result says what was run."""
    read = overlap_cfg.read(Path(path).expanduser())
    return {"slots": read.slots, "switches": read.switches}


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """Megatron-Core's, where a file was given; Transformer Engine's defaults are in none."""
    given = point.get("overlap_cfg")
    return {"": OverlapConfig(given["slots"], given["switches"])} if given else {}


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Train, profile some more steps, and leave nothing behind for the next point."""
    from overlap_sweep.workloads.tp_training.run import run_tp_training

    return run_tp_training(point, directory, ranks)


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    sizes = [f"tp{point['tp_size']}", f"dp{point['dp_size'] or 1}"]
    return [models.short_name(point["model"]), *sizes, point["impl"] or DEFAULT_IMPL]


def _cost(point: Mapping[str, Any]) -> tuple[Any, ...]:
    training, model = point["tp_training"], point["language_model"]
    # Compiling takes longer than all the steps.
    return training["num_training_steps"], training["compile"], model["num_hidden_layers"], point["tp_size"]


def _workers(point: Mapping[str, Any], directory: Path) -> Workers:
    """Stacks patch what others run, and are compared by the memory that they take: none shares a process with
    another."""
    # With eight queues, NCCL's kernels wait for a GEMM that has taken all SMs: a ring exchange took 22 % longer.
    return Workers(max_connections=1 if point["impl"] == "megatron" else 8, company=point["impl"])


WORKLOAD = Workload(
    name="tp_training",
    package=__name__,
    complete=complete,
    refusal=refusal,
    overlap_configs=overlap_configs,
    run=run,
    subject=lambda point: f"{point['impl']} step",
    words=_words,
    named={"tp_size", "impl", "dp_size", "tp_training.output_dir"},
    world_size=lambda point: int(point["tp_size"] * (point["dp_size"] or 1)),
    fewer_gpus=lambda point: (
        f"tp_size={point['tp_size']} x dp_size={point['dp_size']}",
        "sizes whose product is smaller",
    ),
    cost=_cost,
    workers=_workers,
    output_option="tp_training.output_dir",
    names_in_output=True,
)
