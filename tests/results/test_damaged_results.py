"""Results of every workload that cannot be: one sentence each, and the rest is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
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
    '{"name": "x", "status": "ok", "point": {"operator": "fc1"}}': "describes no point",
}

ANY: Damages = {
    "no point": (lambda r: r.pop("point"), "missing required field"),
    "no number": (lambda r: r.update(name=math.nan), "JSON is malformed"),
    "wrong type": (lambda r: r.update(environment=[1]), "Expected `object`"),
    "no status": (lambda r: r.update(status="fine"), "Invalid enum value"),
    "no workload's name": (lambda r: r["point"].update(workload={"tokens": 1}), "describes no point"),
    "a later workload": (
        lambda r: r["point"]["workload"].update(name="model"),
        "says model, which is none of",
    ),
    "tp_size": (lambda r: r["point"].update(tp_size="2"), "describes no point"),
    "no model": (lambda r: r["point"].pop("model"), "describes no point"),
}

_WHOLE = "ok without whole times"
_SHOWN = "too long or not printable"

TRAINING: Damages = {
    "nothing measured": (lambda r: r.update(training=None), "ok without whole times of its steps"),
    "no none": (lambda r: r["training"]["step"].pop("none"), "ok without whole times of its steps"),
    "samples": (lambda r: r["training"]["step"]["none"]["samples_us"].pop(), _WHOLE),
    "negative": (lambda r: r["training"]["step"]["floor"].update(samples_us=[-1.0] * 5), _WHOLE),
    "zero": (lambda r: r["training"]["step"]["floor"]["samples_us"].__setitem__(0, 0.0), _WHOLE),
    "huge": (lambda r: r["training"]["step"]["point"].update(median_us=1e300), _WHOLE),
    "quartiles": (lambda r: r["training"]["step"]["point"].update(q1_us=1600.0), "outside of its quartiles"),
    "outside": (lambda r: r["training"]["step"]["point"].update(samples_us=[1.0] * 5), "outside of its samples"),
    "variant": (lambda r: r["training"]["step"].update({"\x1b[2J": r["training"]["step"]["none"]}), _SHOWN),
    "variants": (
        lambda r: r["training"]["step"].update({f"v{i}": r["training"]["step"]["none"] for i in range(30)}),
        "33 variants, more than 20",
    ),
    "batch": (lambda r: r["point"]["training"].update(batch_size=None), "ok without a batch size"),
    "count": (lambda r: r["training"].update(samples_per_step=1), "1 samples in a step of 256"),
    "parameters": (lambda r: r["training"].update(parameters=-1), "-1 parameters"),
    "tokens": (lambda r: r["point"]["workload"].update(tokens=None), "no tokens"),
    "host": (lambda r: r["training"].update(host_us={"point": -1.0}), "a host without a time"),
    "host's variant": (lambda r: r["training"].update(host_us={"x" * 101: 1.0}), _SHOWN),
    "losses": (lambda r: r["training"].update(losses=[]), "losses that are none"),
    "loss": (lambda r: r["training"].update(losses=["0.5"]), "cannot be read"),
    "memory": (lambda r: r["training"].update(peak_memory_gb=-2.0), "a peak memory of -2 GB"),
    "compiled": (lambda r: r["training"].update(compiled="x" * 20_000), "20000 characters about its compilation"),
    "telemetry": (lambda r: r["training"].update(telemetry=["../../etc/passwd"]), "telemetry files that are none"),
    "files": (lambda r: r["training"].update(telemetry=["a"] * 5), "telemetry files that are none"),
    "strategy": (lambda r: r["point"]["distributed"].update(strategy="zero3"), "zero3, which is none of fsdp2, ddp"),
    "ranks": (lambda r: r["point"]["distributed"].update(dp_size=0), "describes no point"),
    "prefetch": (lambda r: r["point"]["fsdp"].update(forward_prefetch=[1]), "describes no point"),
    "variable": (lambda r: r["point"]["distributed"].update(env={"A": "x" * 200}), _SHOWN),
    "variable's name": (lambda r: r["point"]["distributed"].update(env={"\x07": 1}), _SHOWN),
    "knob": (lambda r: r["point"]["fsdp"].update(backward_prefetch="\u202egnp"), _SHOWN),
    "variables": (
        lambda r: r["point"]["distributed"].update(env={f"NCCL_{i}": 1 for i in range(101)}),
        "sets 101 variables and options",
    ),
    "options": (lambda r: r["point"]["compile"].update(options={"a": ["b" * 99] * 50}), "or very long ones"),
    "no section": (lambda r: r["point"].pop("streams"), "describes no point"),
    "precision": (lambda r: r["point"].update(precision=None), "no result of a point"),
}

COPIES: Damages = {
    "nothing measured": (lambda r: r.update(copies=None), "ok without whole times of GEMMs and copies"),
    "no copy": (lambda r: r["copies"]["times"].pop("copy"), "ok without whole times of GEMMs and copies"),
    "samples": (lambda r: r["copies"]["times"]["copy"]["samples_us"].pop(), _WHOLE),
    "zero": (lambda r: r["copies"]["times"]["gemm"].update(samples_us=[0.0] * 5), _WHOLE),
    "quartiles": (lambda r: r["copies"]["times"]["gemm"].update(q3_us=1.0), "outside of its quartiles"),
    "bytes": (lambda r: r["copies"].update(bytes_copied=0), "bytes_copied=0"),
    "operations": (lambda r: r["copies"].update(flops=-1), "flops=-1"),
    "variant": (lambda r: r["copies"]["launch_bound"].update({"\x00": True}), _SHOWN),
    "direction": (lambda r: r["point"]["copy_engine"].update(direction="x" * 200), _SHOWN),
    "size": (lambda r: r["point"]["copy_engine"].update(matrix_size=0), "describes no point"),
    "MiB": (lambda r: r["point"]["copy_engine"].update(copy_mb=-1.0), "describes no point"),
    "no section": (lambda r: r["point"].pop("copy_engine"), "describes no point"),
    "tokens": (lambda r: r["point"]["workload"].update(tokens="${x}"), "no result of a point"),
}


def _step(number: int, **changes: Any) -> Change:
    return lambda r: r["tp_training"]["steps"][number].update(changes)


STACKS: Damages = {
    "nothing measured": (lambda r: r.update(tp_training=None), "ok without a timed step"),
    "no step": (lambda r: r["tp_training"].update(steps=[]), "ok without a timed step"),
    "warm-up only": (lambda r: [s.update(warmup=True) for s in r["tp_training"]["steps"]], "ok without a timed step"),
    "zero": (_step(3, step_us=0.0), "a step 3 without whole times"),
    "negative": (_step(3, forward_us=-1.0), "a step 3 without whole times"),
    "huge": (_step(3, backward_us=1e300), "a step 3 without whole times"),
    "norm": (_step(3, grad_norm=-1.0), "a step 3 whose loss or gradient norm is none"),
    "memory": (_step(3, memory_peak_gb=1e300), "a step 3 with a memory that is none"),
    "twice": (_step(3, step=2), "don't follow each other"),
    "backwards": (lambda r: r["tp_training"]["steps"].reverse(), "don't follow each other"),
    "late": (_step(6, step=10**12), "don't follow each other"),
    "samples": (lambda r: r["tp_training"].update(samples_per_step=7), "7 samples in a step of 2"),
    "tokens": (lambda r: r["tp_training"].update(tokens_per_step=7), "7 tokens in a step of 1024"),
    "parameters": (lambda r: r["tp_training"].update(parameters=0), "0 parameters"),
    "flops": (lambda r: r["tp_training"].update(flops_per_step=-1.0), "-1 operations"),
    "host": (lambda r: r["tp_training"].update(host_ahead_us=1e300), "a host that is 1e+300 us ahead"),
    "details": (lambda r: r["tp_training"].update(details={"a": [0] * 200_000}), "holds more than"),
    "impl": (lambda r: r["point"].update(impl="zero3"), "which is none of autotp"),
    "unprintable impl": (lambda r: r["point"].update(impl="a\x1b[31m"), r"says 'a\x1b[31m', which is none of autotp"),
    "no impl": (lambda r: r["point"].update(impl=None), "no result of a point"),
    "dp_size": (lambda r: r["point"].update(dp_size=0), "describes no point"),
    "huge tp_size": (lambda r: r["point"].update(tp_size=10**12), "describes no point"),
    "dtype": (lambda r: r["point"]["tp_training"].update(dtype="float64"), "which is none of bfloat16"),
    "batch": (lambda r: r["point"]["tp_training"].update(batch_size=None), "describes no point"),
    "sequence": (lambda r: r["point"]["tp_training"].update(seq_length=None), "no result of a point"),
    "rate": (lambda r: r["point"]["tp_training"].update(learning_rate="a"), "describes no point"),
    "no learning rate": (lambda r: r["point"]["tp_training"].pop("learning_rate"), "learning_rate"),
    "no vocabulary": (lambda r: r["point"]["tp_training"].pop("vocab_parallel"), "vocab_parallel"),
    "peak": (lambda r: r["point"]["tp_training"].update(peak_tflops=0.0), "describes no point"),
    "attention": (lambda r: r["point"]["tp_training"].update(attn_impl="x" * 200), _SHOWN),
    "file": (lambda r: r["point"]["tp_training"].update(tp_comm_overlap_cfg="\u202egnp"), _SHOWN),
    "layers": (lambda r: r["point"]["language_model"].update(num_hidden_layers=0), "no result of a point"),
    "no language model": (lambda r: r["point"].pop("language_model"), "no result of a point"),
    "no section": (lambda r: r["point"].pop("tp_training"), "describes no point"),
}


def _layer(change: Change) -> tuple[Change, str]:
    return lambda r: change(r["variants"]["default"]["times"]), "ok without whole times of its variants"


LAYERS: Damages = {
    "no variant": (lambda r: r.update(variants={}), "ok without whole times of its variants"),
    "no backward": _layer(lambda times: times.pop("bwd")),
    "no whole": _layer(lambda times: times.pop("all")),
    "unequal rounds": _layer(lambda times: [one["samples_us"].append(102.0) for one in times.values()]),
    "a sample of 0": _layer(lambda times: times["all"].update(samples_us=[0.0, 101.0])),
    "a step of 0": _layer(lambda times: times["step"].update(median_us=0.0, q1_us=0.0, samples_us=[0.0, 0.0])),
    "no kind": (lambda r: r["point"].update(layer={"kind": "linear"}), "describes no point"),
}

OPERATORS: Damages = {
    "no pass": (lambda r: r["times"].pop("fwd"), "ok without whole fwd times"),
    "median": (lambda r: r["times"]["fwd"]["point"].update(median_us=0.0), "ok without whole fwd times"),
    "default": (lambda r: r["times"]["bwd"]["default"]["none"].update(median_us=0.0), "ok without whole bwd times"),
    "samples": (lambda r: r["times"]["fwd"]["point"].update(samples_us=[0.0] * 5), "ok without whole fwd times"),
    "a negative sample": (lambda r: r["times"]["fwd"]["none"]["samples_us"].append(-1.0), "ok without whole fwd times"),
    "quartile": (lambda r: r["times"]["fwd"]["point"].update(q1_us=0.0), "ok without whole fwd times"),
    "nearly nothing": (lambda r: r["times"]["fwd"]["floor"].update(q1_us=5e-324), "ok without whole fwd times"),
    "outside": (lambda r: r["times"]["fwd"]["floor"].update(q1_us=1e9), "outside of its quartiles"),
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
    assert all(said in problem for said in (str(path), TEXTS[text], "measure the point again"))


@pytest.mark.parametrize("workload", MEASURED)
def test_what_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path, workload: str) -> None:
    directory = write(workload, tmp_path)
    section = {"operator": "model", "kernel": "model"}.get(workload, workload)
    rewrite(directory, lambda r: r["point"][section].update(something_new={"a": 1}))
    rewrite(directory, lambda r: r.update(something_new=[1]))
    assert read_points(tmp_path).problems == []


def test_a_variant_that_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path) -> None:
    rewrite(write("fsdp", tmp_path), lambda r: r["training"]["step"].update(another=r["training"]["step"]["none"]))
    assert read_points(tmp_path).problems == []
