"""Results of every workload that cannot be: one sentence each, and the rest is read."""

import copy
import functools
import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
from overlap_sweep.workloads import analyse
from tests.make_point import MEASURED, RING, default_timing, implementation, make_point, pass_times, rewrite, variant
from tests.report.hostile_sweeps import PAYLOAD

WHOLE: dict[str, dict[str, Any]] = {
    "operator": {"bwd": pass_times(90.0, default=default_timing(90.0))},
    "layer": {"variants": {"none": variant([100.0, 101.0]), "default": variant([100.0, 101.0], step_us=1.0)}},
    "kernel": {"implementations": {"ring_exchange": implementation(150.0, setting=RING)}},
}


def write(workload: str, directory: Path) -> Path:
    return make_point(workload, directory, name="bad", **WHOLE.get(workload, {}))


TEXTS = {
    "": "Input data was truncated",
    "\0": "JSON is malformed",
    '{"schema": 1, "name": "x"': "truncated",
    '{"schema": NaN}': "JSON is malformed",
    "[" * 100_000: "recursion depth exceeded",
    '{"environment":' + '{"a":' * 100_000: "recursion depth exceeded",
    "{}": "missing required field",
    '{"name": "x", "status": "ok", "point": {"operator": "fc1"}}': "required field `workload` - at `$.point`",
}

GONE = object()
Damage = tuple[str, Any, str]
"""What a dotted place in the result becomes, or a function of what was there; and what is said of it."""
LESS = operator.itemgetter(slice(-1))
LONG = "x" * 200


def damage(result: dict[str, Any], place: str, value: Any) -> None:
    *above, last = place.split("/")
    found = functools.reduce(lambda inner, key: inner[int(key) if isinstance(inner, list) else key], above, result)
    key: Any = int(last) if isinstance(found, list) else last
    if value is GONE:
        del found[key]
    else:
        found[key] = value(found[key]) if callable(value) else value


ANY: list[Damage] = [
    ("point", GONE, "missing required field"),
    ("name", math.nan, "JSON is malformed"),
    ("environment", [1], "Expected `object`"),
    ("status", "fine", "Invalid enum value"),
    ("point/workload", {"tokens": 1}, "missing required field `name` - at `$.point.workload`"),
    ("point/workload/name", "model", "workload=model is not known); install the package that has it."),
    ("point/tp_size", "2", "`$.point.tp_size`"),
    ("point/tp_size", 10**12, "`$.point.tp_size`"),
    ("point/model", GONE, "missing required field `model` - at `$.point`"),
    ("point/runtime/device", GONE, "not the device that it ran on - at `$.point.runtime.device`"),
    ("environment/cpu_count", 10**30, "beyond 64 bits"),
    ("environment/deep", json.loads("[" * 100 + "]" * 100), "nested more than 32 deep"),
    ("environment/gpu", ["a"], "`$.environment.gpu`"),
    ("environment/packages", [1], "`$.environment.packages`"),
    ("conditions/start", {"all": [0] * 200_000}, "holds more than 100000 values"),
    ("conditions/start", {"gpus": [{"temperature_c": "hot"}]}, "`$.conditions[...].gpus[0][...]`"),
]
STEP = "measured/step"
TRAINING: list[Damage] = [
    ("measured", None, "ok, but nothing measured"),
    (f"{STEP}/none", GONE, "no none times of a step"),
    (f"{STEP}/none/samples_us", LESS, "unequal numbers of samples"),
    (f"{STEP}/floor/samples_us", [-1.0] * 5, "`$.measured.step[...].samples_us[0]`"),
    (f"{STEP}/floor/samples_us/0", 0.0, "`$.measured.step[...].samples_us[0]`"),
    (f"{STEP}/point/median_us", 1e300, "`$.measured.step[...].median_us`"),
    (f"{STEP}/point/q1_us", 1600.0, "is outside its quartiles"),
    (f"{STEP}/point/samples_us", [1.0] * 5, "is outside its samples"),
    (STEP, lambda step: {**step, "\x1b[2J": step["none"]}, "`key` in `$.measured.step`"),
    (
        STEP,
        lambda step: step | {f"v{i}": step["none"] for i in range(30)},
        "Expected `object` of length <= 20 - at `$.measured.step`",
    ),
    ("point/training/batch_size", None, "`$.point.training.batch_size`"),
    ("measured/samples_per_step", 1, "1 samples in a step of 256"),
    ("measured/parameters", -1, "`$.measured.parameters`"),
    ("point/workload/tokens", None, "`$.point.workload.tokens`"),
    ("measured/host_us", {"point": -1.0}, "`$.measured.host_us[...]`"),
    ("measured/host_us", {"x" * 101: 1.0}, "Expected `str` of length <= 100 - at `key` in `$.measured.host_us`"),
    ("measured/losses", [], "Expected `array` of length >= 1 - at `$.measured.losses`"),
    ("measured/losses", ["0.5"], "`$.measured.losses[0]`"),
    ("measured/peak_memory_gb", -2.0, "`$.measured.peak_memory_gb`"),
    ("measured/compiled", "x" * 20_000, "Expected `str` of length <= 10000 - at `$.measured.compiled`"),
    ("measured/telemetry", ["../../etc/passwd"], "`$.measured.telemetry[0]`"),
    ("point/distributed/strategy", "zero3", "`$.point.distributed.strategy`"),
    ("point/distributed/dp_size", 0, "`$.point.distributed.dp_size`"),
    ("point/fsdp/forward_prefetch", [1], "`$.point.fsdp.forward_prefetch`"),
    ("point/distributed/env", {"A": LONG}, "Expected `str` of length <= 100 - at `$.point.distributed.env[...]`"),
    ("point/distributed/env", {"\x07": 1}, "`key` in `$.point.distributed.env`"),
    ("point/distributed/env", {f"NCCL_{i}": 1 for i in range(101)}, "Expected `object` of length <= 100 - at"),
    ("point/fsdp/backward_prefetch", "\u202egnp", "`$.point.fsdp.backward_prefetch`"),
    ("point/compile/options", {"a": ["b" * 99] * 50}, "very long options of torch.compile"),
    ("point/streams", GONE, "missing required field `streams` - at `$.point`"),
    ("point/precision", None, "`$.point.precision`"),
]
COPIES: list[Damage] = [
    ("measured", None, "ok, but nothing measured"),
    ("measured/times/copy", GONE, "no copy times"),
    ("measured/times/copy/samples_us", LESS, "unequal numbers of samples"),
    ("measured/times/gemm/samples_us", [0.0] * 5, "`$.measured.times[...].samples_us[0]`"),
    ("measured/times/gemm/q3_us", 1.0, "is outside its quartiles"),
    ("measured/bytes_copied", 0, "`$.measured.bytes_copied`"),
    ("measured/flops", -1, "`$.measured.flops`"),
    ("measured/launch_bound/\x00", True, "`key` in `$.measured.launch_bound`"),
    ("point/copy_engine/direction", LONG, "`$.point.copy_engine.direction`"),
    ("point/copy_engine/matrix_size", 0, "`$.point.copy_engine.matrix_size`"),
    ("point/copy_engine/copy_mb", -1.0, "`$.point.copy_engine.copy_mb`"),
    ("point/copy_engine", GONE, "missing required field `copy_engine` - at `$.point`"),
    ("point/workload/tokens", "${x}", "`$.point.workload.tokens`"),
]
STACKS: list[Damage] = [
    ("measured", None, "ok, but nothing measured"),
    ("measured/steps", [], "no timed step"),
    ("measured/steps", lambda steps: [{**step, "warmup": True} for step in steps], "no timed step"),
    ("measured/steps/3/step_us", 0.0, "`$.measured.steps[3].step_us`"),
    ("measured/steps/3/forward_us", -1.0, "`$.measured.steps[3].forward_us`"),
    ("measured/steps/3/backward_us", 1e300, "`$.measured.steps[3].backward_us`"),
    ("measured/steps/3/grad_norm", -1.0, "`$.measured.steps[3].grad_norm`"),
    ("measured/steps/3/memory_peak_gb", 1e300, "`$.measured.steps[3].memory_peak_gb`"),
    ("measured/steps/3/step", 2, "don't follow each other"),
    ("measured/steps", lambda steps: steps[::-1], "don't follow each other"),
    ("measured/steps/6/step", 10**12, "`$.measured.steps[6].step`"),
    ("measured/samples_per_step", 7, "(7, 7, 1024) steps, samples and tokens"),
    ("measured/tokens_per_step", 7, "(7, 2, 7) steps, samples and tokens"),
    ("measured/parameters", 0, "`$.measured.parameters`"),
    ("measured/flops_per_step", -1.0, "`$.measured.flops_per_step`"),
    ("measured/host_ahead_us", 1e300, "`$.measured.host_ahead_us`"),
    ("measured/details", {"a": [0] * 200_000}, "holds more than"),
    ("point/impl", "a\x1b[31m", "`$.point.impl`"),
    ("point/impl", None, "`$.point.impl`"),
    ("point/dp_size", 0, "`$.point.dp_size`"),
    ("point/tp_training/dtype", "float64", "`$.point.tp_training.dtype`"),
    ("point/tp_training/batch_size", None, "`$.point.tp_training.batch_size`"),
    ("point/tp_training/seq_length", None, "Expected `int`, got `null` - at `$.point.tp_training.seq_length`"),
    ("point/tp_training/learning_rate", "a", "`$.point.tp_training.learning_rate`"),
    ("point/tp_training/peak_tflops", 0.0, "`$.point.tp_training.peak_tflops`"),
    ("point/tp_training/attn_impl", "fast", "`$.point.tp_training.attn_impl`"),
    ("point/tp_training/tp_comm_overlap_cfg", "\u202egnp", "`$.point.tp_training.tp_comm_overlap_cfg`"),
    ("point/language_model/num_hidden_layers", 0, "`$.num_hidden_layers`"),
    ("point/language_model", GONE, "missing required field `language_model` - at `$.point`"),
    ("point/tp_training", GONE, "missing required field `tp_training` - at `$.point`"),
]
TIMES = "measured/variants/default/times"
LAYERS: list[Damage] = [
    ("measured/variants", {}, "Expected `object` of length >= 1 - at `$.measured.variants`"),
    (f"{TIMES}/bwd", GONE, "a variant has no bwd times"),
    (f"{TIMES}/all", GONE, "a variant has no all times"),
    (f"{TIMES}/all/samples_us", [100.0, 101.0, 102.0], "unequal numbers of samples"),
    (f"{TIMES}/all/samples_us", [0.0, 101.0], "times[...].samples_us[0]`"),
    (f"{TIMES}/step/median_us", 0.0, "times[...].median_us`"),
    ("point/layer/kind", LONG, "`$.point.layer.kind`"),
]
FWD = "measured/times/fwd"
OPERATORS: list[Damage] = [
    (FWD, GONE, "no fwd times"),
    (f"{FWD}/point/median_us", 0.0, "`$.measured.times[...].point.median_us`"),
    ("measured/times/bwd/default/none/median_us", 0.0, "`$.measured.times[...].default.none.median_us`"),
    (f"{FWD}/point/samples_us", [0.0] * 5, "`$.measured.times[...].point.samples_us[0]`"),
    (f"{FWD}/none/samples_us/4", -1.0, "`$.measured.times[...].none.samples_us[4]`"),
    (f"{FWD}/point/q1_us", 0.0, "`$.measured.times[...].point.q1_us`"),
    (f"{FWD}/floor/q1_us", 5e-324, "`$.measured.times[...].floor.q1_us`"),
    (f"{FWD}/floor/q1_us", 1e9, "is outside its quartiles"),
    (f"{FWD}/point/median_us", 1e300, "`$.measured.times[...].point.median_us`"),
    (f"settings/{PAYLOAD.replace('/', '')}", {"method": "bulk"}, "`key` in `$.settings`"),
    ("settings/qkv_dgrad", {"method": "bulk"}, "qkv_dgrad"),
    ("settings/fc1_dgrad", {"method": PAYLOAD}, "`$.settings[...].method`"),
    ("settings/fc1_dgrad", {"method": "bulk", PAYLOAD: 1}, "Object contains unknown field"),
    ("settings/fc1_dgrad", {"method": "bulk", "num_sm": "4)]; import os"}, "`$.settings[...].num_sm`"),
    ("point/phases", {PAYLOAD: {"method": "bulk"}}, "Expected `str` matching regex"),
]
IMPLEMENTATIONS = "measured/implementations"
GEMM, RING_EXCHANGE = f"{IMPLEMENTATIONS}/gemm_only/time", f"{IMPLEMENTATIONS}/ring_exchange"
KERNELS: list[Damage] = [
    ("point/kernel", PAYLOAD, "`$.point.kernel`"),
    ("point/n", 10**12, "`$.point.n`"),
    ("point/workload/tokens", "${m}", "`$.point.workload.tokens`"),
    ("point/precision", "fp7", "fp7"),
    ("point/implementations/a\n", {}, "`key` in `$.point.implementations`"),
    ("point/backend", "a\nb", "`$.point.backend`"),
    ("point/operator", "x" * 101, "`$.point.operator`"),
    ("point", lambda point: {**point, "m": 7, "tp_size": 2**31 - 1}, "tp_size"),
    (f"{RING_EXCHANGE}/setting", {"method": "x", "a": {"b": 1}}, "setting"),
    (f"{RING_EXCHANGE}/setting", {"method": "x", "num_sm": "4"}, "`$.num_sm`"),
    (f"{RING_EXCHANGE}/relative_error", -1.0, "relative_error"),
    (f"{RING_EXCHANGE}/time/samples_us", [1.0, 2.0, 3.0, 4.0, 5.0], "is outside its samples"),
    (f"{IMPLEMENTATIONS}/comm_only", GONE, "an implementation and all baselines are needed"),
    (RING_EXCHANGE, GONE, "an implementation and all baselines are needed"),
    (f"{IMPLEMENTATIONS}/sequential/time/samples_us", LESS, "unequal numbers of samples"),
    (f"{IMPLEMENTATIONS}/sequential/independent", True, "a baseline cannot be independent"),
    (f"{GEMM}/samples_us", [0.0, 1.0, 1.0, 1.0, 1.0], "samples_us[0]`"),
    (f"{GEMM}/median_us", 1e-300, "median_us`"),
    (f"{GEMM}/median_us", 99.0, "is outside its"),
    (f"{GEMM}/q3_us", 1e300, "q3_us`"),
    (f"{GEMM}/q1_us", 101.0, "is outside its quartiles"),
    (IMPLEMENTATIONS, lambda own: own | {f"ring{i}": own["ring_exchange"] for i in range(3000)}, "of length <="),
    (IMPLEMENTATIONS, lambda own: own | {"a\x1b[2J": own["ring_exchange"]}, "`key` in `$.measured.implementations`"),
    ("measured/left_out", {f"ring{i}": "too large" for i in range(3000)}, "of length <="),
    ("measured/left_out", {"x" * 101: "too large"}, "`key` in `$.measured.left_out`"),
    ("measured/left_out", {"gemm_only": "too large"}, "all baselines are needed"),
]
OF_WORKLOAD = {
    "operator": OPERATORS,
    "layer": LAYERS,
    "kernel": KERNELS,
    "fsdp": TRAINING,
    "copy_engine": COPIES,
    "tp_training": STACKS,
}
CASES = [(workload, *one) for workload in MEASURED for one in (*ANY, *OF_WORKLOAD.get(workload, ()))]


@pytest.mark.parametrize(("workload", "place", "value", "said"), CASES)
def test_a_result_that_cannot_be_is_one_sentence(
    tmp_path: Path, workload: str, place: str, value: Any, said: str
) -> None:
    directory = write(workload, tmp_path)
    rewrite(directory, lambda result: damage(result, place, value))
    reading = read_points(tmp_path)
    (problem,) = reading.problems
    assert str(directory / RESULT_FILE) in problem
    assert said in problem
    assert problem.isprintable()
    assert len(problem) < 1000
    assert not reading.points


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("workload", MEASURED)
def test_one_unreadable_result_is_named_and_the_others_are_read(tmp_path: Path, workload: str, text: str) -> None:
    make_point("operator", tmp_path, name="good")
    path = write(workload, tmp_path) / RESULT_FILE
    path.write_text(text)
    reading = read_points(tmp_path)
    assert [point.name for point in reading.points] == ["good"]
    (problem,) = reading.problems
    assert all(said in problem for said in (str(path), TEXTS[text], "measure that again with resume="))


@pytest.mark.parametrize("workload", MEASURED)
def test_what_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path, workload: str) -> None:
    directory = write(workload, tmp_path)
    section = {"operator": "model", "kernel": "model"}.get(workload, workload)
    rewrite(directory, lambda r: r["point"][section].update(something_new={"a": 1}))
    rewrite(directory, lambda r: r.update(something_new=[1]))
    assert read_points(tmp_path).problems == []


def test_a_variant_that_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path) -> None:
    rewrite(write("fsdp", tmp_path), lambda r: r["measured"]["step"].update(another=r["measured"]["step"]["none"]))
    assert read_points(tmp_path).problems == []


@pytest.mark.parametrize("workload", MEASURED)
def test_a_point_without_any_of_its_options_is_refused_or_reported(tmp_path: Path, workload: str) -> None:
    """What is missing gets its default, or is named in one line."""
    path = make_point(workload, tmp_path / "sweep") / RESULT_FILE
    whole = json.loads(path.read_text())

    def keys(found: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, below in found.items():
            yield (*above, name)
            if isinstance(below, dict):
                yield from keys(below, (*above, name))

    for *above, name in keys(whole["point"]):
        damaged = copy.deepcopy(whole)
        del functools.reduce(operator.getitem, above, damaged["point"])[name]
        path.write_text(json.dumps(damaged))
        analysis = analyse(tmp_path / "sweep", AnalysisConfig())
        assert all("\n" not in problem for problem in analysis.problems), (above, name)
