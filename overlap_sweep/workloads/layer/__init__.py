"""A transformer layer, or a part of it, under several overlap configurations in turns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import TypeVar, cast

from overlap_sweep import backends
from overlap_sweep.declared import shown
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import FILE, MEGATRON_NAMES, OverlapConfig
from overlap_sweep.overlap.recipes import RECIPES, notes
from overlap_sweep.overlap.space import MOE_KIND
from overlap_sweep.results.run_directory import settings_file
from overlap_sweep.workloads import Workload, run_of, tp_groups_on_nodes, tp_ranks, usual_workers
from overlap_sweep.workloads.layer import moe
from overlap_sweep.workloads.layer.config import Asked, Config, Moe, Resolved, ResolvedLayer, ResolvedMoe
from overlap_sweep.workloads.memory import ADAM_BYTES, Memory

R = TypeVar("R")

NOT_OVERLAPPED = ("none", "floor")

_EVERY, _COLUMN, _ROW = tuple(space.OPERATORS), ("qkv", "fc1"), ("proj", "fc2")
_OFF = {**dict.fromkeys(overlap_cfg.SWITCH_DEFAULTS, False), "tp_comm_overlap": True}
_SWITCHED_ON = {
    "bulk": ("tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad"),
    "ring_exchange": ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad"),
    "pipeline": ("tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad"),
    "split": ("tp_comm_overlap_ag", "tp_comm_overlap_rs"),
}
"""The switches that are on, by preset."""
_SPLIT = (("ring_exchange", "fprop", _COLUMN), ("ring_exchange", "dgrad", _ROW), ("pipeline", "fprop", _ROW))
"""Method, phase and operators of the preset `split`."""
PRESETS = ("default", *_SWITCHED_ON, "rs_dgrad", "atomic")
_WITH_DEFAULT = ("default", "rs_dgrad", "ring_exchange", "bulk")
_WITHOUT_DEFAULT = ("bulk", "ring_exchange", "pipeline")
"""Variants of a point whose user names none, with a backend that has a default overlap, and with others."""
_SWITCH_OPTIONS = tuple(name for name in MEGATRON_NAMES if name != "ub_overlap_rs_dgrad")
"""The options that switch the default overlap; that of `ub_overlap_rs_dgrad` also needs other settings."""

DEFAULT_TOLERANCE = 5e-2
FP8_TOLERANCE = 0.2
"""For every recipe. FP8 has two or three bits of mantissa: another order of summation rounds some activations
differently, which the next GEMMs amplify. A wrong chunk has an error of 1."""


def complete(config: Asked) -> Asked:
    """Returns the point with its backend and the configuration of each variant, read from its file. UserError for an
    option of layers with experts."""
    for option in fields(Moe):
        if (value := getattr(config.layer.moe, option.name)) is not None:
            raise UserError(f"layer.moe.{option.name}={shown(value)} is for layer=moe; add that, or leave it out.")
    backend = backends.chosen(config)
    model = models.without_experts(config.model)
    chosen = replace(config, backend=backend, model=model, with_cublasmp=config.with_cublasmp or None)
    configs = configurations(chosen) if backend in backends.LAYERS else {}
    layer = {**vars(config.layer), "moe": ResolvedMoe(), "configurations": configs}
    return replace(chosen, layer=ResolvedLayer(**layer))


def refusal(point: Resolved) -> str | None:
    backend = backends.load(point.backend)
    if point.backend not in backends.LAYERS:
        return f"backend={point.backend} has no whole layers; choose one of {', '.join(backends.LAYERS)}"
    layer, sizes = point.layer, (point.workload.tokens, point.tp_size)
    if reason := models.layer_refusal(point.model, layer.kind, layer.micro_batch_size, *sizes):
        return reason
    for operator in space.LAYER_KINDS[layer.kind]:
        if reason := backend.refusal(point, operator, {}):
            return str(reason)
    refused = refused_variants(point)
    if refused and len(refused) == len(layer.configurations):
        return "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return None


def refused_variants(point: Resolved) -> dict[str, str]:
    """Returns why variants cannot run, by name; without those that can."""
    reasons = {name: _refusal_of(config, point) for name, config in point.layer.configurations.items()}
    return {name: why for name, why in reasons.items() if why}


def _refusal_of(config: OverlapConfig, point: backends.LayerPoint) -> str | None:
    """Returns why a variant of this configuration cannot run, or None."""
    kind = point.layer.kind
    operators = space.LAYER_KINDS[kind]
    if point.tp_size == 1:
        return "tp_size=1 has no communication to overlap; set layer.comm_overlap=false"
    if not overlap_cfg.overlaps(config, operators):
        return f"no overlap is on in layer={kind}"
    return backends.load(point.backend).layer_refusal(point, config, operators)


def overlap_configs(point: Resolved) -> dict[str, OverlapConfig]:
    """Returns the configurations of the variants that can run. The others are left out with a warning."""
    refused = refused_variants(point)
    return {name: config for name, config in point.layer.configurations.items() if name not in refused}


def tolerance(point: Resolved) -> float:
    """Returns the largest allowed relative error of a variant."""
    if point.precision == "fp32":
        return space.allowed_error(point)
    return space.allowed_error(point, FP8_TOLERANCE if point.precision in RECIPES else DEFAULT_TOLERANCE)


def names(point: Asked) -> list[str]:
    """Returns the variants to measure, in order: `none`, unless the user's list leaves it out, then the others, and
    `floor` last. UserError if two options both choose the overlap."""
    layer = point.layer
    switched = {name: on for name in _SWITCH_OPTIONS if (on := getattr(layer, name)) is not None}
    preset = "rs_dgrad" if layer.ub_overlap_rs_dgrad else "default"
    arguments = [*(["ub_overlap_rs_dgrad"] if layer.ub_overlap_rs_dgrad else []), *switched]
    chosen_by = [*(name for name in ("variants", "tp_comm_overlap_cfg") if getattr(layer, name)), *arguments[:1]]
    if layer.comm_overlap and len(chosen_by) > 1:
        of_variants = "; switches follow a name: 'bulk ub_bulk_wgrad=false'" if switched else ""
        raise UserError(
            f"layer.{chosen_by[0]} and layer.{chosen_by[1]} both choose the overlap; give one of them "
            f"(in layer.variants a file is file:<path>{of_variants})."
        )
    variants = layer.variants
    if variants is None and layer.tp_comm_overlap_cfg:
        variants = ["none", FILE + layer.tp_comm_overlap_cfg]
    elif variants is None and arguments:
        variants = ["none", _switched(preset, switched, point)]
    elif variants is None:
        variants = ["none", *_usual(point)]
    if not layer.comm_overlap:
        variants = [name for name in variants if name in NOT_OVERLAPPED]
    others = [name for name in variants if name != "floor"] or ["none"]
    return [*dict.fromkeys(others), "floor"]


def _usual(point: Asked) -> list[str]:
    """Returns the variants that are compared with `none` if the user names none: those that can run here."""
    if point.precision and notes(point.precision):
        return []
    has_default = backends.load(point.backend).LAYER_HAS_DEFAULT
    usual = _WITH_DEFAULT if has_default else _WITHOUT_DEFAULT
    # The machine has decided its precision and tp_size.
    decided = cast(backends.LayerPoint, point)
    can_run = [name for name in usual if _refusal_of(_configuration(name, point), decided) is None]
    # Refused, it says why.
    return can_run or ["default"] * has_default


def _switched(preset: str, switched: Mapping[str, bool], point: Asked) -> str:
    """Returns the name of the preset under other switches, such as `default ub_overlap_ag=false`."""
    own = _preset(preset, point).switches
    changed = {name: on for name, on in switched.items() if own[MEGATRON_NAMES[name]] != on}
    return " ".join([preset, *(f"{name}={str(on).lower()}" for name, on in changed.items())])


def configurations(point: Asked) -> dict[str, OverlapConfig]:
    """Returns the configuration of every variant that overlaps. UserError for an invalid name or file."""
    overlapped = [name for name in names(point) if name not in NOT_OVERLAPPED]
    written = {settings_file(name): name for name in overlapped}
    for name in overlapped:
        if (other := written[settings_file(name)]) != name:
            raise UserError(
                f"layer.variants: {name} and {other} would be recorded under the same file name; rename one."
            )
    return {name: _configuration(name, point) for name in overlapped}


def _configuration(name: str, point: Asked) -> OverlapConfig:
    if name.startswith(FILE):
        return overlap_cfg.read(Path(name.removeprefix(FILE)).expanduser())
    preset, *words = name.split(" ")
    if preset not in PRESETS:
        known = ", ".join((*NOT_OVERLAPPED, *PRESETS, FILE + "<path>"))
        raise UserError(f"layer.variants: {name} is not known; choose one of {known}.")
    switches = {f"{argument}={value}": argument for argument in MEGATRON_NAMES for value in ("true", "false")}
    if unknown := [word for word in words if word not in switches]:
        known = ", ".join(MEGATRON_NAMES)
        raise UserError(f"layer.variants: {name}: {unknown[0]!r} is not a switch; give {known} with =true or =false.")
    config = _preset(preset, point)
    changed = {MEGATRON_NAMES[switches[word]]: word.endswith("=true") for word in words}
    return OverlapConfig(config.slots, {**config.switches, **changed})


def _preset(name: str, point: Asked) -> OverlapConfig:
    if name == "default":
        return OverlapConfig()
    if name == "rs_dgrad":
        slots: dict[str, space.Setting] = {slot: {"method": "ring_exchange"} for slot in ("qkv_dgrad", "fc1_dgrad")}
        return OverlapConfig(slots, {**overlap_cfg.SWITCH_DEFAULTS, "tp_comm_overlap_rs_dgrad": True})
    if name == "atomic":
        return OverlapConfig(_slots(replace(point, atomic_gemm=True), [("ring_exchange", "fprop", _EVERY)]))
    wanted = _SPLIT if name == "split" else [(name, "all", _EVERY)]
    return OverlapConfig(_slots(point, wanted), {**_OFF, **dict.fromkeys(_SWITCHED_ON[name], True)})


def _slots(point: Asked, wanted: Iterable[tuple[str, str, tuple[str, ...]]]) -> dict[str, space.Setting]:
    """Returns the slots for these methods, phases and operators, with the point's knobs or the backend's defaults."""
    slots: dict[str, space.Setting] = {}
    knobs = {knob: value for knob in space.KNOBS if (value := getattr(point, knob)) is not None}
    for method, phase, operators in wanted:
        defaults = backends.default_knobs(point, method)
        setting = {**defaults, **knobs, "method": method}
        phases = space.PHASES if phase == "all" else (phase,)
        for operator in operators:
            slots |= space.slots_of(operator, dict.fromkeys(phases, setting))
    return slots


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    replicas = config.layer.num_replicas
    begin = [models.short_name(config.model), f"tp{config.tp_size}", config.layer.kind]
    return [*begin, *([f"dp{replicas}"] if replicas > 1 else [])]


def _fewer_gpus(config: Config) -> tuple[str, str]:
    replicas = config.layer.num_replicas
    with_replicas = f" with layer.num_replicas={replicas}" if replicas > 1 else ""
    return f"tp_size={config.tp_size}{with_replicas}", "a smaller tp_size"


def _memory(point: Resolved) -> Memory:
    model, sizes = point.model, (point.workload.tokens, point.tp_size)
    shapes = [models.linear_shape(model, operator, *sizes) for operator in space.LAYER_KINDS[point.layer.kind]]
    number_bytes = 4 if point.precision == "fp32" else 2
    # Each variant has its own weights. One after the other they keep inputs and outputs.
    weights = sum(prod(shape.weight_shape) for shape in shapes) * number_bytes * len({*names(point), "none"})
    kept = sum(prod(shape.local().input_shape) + prod(shape.local().output_shape) for shape in shapes) * number_bytes
    optimizer = weights * ADAM_BYTES / 4 if point.layer.training else 0.0
    return Memory(parameters=weights, gradients=weights, optimizer=optimizer, activations=kept)


def _by_kind(tensor_parallel: Callable[..., R], of_moe: Callable[..., R]) -> Callable[..., R]:
    """Returns a call of the workload that depends on the point's kind of layer."""
    return lambda config, *more: (of_moe if config.layer.kind == MOE_KIND else tensor_parallel)(config, *more)


WORKLOAD = Workload[Config, Resolved](
    name="layer",
    package=__name__,
    complete=_by_kind(complete, moe.complete),
    refusal=_by_kind(refusal, moe.refusal),
    # The arguments of layers with experts are in the point.
    overlap_configs=_by_kind(overlap_configs, lambda point: {}),
    # The latter only where Megatron-Core is installed.
    run=_by_kind(run_of(__name__), run_of(__name__, "moe_bench")),
    subject=lambda point: point.layer.kind,
    words=_by_kind(_words, moe.words),
    named={"tp_size", "layer", "layer.num_replicas", "layer.moe.ep_size"},
    ranks=_by_kind(lambda config: tp_ranks(config, config.layer.num_replicas), moe.ranks),
    fewer_gpus=_by_kind(_fewer_gpus, moe.fewer_gpus),
    memory=_by_kind(_memory, lambda point: None),
    less_memory="fewer layer.variants, a larger tp_size or a smaller model",
    # Overlap is within a tensor-parallel group; NCCL or gloo reduce the replicas' gradients and reach all experts.
    on_one_node=tp_groups_on_nodes,
    workers=_by_kind(usual_workers, moe.workers),
)
