"""Results of every workload that cannot be: one sentence each, and the rest is read."""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
from overlap_sweep.workloads.sections import analyse
from tests.make_point import MEASURED, default_timing, make_point, pass_times, rewrite, variant

Change = Callable[[dict[str, Any]], Any]
Damages = dict[str, tuple[Change, str]]

WHOLE: dict[str, dict[str, Any]] = {
    "operator": {"bwd": pass_times(90.0, default=default_timing(90.0))},
    "layer": {"variants": {"none": variant([100.0, 101.0]), "default": variant([100.0, 101.0], step_us=1.0)}},
}


def write(workload: str, directory: Path) -> Path:
    return make_point(workload, directory, name="bad", **WHOLE.get(workload, {}))


TEXTS = {
    "": "Input data was truncated",
    '{"schema": 1, "name": "x"': "truncated",
    "{}": "missing required field",
    '{"name": "x", "status": "ok", "point": {"operator": "fc1"}}': "required field `workload` - at `$.point`",
}

ANY: Damages = {
    "no point": (lambda r: r.pop("point"), "missing required field"),
    "no number": (lambda r: r.update(name=math.nan), "JSON is malformed"),
    "wrong type": (lambda r: r.update(environment=[1]), "Expected `object`"),
    "no status": (lambda r: r.update(status="fine"), "Invalid enum value"),
    "no workload's name": (
        lambda r: r["point"].update(workload={"tokens": 1}),
        "missing required field `name` - at `$.point.workload`",
    ),
    "a later workload": (
        lambda r: r["point"]["workload"].update(name="model"),
        "workload=model is not known); install the package that has it.",
    ),
    "tp_size": (lambda r: r["point"].update(tp_size="2"), "`$.point.tp_size`"),
    "no model": (lambda r: r["point"].pop("model"), "missing required field `model` - at `$.point`"),
}

TRAINING: Damages = {
    "nothing measured": (lambda r: r.update(measured=None), "ok, but nothing measured"),
    "no none": (lambda r: r["measured"]["step"].pop("none"), "no none times of a step"),
    "samples": (lambda r: r["measured"]["step"]["none"]["samples_us"].pop(), "unequal numbers of samples"),
    "negative": (
        lambda r: r["measured"]["step"]["floor"].update(samples_us=[-1.0] * 5),
        "`$.measured.step[...].samples_us[0]`",
    ),
    "zero": (
        lambda r: r["measured"]["step"]["floor"]["samples_us"].__setitem__(0, 0.0),
        "`$.measured.step[...].samples_us[0]`",
    ),
    "huge": (lambda r: r["measured"]["step"]["point"].update(median_us=1e300), "`$.measured.step[...].median_us`"),
    "quartiles": (lambda r: r["measured"]["step"]["point"].update(q1_us=1600.0), "is outside its quartiles"),
    "outside": (lambda r: r["measured"]["step"]["point"].update(samples_us=[1.0] * 5), "is outside its samples"),
    "variant": (
        lambda r: r["measured"]["step"].update({"\x1b[2J": r["measured"]["step"]["none"]}),
        "`key` in `$.measured.step`",
    ),
    "variants": (
        lambda r: r["measured"]["step"].update({f"v{i}": r["measured"]["step"]["none"] for i in range(30)}),
        "Expected `object` of length <= 20 - at `$.measured.step`",
    ),
    "batch": (lambda r: r["point"]["training"].update(batch_size=None), "`$.point.training.batch_size`"),
    "count": (lambda r: r["measured"].update(samples_per_step=1), "1 samples in a step of 256"),
    "parameters": (lambda r: r["measured"].update(parameters=-1), "`$.measured.parameters`"),
    "tokens": (lambda r: r["point"]["workload"].update(tokens=None), "`$.point.workload.tokens`"),
    "host": (lambda r: r["measured"].update(host_us={"point": -1.0}), "`$.measured.host_us[...]`"),
    "host's variant": (
        lambda r: r["measured"].update(host_us={"x" * 101: 1.0}),
        "Expected `str` of length <= 100 - at `key` in `$.measured.host_us`",
    ),
    "losses": (lambda r: r["measured"].update(losses=[]), "Expected `array` of length >= 1 - at `$.measured.losses`"),
    "loss": (lambda r: r["measured"].update(losses=["0.5"]), "`$.measured.losses[0]`"),
    "memory": (lambda r: r["measured"].update(peak_memory_gb=-2.0), "`$.measured.peak_memory_gb`"),
    "compiled": (
        lambda r: r["measured"].update(compiled="x" * 20_000),
        "Expected `str` of length <= 10000 - at `$.measured.compiled`",
    ),
    "telemetry": (lambda r: r["measured"].update(telemetry=["../../etc/passwd"]), "`$.measured.telemetry[0]`"),
    "strategy": (lambda r: r["point"]["distributed"].update(strategy="zero3"), "`$.point.distributed.strategy`"),
    "ranks": (lambda r: r["point"]["distributed"].update(dp_size=0), "`$.point.distributed.dp_size`"),
    "prefetch": (lambda r: r["point"]["fsdp"].update(forward_prefetch=[1]), "`$.point.fsdp.forward_prefetch`"),
    "variable": (
        lambda r: r["point"]["distributed"].update(env={"A": "x" * 200}),
        "Expected `str` of length <= 100 - at `$.point.distributed.env[...]`",
    ),
    "variable's name": (
        lambda r: r["point"]["distributed"].update(env={"\x07": 1}),
        "`key` in `$.point.distributed.env`",
    ),
    "knob": (lambda r: r["point"]["fsdp"].update(backward_prefetch="\u202egnp"), "`$.point.fsdp.backward_prefetch`"),
    "variables": (
        lambda r: r["point"]["distributed"].update(env={f"NCCL_{i}": 1 for i in range(101)}),
        "Expected `object` of length <= 100 - at `$.point.distributed.env`",
    ),
    "options": (
        lambda r: r["point"]["compile"].update(options={"a": ["b" * 99] * 50}),
        "very long options of torch.compile",
    ),
    "no section": (lambda r: r["point"].pop("streams"), "missing required field `streams` - at `$.point`"),
    "precision": (lambda r: r["point"].update(precision=None), "`$.point.precision`"),
}

COPIES: Damages = {
    "nothing measured": (lambda r: r.update(measured=None), "ok, but nothing measured"),
    "no copy": (lambda r: r["measured"]["times"].pop("copy"), "no copy times"),
    "samples": (lambda r: r["measured"]["times"]["copy"]["samples_us"].pop(), "unequal numbers of samples"),
    "zero": (
        lambda r: r["measured"]["times"]["gemm"].update(samples_us=[0.0] * 5),
        "`$.measured.times[...].samples_us[0]`",
    ),
    "quartiles": (lambda r: r["measured"]["times"]["gemm"].update(q3_us=1.0), "is outside its quartiles"),
    "bytes": (lambda r: r["measured"].update(bytes_copied=0), "`$.measured.bytes_copied`"),
    "operations": (lambda r: r["measured"].update(flops=-1), "`$.measured.flops`"),
    "variant": (lambda r: r["measured"]["launch_bound"].update({"\x00": True}), "`key` in `$.measured.launch_bound`"),
    "direction": (
        lambda r: r["point"]["copy_engine"].update(direction="x" * 200),
        "`$.point.copy_engine.direction`",
    ),
    "size": (lambda r: r["point"]["copy_engine"].update(matrix_size=0), "`$.point.copy_engine.matrix_size`"),
    "MiB": (lambda r: r["point"]["copy_engine"].update(copy_mb=-1.0), "`$.point.copy_engine.copy_mb`"),
    "no section": (lambda r: r["point"].pop("copy_engine"), "missing required field `copy_engine` - at `$.point`"),
    "tokens": (lambda r: r["point"]["workload"].update(tokens="${x}"), "`$.point.workload.tokens`"),
}


def _step(number: int, **changes: Any) -> Change:
    return lambda r: r["measured"]["steps"][number].update(changes)


STACKS: Damages = {
    "nothing measured": (lambda r: r.update(measured=None), "ok, but nothing measured"),
    "no step": (lambda r: r["measured"].update(steps=[]), "no timed step"),
    "warm-up only": (lambda r: [s.update(warmup=True) for s in r["measured"]["steps"]], "no timed step"),
    "zero": (_step(3, step_us=0.0), "`$.measured.steps[3].step_us`"),
    "negative": (_step(3, forward_us=-1.0), "`$.measured.steps[3].forward_us`"),
    "huge": (_step(3, backward_us=1e300), "`$.measured.steps[3].backward_us`"),
    "norm": (_step(3, grad_norm=-1.0), "`$.measured.steps[3].grad_norm`"),
    "memory": (_step(3, memory_peak_gb=1e300), "`$.measured.steps[3].memory_peak_gb`"),
    "twice": (_step(3, step=2), "don't follow each other"),
    "backwards": (lambda r: r["measured"]["steps"].reverse(), "don't follow each other"),
    "late": (_step(6, step=10**12), "`$.measured.steps[6].step`"),
    "samples": (lambda r: r["measured"].update(samples_per_step=7), "(7, 7, 1024) steps, samples and tokens"),
    "tokens": (lambda r: r["measured"].update(tokens_per_step=7), "(7, 2, 7) steps, samples and tokens"),
    "parameters": (lambda r: r["measured"].update(parameters=0), "`$.measured.parameters`"),
    "flops": (lambda r: r["measured"].update(flops_per_step=-1.0), "`$.measured.flops_per_step`"),
    "host": (lambda r: r["measured"].update(host_ahead_us=1e300), "`$.measured.host_ahead_us`"),
    "details": (lambda r: r["measured"].update(details={"a": [0] * 200_000}), "holds more than"),
    "unprintable impl": (lambda r: r["point"].update(impl="a\x1b[31m"), "`$.point.impl`"),
    "no impl": (lambda r: r["point"].update(impl=None), "`$.point.impl`"),
    "dp_size": (lambda r: r["point"].update(dp_size=0), "`$.point.dp_size`"),
    "huge tp_size": (lambda r: r["point"].update(tp_size=10**12), "`$.point.tp_size`"),
    "dtype": (lambda r: r["point"]["tp_training"].update(dtype="float64"), "`$.point.tp_training.dtype`"),
    "batch": (lambda r: r["point"]["tp_training"].update(batch_size=None), "`$.point.tp_training.batch_size`"),
    "sequence": (
        lambda r: r["point"]["tp_training"].update(seq_length=None),
        "Expected `int`, got `null` - at `$.point.tp_training.seq_length`",
    ),
    "rate": (lambda r: r["point"]["tp_training"].update(learning_rate="a"), "`$.point.tp_training.learning_rate`"),
    "peak": (lambda r: r["point"]["tp_training"].update(peak_tflops=0.0), "`$.point.tp_training.peak_tflops`"),
    "attention": (lambda r: r["point"]["tp_training"].update(attn_impl="fast"), "`$.point.tp_training.attn_impl`"),
    "file": (
        lambda r: r["point"]["tp_training"].update(tp_comm_overlap_cfg="\u202egnp"),
        "`$.point.tp_training.tp_comm_overlap_cfg`",
    ),
    "layers": (
        lambda r: r["point"]["language_model"].update(num_hidden_layers=0),
        "`$.num_hidden_layers`",
    ),
    "no language model": (
        lambda r: r["point"].pop("language_model"),
        "missing required field `language_model` - at `$.point`",
    ),
    "no section": (lambda r: r["point"].pop("tp_training"), "missing required field `tp_training` - at `$.point`"),
}


def _layer(change: Change) -> Change:
    return lambda r: change(r["measured"]["variants"]["default"]["times"])


LAYERS: Damages = {
    "no variant": (
        lambda r: r["measured"].update(variants={}),
        "Expected `object` of length >= 1 - at `$.measured.variants`",
    ),
    "no backward": (_layer(lambda times: times.pop("bwd")), "a variant has no bwd times"),
    "no whole": (_layer(lambda times: times.pop("all")), "a variant has no all times"),
    "unequal rounds": (
        _layer(lambda times: [one["samples_us"].append(102.0) for one in times.values()]),
        "unequal numbers of samples",
    ),
    "a sample of 0": (_layer(lambda times: times["all"].update(samples_us=[0.0, 101.0])), "times[...].samples_us[0]`"),
    "a step of 0": (
        _layer(lambda times: times["step"].update(median_us=0.0, q1_us=0.0, samples_us=[0.0, 0.0])),
        "times[...].median_us`",
    ),
    "no kind": (lambda r: r["point"]["layer"].update(kind="x" * 200), "`$.point.layer.kind`"),
}

OPERATORS: Damages = {
    "no pass": (lambda r: r["measured"]["times"].pop("fwd"), "no fwd times"),
    "median": (
        lambda r: r["measured"]["times"]["fwd"]["point"].update(median_us=0.0),
        "`$.measured.times[...].point.median_us`",
    ),
    "default": (
        lambda r: r["measured"]["times"]["bwd"]["default"]["none"].update(median_us=0.0),
        "`$.measured.times[...].default.none.median_us`",
    ),
    "samples": (
        lambda r: r["measured"]["times"]["fwd"]["point"].update(samples_us=[0.0] * 5),
        "`$.measured.times[...].point.samples_us[0]`",
    ),
    "a negative sample": (
        lambda r: r["measured"]["times"]["fwd"]["none"]["samples_us"].append(-1.0),
        "`$.measured.times[...].none.samples_us[5]`",
    ),
    "quartile": (
        lambda r: r["measured"]["times"]["fwd"]["point"].update(q1_us=0.0),
        "`$.measured.times[...].point.q1_us`",
    ),
    "nearly nothing": (
        lambda r: r["measured"]["times"]["fwd"]["floor"].update(q1_us=5e-324),
        "`$.measured.times[...].floor.q1_us`",
    ),
    "outside": (lambda r: r["measured"]["times"]["fwd"]["floor"].update(q1_us=1e9), "is outside its quartiles"),
}

OF_WORKLOAD = {"fsdp": TRAINING, "copy_engine": COPIES, "tp_training": STACKS, "layer": LAYERS, "operator": OPERATORS}
CASES = [
    pytest.param(workload, *damage, id=f"{workload} {name}")
    for workload in MEASURED
    for name, damage in {**ANY, **OF_WORKLOAD.get(workload, {})}.items()
]


@pytest.mark.parametrize(("workload", "change", "said"), CASES)
def test_a_result_that_cannot_be_is_one_sentence(tmp_path: Path, workload: str, change: Change, said: str) -> None:
    directory = write(workload, tmp_path)
    rewrite(directory, change)
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
