"""A sweep of the tuner as somebody might send it who wishes the reader ill: whole, with markup in every text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep.kernel_shape import BASELINES
from overlap_sweep.report.provenance import launch_commands
from overlap_sweep.run_directory import RESULT_FILE, SEARCH_FILE, TUNER_FILE, trace_file
from tests.made_sweeps import rounds, write_tuned_sweep
from tests.make_point import (
    copy_config,
    falling,
    implementation,
    kernel_config,
    layer_config,
    make_point,
    operator_config,
    resolved,
    stack_config,
)
from tests.report.page.reports import analysis_of

SCRIPT = "<script>attacked('script')</script></script><svg onload=attacked('svg')>"
IMAGE = """"'><img src=x onerror="attacked('image')"><a href="javascript:attacked('link')">link</a><!--"""
TERMINAL = "\x1b]52;c;YXR0YWNrZWQ=\x07\x1b[2J\r\x9b31m[red][link=https://attacked.example]link[/link]\u202egnp.exe"
CODE = "\n__import__('os').abort()\nfc1_fprop: {method: bulk}\r'''\"\"\"\\\u2028tp_comm_overlap: true  {{7*7}} ${7*7}"
SPREADSHEET = "=cmd|' /C calc'!A0 "
PAYLOAD = SPREADSHEET + SCRIPT + IMAGE + "javascript:attacked('url')" + TERMINAL + CODE
MARKS = ("attacked('", "__import__")

FOLDER = "<svg onload=attacked('folder')>\"'&[red]"

WORD = "=1+<svg onload=attacked('word')>\"'&[red]"
"""The worst that a kernel's names may be."""

_STRUCTURE = ("none", "default", "floor", "tuned")
"""Names of variants and labels that decide whether there is a proof at all."""

TRACES = Path(__file__).parent.parent / "data" / "traces"


def write_hostile_sweep(directory: Path) -> Path:
    """Operator points of every status, whole layers, kernels, training runs, copies, tensor-parallel stacks, a proof,
    traces, and the tuner's records."""
    inner = directory / FOLDER
    write_tuned_sweep(inner)
    for i, status in enumerate(("failed", "timeout", "skipped")):
        failed = operator_config(4, "fc1", "all", "bulk", num_sm=16)
        make_point("operator", inner, failed, status=status, error="", name=f"{status}_{i}")  # type: ignore[arg-type]
    make_point(
        "layer", inner, layer_config(tp_size=8), variants={"none": rounds(1.0), "default": rounds(0.9)}, name="loose"
    )
    for m in (1024, 2048):
        kernel = {
            "ring": implementation(150.0, setting={"method": PAYLOAD, PAYLOAD: PAYLOAD}),
            "a": implementation(90.0),
        }
        make_point(
            "kernel", inner, kernel_config(m), implementations=kernel, left_out={"refused": PAYLOAD, "wrong": PAYLOAD}
        )
    make_point("kernel", inner, kernel_config(tp_size=8), implementations={"ring": implementation(150.0)})
    make_point("kernel", inner, kernel_config(), implementations={}, status="skipped")
    for ahead in (0, 1):
        make_point("fsdp", inner, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 300 * ahead)
    make_point("fsdp", inner, resolved("fsdp", **{"compile.enabled": True}), compiled=f"no: {PAYLOAD}")
    make_point("fsdp", inner, status="timeout", error=PAYLOAD)
    for size in (2048, 4096):
        make_point("copy_engine", inner, copy_config(matrix_size=size))
    make_point("copy_engine", inner, status="failed", error=PAYLOAD)
    for impl in ("autotp", "megatron"):
        make_point("tp_training", inner, stack_config(impl), losses=falling(off={3: None}), details={PAYLOAD: PAYLOAD})
    make_point("tp_training", inner, status="failed", error=PAYLOAD)
    (inner / "missing" / ".hydra").mkdir(parents=True)
    missing = _poisoned_point(operator_config(4, "fc1", "all", "bulk", num_sm=2))
    (inner / "missing" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(missing))
    overrides = {"task": [PAYLOAD], "hydra": [f"hydra/{PAYLOAD}"]}
    (inner / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    for path in sorted(inner.rglob(RESULT_FILE)):
        _rewrite(path, _poisoned_result)
        _write_traces(path.parent)
    _rewrite(inner / TUNER_FILE, _poisoned_tuner)
    _rewrite(inner / SEARCH_FILE, _poisoned_search)
    for path in sorted(inner.iterdir()):
        if path.is_dir():
            path.rename(path.with_name(path.name + FOLDER))
    return directory


def hostile_trace() -> bytes:
    """A recorded one whose kernels, operators and streams are called something else."""
    trace = json.loads(gzip.decompress((TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()))
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            event["name"] += PAYLOAD
            event["tid"] = f"{event['tid']} {PAYLOAD}"
    return gzip.compress(json.dumps(trace).encode(), compresslevel=1)


def _write_traces(point: Path) -> None:
    for name in json.loads((point / RESULT_FILE).read_text())["traces"]:
        if "/" not in name and name.isprintable():
            (point / name).write_bytes(hostile_trace())


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _poisoned(value: Any) -> Any:
    """Every text in it, those that are keys too."""
    if isinstance(value, dict):
        return {f"{key}{PAYLOAD}": _poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item) for item in value]
    return f"{PAYLOAD}{value}" if isinstance(value, str) else value


def _name(name: str) -> str:
    return name if name in _STRUCTURE else f"{name}{PAYLOAD}"


def _poisoned_point(point: dict[str, Any]) -> dict[str, Any]:
    poisoned = {**point, "model": {"name": PAYLOAD, "source": PAYLOAD}, "precision": PAYLOAD, "backend": PAYLOAD}
    if "kernel" in point:
        poisoned |= {"precision": point["precision"], "operator": WORD, "backend": WORD}
    if "layer" in point:
        poisoned["layer"] = {**point["layer"], "kind": PAYLOAD}
    if "distributed" in point:
        poisoned["distributed"] = {**point["distributed"], "env": {WORD: WORD}}
        poisoned["compile"] = {**point["compile"], "mode": WORD, "options": {WORD: [WORD]}}
    if "language_model" in point:
        poisoned["tp_training"] = {**point["tp_training"], "attn_impl": WORD, "tp_comm_overlap_cfg": f"/a/{WORD}.yaml"}
        poisoned["language_model"] = {**point["language_model"], PAYLOAD: PAYLOAD}
    if "copy_engine" in point:
        poisoned["copy_engine"] = {**point["copy_engine"], "direction": WORD, "dtype": WORD}
    return poisoned


def _poisoned_result(result: dict[str, Any]) -> dict[str, Any]:
    environment = {name: _poisoned(value) for name, value in result["environment"].items()}
    environment |= {PAYLOAD: PAYLOAD, "driver": PAYLOAD, "cpu": PAYLOAD, "topology": f"{PAYLOAD}\n{PAYLOAD}"}
    return {
        **result,
        "name": PAYLOAD,
        "point": _poisoned_point(result["point"]),
        "error": PAYLOAD,
        "variants": {_name(name): timed for name, timed in result["variants"].items()},
        "implementations": {
            name if name in BASELINES else f"{WORD}{name}": timed for name, timed in result["implementations"].items()
        },
        "left_out": {f"{WORD}{name}": why for name, why in result["left_out"].items()},
        "attention_backend": PAYLOAD,
        "warnings": [PAYLOAD],
        "relative_error": {f"{WORD}wrong": None} if result["left_out"] else {},
        "environment": environment,
        "conditions": {PAYLOAD: {PAYLOAD: PAYLOAD}},
        "traces": [trace_file(0), trace_file(0, "none"), f"{PAYLOAD}.json"],
        "started": PAYLOAD,
    }


def _poisoned_tuner(record: dict[str, Any]) -> dict[str, Any]:
    def trial(recorded: dict[str, Any]) -> dict[str, Any]:
        variants = {_name(label): _name(name) for label, name in recorded["variants"].items()}
        return {**recorded, "point": recorded["point"] + FOLDER, "variants": variants | {PAYLOAD: f"file:{PAYLOAD}"}}

    changed = {name: [trial(one) for one in record[name]] for name in ("together", "proofs")}
    return {**record, **changed, "command": PAYLOAD, "started": PAYLOAD, "dropped": _poisoned(record["dropped"])}


def _poisoned_search(record: dict[str, Any]) -> dict[str, Any]:
    words = {"model": PAYLOAD, "operator": PAYLOAD, "pass": PAYLOAD, "stopped": PAYLOAD, "notes": [PAYLOAD]}
    words |= {"refused": {PAYLOAD: 3}, "tried": [{"setting": PAYLOAD}]}
    return {**record, "dropped": {PAYLOAD: PAYLOAD}, "searches": [{**one, **words} for one in record["searches"]]}


def only_problem(directory: Path) -> str:
    """What `analyze` would print as an error, having answered from the rest."""
    analysis = analysis_of(directory)
    assert analysis.cases
    launch_commands(analysis.reading.points)
    (problem,) = analysis.problems
    assert len(problem) < 3000
    return problem
