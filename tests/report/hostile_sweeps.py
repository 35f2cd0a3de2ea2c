"""A sweep of the tuner as somebody might send it who wishes the reader ill: whole, with markup in every text."""

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep.overlap.models import BASELINES
from overlap_sweep.results.provenance import launch_commands
from overlap_sweep.results.records import SearchRecord, TunerRecord
from overlap_sweep.results.run_directory import RESULT_FILE, trace_file
from tests.made_sweeps import write_every_workload, write_tuned_sweep
from tests.make_point import make_point, missing_point, operator_config
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

JOB = PAYLOAD.translate(str.maketrans("", "", "'\"\\\n`${};|&<>"))
"""What a command line may hold that is split as by a shell."""

_STRUCTURE = ("none", "default", "floor", "tuned")
"""Names of variants and labels that decide whether there is a proof at all."""

TRACE_FILES = (trace_file(0), trace_file(0, "none"))
TRACES = Path(__file__).parent.parent / "data" / "traces"


def write_hostile_sweep(directory: Path) -> Path:
    """Points of every workload and status, a proof, traces, and the tuner's records."""
    inner = directory / FOLDER
    write_tuned_sweep(inner)
    write_every_workload(inner)
    make_point("fsdp", inner, status="timeout")
    asked = operator_config(4, "fc1", "all", "bulk", num_sm=2)
    missing_point(inner, {**_poisoned_point(asked), "precision": None})
    overrides = {"task": [PAYLOAD], "hydra": [f"hydra/{PAYLOAD}"]}
    (inner / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    for path in sorted(inner.rglob(RESULT_FILE)):
        _rewrite(path, _poisoned_result)
        if path.parent.parent in (inner, inner / "stacks"):
            for rank_file in TRACE_FILES:
                (path.parent / rank_file).write_bytes(hostile_trace())
    _rewrite(inner / TunerRecord.FILE, _poisoned_tuner)
    _rewrite(inner / SearchRecord.FILE, _poisoned_search)
    for path in sorted(inner.iterdir()):
        if path.is_dir():
            path.rename(path.with_name(path.name + FOLDER))
    return directory


@cache
def hostile_trace() -> bytes:
    """A recorded one whose kernels, operators and streams are called something else."""
    trace = json.loads(gzip.decompress((TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()))
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            event["name"] += PAYLOAD
            event["tid"] = f"{event['tid']} {PAYLOAD}"
    return gzip.compress(json.dumps(trace).encode(), compresslevel=1)


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
    poisoned = {**point, "model": {"name": PAYLOAD}, "precision": PAYLOAD, "backend": PAYLOAD}
    if "kernel" in point:
        poisoned |= {"precision": point["precision"], "backend": WORD}
    if "distributed" in point:
        poisoned["distributed"] = {**point["distributed"], "env": {WORD: WORD}}
        poisoned["compile"] = {**point["compile"], "mode": WORD, "options": {WORD: [WORD]}}
    if "language_model" in point:
        poisoned["tp_training"] = {**point["tp_training"], "tp_comm_overlap_cfg": f"/a/{WORD}.yaml"}
        poisoned["language_model"] = {**point["language_model"], PAYLOAD: PAYLOAD}
    if "job" in point:
        poisoned["job"] = {
            **point["job"],
            **{"command": f"{JOB} {{{WORD}}}", "directory": JOB, "values": {WORD: WORD}, "env": {WORD: JOB}},
            **{"metric": PAYLOAD, "files": {PAYLOAD: WORD}},
        }
    return poisoned


def _poisoned_result(result: dict[str, Any]) -> dict[str, Any]:
    environment = {name: _poisoned(value) for name, value in result["environment"].items()}
    environment |= {PAYLOAD: PAYLOAD, "driver": PAYLOAD, "cpu": PAYLOAD, "topology": f"{PAYLOAD}\n{PAYLOAD}"}
    return {
        **result,
        "name": PAYLOAD,
        "point": _poisoned_point(result["point"]),
        "error": PAYLOAD,
        "measured": result["measured"] and _poisoned_measured(result["measured"]),
        "warnings": [PAYLOAD],
        "relative_error": {f"{WORD}wrong": None} if (result["measured"] or {}).get("left_out") else {},
        "environment": environment,
        "conditions": {PAYLOAD: {PAYLOAD: PAYLOAD}},
        "traces": [*TRACE_FILES],
        "started": PAYLOAD,
    }


def _poisoned_measured(measured: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, dict[str, Any]] = {
        "layer": {
            "variants": {_name(name): timed for name, timed in measured.get("variants", {}).items()},
            "attention_backend": PAYLOAD,
        },
        "kernel": {
            "implementations": {
                name if name in BASELINES else f"{WORD}{name}": {
                    **timed,
                    "setting": {"method": PAYLOAD, PAYLOAD: PAYLOAD},
                }
                for name, timed in measured.get("implementations", {}).items()
            },
            "left_out": {f"{WORD}{name}": PAYLOAD for name in measured.get("left_out", {})},
        },
        "fsdp": {"compiled": PAYLOAD},
        "tp_training": {"details": {PAYLOAD: PAYLOAD}},
        "job": {
            "unit": WORD,
            "groups": [{"group": PAYLOAD, "exposed_us": 1.0, "hidden_us": 1.0}],
            "causes": [{"cause": WORD, "where": PAYLOAD, "lost_us": 1.0, "share": 0.1, "advice": PAYLOAD}],
        },
    }
    return {**measured, **changes.get(measured["workload"], {})}


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
    assert any(section.answers for section in analysis.sections if section.name == "operators")
    launch_commands(analysis.sources.reading.points)
    (problem,) = analysis.problems
    assert len(problem) < 3000
    return problem
