"""A whole transformer layer, or a part of it, under several overlap configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep import models, overlap_cfg, space
from overlap_sweep.backends import transformer_engine
from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.run_directory import VariantTimes, trace_file
from overlap_sweep.workloads import layer_variants

if TYPE_CHECKING:
    from overlap_sweep.measure.variant import Variant
    from overlap_sweep.ranks import Ranks

TOLERANCE = 5e-2
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
_WITH_ATTENTION = ("multihead_attention", "transformer_layer")


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Record the configuration that each variant stands for, as its file is now."""
    backend = "transformer_engine" if point["backend"] == "auto" else point["backend"]
    configs = {name: asdict(config) for name, config in layer_variants.configurations(point).items()}
    return {**point, "backend": backend, "layer": {**point["layer"], "configurations": configs}}


def _configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    return {name: OverlapConfig(**config) for name, config in point["layer"]["configurations"].items()}


def refusal(point: Mapping[str, Any]) -> str | None:
    if point["backend"] != "transformer_engine":
        return f"workload=layer runs Transformer Engine's layers, not backend={point['backend']}'s"
    if reason := transformer_engine.missing():
        return reason
    layer, tokens = point["layer"], point["workload"]["tokens"]
    sequence, rest = divmod(tokens, layer["micro_batch_size"])
    if rest or sequence % point["tp_size"]:
        return (
            f"{tokens} tokens are no layer.micro_batch_size={layer['micro_batch_size']} sequences "
            f"that divide by tp_size={point['tp_size']}"
        )
    for operator in _OPERATORS_OF_KIND[layer["kind"]]:
        unset = {"operator": operator, "phase": "all", "method": "none"}
        reason = models.refusal(point["model"], operator, tokens, point["tp_size"])
        if reason or (reason := transformer_engine.userbuffers_refusal({**point, **unset})):
            return reason
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
    if point["tp_size"] not in space.USERBUFFERS_RANKS:
        return f"userbuffers have no kernels for tp_size={point['tp_size']}; they are for 2, 4 and 8 ranks"
    kind = point["layer"]["kind"]
    operators = _OPERATORS_OF_KIND[kind]
    if not overlap_cfg.overlaps(config, operators):
        return f"it overlaps nothing in layer={kind}"
    if config.switches["tp_comm_overlap_disable_fc1"] and "fc1" in operators:
        return "Transformer Engine's layers cannot switch off fc1's overlap alone, as tp_comm_overlap_disable_fc1 asks"
    if reason := overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config, operators):
        return reason
    for slot, setting in config.slots.items():
        operator, _, phase = slot.partition("_")
        if operator in operators:
            alone = {**point, **dict.fromkeys(space.KNOBS), **setting, "operator": operator, "phase": phase}
            if "method" in setting and (reason := transformer_engine.userbuffers_refusal(alone)):
                return reason
    return None


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """By variant that can run. One that cannot is left out, with a warning, as long as another can."""
    refused = _refused(point)
    return {name: config for name, config in _configs(point).items() if name not in refused}


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Check, time and profile every variant; the fields of `Result` that were measured."""
    from overlap_sweep.measure.attention import attention_backend, attention_warnings
    from overlap_sweep.measure.timing import summarise, time_variants
    from overlap_sweep.workloads.layer_bench import layer_bench

    refused, configs = _refused(point), overlap_configs(point)
    names = [name for name in layer_variants.names(point["layer"]) if name not in refused]
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
    backend = attention_backend() if point["layer"]["kind"] in _WITH_ATTENTION else None
    return {
        "variants": found,
        "objective_us": found[_fastest(found)].times["all"].median_us,
        "launch_bound": any(times.launch_bound for times in found.values()),
        "traces": traces,
        "attention_backend": backend,
        "relative_error": wrong_errors,
        "warnings": [
            *(f"{name} was not measured: {reason}." for name, reason in refused.items()),
            *wrong.values(),
            *attention_warnings(backend),
        ],
    }


def _errors(
    names: Sequence[str], variants: Mapping[str, Variant], reference: Variant, ranks: Ranks
) -> dict[str, dict[str, float]]:
    """By variant, its relative errors against `none`, each under its own userbuffers."""
    from overlap_sweep.measure.agreement import relative_error

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
    from overlap_sweep.measure.profile import capture

    wanted = {"all": set(found), "best": {"none", _fastest(found)}, "none": set[str]()}[point["profile"]]
    traces = []
    for name in (name for name in variants if name in wanted):
        capture(variants[name], ranks, point["workload"]["profiled"], directory, name)
        traces += [trace_file(rank, name) for rank in range(ranks.world_size)]
    return traces


def tolerance(point: Mapping[str, Any]) -> float:
    """The largest relative error at which a variant still counts as right."""
    given: float | None = point["workload"]["tolerance"]
    if given is not None:
        return given
    return FP8_TOLERANCE if point["precision"].startswith("fp8") else TOLERANCE
