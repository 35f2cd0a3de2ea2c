"""A whole transformer layer, or a part of it, under several overlap configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep import backends
from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Workload
from overlap_sweep.workloads.layer import variants as layer_variants
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks
    from overlap_sweep.measure.timing import Variant

TOLERANCE = {"fp32": 1e-4}
DEFAULT_TOLERANCE = 5e-2
FP8_TOLERANCE = 0.2
"""FP8 has two or three bits of mantissa: sums taken in another order round some activations to a neighbour, and the
GEMMs that follow see it. A wrong chunk is off by 1."""

_OPERATORS_OF_KIND = {
    "linear": ("proj",),
    "layernorm_linear": ("qkv",),
    "layernorm_mlp": ("fc1", "fc2"),
    "multihead_attention": ("qkv", "proj"),
    "transformer_layer": tuple(space.OPERATORS),
}
_RECORDED_SINCE_EVER = {"operator": "fc1", "phase": "all", "method": "bulk", "phases": None}
"""Nothing reads it, but earlier results have it, and equal points are recognised by all that they record."""
_WITH_ATTENTION = ("multihead_attention", "transformer_layer")


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the backend, and record the configuration that each variant stands for in it, as its file is now."""
    backend = backends.choose(point["runtime"]["device"]) if point["backend"] == "auto" else point["backend"]
    chosen = {**_RECORDED_SINCE_EVER, **point, "backend": backend}
    configs = layer_variants.configurations(chosen) if backend in backends.LAYERS else {}
    recorded = {name: asdict(config) for name, config in configs.items()}
    return {**chosen, "layer": {**point["layer"], "configurations": recorded}}


def _configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    return {name: OverlapConfig(**config) for name, config in point["layer"]["configurations"].items()}


def refusal(point: Mapping[str, Any]) -> str | None:
    backend = backends.load(point["backend"])
    if point["backend"] not in backends.LAYERS:
        return f"backend={point['backend']} has no whole layers; {', '.join(backends.LAYERS)} have"
    layer, tokens = point["layer"], point["workload"]["tokens"]
    sequence, rest = divmod(tokens, layer["micro_batch_size"])
    if rest or sequence % point["tp_size"]:
        return (
            f"{tokens} tokens are no layer.micro_batch_size={layer['micro_batch_size']} sequences "
            f"that divide by tp_size={point['tp_size']}"
        )
    if lacking := models.lacks(point["model"], _OPERATORS_OF_KIND[layer["kind"]]):
        return lacking
    for operator in _OPERATORS_OF_KIND[layer["kind"]]:
        unset = {"operator": operator, "phase": "all", "method": "none", "phases": None}
        reason = models.refusal(point["model"], operator, tokens, point["tp_size"])
        if reason := reason or backend.refusal({**point, **unset}):
            return str(reason)
    refused = _refused(point)
    if refused and len(refused) == len(_configs(point)):
        return "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return None


def _refused(point: Mapping[str, Any]) -> dict[str, str]:
    """By name, why variants that overlap cannot run."""
    reasons = {name: _variant_refusal(point, config) for name, config in _configs(point).items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _variant_refusal(point: Mapping[str, Any], config: OverlapConfig) -> str | None:
    if point["tp_size"] == 1:
        return "tp_size=1 communicates nothing that could overlap; give layer.comm_overlap=false"
    kind = point["layer"]["kind"]
    operators = _OPERATORS_OF_KIND[kind]
    if not overlap_cfg.overlaps(config, operators):
        return f"it overlaps nothing in layer={kind}"
    reason: str | None = backends.load(point["backend"]).layer_refusal(point, config, operators)
    return reason


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """By variant that can run. One that cannot is left out, with a warning, as long as another can."""
    refused = _refused(point)
    return {name: config for name, config in _configs(point).items() if name not in refused}


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Check, time and profile every variant; the fields of `Result` that were measured."""
    from overlap_sweep.measure.timing import summarise, time_variants
    from overlap_sweep.workloads.layer.bench import layer_bench

    refused, configs = _refused(point), overlap_configs(point)
    names = [name for name in layer_variants.names(point) if name not in refused]
    # `none` is what the others are checked against, also where the user did not ask for its time.
    to_build = list(dict.fromkeys(["none", *names]))
    variants, refused_there = layer_bench(point, to_build, configs, ranks)
    refused |= refused_there
    configs = {name: config for name, config in configs.items() if name in variants}
    if refused and not configs:
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    reference = variants["none"] if "none" in names else variants.pop("none")
    errors = _errors(list(configs), variants, reference, ranks)
    wrong = _wrong(errors, tolerance(point))
    wrong_errors = {f"{name} {tensor}": error for name in wrong for tensor, error in errors[name].items()}
    if wrong and len(wrong) == len(configs):
        raise WrongNumbers(" ".join(wrong.values()), wrong_errors)
    workload = point["workload"]
    right = {name: variant for name, variant in variants.items() if name not in wrong}
    samples = time_variants(right, ranks, workload["warmup"], workload["repeats"])
    found = {
        name: VariantTimes(
            times={pass_name: summarise(us) for pass_name, us in taken.us.items()},
            settings=configs[name].slots if name in configs else {},
            switches=configs[name].switches if name in configs else {},
            relative_error=errors.get(name, {}),
            launch_bound=taken.launch_bound,
        )
        for name, taken in samples.items()
    }
    traces = _profile(point, found, right, directory, ranks)
    attention, attention_warnings = None, []
    if point["layer"]["kind"] in _WITH_ATTENTION:
        attention, attention_warnings = backends.load(point["backend"]).attention(point, ranks)
    return {
        "measured": LayerTimes(variants=found, attention_backend=attention),
        "objective_us": found[_fastest(found)].times["all"].median_us,
        "launch_bound": any(times.launch_bound for times in found.values()),
        "traces": traces,
        "relative_error": wrong_errors,
        "warnings": [
            *(f"{name} was not measured: {reason}." for name, reason in refused.items()),
            *wrong.values(),
            *attention_warnings,
        ],
    }


def _errors(
    names: Sequence[str], variants: Mapping[str, Variant], reference: Variant, ranks: Ranks
) -> dict[str, dict[str, float]]:
    """By variant, its relative errors against `none`, each under its own userbuffers."""
    from overlap_sweep.measure.timing import relative_error

    errors = {}
    for name in names:
        variants[name].get_ready()
        errors[name] = relative_error(variants[name], reference, ranks)
    return errors


def _wrong(errors: Mapping[str, Mapping[str, float]], allowed: float) -> dict[str, str]:
    """What to say of the variants that are off by more than is allowed."""
    said = {}
    for name, error in errors.items():
        worst = max(error, key=error.__getitem__)
        if error[worst] > allowed:
            said[name] = (
                f"{name} computes wrong numbers and was not measured: {worst} differs from none by "
                f"{error[worst]:.2g} of its largest value, tolerance {allowed:g}."
            )
    return said


def _fastest(found: Mapping[str, VariantTimes]) -> str:
    """The floor is no way to compute a layer."""
    return min((name for name in found if name != "floor"), key=lambda name: found[name].times["all"].median_us)


def _profile(
    point: Mapping[str, Any],
    found: Mapping[str, VariantTimes],
    variants: Mapping[str, Variant],
    directory: Path,
    ranks: Ranks,
) -> list[str]:
    """Capture the variants that `profile` asks for; the names of the traces. `best` is the fastest and `none`."""
    from overlap_sweep.measure.profile import capture_each

    wanted = {"all": set(found), "best": {"none", _fastest(found)}, "none": set[str]()}[point["profile"]]
    profiled = {name: variant for name, variant in variants.items() if name in wanted}
    return capture_each(profiled, ranks, point["workload"]["profiled"], directory)


def tolerance(point: Mapping[str, Any]) -> float:
    """The largest relative error at which a variant still counts as right."""
    given: float | None = point["workload"]["tolerance"]
    if given is not None:
        return given
    if point["precision"].startswith("fp8"):
        return FP8_TOLERANCE
    return TOLERANCE.get(point["precision"], DEFAULT_TOLERANCE)


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    replicas = point["layer"]["num_replicas"]
    begin = [models.short_name(point["model"]), f"tp{point['tp_size']}", point["layer"]["kind"]]
    return [*begin, *([f"dp{replicas}"] if replicas > 1 else [])]


def _fewer_gpus(point: Mapping[str, Any]) -> tuple[str, str]:
    replicas = point["layer"]["num_replicas"]
    with_replicas = f" with layer.num_replicas={replicas}" if replicas > 1 else ""
    return f"tp_size={point['tp_size']}{with_replicas}", "a smaller tp_size"


WORKLOAD = Workload(
    name="layer",
    package=__name__,
    complete=complete,
    refusal=refusal,
    overlap_configs=overlap_configs,
    run=run,
    subject=lambda point: str(point["layer"]["kind"]),
    words=_words,
    named={"tp_size", "layer", "layer.num_replicas"},
    world_size=lambda point: int(point["tp_size"] * point["layer"]["num_replicas"]),
    fewer_gpus=_fewer_gpus,
)
