"""What the files of a run directory must be before anything else looks at them, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.kernel_shape import KERNELS
from overlap_sweep.overlap.overlap_cfg import NO_YAML, SWITCH_DEFAULTS
from overlap_sweep.overlap.space import METHODS, OPERATORS, PASSES, PHASES, SLOTS
from overlap_sweep.results.check_parts import (
    MEASURE_AGAIN,
    UPDATE,
    Count,
    SizedWorkload,
    Word,
    Workload,
    check_name,
    contradiction,
    is_whole,
)
from overlap_sweep.results.kernel_checks import check_implementations, check_kernel
from overlap_sweep.results.run_directory import RESULT_FILE, Result, SearchRecord, TunerRecord
from overlap_sweep.results.tp_training_checks import (
    check_resolved_tp_training,
    check_tp_training,
    check_tp_training_config,
)
from overlap_sweep.results.training_checks import (
    check_copies,
    check_copy_config,
    check_resolved,
    check_training,
    check_training_config,
)
from overlap_sweep.trace.directories import is_below, is_plain_name, is_special

LAYER_PASSES = {"fwd", "bwd", "all"}
"""What every variant of a layer has times of; `step` only where an optimizer runs."""

MOST_BYTES = 64 << 20
"""Of one file: a result has some 100 kB."""
MOST_YAML_BYTES = 1 << 20
"""Reading it takes a second."""
_MOST_VALUES = 100_000
"""Also in a file of a few lines whose aliases name each other."""
_DEEPEST = 32
_LARGEST = 2**63

_Flag = bool | int | None


class _Setting(msgspec.Struct, forbid_unknown_fields=True):
    """Of one slot: those of space.KNOBS, and what else Transformer Engine takes."""

    method: str | None = None
    num_sm: Count | None = None
    num_splits: Count | None = None
    cga_size: Count | None = None
    aggregate: _Flag = None
    set_sm_margin: _Flag = None
    use_ce: _Flag = None
    atomic_gemm: _Flag = None
    fp8_buf: _Flag = None
    is_reduce_scatter: _Flag = None
    comm_priority: _Flag = None
    gemm_priority: _Flag = None
    pipeline_rs_overlap_first_gemm: _Flag = None


class _Model(msgspec.Struct):
    name: str


class _Runtime(msgspec.Struct):
    device: str
    max_connections: Count | None = None


class _Configuration(msgspec.Struct):
    slots: dict[str, _Setting]
    switches: dict[str, bool]


class _Layer(msgspec.Struct):
    kind: str
    num_replicas: Count
    training: bool
    configurations: dict[str, _Configuration] = {}


class _Config(msgspec.Struct):
    """The part of a point's configuration that analysis relies on."""

    model: _Model
    workload: Workload
    runtime: _Runtime
    tp_size: Count
    backend: str
    precision: str | None


class _OperatorConfig(_Config):
    workload: SizedWorkload
    operator: str
    phase: str
    method: str
    phases: dict[str, _Setting] | None = None
    num_sm: Count | None = None
    num_splits: Count | None = None
    cga_size: Count | None = None
    aggregate: bool | None = None
    set_sm_margin: bool | None = None
    use_ce: bool | None = None
    atomic_gemm: bool | None = None
    fp8_buf: bool | None = None


class _LayerConfig(_Config):
    workload: SizedWorkload
    layer: _Layer


class _KernelConfig(_Config):
    """As it was asked for: null is what the model, the operator or the device decide."""

    kernel: str | None
    m: Count | None
    n: Count | None
    k: Count | None
    operator: str | None = None


class _Environment(msgspec.Struct):
    """The part of the environment that analysis relies on."""

    host: str | None = None
    gpu: str | None = None
    device: str | None = None
    gpu_count: Word = None
    cpu: Word = None
    cpu_count: Word = None
    driver: Word = None
    nccl: Word = None
    cuda: Word = None
    cudnn: Word = None
    packages: dict[str, Word] = {}
    variables: dict[str, Word] = {}


class _Moment(msgspec.Struct):
    gpus: list[dict[str, float]] = []


_CONFIG_OF_WORKLOAD: dict[str, type[_Config]] = {
    "operator": _OperatorConfig,
    "layer": _LayerConfig,
    "kernel": _KernelConfig,
    "fsdp": _Config,
    "copy_engine": _Config,
    "tp_training": _Config,
}


def check_place(path: Path, root: Path, most_bytes: int | None = MOST_BYTES) -> None:
    """UserError unless it is an ordinary file, or none, that lies below `root` and has no more than so many bytes."""
    if not is_below(path, root):
        raise UserError(f"{path} is a link that leads out of {root}, so it is not read; copy the file there.")
    if is_special(path):
        raise UserError(f"{path} is no ordinary file, so it is not read; remove it.")
    if most_bytes and path.exists() and path.stat().st_size > most_bytes:
        raise UserError(f"{path} has more than {most_bytes >> 20} MiB, so it is not read; remove it.")


def refused_traces(result: Result, directory: Path, root: Path) -> dict[str, str]:
    """By the name that the result lists, why that trace is not read."""
    refused = {}
    for name in result.traces:
        if not is_plain_name(name):
            said = f"the trace {name[:100]!r}, which is no name of a file beside it; {MEASURE_AGAIN}"
            refused[name] = f"{directory / RESULT_FILE} lists {said}."
            continue
        try:
            check_place(directory / name, root, most_bytes=None)
        except UserError as error:
            refused[name] = str(error)
    return refused


def read_yaml(path: Path) -> Any:
    """UserError where it is none, or holds more than a configuration could."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, *NO_YAML) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); remove it.") from None
    if reason := _excess([content]):
        raise UserError(f"{path} {reason}; remove it.")
    return content


def check_config(config: Any, path: Path) -> None:
    """UserError when this is no point's configuration: written by something else, or by a later version."""
    try:
        workload = msgspec.convert(config, _Config).workload.name
        known = msgspec.convert(config, _CONFIG_OF_WORKLOAD.get(workload, _Config))
        if workload == "fsdp":
            check_training_config(config, path)
        elif workload == "copy_engine":
            check_copy_config(config, path)
        elif workload == "tp_training":
            check_tp_training_config(config, path)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} describes no point ({error}); {MEASURE_AGAIN}.") from None
    if isinstance(known, _KernelConfig):
        for name in (known.backend, known.operator or ""):
            check_name(name, path)
    choices_of: list[tuple[str | None, Collection[str]]] = [(workload, _CONFIG_OF_WORKLOAD)]
    if isinstance(known, _OperatorConfig):
        choices_of += [(known.operator, OPERATORS), (known.phase, (*PHASES, "all")), (known.method, METHODS)]
        for phase, asked in (known.phases or {}).items():
            choices_of += [(phase, PHASES), (asked.method, METHODS)]
    if isinstance(known, _KernelConfig) and known.kernel is not None:
        choices_of.append((known.kernel, KERNELS))
    for value, choices in choices_of:
        if value not in choices:
            raise UserError(f"{path} says {str(value)[:200]}, which is none of {', '.join(choices)}; {UPDATE}.")
    if isinstance(known, _LayerConfig):
        for configuration in known.layer.configurations.values():
            _check_slots(configuration.slots, path)
            _check_switches(configuration.switches, path)


def check_result(result: Result, path: Path) -> None:
    """UserError where analysis could not rely on a part of it: edited by hand, or by another program."""
    of_kernel = [one.setting for one in result.implementations.values()]
    details = result.tp_training.details if result.tp_training else {}
    if reason := _excess([result.point, result.environment, result.conditions, result.settings, of_kernel, details]):
        raise UserError(f"{path} {reason}; {MEASURE_AGAIN}.")
    check_config(result.point, path)
    workload = result.point["workload"]["name"]
    try:
        settings = msgspec.convert(result.settings, dict[str, _Setting])
        of_variants = [msgspec.convert(one.settings, dict[str, _Setting]) for one in result.variants.values()]
        msgspec.convert(result.environment, _Environment)
        msgspec.convert(result.conditions, dict[str, _Moment])
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is no result of a point ({error}); {MEASURE_AGAIN}.") from None
    if workload == "kernel":
        check_kernel(result, path)
    if workload in ("fsdp", "copy_engine"):
        check_resolved(result, path)
    if workload == "tp_training":
        check_resolved_tp_training(result, path)
    _check_slots(settings, path, result.point["operator"] if workload == "operator" else None)
    for slots in of_variants:
        _check_slots(slots, path)
    for variant in result.variants.values():
        _check_switches(variant.switches, path)
    if result.status == "failed" and result.relative_error and "tolerance" not in result.point["workload"]:
        raise UserError(f"{path} says nothing of the workload's tolerance; {MEASURE_AGAIN}.")
    if result.status == "ok":
        _CHECK_OF_WORKLOAD[workload](result, path)


def check_tuner(record: TunerRecord, path: Path) -> None:
    _check_record(record, path)
    for trial in (*record.together, *record.proofs):
        if not is_plain_name(trial.point):
            raise UserError(f"{path} names the point {trial.point[:100]!r}, which is none beside it; remove it.")
        _check_tp_size(trial.tp_size, path)


def check_search(record: SearchRecord, path: Path) -> None:
    _check_record(record, path)
    for search in record.searches:
        _check_tp_size(search.tp_size, path)
        try:
            chosen = msgspec.convert(search.chosen, dict[str, _Setting])
        except msgspec.ValidationError as error:
            raise UserError(f"{path} is no record of a search ({error}); remove it.") from None
        _check_slots(chosen, path)
        if any(setting.method is None for setting in chosen.values()):
            raise UserError(f"{path} is no record of a search (a setting without a method); remove it.")


def _check_record(record: TunerRecord | SearchRecord, path: Path) -> None:
    if reason := _excess([msgspec.to_builtins(record)]):
        raise UserError(f"{path} {reason}; remove it.")


def _check_tp_size(tp_size: int, path: Path) -> None:
    if not 1 <= tp_size < 2**31:
        raise UserError(f"{path} says tp_size={tp_size}, which there cannot be; remove it.")


def _check_slots(slots: Mapping[str, _Setting], path: Path, operator: str | None = None) -> None:
    """Of the operator alone where it is given; then each has a method, too."""
    for slot, setting in slots.items():
        methods = (*METHODS, *([] if operator else [None]))
        if slot not in SLOTS or setting.method not in methods or (operator and not slot.startswith(f"{operator}_")):
            said = f"{slot} {setting.method or ''}".rstrip()[:200]
            raise UserError(f"{path} sets {said}, which there is not; {UPDATE}, or {MEASURE_AGAIN}.")


def _check_switches(switches: Iterable[str], path: Path) -> None:
    for name in switches:
        if name not in SWITCH_DEFAULTS:
            raise UserError(f"{path} sets {name[:200]}, which is no switch of Megatron-Core's; {UPDATE}.")


def _check_times(result: Result, path: Path) -> None:
    for name in PASSES:
        times = result.times.get(name)
        timings = [times.point, times.none, times.floor] if times else []
        if times and times.default:
            timings += [times.default.default, times.default.none]
        if times and times.tp1:
            timings.append(times.tp1)
        if not timings or not all(map(is_whole, timings)):
            raise UserError(f"{path} is ok without whole {name} times; {MEASURE_AGAIN}.")
        if reason := next(filter(None, map(contradiction, timings)), None):
            raise UserError(f"{path} gives {name} {reason}, which there cannot be; {MEASURE_AGAIN}.")


def _check_variants(result: Result, path: Path) -> None:
    timings = [timing for variant in result.variants.values() for timing in variant.times.values()]
    complete = all(variant.times.keys() >= LAYER_PASSES for variant in result.variants.values())
    rounds = {len(timing.samples_us) for timing in timings}
    if len(rounds) != 1 or not (complete and all(map(is_whole, timings))):
        raise UserError(f"{path} is ok without whole times of its variants; {MEASURE_AGAIN}.")
    if reason := next(filter(None, map(contradiction, timings)), None):
        raise UserError(f"{path} gives a variant {reason}, which there cannot be; {MEASURE_AGAIN}.")


_CHECK_OF_WORKLOAD: dict[str, Callable[[Result, Path], None]] = {
    "operator": _check_times,
    "layer": _check_variants,
    "kernel": check_implementations,
    "fsdp": check_training,
    "copy_engine": check_copies,
    "tp_training": check_tp_training,
}
"""Of a point that is ok."""


def _excess(content: Iterable[Any]) -> str | None:
    """What would take whoever walks it, or writes it, too far."""
    for count, (value, depth) in enumerate(_walk(content), start=1):
        if count > _MOST_VALUES:
            return f"holds more than {_MOST_VALUES} values"
        if depth > _DEEPEST:
            return f"is nested more than {_DEEPEST} deep"
        if isinstance(value, int) and abs(value) >= _LARGEST:
            return "holds a number beyond 64 bits"
    return None


def _walk(content: Iterable[Any], depth: int = 0) -> Iterator[tuple[Any, int]]:
    """An endless one where it contains itself."""
    for value in content:
        yield value, depth
        if depth <= _DEEPEST and isinstance(value, dict | list):
            yield from _walk(value.values() if isinstance(value, dict) else value, depth + 1)
