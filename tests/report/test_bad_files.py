"""Files in a sweep that are cut off, nested, huge, or something else: one sentence each, and the rest is analysed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
from tests.made_sweeps import rounds
from tests.make_point import MEASURED as WORKLOADS
from tests.make_point import RING, implementation, make_point, missing_point, operator_config, rewrite
from tests.report.hostile_sweeps import PAYLOAD, only_problem


def _yaml_bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    return "\n".join(lines) + "\n"


BAD_YAML = {
    "bomb": _yaml_bomb(),
    "itself": "&a\nmodel: *a\nphases: *a\n",
    "deep": "[" * 5_000,
    "no time": "model: 2001-13-45",
    "no number": 'model: !!int ""',
    "digits": "model: " + "9" * 5000,
    "object": "model: !!python/object/apply:os.abort []",
    "binary": "\0\1\2",
    "large": "model: " + "x" * 2_000_000,
}


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML)
def test_a_bad_yaml_is_one_sentence(tmp_path: Path, text: str) -> None:
    make_point("operator", tmp_path, **BULK)
    missing_point(tmp_path, {})
    (tmp_path / "missing" / ".hydra" / "config.yaml").write_text(text)
    (tmp_path / "multirun.yaml").write_text(text)
    assert "missing" in only_problem(tmp_path)
    with pytest.raises(UserError) as error:
        overlap_cfg.read(tmp_path / "multirun.yaml")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("template", ["fc1_fprop: {{num_sm: {}}}", "fc1_fprop: {{method: {}}}"])
def test_a_bomb_is_not_written_out(tmp_path: Path, template: str) -> None:
    assert yaml.safe_load(_yaml_bomb())["a29"]
    path = tmp_path / "cfg.yaml"
    path.write_text("fc1_dgrad: &z {num_sm: 1}\n" + _yaml_bomb() + template.format("*a29"))
    with pytest.raises(UserError) as error:
        overlap_cfg.read(path)
    assert len(str(error.value)) < 1000


Change = Callable[[dict[str, Any]], Any]

BAD_ANYWHERE: dict[str, Change] = {
    "huge integer": lambda r: r["environment"].update(cpu_count=10**30),
    "deep": lambda r: r["environment"].update(deep=json.loads("[" * 100 + "]" * 100)),
    "many": lambda r: r["conditions"].update(start={"all": [0] * 200_000}),
    "no GPU": lambda r: r["environment"].update(gpu=["a"]),
    "no packages": lambda r: r["environment"].update(packages=[1]),
    "no conditions": lambda r: r["conditions"].update(start={"gpus": [{"temperature_c": "hot"}]}),
    "huge tp_size": lambda r: r["point"].update(tp_size=10**12),
}
BAD_OPERATORS: dict[str, Change] = {
    "infinite": lambda r: r["measured"]["times"]["fwd"]["point"].update(median_us=1e300),
    "negative": lambda r: r["measured"]["times"]["fwd"]["none"].update(median_us=-1.0),
    "no slot": lambda r: r["settings"].update({PAYLOAD: {"method": "bulk"}}),
    "another's slot": lambda r: r["settings"].update({"qkv_dgrad": {"method": "bulk"}}),
    "no method": lambda r: r["settings"].update({"fc1_dgrad": {"method": PAYLOAD}}),
    "no knob": lambda r: r["settings"].update({"fc1_dgrad": {"method": "bulk", PAYLOAD: 1}}),
    "no number": lambda r: r["settings"].update({"fc1_dgrad": {"method": "bulk", "num_sm": "4)]; import os"}}),
    "no phase": lambda r: r["point"].update(phases={PAYLOAD: {"method": "bulk"}}),
}


def change_implementation(**changes: Any) -> Change:
    return lambda r: r["measured"]["implementations"]["ring_exchange"].update(changes)


def change_gemm(**changes: Any) -> Change:
    return lambda r: r["measured"]["implementations"]["gemm_only"]["time"].update(changes)


def add_ring(*names: str) -> Change:
    def change(result: dict[str, Any]) -> None:
        implementations = result["measured"]["implementations"]
        implementations.update(dict.fromkeys(names, implementations["ring_exchange"]))

    return change


BAD_KERNELS: dict[str, Change] = {
    "no kernel": lambda r: r["point"].update(kernel=PAYLOAD),
    "huge n": lambda r: r["point"].update(n=10**12),
    "tokens": lambda r: r["point"]["workload"].update(tokens="${m}"),
    "no precision": lambda r: r["point"].update(precision=PAYLOAD),
    "nested setting": change_implementation(setting={"method": "x", "a": {"b": 1}}),
    "no number": change_implementation(setting={"method": "x", "num_sm": "4"}),
    "negative error": change_implementation(relative_error=-1.0),
    "no baseline": lambda r: r["measured"]["implementations"].pop("comm_only"),
    "only baselines": lambda r: r["measured"]["implementations"].pop("ring_exchange"),
    "unequal rounds": lambda r: r["measured"]["implementations"]["sequential"]["time"]["samples_us"].append(1.0),
    "a sample of 0": change_gemm(samples_us=[0.0, 1.0, 1.0, 1.0, 1.0]),
    "tiny": change_gemm(median_us=1e-300),
    "infinite": change_gemm(q3_us=1e300),
    "3,000 implementations": add_ring(*(f"ring{i}" for i in range(3000))),
    "3,000 left out": lambda r: r["measured"].update(left_out={f"ring{i}": "too large" for i in range(3000)}),
    "a control character": lambda r: r["measured"]["implementations"].update(
        {"a\x1b[2J": r["measured"]["implementations"]["ring_exchange"]}
    ),
    "a long name": lambda r: r["measured"]["left_out"].update({"x" * 101: "too large"}),
    "a control character asked for": lambda r: r["point"]["implementations"].update({"a\n": {}}),
    "a backend of two lines": lambda r: r["point"].update(backend="a\nb"),
    "a long operator": lambda r: r["point"].update(operator="x" * 101),
    "what cannot be cut": lambda r: r["point"].update(m=7, tp_size=2**31 - 1),
    "a median below its quartiles": change_gemm(median_us=99.0),
    "quartiles the wrong way": change_gemm(q1_us=101.0),
    "a median of no samples": change_implementation(
        time={"median_us": 150.0, "q1_us": 140.0, "q3_us": 160.0, "samples_us": [1.0, 2.0, 3.0, 4.0, 5.0]}
    ),
    "an independent baseline": lambda r: r["measured"]["implementations"]["sequential"].update(independent=True),
    "no baseline but a reason": lambda r: r["measured"]["left_out"].update({"gemm_only": "too large"}),
}


KERNEL = {"implementations": {"ring_exchange": implementation(150.0, setting=RING)}}
BULK = {"point": operator_config(2, "fc1", "all", "bulk", num_sm=4)}
MEASURED: dict[str, dict[str, Any]] = {"operator": BULK, "kernel": KERNEL, "layer": {"variants": {"none": rounds(1.0)}}}
BAD = [(workload, name, change) for workload in WORKLOADS for name, change in BAD_ANYWHERE.items()]
BAD += [("operator", name, change) for name, change in BAD_OPERATORS.items()]
BAD += [("kernel", name, change) for name, change in BAD_KERNELS.items()]


@pytest.mark.parametrize(("workload", "name", "change"), BAD, ids=[f"{workload} {name}" for workload, name, _ in BAD])
def test_a_bad_result_is_one_sentence(tmp_path: Path, workload: str, name: str, change: Change) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=8))
    path = make_point(workload, tmp_path, **MEASURED.get(workload, {}), name="bad")
    rewrite(path, change)
    assert str(path / RESULT_FILE) in only_problem(tmp_path)


NO_JSON = ("[" * 100_000, '{"environment":' + '{"a":' * 100_000, '{"schema": NaN}', '{"schema": 1e999}', "\0", "")


@pytest.mark.parametrize("text", NO_JSON, ids=lambda text: text[:12])
@pytest.mark.parametrize("name", ["bad/result.json", "tuner.json", "search.json"])
def test_no_json_is_one_sentence(tmp_path: Path, text: str, name: str) -> None:
    make_point("operator", tmp_path, **BULK)
    (tmp_path / "bad").mkdir()
    (tmp_path / name).write_text(text)
    assert name.partition("/")[0] in only_problem(tmp_path)


@pytest.mark.parametrize("name", ["result.json", "tuner.json"])
def test_what_is_no_ordinary_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    make_point("operator", tmp_path, **BULK)
    (tmp_path / "bad").mkdir()
    os.mkfifo(tmp_path / "bad" / name)
    assert "is not a regular file" in only_problem(tmp_path)


@contextmanager
def unprivileged(directory: Path) -> Iterator[None]:
    """Makes the process a user who may read the directory, but no closed files: none is closed to root."""
    user = os.geteuid()
    for folder in (directory, *directory.parents):
        if folder.stat().st_uid == user and folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o055)
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_directory_that_cannot_be_read_is_a_sentence_beside_the_rest(tmp_path: Path) -> None:
    for name in ("good", "no_entry", "unreadable", "earlier"):
        make_point("operator", tmp_path, **BULK, name=name)
    missing_point(tmp_path, {**BULK["point"], "num_sm": 0}, name="refused")
    rewrite(tmp_path / "earlier", lambda result: result.update(schema=1))
    (tmp_path / "no_entry").chmod(0)
    (tmp_path / "unreadable" / RESULT_FILE).chmod(0)
    with unprivileged(tmp_path):
        reading = read_points(tmp_path)
    (tmp_path / "no_entry").chmod(0o755)
    assert [point.name for point in reading.points] == ["good"]
    mends = {
        "no_entry": "make it readable",
        "unreadable": "make it readable",
        "earlier": "measure that again with resume=",
    }
    for name, mend in {**mends, "refused": f"move {tmp_path / 'refused'} elsewhere."}.items():
        (problem,) = [problem for problem in reading.problems if problem.startswith(str(tmp_path / name))]
        assert mend in problem
